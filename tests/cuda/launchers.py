"""The ops without a table by their launchers: NumPy arrays in and out, without TensorFlow.

Checks (tests/cuda/checks) call these, or the ops by tests/support/small_ops.py. Padded buffers are longer than their
data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.cuda.checks.jagged_attention_call import from_bits, prepare
from tests.cuda.memory import Allocator

INVALID, OUT_OF_MEMORY = 1, 2  # of cuda_api.h
COMBINERS = ("sum", "mean", "sqrtn")
DISTRIBUTIONS = ("constant", "uniform", "normal", "truncated_normal")
PADDING = 5
SMALL_OPS = ("fuse_ids", "initial_rows", "join_messages", "rank_partition", "recovery", "segment_unique")
OPS = (*SMALL_OPS, "jagged_attention")
TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2}  # 2: bits of bfloat16


def pointers(values: list) -> ctypes.Array:
    return (ctypes.c_void_p * len(values))(*values)


class Feature(ctypes.Structure):
    """FusedrecFeature of fuse_ids_cuda.h."""

    _fields_ = [
        ("ids", ctypes.c_void_p), ("row_splits", ctypes.c_void_p), ("num_ids", ctypes.c_int64),
        ("num_splits", ctypes.c_int64), ("bag_size", ctypes.c_int64), ("combiner", ctypes.c_int64),
    ]  # fmt: skip


class Refused(Exception):
    """A launcher has found wrong input on the device."""


class Launchers:
    """The ops over the launchers of a library.

    Args:
      kernels: tests.cuda.memory.Kernels.
    """

    times_of_float32 = 1  # errors of attention, of those in jagged_attention_call.py

    def __init__(self, kernels: Any):
        self.kernels, self.memory = kernels, kernels.memory
        self.answer, self.allocator = kernels.answer, kernels.allocator

    def _put(self, values, dtype=np.int64):
        return self.memory.put(np.array(values, dtype))

    def run(self, name, *arguments):
        answer = self.answer(name, *arguments)
        if answer == OUT_OF_MEMORY:
            raise MemoryError
        if answer == INVALID:
            raise Refused
        assert answer == 0, f"fusedrec_{name} answered {answer}"

    def refuse_without_memory(self, call: Callable[[], Any]) -> None:
        """Asserts that a call answers OUT_OF_MEMORY when the allocator has no memory."""
        self.allocator, allocator = Allocator(lambda *_: None, lambda *_: None), self.allocator
        try:
            call()
        except MemoryError:
            return
        finally:
            self.allocator = allocator
        raise AssertionError("a launcher without memory did not say so")

    def segment_unique(self, ids, splits):
        n = len(ids)
        unique, inverse = self.memory.empty([n], np.int64), self.memory.empty([n], np.int32)
        unique_splits, splits = np.full(len(splits), -7, np.int64), np.array(splits, np.int64)
        out = unique, unique_splits, inverse
        self.run("segment_unique", self._put(ids), splits, n, len(splits) - 1, self.allocator, *out)
        return self.memory.get(unique)[: unique_splits[-1]], unique_splits, self.memory.get(inverse)

    def rank_partition(self, ids, splits, ranks, owner, id_bits=64):
        n, segments = len(ids), len(splits) - 1
        size = n + ranks * segments + PADDING
        message, restore = self.memory.empty([size], np.int64), self.memory.empty([n], np.int32)
        counts = np.full(ranks + 1, -7, np.int32)
        self.run(
            "rank_partition", self._put(ids), np.array(splits, np.int64), n, segments, ranks, owner == "tfra", id_bits,
            self.allocator, message, size, counts, restore,
        )  # fmt: skip
        if counts[-1] >= 0:
            raise Refused(int(counts[-1]))
        return self.memory.get(message), counts[:-1] + segments, counts[:-1], self.memory.get(restore)

    def unpack_message(self, messages, segments):
        ranks, flat = len(messages), self._put([entry for message in messages for entry in message])
        sizes = np.array([len(message) for message in messages], np.int32)
        headers, n = np.full([ranks, segments], -7, np.int64), sum(sizes) - ranks * segments
        self.run("message_headers", flat, sizes, segments, ranks, self.allocator, headers)
        ids, position = self.memory.empty([n], np.int64), self.memory.empty([n], np.int32)
        splits, id_splits = np.full(segments + 1, -7, np.int64), np.full(ranks, -7, np.int32)
        out = ids, splits, position, id_splits
        self.run("unpack_message", flat, headers, segments, ranks, self.allocator, *out)
        return self.memory.get(ids), splits, self.memory.get(position), id_splits

    def join_messages(self, messages, splits):
        on_device = [self._put(message) for message in messages]
        sizes = [np.array(of_message, np.int32) for of_message in splits]
        size = sum(map(sum, splits)) + PADDING
        joined = self.memory.empty([size], np.int64)
        self.run(
            "join_messages", pointers([self.memory.pointer(array).value for array in on_device]),
            pointers([array.ctypes.data for array in sizes]), len(messages), len(splits[0]), self.allocator, joined,
            size,
        )  # fmt: skip
        return self.memory.get(joined), np.sum(sizes, axis=0, dtype=np.int32)

    def split_messages(self, message, splits, segments):
        count, ranks = len(segments), len(splits)
        lengths, flat = np.full([count, ranks], -7, np.int32), self._put(message)
        sizes = np.array(splits, np.int32), np.array(segments, np.int64), count, ranks
        self.run("message_lengths", flat, *sizes, self.allocator, lengths)
        parts = [self.memory.empty([size], np.int64) for size in lengths.sum(axis=1)]
        to = pointers([self.memory.pointer(part).value for part in parts])
        self.run("split_messages", flat, lengths, count, ranks, self.allocator, to)
        return [self.memory.get(part) for part in parts], lengths

    def fuse_ids(self, features, row_splits, bag_sizes, combiners):
        arrays, records, bags = [], [], 0
        for f, ids in enumerate(features):
            arrays += [self._put(ids), self._put(row_splits.get(f, []))]
            at = [self.memory.pointer(array) for array in arrays[-2:]]
            sizes = len(ids), len(row_splits.get(f, [])), bag_sizes[f], COMBINERS.index(combiners[f])
            records.append(Feature(at[0], at[1] if f in row_splits else None, *sizes))
            bags += len(ids) // bag_sizes[f] if bag_sizes[f] else len(row_splits[f]) - 1
        n, wrong = sum(map(len, features)), np.full(1, -7, np.int32)
        out = [self.memory.empty(*a) for a in (([n], np.int64), ([bags + 1], np.int64), ([bags], np.float32))]
        table = (Feature * len(records))(*records)
        self.run("fuse_ids", table, len(records), n, bags, self.allocator, *out, wrong)
        if wrong[0] >= 0:
            raise Refused(int(wrong[0]))
        return tuple(map(self.memory.get, out))

    def initial_rows(self, rows, exists, ids, splits, seeds, distribution, a, b):
        """`out` is the buffer of rows where the first row exists, as TensorFlow gives it sometimes."""
        on_device, sizes = self.memory.put(rows), (len(ids), len(seeds), rows.shape[1])
        out = on_device if len(exists) and exists[0] else self.memory.empty(rows.shape, rows.dtype)
        self.run(
            "initial_rows", TYPES[rows.dtype], on_device, self._put(exists, np.uint8), self._put(ids),
            np.array(splits, np.int64), np.array(seeds, np.int64), *sizes, DISTRIBUTIONS.index(distribution), a, b,
            self.allocator, out,
        )  # fmt: skip
        return self.memory.get(out)

    def recover(self, rows, index):
        n, columns = len(index), rows.shape[1]
        out = self.memory.empty([n + PADDING, columns], rows.dtype)
        sizes = len(rows), columns * rows.itemsize
        self.run("recover", self.memory.put(rows), *sizes, self._put(index, np.int32), n, out, n + PADDING)
        return self.memory.get(out)

    def recover_grad(self, grads, index, num_rows, bags=None):
        """bags: splits and scales, for the gradient of the pooled form."""
        splits, scale = (None, None) if bags is None else (self._put(bags[0]), self._put(bags[1], np.float32))
        out = self.memory.empty([num_rows + PADDING, grads.shape[1]], grads.dtype)
        self.run(
            "recover_grad", TYPES[grads.dtype], self.memory.put(grads), grads.shape[1], self._put(index, np.int32),
            len(index), splits, scale, 0 if bags is None else len(bags[1]), self.allocator, out, num_rows,
            num_rows + PADDING,
        )  # fmt: skip
        return self.memory.get(out)

    def pooled_recover(self, parts, index, splits, scale):
        columns, bags = parts[0].shape[1], len(scale)
        arrays, sizes = [self.memory.put(part) for part in parts], np.array([len(part) for part in parts], np.int64)
        out = self.memory.empty([bags + PADDING, columns], parts[0].dtype)
        more = columns, self._put(index, np.int32), len(index), self._put(splits), self._put(scale, np.float32), bags
        kind = TYPES[parts[0].dtype]
        lists = pointers([self.memory.pointer(array).value for array in arrays]), sizes, len(parts)
        self.run("pooled_recover", kind, *lists, *more, self.allocator, out, bags + PADDING)
        return self.memory.get(out)

    def attention(self, type_, case, grads=None):
        """Returns out, also gated, or with grads of the output the gradients: by name, as float32.

        case: as for the oracle (tests/oracles/jagged_attention.py), and query_splits; for gradients `attended`, the
        result before the gate. Without a query, the channels of a bias.
        """
        prepared = prepare(self.memory, type_, case, grads)
        self.run(prepared.launcher, prepared.call, self.allocator)
        results = {name: self.memory.get(prepared.device[name]) for name in prepared.results}
        return {name: x if x.dtype == np.float32 else from_bits(type_, x) for name, x in results.items()}
