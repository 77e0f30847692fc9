"""Oracle for rank_partition and unpack_message. Python integers only; imports nothing from tf_fusedrec."""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


def mix64(x):
    """MurmurHash3's 64-bit finalizer on a Python integer."""
    x &= _MASK
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & _MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33


def owner_oracle(id_, ranks, owner):
    if owner == "tfra":
        return (id_ & 0x7FFFFFFF) % ranks
    return mix64(id_) * ranks >> 64


def rank_partition_oracle(unique_ids, unique_splits, ranks, owner):
    """Returns message (not padded), send_splits, id_splits and restore."""
    owners = [owner_oracle(int(i), ranks, owner) for i in unique_ids]
    message, send_splits, id_splits, restore = [], [], [], np.empty(len(unique_ids), np.int32)
    row = 0
    for r in range(ranks):
        counts, block = [], []
        for begin, end in zip(unique_splits[:-1], unique_splits[1:]):
            mine = [u for u in range(begin, end) if owners[u] == r]
            counts.append(len(mine))
            block += mine
        for u in block:
            restore[u] = row
            row += 1
        message += counts + [int(unique_ids[u]) for u in block]
        send_splits.append(len(counts) + len(block))
        id_splits.append(len(block))
    return np.array(message, np.int64), np.array(send_splits), np.array(id_splits), restore


def unpack_oracle(messages, segments):
    """Unpacks one message [counts[S] | ids] per source. Returns ids, segment_splits, position and id_splits."""
    by_segment = [[] for _ in range(segments)]
    arrival = []
    for message in messages:
        at = segments
        for s in range(segments):
            for i in message[at : at + message[s]]:
                arrival.append((s, len(by_segment[s])))
                by_segment[s].append(i)
            at += message[s]
    splits = np.concatenate([[0], np.cumsum([len(ids) for ids in by_segment])]).astype(np.int64)
    position = np.array([splits[s] + i for s, i in arrival], np.int32)
    ids = np.array([i for ids in by_segment for i in ids], np.int64)
    return ids, splits, position, np.array([len(m) - segments for m in messages])
