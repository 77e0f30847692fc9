"""A cache of user states inside a SavedModel, for signatures that answer from what earlier requests computed."""

from __future__ import annotations

import contextlib
import contextvars
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

_applied_deltas: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("applied_deltas", default=None)


@contextlib.contextmanager
def after_deltas(count: tf.Tensor) -> Iterator[None]:
    """In this context, versions of caches include `count` <int64>[], the deltas that the server has applied."""
    token = _applied_deltas.set(count)
    try:
        yield
    finally:
        _applied_deltas.reset(token)


class CachedStates(NamedTuple):
    """States of B users with T tokens in all, as they were at one moment."""

    revisions: tf.Tensor  # <int64>[B], 0 for a user without a state
    row_splits: tf.Tensor  # <int64>[B+1], tokens of each user
    of_tokens: list[tf.Tensor]  # <dtype>[T, columns] for each part of a token, in the dtype of the model
    of_users: list[tf.Tensor]  # <dtype>[B, columns] for each part of a user


class StateCache(tf.Module):
    """States of users, bounded in bytes, in host memory of the server.

    A state has tokens and parts of the user. Each part is (dtype, columns), of float32, bfloat16, float16 or int64.

    A state belongs to the version of the model that computed it. The signature "apply_delta" begins a new version, and
    so does `next_version`: all states become unreachable at once. A program that changes weights or rows of a loaded
    model otherwise calls `next_version` after its last change. Each loaded model has its own cache.

    Args:
      of_token: One or more parts of a token, as the model computes them.
      of_user: Parts of a user, which each write replaces.
      longest: Tokens of the longest state.
      max_bytes: Limit of the memory. The state used least recently leaves first.
      dtype: "float32", or "bfloat16" for half the bytes: dtype in which the cache keeps float32 parts of tokens.
      page_tokens: Tokens of a page. A state takes whole pages.
      ttl: Seconds without use after which a state leaves; 0 for never.

    Raises:
      ValueError: dtype is unknown, or max_bytes does not hold a longest state.
      InvalidArgumentError: Another argument is out of range.

    Examples:
      >>> parts = {"of_token": [(tf.float32, 16)], "of_user": [(tf.int64, 1)]}
      >>> cache = fr.saved_model.StateCache(**parts, longest=100, max_bytes=1 << 20)
      >>> cache.state_bytes(100) < 1 << 20  # fr.Signature(..., resources=(cache,)) takes it
      True
    """

    def __init__(
        self,
        *,
        of_token: Sequence[tuple[tf.DType, int]],
        of_user: Sequence[tuple[tf.DType, int]],
        longest: int,
        max_bytes: int,
        dtype: str = "float32",
        page_tokens: int = 64,
        ttl: int = 0,
    ):
        super().__init__(name="states")
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f'dtype must be "float32" or "bfloat16", got {dtype!r}.')
        self._computed = ops.StateParts(tuple(of_token), tuple(of_user))
        self._page_tokens, self._longest = page_tokens, longest
        kept = [(tf.as_dtype(dtype) if part == tf.float32 else part, columns) for part, columns in of_token]
        self._kept = ops.StateParts(tuple(kept), tuple(of_user))
        if self.state_bytes(longest) > max_bytes:
            raise ValueError(
                f"max_bytes must hold the longest state: {longest} tokens, {self.state_bytes(longest)} bytes; got "
                f'{max_bytes}. Raise it, or keep smaller pages, shorter histories or dtype "bfloat16".'
            )
        self._resource = _Resource(self._kept, max_bytes=max_bytes, page_tokens=page_tokens, ttl=ttl)
        self._called = tf.Variable(0, dtype=tf.int64, trainable=False, name="version")  # calls of next_version

    def state_bytes(self, tokens: int) -> int:
        """Returns the bytes of a state with this number of tokens."""
        return ops.user_state_bytes(self._kept, tokens, self._page_tokens)

    def version(self) -> tf.Tensor:
        """Returns the version of the model that answers, <int64>[], which never decreases."""
        return self._since(self._called.read_value())

    @staticmethod
    def _since(called: tf.Tensor) -> tf.Tensor:
        deltas = _applied_deltas.get()
        return called if deltas is None else called + deltas

    def find(self, users: tf.Tensor, version: tf.Tensor, wanted: tf.Tensor) -> CachedStates:
        """Reads states.

        Args:
          users: <int64>[B].
          version: <int64>[], self.version() as it was before the model read a weight or a row for this request.
          wanted: <bool>[B], the users to look up. All other users have no state in the result.
        """
        places = tf.where(wanted)
        states = ops.user_states_find(
            self._resource.resource_handle, tf.boolean_mask(users, wanted), version, _now(), parts=self._kept
        )
        size = tf.shape(users, tf.int64)

        def spread(rows: tf.Tensor) -> tf.Tensor:
            """Rows of all users, with zeros for the rest."""
            return tf.scatter_nd(places, rows, tf.concat([size, tf.shape(rows, tf.int64)[1:]], axis=0))

        lengths = spread(states.row_splits[1:] - states.row_splits[:-1])
        return CachedStates(
            spread(states.revisions),
            tf.concat([[0], tf.cumsum(lengths)], axis=0),
            [tf.cast(part, dtype) for part, (dtype, _) in zip(states.of_tokens, self._computed.of_token)],
            [spread(part) for part in states.of_users],
        )

    def write(
        self,
        users: tf.Tensor,
        version: tf.Tensor,
        revisions: tf.Tensor,
        row_splits: tf.Tensor,
        of_tokens: Sequence[tf.Tensor],
        of_users: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Appends tokens to states, or puts new states. Arguments and result as in ops.user_states_write."""
        return ops.user_states_write(
            self._resource.resource_handle, users, version, _now(), revisions=revisions, row_splits=row_splits,
            of_tokens=[tf.cast(part, dtype) for part, (dtype, _) in zip(of_tokens, self._kept.of_token)],
            of_users=of_users,
        )  # fmt: skip

    def next_version(self) -> tf.Tensor:
        """Makes all states unreachable, returns their memory, and returns the new version <int64>[]."""
        version = self._since(self._called.assign_add(1, read_value=True))
        with tf.control_dependencies([ops.user_states_drop(self._resource.resource_handle, version)]):
            return tf.identity(version)

    def spill(self, tier_folder: tf.Tensor, tier_bytes: tf.Tensor) -> tf.Tensor:
        """Opens a file for the states that leave memory. Arguments, result and errors as in ops.user_states_spill.

        A server calls it once for each loaded model. Only states of the newest version go to the file.

        Raises:
          InvalidArgumentError: tier_bytes does not hold a longest state.
        """
        needed = self.state_bytes(self._longest)
        holds = tf.debugging.assert_greater_equal(
            tier_bytes, tf.constant(needed, tf.int64),
            message=f"tier_bytes must hold the longest state: {self._longest} tokens, {needed} bytes. Raise it.",
        )  # fmt: skip
        with tf.control_dependencies([] if holds is None else [holds]):
            return ops.user_states_spill(self._resource.resource_handle, tier_folder, tf.identity(tier_bytes))

    def statistics(self) -> ops.UserStatesStatistics:
        """Returns the counts of the cache, <int64>[] each."""
        return ops.UserStatesStatistics(*tf.unstack(ops.user_states_statistics(self._resource.resource_handle)))


def _now() -> tf.Tensor:
    return tf.cast(tf.timestamp(), tf.int64)


class _Resource(tf.saved_model.experimental.TrackableResource):
    def __init__(self, parts: ops.StateParts, **options: int):
        super().__init__(device="CPU")
        self._parts, self._options = parts, options
        # The name is unique, because one process may serve two versions of a model.
        self._shared_name = f"fusedrec/states/{uuid.uuid4().hex}"
        _ = self.resource_handle  # Creates the handle here, outside the functions that capture it.

    def _create_resource(self) -> tf.Tensor:
        # As for the served tables (native_tables.py): only a session needs the name.
        of_session = not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function
        return ops.user_states(self._parts, shared_name=self._shared_name, anonymous=not of_session, **self._options)
