"""Updates of the table on the device: sums against dictionaries, rules against their definitions."""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.device_table import DeviceTable
from tests.oracles.hash_table import TableOracle, pack
from tests.oracles.optimizers import OptimizerOracle

# Options of the oracle, and the launcher's arguments for the same rule.
RULES = {
    "sgd": ("sgd", {}, {}),
    "clipped": ("sgd", {"clipnorm": 0.7}, {"clipnorm": 0.7}),
    "momentum": ("momentum", {"momentum": 0.9}, {"momentum": 0.9}),
    "nesterov": ("momentum", {"momentum": 0.8, "nesterov": True}, {"momentum": 0.8, "nesterov": 1}),
    "adagrad": ("adagrad", {}, {"epsilon": 1e-7}),
    "adagrad_inside": ("adagrad", {"epsilon": 1e-3, "epsilon_inside": True}, {"epsilon": 1e-3, "epsilon_inside": 1}),
    "adagrad_scale": (  # of v, which starts at 0.1; the caller scales rate and epsilon by the root of the scale
        "adagrad", {"epsilon": 1e-7, "moment_scale": 4.0}, {"epsilon": 2e-7, "moment_offset": 0.3}
    ),
    "rmsprop": ("rmsprop", {}, {"epsilon": 1e-7, "one_minus_rho": 0.1}),
    "rmsprop_inside": (
        "rmsprop", {"epsilon": 1e-3, "epsilon_inside": True},
        {"epsilon": 1e-3, "epsilon_inside": 1, "one_minus_rho": 0.1},
    ),
    "rowwise_scale": (
        "rowwise_adagrad", {"moment_scale": 4.0, "initial_accumulator_value": 2.0},
        {"epsilon": 1e-8, "moment_scale": 4.0, "initial_accumulator_value": 2.0, "mean": 1},
    ),
    "rowwise": ("rowwise_adagrad", {"variant": "2d_sp", "moment_scale": 2.0}, {"epsilon": 1e-8, "moment_scale": 2.0}),
    "rowwise_mean": (
        "rowwise_adagrad", {"variant": "torchrec", "clipnorm": 1.0}, {"epsilon": 1e-8, "mean": 1, "clipnorm": 1.0}
    ),
    "rowwise_inside": ("rowwise_adagrad", {"variant": "hsp"}, {"epsilon": 1e-8, "epsilon_inside": 1}),
    "adam": ("adam", {}, {"epsilon": 1e-7, "one_minus_beta_1": 0.1, "one_minus_beta_2": 0.001}),
    "adamw": (
        "adamw", {}, {"epsilon": 1e-7, "one_minus_beta_1": 0.1, "one_minus_beta_2": 0.001, "weight_decay": 0.004}
    ),
    "ftrl": (
        "ftrl", {"l1": 0.02, "l2": 0.1, "beta": 0.3}, {"learning_rate_power": -0.5, "l1": 0.02, "l2": 0.1, "beta": 0.3}
    ),
    "ftrl_power": (
        "ftrl", {"learning_rate_power": -0.7, "l2_shrinkage": 0.1}, {"learning_rate_power": -0.7, "l2_shrinkage": 0.1}
    ),
}  # fmt: skip


def batch_of(random, sources, most, vocabulary):
    return [[random.integers(0, vocabulary, random.integers(1, most)).tolist()] for _ in range(sources)]


# The result of a column does not depend on the schedule.
@once
def check_rules(kernels):
    """Makes two steps with each rule. Ids come from several sources, some of them repeatedly."""
    for number, (name, (rule, options, numbers)) in enumerate(RULES.items()):
        random = np.random.default_rng(number)
        dim, start = (5, 19, 32)[number % 3], 0.1 if rule in ("adagrad", "ftrl") else 0.0
        numbers = {**({"initial_accumulator_value": start} if start else {}), **numbers}
        table = DeviceTable(kernels, dim, [1], rule=rule.removesuffix("w"), a=0.25, **numbers)
        options = {**({"initial_accumulator_value": start} if start else {}), **options}
        oracle = OptimizerOracle(np.full(dim, 0.25), "sgd" if rule == "momentum" else rule, **options)
        for step in (1, 2):
            message, splits, received = pack(batch_of(random, 3, 12, 9))
            _, inverse, handles = table.lookup(message, splits)
            grads = random.normal(size=[len(received), dim]).astype(np.float32)
            rate = 0.05 * (2.0 if name == "adagrad_scale" else 1.0)
            table.apply(handles, inverse, grads, learning_rate=rate, scale=0.5, step=step)
            oracle.step([key[1] for key in received], 0.5 * grads.astype(np.float64), 0.05)
        rows, _ = table.find(np.array([9, *range(9)]), [10])
        wanted = np.array([oracle.row(id_) for id_ in range(9)])
        # float32, a few operations a step; the second moments divide.
        np.testing.assert_allclose(rows[:9], wanted, rtol=2e-5, atol=2e-6, err_msg=name)
        table.close()


