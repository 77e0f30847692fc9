"""A table on a GPU: finds rows, trains them, and exchanges them with host memory. The case `table` of benchmarks.ops.

"find" looks up a million distinct ids in lines filled to 0.5 and 0.75, with and without a copy of the rows. Its work is
the id, its line of 64 bytes and its row read, and the row (or its number) written. A training step looks up ids, a
third of them distinct, and updates their rows by row-wise Adagrad. A time covers a whole call, with the copies of
counts to the host. The peers know the number of every row, so they search nothing: torch embedding, and a step of
torch.unique, embedding, index_add_ and row-wise Adagrad.

With rows in host memory the benchmark times the two buffers of a batch, which shares half of its rows with the next
batch. The bound of rows that move between host and device is the measured rate of the link.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.gpu import Call, Rates, Work, timed
from tests.cuda.device_buffer import DeviceBuffer
from tests.cuda.device_table import NOWHERE, STORAGES, DeviceTable, Step

NUM_IDS = 1 << 20
LEARNING_RATE, EPSILON = 0.01, 1e-8
# HierarchicalKV, find of 1 M keys of 8 bytes: G keys/s by (device, dim, load); dim 0: pointers to rows alone.
PUBLISHED_FIND = {
    (0, 0.5): {"HierarchicalKV H100 NVL": 6.94, "HierarchicalKV A100": 3.7},
    (0, 0.75): {"HierarchicalKV H100 NVL": 5.96},
    (8, 0.5): {"HierarchicalKV H100 NVL": 3.9, "HierarchicalKV A100": 2.47},
    (64, 0.5): {"HierarchicalKV A100": 1.98},
}
# dynamicemb on an H100, D 128, float32, SGD, 1.05 M ids of which 350 K distinct: lookup and update, us of kernels.
PUBLISHED_STEP = {"dynamicemb H100": {"ids": 1.05e6, "us": 53 + 150 + 131 + 295 + 352 + 188}}


def ids_of(n: int) -> np.ndarray:
    """Returns distinct ids, spread over all 64 bits."""
    return (np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def filled(kernels: Any, dim: int, load: float, rule: str, lines: int = 1 << 20) -> tuple[DeviceTable, np.ndarray]:
    """Returns a table whose `lines` (a power of two) are filled to `load` (above 0.375), and its ids."""
    ids = ids_of(int(load * 5 * lines) - 1)
    options = {"distribution": "uniform", "a": -0.1, "b": 0.1, "rule": rule}
    if rule != "sgd":
        options["epsilon"] = EPSILON
    table = DeviceTable(kernels, dim, [1], chunk_rows=1 << 16, **options)
    for part in np.array_split(ids, 4):
        table.lookup(np.concatenate([[len(part)], part]), [len(part) + 1], padding=0)
    assert table.size()[1]["line_bytes"] == 64 * lines
    return table, ids


def check(table: DeviceTable, ids: np.ndarray) -> None:
    """Checks that every id has a row of its own and that other ids have none."""
    part = np.concatenate([ids[:1000], ids[:1000] + 1])
    _, found = table.find(np.concatenate([[len(part)], part]), [len(part) + 1])
    here, there = np.split(found, 2)
    assert len(set(here)) == len(here) and not np.any(here == NOWHERE) and np.all(there == NOWHERE)


def find(kernels: Any, rates: Rates, libraries: Mapping[str, Any], dim: int, **more: Any) -> list[dict]:
    return [line for load in (0.5, 0.75) for line in _find(kernels, rates, libraries, dim, load, **more)]


def _find(
    kernels: Any, rates: Rates, libraries: Mapping[str, Any], dim: int, load: float, num_ids: int = NUM_IDS, **more: Any
) -> list[dict]:
    table, ids = filled(kernels, dim, load, "sgd", **more)
    check(table, ids)
    memory, wanted = kernels.memory, np.random.default_rng(0).permutation(ids)[:num_ids]
    n = len(wanted)
    entries, splits, message = table.message(np.concatenate([[n], wanted]), [n + 1])
    rows, found = memory.empty([n, dim], np.float32), memory.empty([n], np.uint32)
    calls = {
        "find numbers": Call(
            lambda: kernels.run("table_find", table.handle, message, 0, None, 0, found), Work(bytes=n * (8 + 64 + 4))
        ),
        "find": Call(
            lambda: kernels.run("table_find", table.handle, message, 0, rows, n, found),
            Work(bytes=n * (8 + 64 + 4 + 8 * dim)),
        ),
        **_embedding(libraries, n, len(ids), dim),
    }
    filled_to = len(ids) / 5 / (table.size()[1]["line_bytes"] // 64)
    results = timed(calls, rates, dim=dim, load=filled_to, ids=n)
    for result, columns in zip(results, (0, dim)):
        result["published_G_rows_per_s"] = PUBLISHED_FIND.get((columns, load), {})
    for result in results:
        result["G_rows_per_s"] = n / result["us"] / 1e3
    table.close()
    return results


def train(
    kernels: Any, rates: Rates, libraries: Mapping[str, Any], dim: int, num_ids: int = NUM_IDS, **more: Any
) -> list[dict]:
    table, ids = filled(kernels, dim, 0.5, "rowwise_adagrad", **more)
    memory, random = kernels.memory, np.random.default_rng(1)
    numbers = random.integers(0, min(len(ids), num_ids // 3), min(num_ids, 2 * len(ids)))
    received, n, distinct = ids[numbers], len(numbers), len(np.unique(numbers))
    entries, splits, message = table.message(np.concatenate([[n], received]), [n + 1])
    rows, inverse = memory.empty([n, dim], np.float32), memory.empty([n], np.int32)
    handles, grads = memory.empty([n], np.int64), memory.put(np.full([n, dim], 1e-3, np.float32))
    left_out, num_left_out, num_rows = memory.empty([n], np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64)
    update = Step(learning_rate=LEARNING_RATE, number=1)

    def lookup() -> None:
        kernels.run("table_lookup", table.handle, message, STORAGES["float32"], rows, n, inverse, handles, num_rows)

    def apply() -> None:
        distinct_rows = int(num_rows[0])
        kernels.run(
            "table_apply", table.handle, handles, distinct_rows, inverse, n, grads, STORAGES["float32"], 1.0, update,
            left_out, num_left_out,
        )  # fmt: skip

    def step() -> None:
        lookup()
        apply()

    lookup()
    start = memory.get(rows).copy()
    apply()
    lookup()
    assert num_rows[0] == distinct
    trained = memory.get(rows).copy()
    looked_up, updated = n * (8 + 64 + 4 + 8 * dim), n * 4 * dim + distinct * 8 * dim
    peer = Trained(start, trained, numbers, LEARNING_RATE, EPSILON)
    calls = {
        "lookup": Call(lookup, Work(bytes=looked_up)),
        "update": Call(apply, Work(bytes=updated, flops=float(n * dim))),
        "lookup and update": Call(step, Work(bytes=looked_up + updated, flops=float(n * dim))),
        **_step(libraries, peer, Work(bytes=n * (8 + 8 * dim) + updated, flops=float(n * dim))),
    }
    results = timed(calls, rates, dim=dim, ids=n, rows=distinct)
    for result in results:
        result["G_ids_per_s"] = n / result["us"] / 1e3
    results[2]["published"] = PUBLISHED_STEP
    table.close()
    return results


def exchange(
    kernels: Any, rates: Rates, libraries: Mapping[str, Any], dim: int, rows: int = NUM_IDS // 4
) -> list[dict]:
    """Times rows from host memory, and the change to the next batch with the rows of the last one back.

    The update rule is row-wise Adagrad.
    """
    buffer = DeviceBuffer(kernels, dim, [1], rule="rowwise_adagrad", chunk_rows=1 << 16)
    ids, splits = ids_of(rows + rows // 2), np.array([0, rows], np.int64)
    batches = [ids[:rows].copy(), ids[rows // 2 :].copy()]
    records = buffer.pinned(np.zeros([rows, buffer.record_bytes()], np.uint8))
    buffer.prefetch(batches[1], splits, records)
    buffer.advance()
    buffer.write_back()
    number, shared = 0, 0

    def prefetch() -> None:
        buffer.prefetch(batches[number % 2], splits, records)
        buffer.host_memory(1)  # waits for the copy

    def advance() -> None:
        nonlocal number, shared
        number, shared = number + 1, buffer.advance()
        buffer.wait_back()

    record_bytes = rows * buffer.record_bytes()
    half = 2 * rows - len(ids)  # rows that both batches have
    # Keys and lines of all rows move when they are inserted and when they are compared. Records move in and out. Rows
    # in both batches are read and written once more, with their slots.
    moved = rows * 2 * (32 + 64) + (2 * rows + half) * 2 * (record_bytes // rows)
    calls = {
        "rows to a buffer": Call(prefetch, Work(host_bytes=record_bytes)),
        "the next batch, rows back": Call(advance, Work(bytes=moved, host_bytes=record_bytes)),
    }
    results = timed(calls, rates, dim=dim, rows=rows, shared=half)
    assert shared == half
    buffer.close()
    return results


class Trained(NamedTuple):
    """A training step of a table, which a peer must repeat."""

    start: np.ndarray  # <float32>[n, dim], the rows of the ids before the step
    trained: np.ndarray  # <float32>[n, dim], behind it
    numbers: np.ndarray  # <int64>[n], number of each id's row
    learning_rate: float
    epsilon: float


def _embedding(libraries: Mapping[str, Any], n: int, num_rows: int, dim: int) -> dict[str, Call]:
    """torch embedding of n random rows of num_rows."""
    torch = libraries.get("torch")
    if torch is None:
        return {}
    weight = torch.rand(num_rows, dim, device="cuda")
    numbers = torch.randperm(num_rows, device="cuda")[:n]

    def run() -> Any:
        return torch.nn.functional.embedding(numbers, weight)

    def check() -> None:
        assert torch.equal(run(), weight[numbers])

    return {"torch embedding": Call(run, Work(bytes=n * (8 + 8 * dim)), check)}


def _step(libraries: Mapping[str, Any], wanted: Trained, work: Work) -> dict[str, Call]:
    """embedding, torch.unique, index_add_ and row-wise Adagrad, on gradients of 1e-3."""
    torch = libraries.get("torch")
    if torch is None:
        return {}
    numbers = torch.from_numpy(wanted.numbers).cuda()
    weight = torch.zeros(int(wanted.numbers.max()) + 1, wanted.start.shape[1], device="cuda")
    weight[numbers] = torch.from_numpy(wanted.start).cuda()
    accumulator = torch.zeros(len(weight), device="cuda")
    grads = torch.full(wanted.start.shape, 1e-3, device="cuda")

    def run() -> Any:
        rows = torch.nn.functional.embedding(numbers, weight)
        distinct, inverse = torch.unique(numbers, return_inverse=True)
        sums = torch.zeros(len(distinct), weight.shape[1], device="cuda").index_add_(0, inverse, grads)
        accumulator[distinct] += sums.square().sum(dim=1)
        weight[distinct] -= wanted.learning_rate * sums / (accumulator[distinct].sqrt() + wanted.epsilon)[:, None]
        return rows

    def check() -> None:
        run()
        # Sums of some float32 numbers in another order.
        np.testing.assert_allclose(weight[numbers].cpu().numpy(), wanted.trained, rtol=1e-4, atol=1e-6)

    return {"torch step": Call(run, work, check)}
