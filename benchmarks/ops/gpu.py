"""The cases of benchmarks.ops on a GPU: our kernels, their least work, and peers of PyTorch, CuPy and Triton.

segment_unique   Ten segments of int64 keys by zipf(1.05). The peers sort the whole array as one segment. Work: 8 bytes
                 read per key, 4 bytes of inverse per key and 8 bytes per unique key written.
recovery         The gather of rows and its deterministic gradient. The peers gather with embedding and take. They sum
                 with index_add_ and scatter_add, which add in no fixed order. All set their sums to zero first.
attention        Causal, bfloat16. Operations are counted as usual: 4 S^2 D / 2 per head and sequence forward, 2.5 times
                 as many backward. The peer is triton_kernel.py, forward without bias.
bias_attention   The channels of FuXi, one map by position and one by time. A column of a head and channel takes
                 2 S^2 / 2 operations forward and twice as many backward. PyTorch multiplies padded rows by maps
                 [row, S, S], as published code does, forward only. `difference` is its largest difference from ours,
                 over its largest number.
table            "find" looks up a million distinct ids in lines filled to 0.5 and 0.75, with and without a copy of the
                 rows. Work: the id, its line of 64 bytes and its row read, and the row (or its number) written. A step
                 looks up ids, a third of them distinct, and updates their rows by row-wise Adagrad. A time covers a
                 whole call, with the copies of counts to the host. The peers know the number of every row: embedding,
                 and a step of unique, embedding, index_add_ and row-wise Adagrad. With rows in host memory, the two
                 buffers of a batch are timed, which shares half of its rows with the next batch.

Bytes are tensors of tokens, each read or written once. Rows of attention have between S / 2 and S tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.gpu import Call, Rates, Work, timed
from tests.cuda.checks import jagged_attention, jagged_attention_channels
from tests.cuda.checks.jagged_attention_call import Prepared, assert_near, from_bits, prepare, random_case
from tests.cuda.device_buffer import DeviceBuffer
from tests.cuda.device_table import NOWHERE, STORAGES, DeviceTable, Step
from tests.cuda.launchers import Launchers
from tests.oracles.recovery import recover_oracle

SEGMENTS, HEADS = 10, 4
TOKENS = 1 << 16  # of a batch of attention
# PyTorch rounds both maps and the values to bfloat16, 2^-8 each, and its sums of up to 8192 terms; ours the results.
MOST_APART = 2.0**-5
# Published on an H100. dynamicemb, us: segmented_unique of 1.05 M keys in 10 tables by zipf 1.05, in no fixed order;
# gather and reduce_grads of 1.05 M indices of 350 K rows of 128 float32.
PUBLISHED_US = {
    ("segment_unique", 1 << 20): {"dynamicemb H100": 65.0}, ("recover", 128): {"dynamicemb H100": 295.0},
    ("recover_grad", 128): {"dynamicemb H100": 352.0},
}  # fmt: skip
# TFLOP/s, bfloat16, causal, no bias, by (pass, dim, longest): HSTU kernels of recsys-examples (wgmma), and
# FlashAttention-2 (mma.sync, as ours), which is attention with softmax.
PUBLISHED_TFLOPS: dict[tuple[str, int], dict[int, tuple]] = {
    ("forward", 64): {512: (169, 180), 1024: (253, 229), 2048: (368, 262), 4096: (426, 284)},
    ("backward", 64): {512: (166,), 1024: (257,), 2048: (329,), 4096: (379,)},
    ("forward", 128): {512: (261, 191), 1024: (391, 260), 2048: (459, 298), 4096: (505, 319)},
    ("backward", 128): {512: (197,), 1024: (313,), 2048: (383,), 4096: (439,)},
}


def segment_unique(kernels: Any, rates: Rates, libraries: Mapping[str, Any], n: int) -> list[dict]:
    memory, torch, cupy = kernels.memory, libraries.get("torch"), libraries.get("cupy")
    ranks = np.random.default_rng(n).zipf(1.05, n).astype(np.uint64)
    keys = (ranks * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)  # spread over all 64 bits
    splits, distinct = np.arange(SEGMENTS + 1, dtype=np.int64) * n // SEGMENTS, np.unique(keys)
    ids, bounds, inverse = Launchers(kernels).segment_unique(keys, splits)
    np.testing.assert_array_equal(ids[inverse], keys)
    for begin, end, first, last in zip(splits[:-1], splits[1:], bounds[:-1], bounds[1:]):
        assert last - first == len(np.unique(keys[begin:end]))
    device_keys = memory.put(keys)
    out = memory.empty([n], np.int64), np.empty(SEGMENTS + 1, np.int64), memory.empty([n], np.int32)

    def ours() -> None:
        kernels.run("segment_unique", device_keys, splits, n, SEGMENTS, kernels.allocator, *out)

    def peer(library: Any, array: Any, to_host: Callable[[Any], np.ndarray]) -> Call:
        def run() -> Any:
            return library.unique(array, return_inverse=True)

        def check() -> None:
            found, places = map(to_host, run())
            np.testing.assert_array_equal(found, distinct)
            np.testing.assert_array_equal(found[places], keys)

        return Call(run, Work(bytes=12 * n + 8 * len(distinct)), check)

    calls = {"segment_unique": Call(ours, Work(bytes=12 * n + 8 * len(ids)))}
    if torch is not None:
        calls["torch.unique"] = peer(torch, torch.from_numpy(keys).cuda(), lambda found: found.cpu().numpy())
    if cupy is not None:
        calls["cupy.unique"] = peer(cupy, cupy.asarray(keys), cupy.asnumpy)
    lines = timed(calls, rates, keys=n)
    for line in lines:
        is_ours = line["name"] == "segment_unique"
        line |= {"segments": SEGMENTS if is_ours else 1, "keys_per_s": 1e6 * n / line["us"]}
        line["times_ours"] = line["us"] / lines[0]["us"]
        line["published_us"] = PUBLISHED_US.get((line["name"], n), {})
    return lines


def recovery(kernels: Any, rates: Rates, libraries: Mapping[str, Any], n: int, num_rows: int, dim: int) -> list[dict]:
    memory, random = kernels.memory, np.random.default_rng(0)
    index = np.minimum(random.zipf(1.2, n) - 1, num_rows - 1).astype(np.int32)
    rows = random.integers(-8, 9, [num_rows, dim]).astype(np.float32)
    got = Launchers(kernels).recover(rows, index[:1000])[:1000]
    np.testing.assert_array_equal(got, recover_oracle(rows, index[:1000]))
    wanted = np.zeros([num_rows, dim])
    np.add.at(wanted, index, rows[index])  # integers, whose sums are exact below 2^24
    summed = Launchers(kernels).recover_grad(rows[index], index, num_rows)[:num_rows]
    np.testing.assert_allclose(summed, wanted, rtol=1e-6)

    gather = Work(bytes=n * (8 * dim + 4))
    scatter = Work(bytes=n * (4 * dim + 4) + 4 * num_rows * dim, flops=float(n * dim))
    d_rows, d_index, grads = memory.put(rows), memory.put(index), memory.put(rows[index])
    out, sums = memory.empty([n, dim], np.float32), memory.empty([num_rows, dim], np.float32)
    add = ("recover_grad", 0, grads, dim, d_index, n, None, None, 0, kernels.allocator, sums, num_rows, num_rows)
    calls = {
        "recover": Call(lambda: kernels.run("recover", d_rows, num_rows, 4 * dim, d_index, n, out, n), gather),
        "recover_grad": Call(lambda: kernels.run(*add), scatter),
    }

    def peer(run: Callable[[], Any], to_host: Callable[[Any], np.ndarray], work: Work) -> Call:
        want = rows[index] if work is gather else wanted
        return Call(run, work, lambda: np.testing.assert_allclose(to_host(run()), want, rtol=1e-6))  # sums above 2^24

    torch, cupy, cupyx = (libraries.get(name) for name in ("torch", "cupy", "cupyx"))
    if torch is not None:
        tensor, long_index = torch.from_numpy(rows).cuda(), torch.from_numpy(index.astype(np.int64)).cuda()
        gathered, t_sums = tensor[long_index], torch.empty_like(tensor)
        of_torch: dict[str, tuple[Callable[[], Any], Work]] = {
            "torch embedding": (lambda: torch.nn.functional.embedding(long_index, tensor), gather),
            "torch index_add_": (lambda: t_sums.zero_().index_add_(0, long_index, gathered), scatter),
        }
        calls |= {name: peer(run, lambda x: x.cpu().numpy(), work) for name, (run, work) in of_torch.items()}
    if cupy is not None and cupyx is not None:
        array, short_index = cupy.asarray(rows), cupy.asarray(index)
        taken, added = array[short_index], cupy.empty_like(array)

        def scatter_add() -> Any:
            added.fill(0)
            cupyx.scatter_add(added, short_index, taken)
            return added

        calls["cupy take"] = peer(lambda: cupy.take(array, short_index, axis=0), cupy.asnumpy, gather)
        calls["cupyx scatter_add"] = peer(scatter_add, cupy.asnumpy, scatter)
    lines = timed(calls, rates, indices=n, rows=num_rows, dim=dim)
    return [{**line, "published_us": PUBLISHED_US.get((line["name"], dim), {})} for line in lines]


def lengths_of_rows(random: np.random.Generator, longest: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(int(random.integers(longest // 2, longest + 1)))
    return lengths


def _operations(lengths: Sequence[int], dim: int) -> float:
    """Returns the operations of one causal product over all heads and rows."""
    return 2.0 * HEADS * dim * float(np.sum(np.square(lengths, dtype=np.float64)))


def _ours(kernels: Any, prepared: Prepared, work: Work) -> Call:
    return Call(lambda: kernels.run(prepared.launcher, prepared.call, kernels.allocator), work)


def attention(
    kernels: Any, rates: Rates, libraries: Mapping[str, Any], dim: int, longest: int, bias: bool
) -> list[dict]:
    random = np.random.default_rng(longest + dim)
    lengths = lengths_of_rows(random, longest)
    case = random_case(lengths, HEADS, dim, dim, bias=bias)
    forward = prepare(kernels.memory, 2, case)
    backward = prepare(kernels.memory, 2, case, random.normal(size=case["value"].shape))
    operations, tensor_bytes = _operations(lengths, dim), 2 * case["value"].size
    # Forward: query, key, value and out. Backward: these without out, and four gradients.
    work = Work(bytes=4 * tensor_bytes, flops=operations)
    calls = {
        "forward": _ours(kernels, forward, work),
        "backward": _ours(kernels, backward, Work(bytes=7 * tensor_bytes, flops=2.5 * operations)),
    }
    if not bias and libraries.get("triton") is not None:
        from benchmarks.ops import triton_kernel

        run = triton_kernel.prepare(forward.host["row_splits"], forward.device, HEADS, dim, forward.call.alpha)

        def check() -> None:
            outs = []
            for one in (calls["forward"].run, run):
                one()
                outs.append(from_bits(2, kernels.memory.get(forward.device["out"])))
            assert_near(2, outs[1], outs[0], "out of Triton beside ours", 2)  # each rounds weights and results itself

        calls["triton forward"] = Call(run, work, check)
    lines = timed(calls, rates, dim=dim, longest=longest, bias=bias, tokens=sum(lengths))
    for line in lines:
        line["tflops"] = line["flops"] / line["us"] / 1e6
        figures = PUBLISHED_TFLOPS.get((line["name"], dim), {}).get(longest, ())
        line["published_tflops"] = dict(zip(("recsys-examples HSTU H100", "FlashAttention-2 H100"), figures))
    return lines


def _dense_forward(case: dict, lengths: list[int]) -> Callable[[], Any]:
    """Returns a function that computes both maps and their products [row, S, H, channels, Dv], padded."""
    import torch

    rows, longest = len(lengths), max(lengths)
    splits = np.concatenate([[0], np.cumsum(lengths)])

    def padded(array: np.ndarray) -> torch.Tensor:
        dense = np.zeros([rows, longest, *array.shape[1:]], array.dtype)
        for b, length in enumerate(lengths):
            dense[b, :length] = array[splits[b] : splits[b + 1]]
        return torch.from_numpy(dense).cuda()

    value = padded(case["value"].reshape(splits[-1], -1).astype(np.float32)).bfloat16()
    asks, answers = padded(case["asks"]), padded(case["answers"])
    position, time = (
        torch.tensor(case[f"{name}_weights"], dtype=torch.float32, device="cuda") for name in ("position", "time")
    )
    thresholds = None if case["time"] == "power" else torch.from_numpy(case["thresholds"]).cuda()
    places = torch.arange(longest, device="cuda")
    index = len(position) // 2 + places[None, :] - places[:, None]
    causal = (places[:, None] >= places[None, :]).bfloat16()

    def run() -> torch.Tensor:
        difference = asks[:, :, None] - answers[:, None, :]
        if thresholds is None:
            time_map = time[0] * (difference.clamp(min=0).float() + 1.0) ** -time[1]
        else:
            time_map = time[torch.bucketize(difference.abs(), thresholds, right=True)]
        maps = (position[index].bfloat16() * causal, time_map.bfloat16() * causal)
        return torch.cat([torch.matmul(one, value).reshape(rows, longest, HEADS, 1, -1) for one in maps], dim=3)

    return run


def bias_attention(
    kernels: Any, rates: Rates, libraries: Mapping[str, Any], dim: int, longest: int, function: str | None
) -> list[dict]:
    random = np.random.default_rng(longest + dim)
    lengths = lengths_of_rows(random, longest)
    case = jagged_attention_channels.channels(lengths, HEADS, dim, function=function)
    grads = random.normal(size=[sum(lengths), HEADS, 2 * dim])
    forward, backward = (prepare(kernels.memory, 2, case, of) for of in (None, grads))
    dense, operations = _dense_forward(case, lengths), _operations(lengths, dim)
    value_bytes, time_bytes = 2 * case["value"].size, 2 * 8 * sum(lengths)
    # Forward: values, and both channels out. Backward: values, both channels' gradients, and gradients of values.
    work = Work(bytes=3 * value_bytes + time_bytes, flops=operations)
    calls = {
        "forward": _ours(kernels, forward, work),
        "backward": _ours(kernels, backward, Work(bytes=4 * value_bytes + time_bytes, flops=2.0 * operations)),
        "torch dense forward": Call(dense, work),
    }
    calls["forward"].run()
    out, theirs = from_bits(2, kernels.memory.get(forward.device["out"])), dense().float().cpu().numpy()
    theirs = np.concatenate([theirs[b, :length].reshape(length, HEADS, -1) for b, length in enumerate(lengths)])
    apart = float(np.max(np.abs(out - theirs)) / np.max(np.abs(theirs)))
    assert apart <= MOST_APART, f"the result differs from PyTorch's by {apart:.2e} of its largest number"
    kind = function or "buckets"
    lines = timed(calls, rates, columns=HEADS * dim, longest=longest, time=kind, tokens=sum(lengths))
    return [{**line, "tflops": line["flops"] / line["us"] / 1e6, "difference": apart} for line in lines]


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


def check_table(table: DeviceTable, ids: np.ndarray) -> None:
    """Checks that every id has a row of its own and that other ids have none."""
    part = np.concatenate([ids[:1000], ids[:1000] + 1])
    _, found = table.find(np.concatenate([[len(part)], part]), [len(part) + 1])
    here, there = np.split(found, 2)
    assert len(set(here)) == len(here) and not np.any(here == NOWHERE) and np.all(there == NOWHERE)


def find_rows(kernels: Any, rates: Rates, libraries: Mapping[str, Any], dim: int, **more: Any) -> list[dict]:
    return [line for load in (0.5, 0.75) for line in _find(kernels, rates, libraries, dim, load, **more)]


def _find(
    kernels: Any, rates: Rates, libraries: Mapping[str, Any], dim: int, load: float, num_ids: int = NUM_IDS, **more: Any
) -> list[dict]:
    table, ids = filled(kernels, dim, load, "sgd", **more)
    check_table(table, ids)
    memory, wanted = kernels.memory, np.random.default_rng(0).permutation(ids)[:num_ids]
    n = len(wanted)
    entries, splits, message = table.message(np.concatenate([[n], wanted]), [n + 1])
    rows, found = memory.empty([n, dim], np.float32), memory.empty([n], np.uint32)
    calls = {
        "find numbers": Call(
            lambda: kernels.run("table_find", table.handle, message, 0, 0, None, 0, found),
            Work(bytes=n * (8 + 64 + 4)),
        ),
        "find": Call(
            lambda: kernels.run("table_find", table.handle, message, 0, 0, rows, n, found),
            Work(bytes=n * (8 + 64 + 4 + 8 * dim)),
        ),
    }
    if (torch := libraries.get("torch")) is not None:
        weight = torch.rand(len(ids), dim, device="cuda")
        numbers = torch.randperm(len(ids), device="cuda")[:n]

        def embed() -> Any:
            return torch.nn.functional.embedding(numbers, weight)

        def check_rows() -> None:
            assert torch.equal(embed(), weight[numbers])

        calls["torch embedding"] = Call(embed, Work(bytes=n * (8 + 8 * dim)), check_rows)
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
        kernels.run("table_lookup", table.handle, message, 1, STORAGES["float32"], rows, n, inverse, handles, num_rows)

    def apply() -> None:
        gradients = table.gradients(handles, inverse, grads, int(num_rows[0]), n)
        kernels.run("table_apply", table.handle, gradients, update, left_out, num_left_out)

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
    calls = {
        "lookup": Call(lookup, Work(bytes=looked_up)),
        "update": Call(apply, Work(bytes=updated, flops=float(n * dim))),
        "lookup and update": Call(step, Work(bytes=looked_up + updated, flops=float(n * dim))),
    }
    if (torch := libraries.get("torch")) is not None:
        d_numbers = torch.from_numpy(numbers).cuda()
        weight = torch.zeros(int(numbers.max()) + 1, dim, device="cuda")
        weight[d_numbers] = torch.from_numpy(start).cuda()
        accumulator, d_grads = torch.zeros(len(weight), device="cuda"), torch.full([n, dim], 1e-3, device="cuda")

        def peer() -> Any:
            taken = torch.nn.functional.embedding(d_numbers, weight)
            unique, places = torch.unique(d_numbers, return_inverse=True)
            sums = torch.zeros(len(unique), dim, device="cuda").index_add_(0, places, d_grads)
            accumulator[unique] += sums.square().sum(dim=1)
            weight[unique] -= LEARNING_RATE * sums / (accumulator[unique].sqrt() + EPSILON)[:, None]
            return taken

        def check_trained() -> None:
            peer()
            # Sums of some float32 numbers in another order.
            np.testing.assert_allclose(weight[d_numbers].cpu().numpy(), trained, rtol=1e-4, atol=1e-6)

        work = Work(bytes=n * (8 + 8 * dim) + updated, flops=float(n * dim))
        calls["torch step"] = Call(peer, work, check_trained)
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
    number = 0

    def prefetch() -> None:
        buffer.prefetch(batches[number % 2], splits, records)
        buffer.host_memory(1)  # waits for the copy

    def advance() -> None:
        nonlocal number
        number += 1
        buffer.advance()
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
    assert buffer.rows()[0] == rows
    buffer.close()
    return results


class Cases(NamedTuple):
    """The sizes of a name, with the functions that measure each of them, and the libraries of their peers."""

    measures: Sequence[Callable[..., list[dict]]]
    quick: Sequence[Sequence[Any]]
    sizes: Sequence[Sequence[Any]]
    libraries: Sequence[str]
    check: Callable[[Any], None] = lambda kernels: None  # of the kernels, before all


CASES = {
    "segment_unique": Cases([segment_unique], [[1 << 16]], [[1 << n] for n in (16, 18, 20, 22, 24)], ("torch", "cupy")),
    "recovery": Cases(
        [recovery], [(1 << 16, 20_000, 8)], [(1 << 20, 350_000, dim) for dim in (8, 64, 128)],
        ("torch", "cupy", "cupyx"),
    ),
    "attention": Cases(
        [attention], [(64, 512, bias) for bias in (False, True)],
        [*itertools.product((64, 128), (512, 1024, 2048, 4096, 8192), (False, True))], ("triton",),
        lambda kernels: jagged_attention.check_rows_of_all_lengths(Launchers(kernels)),
    ),
    "bias_attention": Cases(
        [bias_attention], [(32, 512, function) for function in (None, "power")],
        [*itertools.product((32, 128), (512, 2048, 8192), (None, "power"))], (),
        lambda kernels: jagged_attention_channels.check_channels_of_rows_of_all_lengths(Launchers(kernels)),
    ),
    "table": Cases(
        [train, find_rows, exchange], [[8]], [[8], [64], [128]], ("torch",)
    ),
}  # fmt: skip
