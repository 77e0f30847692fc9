"""A cache of user states as a TensorFlow resource: what a server keeps of a user's history between requests.

A state has tokens of several parts, for example keys and values by layer, and parts of the user, which each write
replaces. custom_ops/user_states/user_states.h has the design. Concurrent calls are safe, also for one user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library

_STATE_BYTES = 256  # in addition to pages and parts of the user: UserStates::kStateBytes


class StateParts(NamedTuple):
    """The parts of a state. Each is (dtype, columns); a dtype is float32, bfloat16, float16 or int64."""

    of_token: tuple[tuple[tf.DType, int], ...]  # one or more
    of_user: tuple[tuple[tf.DType, int], ...]


class FoundStates(NamedTuple):
    """Result of user_states_find for B users with T tokens in all."""

    revisions: tf.Tensor  # <int64>[B], 0 for a user without a state
    row_splits: tf.Tensor  # <int64>[B+1], tokens of each user
    of_tokens: list[tf.Tensor]  # <dtype>[T, columns] for each part of a token
    of_users: list[tf.Tensor]  # <dtype>[B, columns] for each part of a user; zeros for a user without a state


class UserStatesStatistics(NamedTuple):
    """Counts since the cache was made; states, tokens, bytes, tier_states and tier_bytes describe this moment."""

    states: int  # in memory, as tokens and bytes
    tokens: int
    bytes: int  # pages of running requests included
    hits: int  # users with a state that a find returned
    misses: int
    writes: int  # that took effect
    outrun: int  # appends to a state that was evicted or changed
    no_room: int  # writes and reads of the file for which running requests used too much memory
    evictions: int  # states that left memory for others, also to the file
    expirations: int
    tier_states: int  # in the file
    tier_bytes: int  # pages in the file, and what stays in memory of their states
    tier_hits: int  # states read from the file
    tier_evictions: int  # states that left the file for others, or did not fit in it
    tier_failures: int  # states that the disk refused or lost


def user_states(
    parts: StateParts,
    *,
    max_bytes: int,
    page_tokens: int = 64,
    ttl: int = 0,
    shared_name: str = "",
    anonymous: bool = False,
) -> tf.Tensor:
    """Makes a cache of user states in host memory, or returns the one that has this shared_name.

    Args:
      parts: Parts of a token and of a user.
      max_bytes: Limit of the memory, at least one page. The state used least recently is evicted first.
      page_tokens: Tokens of a page. A state takes whole pages.
      ttl: Seconds without use after which a state is removed; 0 for never.
      shared_name: Name of the resource. It lives until tf.raw_ops.DestroyResourceOp, unless it is anonymous.
      anonymous: True if each call makes a new cache, which lives as long as its handle.

    Returns:
      <resource>[].
    """
    return library.fusedrec_user_states(
        max_bytes=max_bytes, page_tokens=page_tokens, ttl=ttl, shared_name=shared_name, anonymous=anonymous,
        **_attributes(parts),
    )  # fmt: skip


def user_states_find(
    states: tf.Tensor, users: tf.Tensor, version: tf.Tensor, now: tf.Tensor, *, parts: StateParts
) -> FoundStates:
    """Reads the states of users, each as it was at one moment. A find counts as a use.

    Args:
      states: <resource>[].
      users: <int64>[B], any value. Users may repeat.
      version: <int64>[], version of the model. States of other versions are not found.
      now: <int64>[], time in seconds.
      parts: Parts of the cache.
    """
    return FoundStates(
        *library.fusedrec_user_states_find(states=states, users=users, version=version, now=now, **_attributes(parts))
    )


def user_states_write(
    states: tf.Tensor,
    users: tf.Tensor,
    version: tf.Tensor,
    now: tf.Tensor,
    *,
    revisions: tf.Tensor,
    row_splits: tf.Tensor,
    of_tokens: Sequence[tf.Tensor],
    of_users: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Appends tokens to states, or puts new states, user by user. No earlier token is copied.

    Args:
      states: <resource>[].
      users: <int64>[B].
      version: <int64>[], version of the model that made the tokens.
      now: <int64>[], time in seconds.
      revisions: <int64>[B] of user_states_find, the state to append to. 0 replaces any present state; -1 writes
        nothing.
      row_splits: <int64>[B+1], tokens to write of each user.
      of_tokens: <dtype>[T, columns] for each part of a token.
      of_users: <dtype>[B, columns] for each part of a user.

    Returns:
      <bool>[B], False where another request was quicker, the state was evicted, or running requests use too much
      memory.

    Raises:
      ResourceExhaustedError: One state is larger than max_bytes. The other users are written.
    """
    return library.fusedrec_user_states_write(
        states=states, users=users, version=version, now=now, revisions=revisions, row_splits=row_splits,
        of_tokens=list(of_tokens), of_users=list(of_users),
    )  # fmt: skip


def user_states_drop(states: tf.Tensor, version: tf.Tensor | int) -> tf.Tensor:
    """Drops the states of versions below `version` <int64>[], and returns their number <int64>[]."""
    return library.fusedrec_user_states_drop(states=states, version=version)


def user_states_spill(states: tf.Tensor, tier_folder: tf.Tensor | str, tier_bytes: tf.Tensor | int) -> tf.Tensor:
    """Opens a file for the states evicted from memory. A find reads them back, with the same bytes.

    The file has no name and ends with the process, so processes with one folder have separate files. A full disk or a
    damaged page loses a state, which is computed again, and raises no error.

    Args:
      states: <resource>[], without a file.
      tier_folder: <string>[], a folder that the process can write.
      tier_bytes: <int64>[], limit of the file, and of what stays in memory of its states; at least one page.

    Returns:
      tier_bytes.
    """
    return library.fusedrec_user_states_spill(states=states, tier_folder=tier_folder, tier_bytes=tier_bytes)


def user_states_statistics(states: tf.Tensor) -> tf.Tensor:
    """Returns the counts of UserStatesStatistics, <int64>[15]."""
    return library.fusedrec_user_states_statistics(states=states)


def user_state_bytes(parts: StateParts, tokens: int, page_tokens: int = 64) -> int:
    """Returns the bytes of max_bytes that a state of `tokens` tokens uses."""
    of_token, of_user = (sum(tf.as_dtype(dtype).size * columns for dtype, columns in part) for part in parts)
    return -(-tokens // page_tokens) * page_tokens * of_token + of_user + _STATE_BYTES


def _attributes(parts: StateParts) -> dict[str, list]:
    attributes: dict[str, list] = {}
    for name, part in (("token", parts.of_token), ("user", parts.of_user)):
        attributes |= {f"{name}_types": [dtype for dtype, _ in part], f"{name}_columns": [n for _, n in part]}
    return attributes
