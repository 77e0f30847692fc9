"""The cache of user states behind a served model: which state a request goes on from, and what it leaves there.

A request names a user and the number of the user's events before those that it brings:

- 0: it brings the whole history. The answer comes from these events alone, and their state replaces any present one.
- n > 0: it goes on from a state. The state must have n events, or some of the request's events too, because another
  request of the user was quicker. Otherwise the request is not answered, and the client sends the whole history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tf_fusedrec import tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.base import AttentionState
from tf_fusedrec.models.experiment.model_config import GRMConfig, RetrievalConfig
from tf_fusedrec.models.user_state import GRMStates, RetrievalStates, UserState
from tf_fusedrec.saved_model.signatures import Signature
from tf_fusedrec.saved_model.state_cache import StateCache

# A signature's function of its inputs and the version of the model.
Answer = Callable[[dict[str, tf.Tensor], tf.Tensor], dict[str, tf.Tensor]]


class StateOptions(NamedTuple):
    """The cache of user states in an export."""

    max_bytes: int  # limit of its memory on the server
    ttl: int = 0  # seconds without use after which a state leaves; 0: never
    dtype: str = "float32"  # or "bfloat16", of keys and values
    page_tokens: int = 64
    piece: int = 0  # candidates per user and pass of a ranking model; 0: all at once


class Resumed(NamedTuple):
    """The states that B requests go on from."""

    users: tf.Tensor  # <int64>[B]
    version: tf.Tensor  # <int64>[]
    found: tf.Tensor  # <bool>[B], whether the request can be answered
    new_events: tf.Tensor  # <int64>[B], number of the request's last events that the state lacks
    events: tf.Tensor  # <int64>[B], events of the user after the request
    revisions: tf.Tensor  # <int64>[B], what the cache writes: append to, 0 put, -1 nothing
    state: UserState

    def only_new(self, columns: Sequence[tf.RaggedTensor]) -> list[tf.RaggedTensor]:
        """Returns columns of the requests' events, <any>[B,(n),...], without the events that the states have."""
        return jagged.cut(columns, columns[0].row_lengths() - self.new_events, self.new_events)


