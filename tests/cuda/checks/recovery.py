"""Recovery, its gradient and the pooled forms against their NumPy oracles.

Sums are compared exactly: gradients are small integers, whose sums are exact in any order, in float32 and, after the
one rounding that the op promises, in 16 bits.
"""

import numpy as np

from tests.cuda.checks.join_messages import pointers
from tests.cuda.memory import POISON
from tests.oracles.recovery import (
    pooled_recover_grad_oracle,
    pooled_recover_oracle,
    recover_grad_oracle,
    recover_oracle,
)

INVALID = 1  # cudaErrorInvalidValue
TYPES = {0: np.float32, 1: np.float16}  # 2, bfloat16, has no NumPy type: see check_bfloat16


def integers(random, shape, dtype):
    return random.integers(-8, 9, shape).astype(dtype)


def recovered(kernels, rows, index, out_rows):
    memory = kernels.memory
    out = memory.empty([out_rows, rows.shape[1]], rows.dtype)
    bytes_ = rows.shape[1] * rows.itemsize
    kernels.run("recover", memory.put(rows), len(rows), bytes_, memory.put(index), len(index), out, out_rows)
    return memory.get(out)


def check_recover(kernels):
    random = np.random.default_rng(0)
    for dim, dtype in ((4, np.float32), (3, np.float32), (5, np.float16), (8, np.float16)):
        rows, index = integers(random, [40, dim], dtype), random.integers(0, 40, 301).astype(np.int32)
        ours = recovered(kernels, rows, index, 310)
        np.testing.assert_array_equal(ours[:301], recover_oracle(rows, index))
        np.testing.assert_array_equal(ours[301:], 0)
    assert recovered(kernels, rows, index[:0], 0).size == 0


def check_recover_reads_zeros_out_of_range(kernels):
    ours = recovered(kernels, np.ones([3, 4], np.float32), np.array([0, 3, -1, 2], np.int32), 4)
    np.testing.assert_array_equal(ours[:, 0], [1, 0, 0, 1])


def summed(kernels, type_, grads, index, num_rows, out_rows, bags=None):
    memory, dim = kernels.memory, grads.shape[1]
    splits, scale = (None, None) if bags is None else (memory.put(bags[0]), memory.put(bags[1]))
    out = memory.empty([out_rows, dim], grads.dtype)
    kernels.run(
        "recover_grad", type_, memory.put(grads), dim, memory.put(index), len(index), splits, scale,
        0 if bags is None else len(bags[1]), kernels.scratch("recover_grad", len(index), dim), out, num_rows, out_rows,
    )  # fmt: skip
    return memory.get(out)


def check_recover_grad(kernels):
    """Tests rows of one chunk and of many, more rows than one digit sorts, and rows without an index."""
    random = np.random.default_rng(1)
    for type_, n, num_rows, dim in ((0, 3000, 400, 3), (1, 700, 5, 8), (0, 1, 1, 1), (0, 65, 70_000, 2)):
        index = np.minimum(random.zipf(1.4, n) - 1, num_rows - 1).astype(np.int32)
        if n > 600:
            index[100:500] = 2  # several chunks
        grads = integers(random, [n, dim], TYPES[type_])
        ours = summed(kernels, type_, grads, index, num_rows, num_rows + 3)
        np.testing.assert_array_equal(ours[:num_rows], recover_grad_oracle(grads, index, num_rows))
        np.testing.assert_array_equal(ours[num_rows:], 0)
    np.testing.assert_array_equal(summed(kernels, 0, grads[:0], index[:0], 4, 4), 0)


def check_rows_that_fill_their_chunks(kernels):
    """Rows end where chunks end. The parts of a row are neither lost nor added twice."""
    for uses in ([64, 64, 64], [128, 64, 1, 63], [32, 96, 64], [192]):
        index = np.repeat(np.arange(len(uses)), uses).astype(np.int32)
        grads = integers(np.random.default_rng(2), [len(index), 2], np.float32)
        ours = summed(kernels, 0, grads, index, len(uses), len(uses))
        np.testing.assert_array_equal(ours, recover_grad_oracle(grads, index, len(uses)))


