"""States of users that a server keeps: a request computes the new events and the candidates, and no event again.

    state = states.none(users)                      # or the states that the last requests returned
    logits, state = states.update(request, state)   # request: the columns of a batch, with the events since then

The answers equal the model's on whole histories. Two kinds of tokens are computed again, because the next event changes
them. The last event asks at the time of the next one. The context of a user without events has the time of the first
event. A history that outgrows max_history starts again from its newest events.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tf_fusedrec import tf
from tf_fusedrec.layers import HSTU, jagged, sequence_times
from tf_fusedrec.layers.base import AttentionState, appended, first_tokens
from tf_fusedrec.models.base import Batch
from tf_fusedrec.models.grm import GRM
from tf_fusedrec.models.parts.encoders import attends_by_time
from tf_fusedrec.models.retrieval import HSTURetrieval, normalized
from tf_fusedrec.ops import SequenceTimes


class UserState(NamedTuple):
    """One row per user."""

    layers: tuple[AttentionState, ...]  # one per block
    # <float>[B,(0 or 1),D], input of the last event, which the next request computes again.
    open_tokens: tf.RaggedTensor
    open_times: tf.RaggedTensor  # <int64>[B,(0 or 1)], its time in seconds


class GRMStates:
    """Scores candidates by kept states of a GRM.

    Args:
      model: A GRM with weights.
      new_events: True if states take new events. False keeps whole histories, which take candidates only.

    Raises:
      ValueError: With new_events, the model's context tokens see the history; the model has cross_layers, group_norm or
        item_lists; a block cannot keep a state.
    """

    def __init__(self, model: GRM, *, new_events: bool = True):
        if new_events and model.seeing_context:
            raise ValueError(
                f"model.causal_context is False: the {model.seeing_context} context tokens see all events, so "
                "a state cannot take new ones. Train with causal_context: true, or pass new_events=False for states "
                "that take candidates only."
            )
        if model.config.item_lists:
            raise ValueError(
                f"model.config.item_lists is {list(model.config.item_lists)}: a request cuts columns by event, and "
                "lists have several ids per event. Train without item_lists."
            )
        if model.config.cross_layers:
            raise ValueError(
                f"model.config.cross_layers is {model.config.cross_layers}: the crosses take the context of the user, "
                "which a state does not keep. Train with cross_layers: 0."
            )
        if model.config.group_norm:
            raise ValueError(
                "model.config.group_norm is True: a state keeps no normalised tokens. Train with group_norm: false."
            )
        for block in model.blocks:
            block.check_extendable()
        self._model = model
        self._new_events = new_events

    def none(self, num_users: tf.Tensor) -> UserState:
        """Returns the state of `num_users` <int>[] users of whom nothing is known."""
        return _none(self._model, num_users)

    def update(self, inputs: Batch, state: UserState) -> tuple[dict[str, tf.Tensor], UserState]:
        """Returns the logits of the candidates, and the state with the new events.

        Args:
          inputs: The columns of GRM's call. history_* hold the events since the state, oldest first, exposed_* the
            candidates; both may be empty. The context of a user with a state is not read.
          state: One row per user of the batch.

        Raises:
          InvalidArgumentError: An event is older than the state, a user has more than config.max_history events, a row
            has more than config.max_sequence_length tokens, or new_events=False and a state got events.
        """
        logits, change = self.answer(inputs, state)
        return logits, extended(state, change)

    def answer(self, inputs: Batch, state: UserState) -> tuple[dict[str, tf.Tensor], UserState]:
        """Returns the logits of `update`, and the change of the state: its new tokens, and its new open event."""
        model = self._model
        *context, history, exposed = model.token_parts(model.rows_of(inputs, False), model.dense_of(inputs))
        settled = state.layers[0].values.row_lengths()
        known = tf.cast(settled > 0, tf.int64)
        events, times = _since(
            state, history, inputs["history_time"], model.config.max_history, model.config.context_tokens
        )
        tokens, times_of_tokens = [events, exposed], [times, inputs["exposed_time"]]
        for rows in context:
            rows = jagged.last(rows, (1 - known) * rows.row_lengths())
            # Context has no time of its own. It takes the time of the oldest event, or 0 without one.
            oldest = tf.gather(jagged.first_tokens(times), jagged.token_rows(rows.row_splits))
            tokens.insert(0, rows)
            times_of_tokens.insert(0, rows.with_values(oldest))
        targets = exposed.row_lengths()
        given: dict[str, Any] = {"num_targets": targets, "contextual_length": model.seeing_context}
        joined = [tokens, times_of_tokens] if attends_by_time(model.config) else [tokens]
        x, *joined_times = jagged.concat_alike(joined)
        if joined_times:
            given["timestamps"] = sequence_times(joined_times[0], num_targets=targets)
        x = model.positions(x, num_targets=targets, before=settled, training=False)
        keep = x.row_lengths() - targets
        if self._new_events:
            # Without an event, the context is open, too.
            keep = tf.where(events.row_lengths() > 0, keep - 1, 0)
        y, layers = _attend(model.blocks, x, state.layers, keep, **given)
        opened = tf.minimum(events.row_lengths(), int(self._new_events))
        change = UserState(layers, *jagged.cut([events, times], events.row_lengths() - opened, opened))
        return model.logits(jagged.last(y, targets).values), change

    def answer_in_pieces(self, inputs: Batch, state: UserState, piece: int) -> tuple[dict[str, tf.Tensor], UserState]:
        """As `answer`, with at most `piece` candidates per user at a time: memory does not grow with their number.

        Source: M-FALCON of Zhai et al., Actions Speak Louder than Words (HSTU), section 3.4.

        Raises:
          ValueError: piece is below 1.
        """
        if piece < 1:
            raise ValueError(f"piece must be >= 1, got {piece}. It is the number of candidates per user and pass.")
        columns = {name: column for name, column in inputs.items() if name.startswith("exposed_")}
        lengths = inputs["exposed_item"].row_lengths()

        def part_of(column: tf.RaggedTensor, number: tf.Tensor) -> tf.RaggedTensor:
            before = tf.minimum(number * piece, lengths)
            taken = tf.minimum(lengths - before, piece)
            return jagged.split(column, [before, taken, lengths - before - taken])[1]

        of_history = {name: jagged.last(column, 0) for name, column in columns.items()}
        _, change = self.answer({**inputs, **of_history}, state)
        state = extended(state, change)
        nothing = {name: jagged.last(column, 0) for name, column in inputs.items() if name.startswith("history_")}
        candidates = inputs["exposed_item"].with_values(tf.range(tf.size(inputs["exposed_item"].values, tf.int64)))

        def step(number: tf.Tensor, found: dict[str, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            of_piece = {name: part_of(column, number) for name, column in columns.items()}
            logits, _ = self.answer({**inputs, **nothing, **of_piece}, state)
            at = part_of(candidates, number).values[:, tf.newaxis]
            return number + 1, {task: tf.tensor_scatter_nd_update(found[task], at, logits[task]) for task in found}

        longest = tf.reduce_max(tf.concat([lengths, [0]], axis=0))
        found = {task: tf.zeros([tf.size(candidates.values)]) for task in self._model.config.tasks}
        _, found = tf.while_loop(
            lambda number, _: number * piece < longest, step, (tf.zeros([], tf.int64), found), parallel_iterations=1
        )
        return found, change


class RetrievalStates:
    """Embeds users by kept states of a retrieval model.

    Args:
      model: An HSTURetrieval with weights, of any encoder.

    Raises:
      ValueError: A block cannot keep a state.
    """

    def __init__(self, model: HSTURetrieval):
        for block in model.blocks:
            block.check_extendable()
        self._model = model

    def none(self, num_users: tf.Tensor) -> UserState:
        """Returns the state of `num_users` <int>[] users of whom nothing is known."""
        return _none(self._model, num_users)

    def embed_users(
        self, items: tf.RaggedTensor, timestamps: tf.RaggedTensor, query_time: tf.Tensor, state: UserState
    ) -> tuple[tf.Tensor, UserState]:
        """Returns the vector of each user's next item, as HSTURetrieval.embed_users, and the state with the new events.

        Args:
          items, timestamps: RaggedTensors <int64>[B,(n)], the events since the state, oldest first. Rows may be empty.
          query_time: <int64>[B], time of the request in seconds.
          state: One row per user.

        Returns:
          <float>[B, D], L2-normalised, or zeros for a user without history.

        Raises:
          InvalidArgumentError: An event is older than the state, or a user has more than config.max_history events.
        """
        vectors, change = self.answer(items, timestamps, query_time, state)
        return vectors, extended(state, change)

    def answer(
        self, items: tf.RaggedTensor, timestamps: tf.RaggedTensor, query_time: tf.Tensor, state: UserState
    ) -> tuple[tf.Tensor, UserState]:
        """Returns the vectors of `embed_users`, and the change of the state: its new tokens, and its new open event."""
        model = self._model
        rows = model.embedding({"item_id": items}, training=False)["item_id"]
        tokens, times = _since(state, rows, timestamps, model.config.max_history)
        x = model.positions(tokens, before=state.layers[0].values.row_lengths(), training=False)
        requests = tf.RaggedTensor.from_row_splits(
            query_time, tf.range(tf.size(query_time, tf.int64) + 1), validate=False
        )
        asks = jagged.last(jagged.concat([times, requests]), times.row_lengths())
        given: dict[str, Any] = {}
        if attends_by_time(model.config):
            given["timestamps"] = sequence_times(times, asks)
        y, layers = _attend(model.blocks, x, state.layers, tf.maximum(x.row_lengths() - 1, 0), **given)
        opened = tf.minimum(tokens.row_lengths(), 1)
        last, *open_tokens = jagged.cut([y, tokens, times], tokens.row_lengths() - opened, opened)
        return normalized(jagged.first_tokens(last)), UserState(layers, *open_tokens)


def extended(state: UserState, change: UserState) -> UserState:
    """Returns the state after a request, from the change that the request makes."""
    return change._replace(layers=tuple(appended(state.layers, change.layers)))


def _attend(
    blocks: list[Any], x: tf.RaggedTensor, layers: tuple[AttentionState, ...], keep: tf.Tensor, **given: Any
) -> tuple[tf.RaggedTensor, tuple[AttentionState, ...]]:
    """Runs the blocks from kept states on. Returns the outputs, and of each block the first `keep` tokens of x."""
    # All layers have the rows of the first one. With its splits, TensorFlow computes the places of tokens once.
    splits, states = layers[0].values.row_splits, []
    for block, layer in zip(blocks, layers):
        parts = (None if part is None else _with_splits(part, splits) for part in layer)
        x, new = block.attend(x, AttentionState(*parts), **given)
        states.append(new)
    return x, tuple(first_tokens(states, keep))


def _with_splits(part: tf.RaggedTensor, row_splits: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(part.values, row_splits, validate=False)


def _none(model: GRM | HSTURetrieval, num_users: tf.Tensor) -> UserState:
    splits = tf.zeros([tf.cast(num_users, tf.int64) + 1], tf.int64)
    tokens = tf.RaggedTensor.from_row_splits(tf.zeros([0, model.config.dim]), splits, validate=False)
    times = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), splits, validate=False)
    given: dict[str, Any] = {}
    if attends_by_time(model.config):
        given["timestamps"] = SequenceTimes(times.values, times.values)
    if all(isinstance(block, HSTU) for block in model.blocks):
        given["num_targets"] = tf.zeros_like(splits[1:])
    layers = tuple(block.attend(tokens, **given)[1] for block in model.blocks)
    return UserState(layers, tokens, times)


def _since(
    state: UserState, new: tf.RaggedTensor, new_times: tf.RaggedTensor, most: int, context: int = 0
) -> list[tf.RaggedTensor]:
    """Returns the tokens and times of the events to compute, after the checks of a user's history.

    context: Tokens before the history.
    """
    events, times = jagged.concat_alike([[state.open_tokens, new], [state.open_times, new_times]])
    settled = tf.maximum(state.layers[0].values.row_lengths() - context, 0)
    fits = tf.debugging.assert_less_equal(
        settled + times.row_lengths(),
        tf.constant(most, tf.int64),
        message=f"a user has more than max_history = {most} events. Start again: pass the newest events with the state "
        "of states.none.",
    )
    # Where both are there, the open event is the first one of the row, and a new event follows.
    both = (new_times.row_lengths() > 0) & (state.open_times.row_lengths() > 0)
    first, ends = times.row_splits[:-1], tf.concat([times.values, [0]], axis=0)
    follows = tf.debugging.assert_less_equal(
        tf.gather(ends, first),
        tf.gather(ends, first + tf.cast(both, tf.int64)),
        message="an event is older than the state of its user. Pass the events since the last request only.",
    )
    with tf.control_dependencies([check for check in (fits, follows) if check is not None]):
        return [events, times.with_values(tf.identity(times.values))]