class KeptStates:
    """Keeps the states of GRMStates or RetrievalStates in a cache.

    Args:
      states: Object that computes and extends states.
      config: Config of its model.
      options: Sizes of the cache.

    Raises:
      ValueError: options.max_bytes does not hold the state of a history of config.max_history events.
    """

    def __init__(self, states: GRMStates | RetrievalStates, config: GRMConfig | RetrievalConfig, options: StateOptions):
        self._most = config.max_history
        self._like = states.none(tf.constant(0)).layers
        of_token = [(part.values.dtype, _columns(part)) for part in _parts_of(self._like)]
        # Number of events, time and input of the last event.
        of_user = ((tf.int64, 1), (tf.int64, 1), (tf.float32, config.dim))
        context = config.context_tokens if isinstance(config, GRMConfig) else 0
        self.cache = StateCache(
            of_token=of_token, of_user=of_user, longest=context + config.max_history, max_bytes=options.max_bytes,
            dtype=options.dtype, page_tokens=options.page_tokens, ttl=options.ttl,
        )  # fmt: skip

    def resume(self, users: tf.Tensor, version: tf.Tensor, before: tf.Tensor, times: tf.RaggedTensor) -> Resumed:
        """Returns what requests go on from.

        Args:
          users: <int64>[B].
          version: <int64>[], the cache's, as it was before the model read a weight or a row for this request.
          before: <int64>[B], number of the user's events before the request's events.
          times: RaggedTensor <int64>[B,(n)], of the events of the request.

        Raises:
          InvalidArgumentError: users or before have another size, before is negative, or the last event that request
            and state both have happened at two times.
        """
        brought = times.row_lengths()
        sizes = tf.stack([tf.size(users, tf.int64), tf.size(before, tf.int64)])
        message = "user and events_before must have one entry for each row of the history"
        checks = [
            tf.debugging.assert_equal(sizes, tf.fill([2], times.nrows(tf.int64)), message=message),
            tf.debugging.assert_non_negative(before, message="events_before must be >= 0"),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            before = tf.identity(before)
        cached = self.cache.find(users, version, before > 0)
        (count, last_time), last_token = (part[:, 0] for part in cached.of_users[:2]), cached.of_users[2]
        both = count - before  # events that request and state have
        goes_on = (cached.revisions > 0) & (both >= 0) & (both <= brought) & (before + brought <= self._most)
        both = tf.where(goes_on, both, 0)
        place = tf.where(both > 0, times.row_splits[:-1] + both - 1, tf.size(times.values, tf.int64))
        same = tf.debugging.assert_equal(
            tf.gather(tf.concat([times.values, [0]], axis=0), place),
            tf.where(both > 0, last_time, 0),
            message="the history contradicts the state of its user: the last event that both have happened at two "
            "times. Send the whole history, with events_before 0.",
        )
        with tf.control_dependencies([] if same is None else [same]):
            found = goes_on | (before == 0)
        new_events = tf.where(found, brought - both, 0)
        revisions = tf.where(new_events > 0, cached.revisions, -1)  # 0 before a whole history, which nobody looks for
        splits, of_tokens = _of_users(goes_on, cached.row_splits, cached.of_tokens)
        one_each = tf.concat([[0], tf.cumsum(tf.cast(goes_on, tf.int64))], axis=0)
        opened, opened_at = (
            tf.RaggedTensor.from_row_splits(tf.boolean_mask(part, goes_on), one_each, validate=False)
            for part in (last_token, last_time)
        )
        state = UserState(_packed(self._like, splits, of_tokens), opened, opened_at)
        return Resumed(users, version, found, new_events, before + brought, revisions, state)

    def keep(self, resumed: Resumed, change: UserState) -> tf.Tensor:
        """Writes a change of the resumed state. Returns whether the cache took it, <bool>[B]."""
        parts = _parts_of(change.layers)
        of_tokens = [tf.reshape(part.values, [part.row_splits[-1], _columns(part)]) for part in parts]
        last_time, last_token = (jagged.first_tokens(part) for part in (change.open_times, change.open_tokens))
        return self.cache.write(
            resumed.users, resumed.version, resumed.revisions, parts[0].row_splits, of_tokens,
            [resumed.events[:, tf.newaxis], last_time[:, tf.newaxis], tf.cast(last_token, tf.float32)],
        )  # fmt: skip

    def signatures(self) -> dict[str, Signature]:
        """Returns the signatures that a server has beside the ones for requests."""

        def next_version(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return {"version": self.cache.next_version()}

        def statistics(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return self.cache.statistics()._asdict()

        def spill(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return {"bytes": self.cache.spill(**inputs)}

        held = (self.cache,)
        of_file = {"tier_folder": tf.TensorSpec([], tf.string), "tier_bytes": tf.TensorSpec([], tf.int64)}
        return {
            "next_version": Signature(next_version, {}, held),
            "spill_states": Signature(spill, of_file, held),
            "state_statistics": Signature(statistics, {}, held),
        }


def _parts_of(layers: tuple[AttentionState, ...]) -> list[tf.RaggedTensor]:
    """Returns keys and values of each layer, then the times of the tokens, which all layers share."""
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    return parts if layers[0].answers is None else [*parts, layers[0].answers]


def _columns(part: tf.RaggedTensor) -> int:
    return math.prod(part.values.shape[1:])


def _packed(
    like: tuple[AttentionState, ...], splits: tf.Tensor, of_tokens: list[tf.Tensor]
) -> tuple[AttentionState, ...]:
    """The inverse of _parts_of, with the shapes of `like`."""

    def rows(part: tf.Tensor, of_like: tf.RaggedTensor) -> tf.RaggedTensor:
        shaped = tf.reshape(part, [splits[-1], *of_like.values.shape[1:]])
        return tf.RaggedTensor.from_row_splits(shaped, splits, validate=False)

    layers = []
    for number, layer in enumerate(like):
        keys, values = (rows(of_tokens[2 * number + n], part) for n, part in enumerate((layer.keys, layer.values)))
        times = None if layer.answers is None else rows(of_tokens[-1], layer.answers)
        layers.append(AttentionState(keys, values, times))
    return tuple(layers)


def _of_users(chosen: tf.Tensor, splits: tf.Tensor, of_tokens: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns splits and parts without the tokens of other users. Where all have to stay, nothing is copied."""
    lengths = splits[1:] - splits[:-1]
    kept = tf.where(chosen, lengths, 0)

    def without() -> list[tf.Tensor]:
        of_chosen = tf.gather(chosen, jagged.token_rows(splits))
        return [tf.boolean_mask(part, of_chosen) for part in of_tokens]

    parts = tf.cond(tf.reduce_all(kept == lengths), lambda: [tf.identity(part) for part in of_tokens], without)
    return tf.concat([[0], tf.cumsum(kept)], axis=0), parts