def check_recover_grad_leaves_out_what_is_out_of_range(kernels):
    ours = summed(kernels, 0, np.ones([4, 1], np.float32), np.array([1, 2, -1, 1], np.int32), 2, 2)
    np.testing.assert_array_equal(ours[:, 0], [0, 2])


def check_the_order_of_a_sum(kernels):
    """A row within one chunk is summed in the order of its positions, bit for bit."""
    random = np.random.default_rng(3)
    grads = random.normal(size=[600, 4]).astype(np.float32)
    index = random.permutation(np.repeat(np.arange(60), 10)).astype(np.int32)
    ours = summed(kernels, 0, grads, index, 60, 60)
    wanted = recover_grad_oracle(grads, index, 60)
    sorted_rows = np.repeat(np.arange(60), 10)
    whole = [u for u in range(60) if sorted_rows.tolist().index(u) // 64 == (sorted_rows.tolist().index(u) + 9) // 64]
    assert len(whole) > 40
    np.testing.assert_array_equal(ours[whole], wanted[whole])
    np.testing.assert_array_equal(ours, summed(kernels, 0, grads, index, 60, 60))
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)  # two orders of ten numbers of size one


def check_sizes_that_do_not_fit_are_refused(kernels):
    """Refuses sizes over 2^31 or below 0, and unknown types, before it follows a pointer."""
    for wrong in (2**31, -1):
        for place in range(3):  # num_rows, row_bytes, num_index
            sizes = [wrong if n == place else 0 for n in range(3)]
            assert kernels.answer("recover", None, *sizes[:2], None, sizes[2], None, wrong) == INVALID, sizes
        for place in range(4):  # num_rows, dim, num_index, num_bags
            rows, dim, n, bags = (wrong if m == place else 0 for m in range(4))
            answer = kernels.answer("pooled_recover", 0, None, rows, dim, None, n, None, None, bags, None, None)
            assert answer == INVALID, place
            answer = kernels.answer("recover_grad", 0, None, dim, None, n, None, None, bags, None, None, rows, rows)
            assert answer == INVALID, place
    assert kernels.answer("recover", None, 0, 4, None, 5, None, 4) == INVALID  # fewer rows out than indices
    assert kernels.answer("recover_grad", 0, None, 1, None, 0, None, None, 0, None, None, 5, 4) == INVALID
    for type_ in (-1, 3):
        assert kernels.answer("pooled_recover", type_, None, 0, 0, None, 0, None, None, 0, None, None) == INVALID
        assert kernels.answer("recover_grad", type_, None, 0, None, 0, None, None, 0, None, None, 0, 0) == INVALID
    half = 2**30  # the rows of all parts are counted
    for parts, type_, dim, bags, out_rows in (
        ([half, half], 0, 1, 0, 0), ([-1], 0, 1, 0, 0), ([], 0, 1, 0, 0), ([1], 3, 1, 0, 0), ([1], 0, 1, 5, 4),
    ):  # fmt: skip
        rows = np.array(parts, np.int64), len(parts)
        more = dim, None, 0, None, None, bags, None, None, out_rows
        assert kernels.answer("pooled_recover_parts", type_, pointers([None] * len(parts)), *rows, *more) == INVALID


def bags_of(random, n, num_bags):
    splits = np.concatenate([[0], np.sort(random.integers(0, n + 1, num_bags - 1)), [n]]).astype(np.int64)
    return splits, 2.0 ** random.integers(-2, 2, num_bags).astype(np.float32)  # powers of two: products are exact


def check_pooled(kernels):
    memory, random = kernels.memory, np.random.default_rng(4)
    for type_, dtype in TYPES.items():
        rows, index = integers(random, [30, 5], dtype), random.integers(0, 30, 400).astype(np.int32)
        splits, scale = bags_of(random, 400, 120)
        out = memory.empty([120, 5], dtype)
        kernels.run(
            "pooled_recover", type_, memory.put(rows), 30, 5, memory.put(index), 400, memory.put(splits),
            memory.put(scale), 120, memory.empty([kernels.count("pooled_recover_scratch_bytes")], np.uint8), out,
        )  # fmt: skip
        np.testing.assert_array_equal(memory.get(out), pooled_recover_oracle(rows, index, splits, scale))
        grads = integers(random, [120, 5], dtype)
        ours = summed(kernels, type_, grads, index, 30, 33, (splits, scale))
        np.testing.assert_array_equal(ours[:30], pooled_recover_grad_oracle(grads, index, splits, scale, 30))


