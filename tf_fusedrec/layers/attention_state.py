"""The state of an attention layer: the keys and values of tokens that it has seen. A server computes new tokens only.

HSTU, FuXi and SASRec give and take it in `extend`. A layer that is extended by the pieces of a row gives the outputs of
the whole row. Where an output depends on later tokens, `extend` refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.ops import SequenceTimes, contextual_lengths


class AttentionState(NamedTuple):
    """Keys and values of one layer, by row. Candidates are never part of it."""

    keys: tf.RaggedTensor  # <float>[B,(L),H,Dqk]; Dqk is 0 for FuXi-beta, which has no keys
    values: tf.RaggedTensor  # <float>[B,(L),H,Dv]
    answers: tf.RaggedTensor | None  # <int64>[B,(L)], when each token happened, in seconds; None without time bias


def checked_input(layer: keras.layers.Layer, x: tf.RaggedTensor) -> tf.RaggedTensor:
    """Returns x in the layer's compute dtype.

    Raises:
      ValueError: x is not ragged, or the layer has no weights yet.
    """
    jagged.check_sequence("x", x)
    if not layer.built:
        raise ValueError(f"layer {layer.name!r} has no weights yet. Call it once, or load the model, before extend.")
    return x.with_values(tf.cast(x.values, layer.compute_dtype))


def only_targets(
    x: tf.RaggedTensor,
    state: AttentionState,
    num_targets: tf.Tensor | None,
    contextual_length: int | tf.Tensor,
    layer: str,
) -> tf.RaggedTensor:
    """Returns x after a check that it brings no events to a row whose context tokens the state holds.

    Raises:
      ValueError: There is a context, and num_targets is None.
      InvalidArgumentError: A row with context has new events.
    """
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
    none = tf.debugging.assert_equal(of_context, tf.zeros_like(of_context), message=message)
    with tf.control_dependencies([] if none is None else [none]):
        return x.with_values(tf.identity(x.values))


def new_answers(times: SequenceTimes | None, x: tf.RaggedTensor, layer: str) -> tf.RaggedTensor | None:
    """Returns when the tokens of x happened.

    Raises:
      ValueError: `times` is a RaggedTensor, whose last token would ask at another time after the next event.
    """
    if times is None:
        return None
    if not isinstance(times, SequenceTimes):
        raise ValueError(
            f"timestamps must be SequenceTimes where layer {layer!r} is extended, got {type(times).__name__}. Say when "
            "each token asks: ops.sequence_times(timestamps, query_times)."
        )
    same = tf.debugging.assert_equal(
        tf.size(times.answers, tf.int64), x.row_splits[-1], message="timestamps must have one time per token of x"
    )
    with tf.control_dependencies([] if same is None else [same]):
        return x.with_values(tf.identity(times.answers))


def whole_times(times: SequenceTimes | None, whole: AttentionState) -> SequenceTimes | None:
    """Returns when the tokens of x ask, and when all tokens of the rows happened."""
    if times is None or whole.answers is None:
        return None
    return SequenceTimes(times.asks, whole.answers.values)


def joined(state: AttentionState | None, new: AttentionState, longest: int, layer: str) -> AttentionState:
    """Returns the new tokens behind the tokens of the state, after a check of each row's length.

    Raises:
      ValueError: One of the two has times that the other lacks.
      InvalidArgumentError: The two have different numbers of rows, or a row is longer than `longest`.
    """
    if state is None:
        whole = new
    else:
        if (state.answers is None) != (new.answers is None):
            raise ValueError(
                f"state.answers must {'not ' if new.answers is None else ''}be there for layer {layer!r}, got "
                f"{'none' if state.answers is None else 'times'}. Pass the state that this layer returned."
            )
        whole = appended([state], [new])[0]
    return whole._replace(values=jagged.checked_lengths(whole.values, longest, layer))


def appended(states: Sequence[AttentionState], new: Sequence[AttentionState]) -> list[AttentionState]:
    """Returns the states with new tokens behind theirs. All states have the same row lengths, and so have all new."""
    pairs = [pair for both in zip(states, new) for pair in zip(*both) if pair[0] is not None]
    parts = iter(jagged.concat_alike(pairs))
    return [AttentionState(*(None if part is None else next(parts) for part in state)) for state in states]


def first_tokens(new: Sequence[AttentionState], counts: tf.Tensor) -> list[AttentionState]:
    """Returns the first `counts` <int64>[B] tokens of each row. All states have the same row lengths."""
    present = [part for state in new for part in state if part is not None]
    parts = iter(jagged.cut(present, tf.zeros_like(counts), counts))
    return [AttentionState(*(None if part is None else next(parts) for part in state)) for state in new]


def kept(
    state: AttentionState | None, new: AttentionState, num_targets: tf.Tensor | None, keep: tf.Tensor | None
) -> AttentionState:
    """Returns the state with the first `keep` of the new tokens, by default all but targets.

    Raises:
      InvalidArgumentError: `keep` is not between 0 and the number of new tokens that are no targets.
    """
    if keep is not None or num_targets is not None:
        (new,) = first_tokens([new], checked_keep(new, num_targets, keep))
    return new if state is None else appended([state], [new])[0]


def checked_keep(new: AttentionState, num_targets: tf.Tensor | None, keep: tf.Tensor | None) -> tf.Tensor:
    """Returns `keep` <int64>[B] after a check; None: all tokens but targets. Raises as `kept`."""
    events = new.values.row_lengths()
    if num_targets is not None:
        events -= tf.cast(num_targets, tf.int64)
    keep = events if keep is None else tf.cast(keep, tf.int64)
    message = "keep must lie between 0 and the number of x's tokens that are no targets"
    checks = [
        tf.debugging.assert_less_equal(keep, events, message=message),
        tf.debugging.assert_non_negative(keep, message=message),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(keep)
