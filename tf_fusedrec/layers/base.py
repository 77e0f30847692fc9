"""The bases of the layers, and the state of attention: keys and values of earlier tokens, which a server keeps.

A layer that is extended by the pieces of a row returns the outputs of the whole row. Where an output depends on later
tokens, `extend` raises ValueError.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.ops import SequenceTimes, contextual_lengths


class AttentionState(NamedTuple):
    """Keys and values of one layer, by row. Candidates are never part of it."""

    keys: tf.RaggedTensor  # <float>[B,(L),H,Dqk]; Dqk is 0 for FuXi-beta, which has no keys
    values: tf.RaggedTensor  # <float>[B,(L),H,Dv]
    answers: tf.RaggedTensor | None  # <int64>[B,(L)], when each token happened, in seconds; None without time bias


class ConfiguredLayer(keras.layers.Layer):
    """A layer with the arguments of its constructor as attributes and as its config."""

    def _configure(self, arguments: dict[str, Any], **instead: Any) -> None:
        """Keeps the constructor's arguments, its locals(). A Dropout layer may be in the place of its rate."""
        parameters = list(inspect.signature(arguments["__class__"].__init__).parameters.values())[1:]
        self._option_names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        for name in self._option_names:
            setattr(self, name, instead.get(name, arguments[name]))

    def get_config(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in self._option_names}
        rates = {name: layer.rate for name, layer in options.items() if isinstance(layer, keras.layers.Dropout)}
        return {**super().get_config(), **options, **rates}


def check_positive(**sizes: int) -> None:
    """Raises ValueError for an argument below 1."""
    for name, number in sizes.items():
        if number < 1:
            raise ValueError(f"{name} must be >= 1, got {number}.")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}.")


class SequenceLayer(ConfiguredLayer):
    """Base of layers from ragged tokens [B,(L),D] to tokens of the same shape."""

    def compute_output_spec(self, x: Any, *_: Any, **__: Any) -> Any:
        """The symbolic tokens of a functional model, for which Keras 3 would trace a call with a dense tensor."""
        if not x.ragged:
            raise ValueError(f"x must be ragged, got shape {x.shape} of a dense tensor. Use keras.Input(ragged=True).")
        return keras_api.KerasTensor(x.shape, self.compute_dtype, ragged=True)


class SequenceBlock(SequenceLayer):
    """Base of HSTU, FuXi and SASRec: attention over ragged sequences that can be computed piece by piece."""

    num_heads: int
    max_sequence_length: int

    def extend(
        self,
        x: tf.RaggedTensor,
        state: AttentionState | None = None,
        timestamps: SequenceTimes | None = None,
        keep: tf.Tensor | None = None,
        **masks: Any,
    ) -> tuple[tf.RaggedTensor, AttentionState]:
        """Computes the next tokens of each row, for inference. The outputs equal a call with the whole row.

        Args:
          x: RaggedTensor <float>[B,(n),D], the tokens after the state's tokens: new events, then targets.
          state: State of the earlier tokens, or None where there are none.
          timestamps: SequenceTimes of x's tokens; a time bias needs them.
          keep: None or <int>[B], number of x's first tokens in the new state. The default is all but targets.
          **masks: num_targets and contextual_length, if a call accepts them. A context token sees all events, so a
            state with context accepts targets only.

        Returns:
          RaggedTensor <float>[B,(n),D], and the new state.

        Raises:
          ValueError: check_extendable raises it, timestamps are not SequenceTimes, or the state is from another layer.
          InvalidArgumentError: A whole row is longer than max_sequence_length, x and state have different numbers of
            rows, `keep` is out of range, or a row with context gets new events.
        """
        times = {} if timestamps is None else {"timestamps": timestamps}
        y, new = self.attend(x, state, **times, **masks)
        if keep is not None or masks.get("num_targets") is not None:
            (new,) = first_tokens([new], _checked_keep(new, masks.get("num_targets"), keep))
        return y, new if state is None else appended([state], [new])[0]

    def attend(
        self, x: tf.RaggedTensor, state: AttentionState | None = None, **options: Any
    ) -> tuple[tf.RaggedTensor, AttentionState]:
        """Returns the outputs of `extend`, and the state of x's tokens only, targets included."""
        raise NotImplementedError

    def check_extendable(self) -> None:
        """Raises ValueError when outputs of earlier tokens change with later tokens, so that no state can be kept."""

    def _cast(self, x: tf.RaggedTensor) -> tf.RaggedTensor:
        """Returns x in the compute dtype, after checks."""
        jagged.check_sequence("x", x)
        if not self.built:
            raise ValueError(f"layer {self.name!r} has no weights yet. Call it once, or load the model, before extend.")
        return x.with_values(tf.cast(x.values, self.compute_dtype))

    def _grown(
        self,
        x: tf.RaggedTensor,
        state: AttentionState | None,
        keys: tf.Tensor,
        values: tf.Tensor,
        times: SequenceTimes | None = None,
    ) -> tuple[AttentionState, AttentionState, SequenceTimes | None]:
        """Returns the state of x's tokens, of the whole rows, and when x's tokens ask and all tokens happened."""
        new = AttentionState(x.with_values(keys), x.with_values(values), _answers(times, x, self.name))
        rows = new
        if state is not None:
            if (state.answers is None) != (new.answers is None):
                raise ValueError(
                    f"state.answers must {'not ' if new.answers is None else ''}be there for layer {self.name!r}, got "
                    f"{'none' if state.answers is None else 'times'}. Pass the state that this layer returned."
                )
            rows = appended([state], [new])[0]
        rows = rows._replace(values=jagged.checked_lengths(rows.values, self.max_sequence_length, self.name))
        if times is not None and rows.answers is not None:
            times = SequenceTimes(times.asks, rows.answers.values)
        return new, rows, times

    def _heads(self, tokens: tf.Tensor, columns: int) -> tf.Tensor:
        """Returns tokens <float>[T, H * columns] by head."""
        return tf.reshape(tokens, [-1, self.num_heads, columns])

    def _flops(self, row_splits: tf.Tensor, per_token: int, per_pair: int, **masks: Any) -> tf.Tensor:
        """Counts operations <float64>[] of all tokens and of all visible pairs."""
        keys = jagged.visible_keys(row_splits, **masks)
        tokens, pairs = (tf.cast(number, tf.float64) for number in (row_splits[-1], tf.reduce_sum(keys)))
        return tokens * per_token + pairs * per_pair