def pool_parts(kernels, type_, parts, index, splits, scale, out_rows):
    """Returns the answer of the launcher, and out."""
    memory, dim = kernels.memory, parts[0].shape[1]
    on_device = [memory.put(part) for part in parts]
    out = memory.empty([out_rows, dim], parts[0].dtype)
    answer = kernels.answer(
        "pooled_recover_parts", type_, pointers([memory.pointer(part).value for part in on_device]),
        np.array([len(part) for part in parts], np.int64), len(parts), dim, memory.put(index), len(index),
        memory.put(splits), memory.put(scale), len(scale), kernels.scratch("pooled_recover_parts", len(parts)), out,
        out_rows,
    )  # fmt: skip
    return answer, memory.get(out)


def check_pooled_parts(kernels):
    """Parts of some rows and of none. Rows behind the bags are zeros. A row beyond all parts is refused."""
    random = np.random.default_rng(5)
    for type_, dtype in TYPES.items():
        rows, index = integers(random, [30, 3], dtype), random.integers(0, 30, 200).astype(np.int32)
        splits, scale = bags_of(random, 200, 90)
        wanted = pooled_recover_oracle(rows, index, splits, scale)
        for ends in ([30], [0, 7, 7, 29, 30, 30]):
            parts = np.split(rows, ends[:-1]) if len(ends) > 1 else [rows]
            answer, ours = pool_parts(kernels, type_, parts, index, splits, scale, 97)
            assert answer == 0
            np.testing.assert_array_equal(ours[:90], wanted)
            np.testing.assert_array_equal(ours[90:], 0)
        index[150] = 30
        answer, ours = pool_parts(kernels, type_, parts, index, splits, scale, 97)
        assert answer == INVALID and np.all(ours.view(np.uint8) == POISON)
    assert pool_parts(kernels, 0, [np.ones([2, 1], np.float32)], index[:0], splits[:1], scale[:0], 0)[0] == 0


def check_bags_that_do_not_fit_are_refused(kernels):
    """Refuses wrong bags before a kernel follows them. Neither form writes a number."""
    memory, index = kernels.memory, np.arange(600, dtype=np.int32) % 7
    bags = np.arange(0, 601, 2)
    wrong = {name: (bags.copy(), index.copy()) for name in ("first", "last", "order", "end", "row", "negative")}
    wrong["first"][0][0], wrong["last"][0][-1], wrong["order"][0][299] = 1, 601, 591
    wrong["end"][0][298:300], wrong["row"][1][599], wrong["negative"][1][0] = 2**40, 7, -1
    wrong["none"] = bags[:1], index
    for name, (splits, rows_of) in wrong.items():
        num_bags = len(splits) - 1
        on_device = [memory.put(x) for x in (rows_of, splits, np.ones(num_bags, np.float32))]
        rows, scratch = memory.put(np.ones([max(num_bags, 7), 3], np.float32)), memory.empty([256], np.uint8)
        out = memory.empty([max(num_bags, 7), 3], np.float32)
        at, splits, scale = on_device
        answer = kernels.answer("pooled_recover", 0, rows, 7, 3, at, 600, splits, scale, num_bags, scratch, out)
        assert answer == INVALID, name
        scratch = kernels.scratch("recover_grad", 600, 3)
        answer = kernels.answer("recover_grad", 0, rows, 3, at, 600, splits, scale, num_bags, scratch, out, 7, 7)
        assert answer == INVALID, name
        assert np.all(memory.get(out).view(np.uint8) == POISON), name


def check_bfloat16(kernels):
    """Compares bits. Small integers are exact; 257 lies halfway between two numbers and rounds to the even one."""
    bits = lambda x: (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)  # noqa: E731
    grads = bits(np.array([[256.0], [1.0], [3.0], [256.0], [3.0]]))
    ours = summed(kernels, 2, grads, np.array([0, 0, 1, 2, 2], np.int32), 3, 3)
    np.testing.assert_array_equal(ours, bits([[256.0], [3.0], [260.0]]))
