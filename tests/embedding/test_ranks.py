"""FusedEmbedding on 3 real Horovod processes trains the tables of one process. test_native_ranks.py has 4."""

import functools

import numpy as np
import pytest

from tests.oracles.rank_partition import mix64
from tests.support.ranks import run_ranks

WORLD_SIZE, STEPS, SAMPLES = 3, 3, 12
# Part of the hash range of the first of three ranks.
_OWNED_BY_RANK_0 = [i for i in range(200) if mix64(i) < 2**62]


def _batches(scenario):
    """Yields the global batches of a scenario, a pure function of its name. A sample is a dict of id lists."""
    random = np.random.default_rng(len(scenario))

    def ids(low, high, n):
        if scenario == "same_id_everywhere":
            return [7] * n
        if scenario == "all_ids_on_one_rank":
            return random.choice(_OWNED_BY_RANK_0, n).tolist()
        return random.integers(low, high, n).tolist()

    low = -(2**62) if scenario == "any_int64" else 0
    high = 2**62 if scenario == "any_int64" else 20
    return [
        [
            {
                "a": ids(low, high, random.integers(0, 5)),
                "b": ids(low, high, random.integers(0, 5)),
                "c": ids(low, high, 2),
                "d": ids(low, high, random.integers(0, 3)),
                "w": None,
            }
            for _ in range(SAMPLES)
        ]
        for _ in range(STEPS)
    ]


# Scenario, gradient_op, backend, calls of the layer in a step. test_native_ranks.py has further scenarios.
CASES = [
    ("uneven", "sum", "native", 1),
    ("same_id_everywhere", "sum", "native", 1),
    ("all_ids_on_one_rank", "sum", "native", 1),
    ("any_int64", "sum", "tfra", 1),
    ("uneven", "average", "native", 2),
    ("uneven", "average", "tfra", 2),
    ("a_rank_with_nothing", "sum", "native", 2),
]


def _slice_of(scenario, rank, size):
    """Returns this rank's uneven slice. With a_rank_with_nothing, rank 0 has no sample unless it is alone."""
    weights = np.arange(1, size + 1)
    if scenario == "a_rank_with_nothing" and size > 1:
        weights[0] = 0
    bounds = np.round(np.concatenate([[0], np.cumsum(weights)]) / weights.sum() * SAMPLES).astype(int)
    return slice(bounds[rank], bounds[rank + 1])


def _train(scenario, gradient_op, backend, calls):
    import tf_fusedrec as fr
    from tf_fusedrec._tf_compat import keras, tf

    rank, size = fr.rank(), fr.size()
    adagrad, adam = keras.optimizers.legacy.Adagrad(0.5), keras.optimizers.legacy.Adam(0.1)
    emb = fr.FusedEmbedding(
        tables=[
            fr.TableConfig(name="item", dim=4, optimizer=adagrad),
            fr.TableConfig(name="user", dim=4, optimizer=adagrad),
            fr.TableConfig(name="wide", dim=8, optimizer=adam),
        ],
        features=[
            fr.FeatureConfig(name="a", table="item"),
            fr.FeatureConfig(name="b", table="item", combiner="mean"),
            fr.FeatureConfig(name="c", table="user"),
            fr.FeatureConfig(name="d", table="wide", combiner="sqrtn"),
        ],
        gradient_op=gradient_op,
        backend=backend,
        key_encoding="hash" if scenario == "any_int64" else "bits",
        name=f"{scenario}-{gradient_op}-{backend}-{calls}",
    )
    ragged = functools.partial(tf.ragged.constant, ragged_rank=1, dtype=tf.int64, row_splits_dtype=tf.int64)

    @tf.function(reduce_retracing=True)
    def step(inputs):
        with tf.GradientTape() as tape:
            out = {}
            for features in ("abcd",) if calls == 1 else ("ad", "bc"):  # a and b share a table
                out.update(emb({name: inputs[name] for name in features}))
            loss = tf.reduce_sum(out["a"].flat_values ** 2) + tf.reduce_sum(tf.sin(5 * out["b"]))
            loss += tf.reduce_sum(out["c"] ** 3) + tf.reduce_sum(tf.cos(out["d"]))
            # Losses are sums here, so an average over ranks must be undone to compare with one process.
            loss *= size if gradient_op == "average" else 1
        tape.gradient(loss, emb.trainable_variables)

    for batch in _batches(scenario):
        mine = batch[_slice_of(scenario, rank, size)]
        inputs = {name: ragged([sample[name] for sample in mine]) for name in "abd"}
        inputs["c"] = tf.constant(np.array([sample["c"] for sample in mine], np.int64).reshape(len(mine), 2))
        step(inputs)
    return {name: emb.export_table(name) for name in ("item", "user", "wide")}


def train_all():
    """Body: trains every case, so one launch serves all."""
    return {case: _train(*case) for case in CASES}