def check_sums_are_in_the_order_received(kernels):
    """Sums equal float32 sums in that order, bit for bit, for many positions of one row and for 16-bit gradients."""
    random = np.random.default_rng(3)
    table = DeviceTable(kernels, 18, [1, 2])
    oracle = TableOracle(2, lambda key: np.zeros(18, np.float32))
    for storage in ("float32", "float16"):
        batch = [[(random.zipf(1.3, 200) % 90).tolist(), [7] * 90] for _ in range(4)]
        message, splits, received = pack(batch)
        _, inverse, handles = table.lookup(message, splits)
        grads = random.normal(size=[len(received) + 2, 18]).astype(storage)
        table.apply(handles, inverse, grads, learning_rate=0.3, scale=0.7, storage=storage)
        oracle.lookup(received)
        oracle.apply(received, grads[: len(received)], 0.7, 0.3)
        np.testing.assert_array_equal(table.find(message, splits)[0][: len(received)], oracle.find(received))
    table.close()


@once
def check_rows_of_16_bits(kernels):
    """Rounding to the nearest equals NumPy's. Stochastic rounding gives a neighbour, equal in every run and right on
    average.
    """
    ids = [64, *range(64)]
    grads = np.random.default_rng(4).uniform(0.0001, 0.0004, [64, 3]).astype(np.float32)
    for stochastic in (False, True):
        runs = []
        for _ in range(2):
            table = DeviceTable(kernels, 3, [1], storage="float16", a=1.0, stochastic_rounding=stochastic)
            _, inverse, handles = table.lookup(ids, [65])
            table.apply(handles, inverse, -grads)
            runs.append(table.find(ids, [65])[0][:64])
            assert np.all(table.find(ids, [65], to="float16")[0].view(np.float16)[:64] == runs[-1])
            table.close()
        np.testing.assert_array_equal(*runs)
        exact, grid = 1.0 + grads, 2.0**-10
        if not stochastic:
            np.testing.assert_array_equal(runs[0], exact.astype(np.float16))
        else:
            assert np.all((runs[0] == 1.0) | (runs[0] == 1.0 + grid))
            # 192 coins: three standard deviations of their mean.
            assert abs(np.mean(runs[0] - exact)) < 3 * grid * 0.5 / np.sqrt(192)


@once
def check_initial_rows_and_slots(kernels):
    """A new row's slots begin as the rule wants, whatever the dimension; bits of the normal distribution are checked
    where rows of the CPU are (tests/ops/test_small_ops.py): both take them from one header."""
    for dim in (1, 4, 7):
        table = DeviceTable(kernels, dim, [5], rule="adagrad", a=0.0, initial_accumulator_value=3.0)
        _, inverse, handles = table.lookup([2, 1, 2], [3])
        table.apply(handles, inverse, np.full([2, dim], 4.0, np.float32), learning_rate=1.0)
        # v = 3 + 4^2
        np.testing.assert_allclose(table.find([2, 1, 2], [3])[0][:2], -4.0 / np.sqrt(19.0), rtol=1e-6)
        table.close()


@once
def check_rows_of_gradients_that_are_not_finite_stay_as_they_are(kernels):
    """Row, slots and version keep their bits, the call returns their places, and all other rows train as usual."""
    random = np.random.default_rng(6)
    for rule, numbers in (
        ("adam", {"one_minus_beta_1": 0.1, "one_minus_beta_2": 0.001}),
        ("rowwise_adagrad", {"initial_accumulator_value": 0.1}),
    ):
        tables = [DeviceTable(kernels, 19, [1], rule=rule, a=0.25, **numbers) for _ in range(2)]
        message, splits, _ = pack([[list(range(40))], [list(range(20, 50))]])
        for bad in (None, np.nan, np.inf):
            grads = random.normal(size=[70, 19]).astype(np.float32)
            spoilt = grads.copy()
            if bad is not None:
                spoilt[3, 18] = spoilt[41, 2] = bad  # ids 3 and 21, the second of which finite gradients have, too
            before = {int(id_): record for id_, record in zip(*tables[0].export(0))} if bad is not None else {}
            for table, of_table in zip(tables, (spoilt, grads)):
                _, inverse, handles = table.lookup(message, splits)
                left_out = table.apply(handles, inverse, of_table, learning_rate=0.05, scale=0.5)
                assert left_out == (sorted([inverse[3], inverse[41]]) if of_table is spoilt and bad is not None else [])
            after, plain = ({int(id_): record for id_, record in zip(*table.export(0))} for table in tables)
            for id_ in range(50):
                # A record begins with clock and count of its last lookup, and the version: imports move the other's.
                left_out = bad is not None and id_ in (3, 21)
                wanted, begin = (before[id_], 8) if left_out else (plain[id_], 12)
                np.testing.assert_array_equal(after[id_][begin:], wanted[begin:], err_msg=f"{rule}, {bad}, id {id_}")
            tables[1].restore(0, np.array(list(after), np.int64), np.array(list(after.values())))
        for table in tables:
            table.close()


def check_a_sum_beyond_the_largest_number_is_left_out(kernels):
    table = DeviceTable(kernels, 2, [1], a=1.0)
    _, inverse, handles = table.lookup([2, 5, 6, 1, 5], [3, 2])
    table.apply(handles, inverse, np.array([[3e38, 0], [1, 1], [3e38, 0]], np.float32))
    np.testing.assert_array_equal(table.find([2, 5, 6], [3])[0][:2], [[1, 1], [0, 0]])
    table.close()
