"""Hash order and the owners of ids in NumPy, as custom_ops/common/hash.h defines them.

Snapshots of tables and files of checkpoints have rows by ascending Mix64(id). Ranges of this hash belong to ranks, so
the rows of a rank are one contiguous range, for any number of ranks.
"""

import hashlib

import numpy as np

LAST_HASH = (1 << 64) - 1


def mix64(ids: np.ndarray) -> np.ndarray:
    """<uint64>[n] MurmurHash3's 64-bit finalizer of ids <int64>[n]: a bijection."""
    x = np.ascontiguousarray(ids, np.int64).view(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))


def hash_range(rank: int, ranks: int) -> tuple[int, int]:
    """First and last hash, both inclusive, of rank `rank` of `ranks`: those with floor(hash * ranks / 2^64) == rank."""
    bounds = [-(-(r << 64) // ranks) for r in (rank, rank + 1)]  # rounded up
    return bounds[0], bounds[1] - 1


def hash_range_owner(ids: np.ndarray, ranks: int) -> np.ndarray:
    """<int64>[n] owner rank of ids <int64>[n] in tables of owner "hash_range"."""
    firsts = np.array([hash_range(rank, ranks)[0] for rank in range(ranks)], np.uint64)
    return np.searchsorted(firsts, mix64(ids), side="right").astype(np.int64) - 1


def tfra_owner(ids: np.ndarray, ranks: int) -> np.ndarray:
    """<int64>[n] owner rank of ids <int64>[n] under TFRA's default partition function."""
    return (ids & 0x7FFFFFFF) % ranks


OWNERS = {"hash_range": hash_range_owner, "tfra": tfra_owner}  # by Table.owner


def table_seed(seed: int, name: str) -> int:
    """A signed 64-bit number, a pure function of a seed and a table's name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
