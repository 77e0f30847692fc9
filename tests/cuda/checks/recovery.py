"""Recovery, its gradient and the pooled forms against their NumPy oracles.

Sums are compared exactly: gradients are small integers, whose sums are exact in any order, in float32 and, after the
one rounding that the op promises, in 16 bits.
"""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.launchers import INVALID, pointers
from tests.cuda.memory import POISON
from tests.oracles.recovery import (
    pooled_recover_grad_oracle,
    pooled_recover_oracle,
    recover_grad_oracle,
    recover_oracle,
)

TYPES = (np.float32, np.float16)  # bfloat16 has no NumPy type: see check_bfloat16


def integers(random, shape, dtype):
    return random.integers(-8, 9, shape).astype(dtype)


def compare(ours, wanted):
    """Rows after the wanted ones are padding."""
    np.testing.assert_array_equal(ours[: len(wanted)], wanted)
    np.testing.assert_array_equal(ours[len(wanted) :], 0)


def check_recover(ops):
    random = np.random.default_rng(0)
    for n, num_rows, dim, dtype in (
        (301, 40, 4, np.float32), (301, 40, 3, np.float32), (301, 40, 5, np.float16), (13, 40, 8, np.float16),
        (7, 1, 16, np.float32), (9, 4, 1, np.float32), (0, 3, 4, np.float16), (0, 0, 4, np.float32),
        (9, 4, 32, np.float32), (9, 4, 64, np.float32),
    ):  # fmt: skip
        rows, index = integers(random, [num_rows, dim], dtype), random.integers(0, max(num_rows, 1), n)
        compare(ops.recover(rows, index), recover_oracle(rows, index))


def check_recover_grad(ops):
    """Tests rows of one chunk and of many, more rows than 16 bits number, and rows without an index."""
    random = np.random.default_rng(1)
    for n, num_rows, dim, dtype in (
        (3000, 400, 3, np.float32), (700, 5, 8, np.float16), (1, 1, 1, np.float32), (65, 70_000, 2, np.float32),
        (0, 4, 3, np.float32), (0, 0, 4, np.float16),
    ):  # fmt: skip
        index = np.minimum(random.zipf(1.4, n) - 1, num_rows - 1).astype(np.int32)
        if n > 600:
            index[100:500] = 2  # several chunks
        grads = integers(random, [n, dim], dtype)
        compare(ops.recover_grad(grads, index, num_rows), recover_grad_oracle(grads, index, num_rows))


def check_rows_that_fill_their_chunks(ops):
    """Rows end where chunks end. The parts of a row are neither lost nor added twice."""
    for uses in ([64, 64, 64], [128, 64, 1, 63], [32, 96, 64], [192]):
        index = np.repeat(np.arange(len(uses)), uses).astype(np.int32)
        grads = integers(np.random.default_rng(2), [len(index), 2], np.float32)
        compare(ops.recover_grad(grads, index, len(uses)), recover_grad_oracle(grads, index, len(uses)))


def check_the_order_of_a_sum(ops):
    """A row within one chunk is summed in the order of its positions, bit for bit."""
    random = np.random.default_rng(3)
    grads = random.normal(size=[600, 4]).astype(np.float32)
    index = random.permutation(np.repeat(np.arange(60), 10)).astype(np.int32)
    ours, wanted = ops.recover_grad(grads, index, 60)[:60], recover_grad_oracle(grads, index, 60)
    first = 10 * np.arange(60)  # sorted position of each row
    whole = np.flatnonzero(first // 64 == (first + 9) // 64)
    assert len(whole) > 40 and (wanted != recover_grad_oracle(grads[::-1], index[::-1], 60)).any()
    np.testing.assert_array_equal(ours[whole], wanted[whole])
    np.testing.assert_array_equal(ours, ops.recover_grad(grads, index, 60)[:60])
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)  # two orders of ten numbers of size one


def bags_of(random, n, num_bags):
    splits = np.concatenate([[0], np.sort(random.integers(0, n + 1, num_bags - 1)), [n]]).astype(np.int64)
    return splits, 2.0 ** random.integers(-2, 2, num_bags).astype(np.float32)  # powers of two: products are exact


