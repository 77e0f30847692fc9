"""Question: how fast does a table on a GPU find rows, train them, and exchange rows with host memory?

    python -m benchmarks.gpu_table [--quick] [--json FILE]

"find" looks up a million distinct ids in lines filled to 0.5 and 0.75, with and without a copy of the rows. The bound
is the copy bandwidth, for the id, its line of 64 bytes and its row read, and the row (or its number) written. A
training step looks up ids, a third of them distinct, and updates their rows by row-wise Adagrad. Its rate counts ids.
A time covers a whole call, with the copies of counts to the host. Published figures stand beside ours.

With rows in host memory the benchmark times the two buffers of a batch, which shares half of its rows with the next
batch. The bound of the change to the next batch is the copy bandwidth. Transfers are in bytes per second.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import gpu_device
from tests.cuda.device_buffer import DeviceBuffer
from tests.cuda.device_table import NOWHERE, STORAGES, DeviceTable, Step

NUM_IDS = 1 << 20
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


def filled(kernels, dim: int, load: float, rule: str, lines: int = 1 << 20) -> tuple[DeviceTable, np.ndarray]:
    """Returns a table whose `lines` (a power of two) are filled to `load` (above 0.375), and its ids."""
    ids = ids_of(int(load * 5 * lines) - 1)
    options = {"distribution": "uniform", "a": -0.1, "b": 0.1, "rule": rule, "epsilon": 1e-8}
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


def measure_find(kernels, dim: int, load: float, bandwidth: float, **more) -> list[dict]:
    table, ids = filled(kernels, dim, load, "sgd", **more)
    check(table, ids)
    memory, wanted = kernels.memory, np.random.default_rng(0).permutation(ids)[:NUM_IDS]
    n = len(wanted)
    entries, splits, message = table.message(np.concatenate([[n], wanted]), [n + 1])
    rows, found = memory.empty([n, dim], np.float32), memory.empty([n], np.uint32)
    calls = {
        0: lambda: kernels.run("table_find", table.handle, message, 0, None, 0, found),
        dim: lambda: kernels.run("table_find", table.handle, message, 0, rows, n, found),
    }
    results = []
    for columns, call in calls.items():
        us, moved = gpu_device.median_us(call), n * (8 + 64 + 4 + 8 * columns)
        results.append({
            "name": "find", "dim": columns, "load": len(ids) / 5 / (table.size()[1]["line_bytes"] // 64), "ids": n,
            "us": us, "G_rows_per_s": n / us / 1e3, "bytes": moved,
            "fraction_of_copy_bandwidth": moved / (us * 1e-6) / bandwidth,
            "published_G_rows_per_s": PUBLISHED_FIND.get((columns, load), {}),
        })  # fmt: skip
    table.close()
    return results


def measure_step(kernels, dim: int, bandwidth: float, **more) -> list[dict]:
    table, ids = filled(kernels, dim, 0.5, "rowwise_adagrad", **more)
    memory, random = kernels.memory, np.random.default_rng(1)
    received = random.choice(ids[: NUM_IDS // 3], min(NUM_IDS, 2 * len(ids)))
    n, distinct = len(received), len(np.unique(received))
    entries, splits, message = table.message(np.concatenate([[n], received]), [n + 1])
    rows, inverse = memory.empty([n, dim], np.float32), memory.empty([n], np.int32)
    handles, grads = memory.empty([n], np.int64), memory.put(np.full([n, dim], 1e-3, np.float32))
    num_rows = np.zeros(1, np.int64)
    update = Step(learning_rate=0.01, step=1)

    def lookup():
        kernels.run("table_lookup", table.handle, message, STORAGES["float32"], rows, n, inverse, handles, num_rows)

    def apply():
        distinct_rows = int(num_rows[0])
        kernels.run(
            "table_apply", table.handle, handles, distinct_rows, inverse, n, grads, STORAGES["float32"], 1.0, update
        )

    def step():
        lookup()
        apply()

    step()
    assert num_rows[0] == distinct
    moved = n * (8 + 64 + 4 + 8 * dim) + n * 4 * dim + distinct * 8 * dim
    results: list[dict] = []
    for name, call in (("lookup", lookup), ("update", apply), ("lookup and update", step)):
        us = gpu_device.median_us(call)
        results.append({"name": name, "dim": dim, "ids": n, "rows": distinct, "us": us, "G_ids_per_s": n / us / 1e3})
    results[-1].update(
        bytes=moved, fraction_of_copy_bandwidth=moved / (results[-1]["us"] * 1e-6) / bandwidth, published=PUBLISHED_STEP
    )
    table.close()
    return results


def measure_buffers(kernels, dim: int, bandwidth: float, rows: int = NUM_IDS // 4) -> list[dict]:
    """Times rows from host memory, the change to the next batch, and rows back, with row-wise Adagrad."""
    buffer = DeviceBuffer(kernels, dim, [1], rule="rowwise_adagrad", chunk_rows=1 << 16)
    ids, splits = ids_of(rows + rows // 2), np.array([0, rows], np.int64)
    batches = [ids[:rows].copy(), ids[rows // 2 :].copy()]
    records = kernels.memory.host([rows, buffer.record_bytes()])
    records[:] = 0
    buffer.prefetch(batches[1], splits, records)
    buffer.advance()
    buffer.write_back()
    number, shared = 0, 0

    def prefetch():
        buffer.prefetch(batches[number % 2], splits, records)

    def advance():
        nonlocal number, shared
        number, shared = number + 1, buffer.advance()

    calls = {"rows to a buffer": prefetch, "the next batch": advance, "rows back": lambda: buffer.write_back(records)}
    times = gpu_device.medians_us(calls, rounds=20)
    assert shared == 2 * rows - len(ids)
    record_bytes = rows * buffer.record_bytes()
    results: list[dict] = [{"name": name, "dim": dim, "rows": rows, "us": us} for name, us in times.items()]
    # Keys and lines of all rows move when they are inserted and when they are compared. Records move in and out. Rows
    # in both batches are read and written once more, with their slots.
    moved = rows * 2 * (32 + 64) + (2 * rows + shared) * 2 * (record_bytes // rows)
    results[1].update(
        shared=shared, bytes=moved, fraction_of_copy_bandwidth=moved / (results[1]["us"] * 1e-6) / bandwidth
    )
    for result in (results[0], results[2]):
        result.update(bytes=record_bytes, GB_per_s=record_bytes / result["us"] / 1e3)
    buffer.close()
    return results


def main() -> None:
    arguments = gpu_device.options(__doc__, "table")
    kernels, bandwidth = gpu_device.open_kernels(), gpu_device.copy_bytes_per_s()
    dims = (8,) if arguments.quick else (8, 64, 128)
    results = [line for dim in dims for load in (0.5, 0.75) for line in measure_find(kernels, dim, load, bandwidth)]
    results += [line for dim in dims for line in measure_step(kernels, dim, bandwidth)]
    results += [line for dim in dims for line in measure_buffers(kernels, dim, bandwidth)]
    gpu_device.write(arguments.json, results)


if __name__ == "__main__":
    main()