def _count_all_to_alls(emb, inputs):
    """Returns the number of Horovod ops in a traced training step, and in an evaluation."""
    from tests.support.graphs import count_ops
    from tf_fusedrec._tf_compat import tf

    @tf.function
    def evaluate():
        return sum(tf.reduce_sum(rows) for rows in emb(inputs).values())

    @tf.function
    def train():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(rows) for rows in emb(inputs).values())
        tape.gradient(loss, emb.trainable_variables)

    return [count_ops(f.get_concrete_function())["HorovodAlltoall"] for f in (train, evaluate)]


def all_to_alls_of_a_step():
    """Body: 8 features in 2 groups."""
    import tf_fusedrec as fr
    from tf_fusedrec._tf_compat import keras, tf

    dims = [4, 8] * 4
    emb = fr.FusedEmbedding(
        tables=[
            fr.TableConfig(name=f"t{i}", dim=d, optimizer=keras.optimizers.legacy.Adagrad(0.1))
            for i, d in enumerate(dims)
        ],
        features=[fr.FeatureConfig(name=f"f{i}", table=f"t{i}") for i in range(8)],
    )
    inputs = {f"f{i}": tf.range(5 + i) for i in range(8)}
    return _count_all_to_alls(emb, inputs)


def all_to_alls_of_26_tables_with_26_limits():
    import tf_fusedrec as fr
    from tf_fusedrec._tf_compat import tf

    adagrad = fr.optimizers.Adagrad(0.1)
    tables = [
        fr.TableConfig(f"t{n}", 4, adagrad, limits=fr.Limits(max_rows=50 + n, eviction="lru", ttl=n)) for n in range(26)
    ]
    emb = fr.FusedEmbedding(tables, [fr.FeatureConfig(table.name, table.name) for table in tables])
    inputs = {table.name: tf.range(5) for table in tables}
    return _count_all_to_alls(emb, inputs)


def remove_rows():
    """Body: each rank removes another id. Returns the number of removed rows and the ids that this rank holds then."""
    import tf_fusedrec as fr
    from tf_fusedrec._tf_compat import tf

    table = fr.TableConfig("item", 4, fr.optimizers.SGD(0.1))
    emb = fr.FusedEmbedding([table], [fr.FeatureConfig("f", "item")], name="forgets")
    emb({"f": tf.range(20)})
    with pytest.raises(ValueError, match="ids to remove from table 'item' are <U1, and must be integers"):
        emb.remove("item", ["7"])
    return emb.remove("item", [3 * fr.rank(), 7, 99]), emb.export_table("item")[0]


def several_bodies():
    return remove_rows(), all_to_alls_of_a_step(), all_to_alls_of_26_tables_with_26_limits()


def merged(results, scenario, table):
    """Returns the rows of all ranks as one table by ascending id. No id may be on two ranks."""
    ids = np.concatenate([r[scenario][table][0] for r in results])
    rows = np.concatenate([r[scenario][table][1] for r in results])
    assert len(np.unique(ids)) == len(ids), "an id lives on two ranks"
    order = np.argsort(ids)
    return ids[order], rows[order]


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(train_all, 1)


def test_rows_after_training_do_not_depend_on_the_number_of_ranks(one_process):
    results = run_ranks(train_all, WORLD_SIZE)
    for scenario in one_process[0]:
        for table in one_process[0][scenario]:
            want_ids, want_rows = merged(one_process, scenario, table)
            ids, rows = merged(results, scenario, table)
            np.testing.assert_array_equal(ids, want_ids, err_msg=f"{scenario} {table}")
            # Sums over ranks are added in another order than over samples: float32 rounding (6e-8) of sums of up to 50
            # terms, over three steps. Adam divides tiny gradients by their own size, hence the absolute part.
            np.testing.assert_allclose(rows, want_rows, rtol=2e-5, atol=2e-6, err_msg=f"{scenario} {table}")
        if scenario[0] == "all_ids_on_one_rank":
            assert [len(r[scenario]["item"][0]) > 0 for r in results] == [True, False, False]


@pytest.fixture(scope="module")
def of_two():
    return run_ranks(several_bodies, 2)


def test_removed_ids_leave_all_ranks(of_two):
    removed, held = zip(*[of_rank for of_rank, *_ in of_two])
    assert removed == (3, 3)
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), sorted({*range(20)} - {0, 3, 7}))


def test_two_groups_make_five_all_to_alls_in_training_and_three_in_evaluation(of_two):
    # The ids of both groups travel together; each group sends rows, and in training gradients.
    assert [of_rank for _, of_rank, _ in of_two] == [[5, 3]] * 2
    assert all_to_alls_of_a_step() == [0, 0]


def test_tables_with_limits_of_their_own_make_the_all_to_alls_of_one_group(of_two):
    assert [of_rank for *_, of_rank in of_two] == [[3, 2]] * 2