def check_pooled(ops):
    random = np.random.default_rng(4)
    for n, num_rows, num_bags, dim in ((400, 30, 120, 5), (7, 1, 1, 16), (50, 9, 50, 17), (0, 3, 2, 4)):
        for dtype in TYPES:
            rows, index = integers(random, [num_rows, dim], dtype), random.integers(0, num_rows, n)
            bags = bags_of(random, n, num_bags)
            compare(ops.pooled_recover([rows], index, *bags), pooled_recover_oracle(rows, index, *bags))
            grads = integers(random, [num_bags, dim], dtype)
            wanted = pooled_recover_grad_oracle(grads, index, *bags, num_rows)
            compare(ops.recover_grad(grads, index, num_rows, bags), wanted)
    rows, no_bags = np.ones([3, 4], np.float32), (np.array([0]), np.zeros(0, np.float32))
    compare(ops.pooled_recover([rows], rows[0, :0].astype(np.int32), *no_bags), rows[:0])


def check_pooled_parts(ops):
    """Parts of some rows and of none. Rows after the bags are zeros."""
    random = np.random.default_rng(5)
    for dtype in TYPES:
        rows, index = integers(random, [30, 3], dtype), random.integers(0, 30, 200)
        bags = bags_of(random, 200, 90)
        for ends in ([30], [0, 7, 7, 29, 30, 30]):
            parts = np.split(rows, ends)
            compare(ops.pooled_recover(parts, index, *bags), pooled_recover_oracle(rows, index, *bags))


def check_bfloat16(ops):
    """Compares bits. Small integers are exact; 257 lies halfway between two numbers and rounds to the even one."""
    bits = lambda x: (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)  # noqa: E731
    grads, index = np.array([[256.0], [1.0], [3.0], [256.0], [3.0]]), np.array([0, 0, 1, 2, 2])
    compare(ops.recover_grad(bits(grads), index, 3), bits([[256.0], [3.0], [260.0]]))
    compare(ops.recover(bits(grads), index), bits(grads[index]))
    bags = np.array([0, 2, 5]), np.array([1.0, 0.5], np.float32)
    pooled, backward = (
        ops.pooled_recover([bits(grads)], index, *bags),
        ops.recover_grad(bits(grads[:2]), index, 3, bags),
    )
    compare(pooled, bits([[512.0], [3.5]]))
    compare(backward, bits([[512.0], [0.5], [1.0]]))


def check_launcher_leaves_out_what_is_out_of_range(ops):
    """A report would wait for the device. It reads zeros, and adds to no row."""
    compare(ops.recover(np.ones([3, 4], np.float32), [0, 3, -1, 2])[:, 0], [1, 0, 0, 1])
    compare(ops.recover_grad(np.ones([4, 1], np.float32), [1, 2, -1, 1], 2)[:, 0], [0, 2])


def check_launcher_refuses_bags_that_do_not_fit(ops):
    """Refuses wrong bags before a kernel follows them. No form writes a number."""
    memory, index = ops.memory, np.arange(600, dtype=np.int32) % 7
    bags = np.arange(0, 601, 2)
    wrong = {name: (bags.copy(), index.copy()) for name in ("first", "last", "order", "end", "row", "negative")}
    wrong["first"][0][0], wrong["last"][0][-1], wrong["order"][0][299] = 1, 601, 591
    wrong["end"][0][298:300], wrong["row"][1][599], wrong["negative"][1][0] = 2**40, 7, -1
    wrong["none"] = bags[:1], index
    for name, (splits, rows_of) in wrong.items():
        num_bags = len(splits) - 1
        at, splits, scale = [memory.put(x) for x in (rows_of, splits, np.ones(num_bags, np.float32))]
        rows, out = memory.put(np.ones([300, 3], np.float32)), memory.empty([300, 3], np.float32)
        more = at, 600, splits, scale, num_bags, ops.allocator, out
        assert ops.answer("recover_grad", 0, rows, 3, *more, 7, 7) == INVALID, name
        parts = pointers([memory.pointer(rows).value]), np.array([7]), 1
        assert ops.answer("pooled_recover", 0, *parts, 3, *more, num_bags) == INVALID, name
        assert np.all(memory.get(out).view(np.uint8) == POISON), name


@once
def check_launcher_without_memory(ops):
    rows, bags = np.ones([1, 2], np.float32), ([0, 1], [1.0])
    ops.refuse_without_memory(lambda: ops.recover_grad(rows, [0], 1))
    ops.refuse_without_memory(lambda: ops.recover_grad(rows, [0], 1, bags))
    ops.refuse_without_memory(lambda: ops.pooled_recover([rows], [0], *bags))
    ops.refuse_without_memory(lambda: ops.pooled_recover([rows, rows], [0], *bags))