def only_targets(
    x: tf.RaggedTensor,
    state: AttentionState,
    num_targets: tf.Tensor | None,
    contextual_length: int | tf.Tensor,
    layer: str,
) -> tf.RaggedTensor:
    """Returns x after a check that it has no events in rows with context tokens in the state."""
    context = contextual_lengths(contextual_length, x.row_splits)
    if context is None:
        return x
    remedy = (
        "A context token sees all events, so its output changes with each of them. Compute the whole row, or pass "
        "contextual_length=0 from the first token on, which makes the context causal."
    )
    if num_targets is None:
        raise ValueError(f"layer {layer!r}: a state with context takes targets only, got num_targets=None. {remedy}")
    events = x.row_lengths() - tf.cast(num_targets, tf.int64)
    of_context = tf.where((context > 0) & (state.values.row_lengths() > 0), events, 0)
    message = f"layer {layer!r}: a state with context takes targets only, got new events. {remedy}"
    check = tf.debugging.assert_equal(of_context, tf.zeros_like(of_context), message=message)
    return jagged.checked_by(check, x)


def _answers(times: SequenceTimes | None, x: tf.RaggedTensor, layer: str) -> tf.RaggedTensor | None:
    """Returns when the tokens of x happened."""
    if times is None:
        return None
    if not isinstance(times, SequenceTimes):  # The last token of a RaggedTensor would ask later after the next event.
        raise ValueError(
            f"timestamps must be SequenceTimes where layer {layer!r} is extended, got {type(times).__name__}. Say when "
            "each token asks: layers.sequence_times(timestamps, query_times)."
        )
    check = tf.debugging.assert_equal(
        tf.size(times.answers, tf.int64), x.row_splits[-1], message="timestamps must have one time per token of x"
    )
    return jagged.checked_by(check, x.with_values(times.answers))


def appended(states: Sequence[AttentionState], new: Sequence[AttentionState]) -> list[AttentionState]:
    """Returns the states followed by new tokens. All states have the same row lengths, and so have all new."""
    pairs = [pair for both in zip(states, new) for pair in zip(*both) if pair[0] is not None]
    parts = iter(jagged.concat_alike(pairs))
    return [AttentionState(*(None if part is None else next(parts) for part in state)) for state in states]


def first_tokens(new: Sequence[AttentionState], counts: tf.Tensor) -> list[AttentionState]:
    """Returns the first `counts` <int64>[B] tokens of each row. All states have the same row lengths."""
    present = [part for state in new for part in state if part is not None]
    parts = iter(jagged.cut(present, tf.zeros_like(counts), counts))
    return [AttentionState(*(None if part is None else next(parts) for part in state)) for state in new]


def _checked_keep(new: AttentionState, num_targets: tf.Tensor | None, keep: tf.Tensor | None) -> tf.Tensor:
    """Returns `keep` <int64>[B] after a check; None: all tokens but targets."""
    events = new.values.row_lengths()
    if num_targets is not None:
        events -= tf.cast(num_targets, tf.int64)
    keep = events if keep is None else tf.cast(keep, tf.int64)
    message = "keep must be between 0 and the number of x's tokens that are no targets"
    checks = [
        tf.debugging.assert_less_equal(keep, events, message=message),
        tf.debugging.assert_non_negative(keep, message=message),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(keep)
