"""Pooled features on 1 to 4 ranks: rows and sums of rows, trained, equal a single process on all samples.

Float32 sums of up to 40 numbers near 1 in another order differ by about 40 * 2^-24 of the largest.
"""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.support.ids import INT64_MAX, INT64_MIN
from tests.support.logs import logged
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, Pipelined, SemiAsync, Sync

STEPS, SOURCES, SAMPLES, DIM = 3, 12, 4, 8
COMBINERS = {"long": "sum", "also_long": "mean", "rare": "sqrtn", "weighted": "sum", "whole": None}
# By case: the layer's options, and the tolerance where numbers travel in 16 bits.
CASES = {"float32": ({}, 2e-4), "wire": ({"wire_dtype": "bfloat16"}, 0.4), "late": ({"accumulate_steps": 3}, 2e-4)}
# By schedule: ranks and topology.
SCHEDULES = {
    DualBuffer(lead=3): (2, Topology()),
    SemiAsync(): (2, Topology()),
    Pipelined(6): (2, Topology()),
    Sync(): (4, Topology(2, "weight_sync", sync_every=2, moment_scale=1.0)),
}


def _samples(source, step):
    """The bags of one of 12 sources by feature: long ones, some empty, and in one step none at all in half of them."""
    random = np.random.default_rng([source, step])
    count = 0 if step == 1 and source >= SOURCES // 2 else SAMPLES
    bags = {}
    for name in COMBINERS:
        lengths = random.integers(0, 40 if "long" in name else 3, count)
        bags[name] = [random.integers(-9, 10**6 if "long" in name else 9, length).tolist() for length in lengths]
    if count and source == 0:
        bags["long"][0] = [INT64_MIN, INT64_MAX, -1, 0, *range(30), INT64_MIN]
    return bags


def _batch(rank, ranks, step):
    parts = [_samples(source, step) for source in range(rank * SOURCES // ranks, (rank + 1) * SOURCES // ranks)]
    return {name: tf.ragged.constant(sum((part[name] for part in parts), []), ragged_rank=1, dtype=tf.int64)
            for name in COMBINERS}  # fmt: skip


def _make(name, dtype="float32", **layer):
    tables = [fr.TableConfig(t, DIM, fr.optimizers.SGD(0.125), fr.Uniform(-1, 1), dtype=dtype) for t in ("a", "b")]
    features = [
        fr.FeatureConfig(feature, "b" if feature in ("rare", "whole") else "a", combiner=combiner)
        for feature, combiner in COMBINERS.items()
    ]
    return fr.FusedEmbedding(features, tables, name=name, gradient_op="sum", **layer)


def _loss(rows, towers):
    total = 0.0
    for n, name in enumerate(COMBINERS):
        part = rows[name].flat_values if name == "whole" else rows[name]
        factors = tf.cos(tf.range(DIM, dtype=tf.float32) + n + towers)
        total += tf.reduce_sum(factors * part)
    return total


def _train(name, **layer):
    embedding = _make(name, **layer)
    weights = lambda ids: {"weighted": tf.cast(ids["weighted"] % 3, tf.float32)}  # noqa: E731

    @tf.function(reduce_retracing=True)
    def step(ids):
        with tf.GradientTape() as tape:
            first = embedding(ids, weights=weights(ids))
            second = embedding({name: ids[name] for name in ("long", "rare")})  # two calls, one update
            loss = _loss(first, 0) + tf.reduce_sum(second["long"]) - tf.reduce_sum(second["rare"])
        tape.gradient(loss, embedding.trainable_variables)
        return {name: getattr(part, "flat_values", part) for name, part in first.items()}

    rows = [step(_batch(fr.rank(), fr.size(), n)) for n in range(STEPS)]
    outputs = [{name: part.numpy() for name, part in of_step.items()} for of_step in rows]
    (group,) = embedding.internals.groups
    tables = {table: group.table.export(table) for table in ("a", "b")}
    evaluated = embedding({"long": _batch(fr.rank(), fr.size(), 0)["long"]}, training=False)["long"].numpy()
    return outputs, tables, evaluated, group.traffic.numpy()


def _left_out():
    """A gradient that is not finite, of a bag of many ids on rank 1, in an update of this rank's rows."""
    embedding = _make("left_out")
    bags = {"long": tf.ragged.constant([list(range(20)), list(range(20, 40))], dtype=tf.int64)}
    with logged("tables") as messages, tf.GradientTape() as tape:
        rows = embedding(bags)["long"]
        factor = tf.constant([[1.0], [np.nan if fr.rank() == 1 else 1.0]])
        loss = tf.reduce_sum(rows * factor)
        tape.gradient(loss, embedding.trainable_variables)
    (group,) = embedding.internals.groups
    ids, _ = group.table.export("a")
    return messages, group.table.left_out.get("a", 0), int(np.sum(ids >= 20))


def _check_known_splits():
    honest = collectives._engine.all_to_all

    def checked(tensors, splits, known, *, name, **options):
        received, received_splits = honest(tensors, splits, known, name=name, **options)
        for of_tensor, true in zip(known, received_splits):
            np.testing.assert_array_equal(of_tensor, true, err_msg=name)
        return received, received_splits

    collectives._engine.all_to_all = checked


def _all():
    found = {case: _train(f"sums_{case}", **layer) for case, (layer, _) in CASES.items()}
    _check_known_splits()  # eager calls
    return found, _left_out()


@pytest.fixture(scope="module")
def single():
    (result,) = run_ranks(_all, 1)
    return result[0]


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(request):
    return run_ranks(_all, request.param)


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_the_rows_of_a_single_process(results, single, case):
    outputs, tables, evaluated, _ = single[case]
    tolerance = {"rtol": 0, "atol": CASES[case][1]}
    for step in range(STEPS):
        for name in COMBINERS:
            got = np.concatenate([found[case][0][step][name] for found, _ in results])
            np.testing.assert_allclose(got, outputs[step][name], **tolerance, err_msg=f"step {step}, {name}")
    np.testing.assert_allclose(np.concatenate([found[case][2] for found, _ in results]), evaluated, **tolerance)
    for table, (ids, rows) in tables.items():
        parts = [found[case][1][table] for found, _ in results]
        got = np.concatenate([part[0] for part in parts])
        order = np.argsort(got)
        np.testing.assert_array_equal(got[order], ids)
        np.testing.assert_allclose(np.concatenate([part[1] for part in parts])[order], rows, **tolerance)


def test_long_bags_travel_as_sums_in_fewer_bytes(results):
    for found, _ in results:
        traffic = found["float32"][3]
        in_rows = 8 * traffic[1] * (len(results) - 1) / len(results) * (1 + 2 * DIM * 4 / 8)
        assert traffic[1] < traffic[0] and traffic[2] < 0.6 * in_rows


def test_a_gradient_that_is_not_finite_leaves_out_its_bag(results):
    for _, (messages, count, rows) in results:
        assert count == rows > 0
        assert "of table 'a'" in messages[0] and "from rank 1 in update 1" in messages[0]


def _scheduled(schedule, topology):
    """Returns the trained state and the traffic, with sums and then with rows alone."""
    random, features = np.random.default_rng(fr.rank()), ("past", "user")
    batches = []
    for step in range(6):
        x, *others = clicks.batch(SAMPLES, 10 * step + fr.rank())
        bags = tf.ragged.constant(random.integers(0, 100, [SAMPLES, 30]).tolist(), ragged_rank=1, dtype=tf.int64)
        batches.append(({"past": bags, "user": x["user"]}, *others))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=clicks.signature(features))
    results = []
    for with_sums in (True, False):
        embedding = clicks.make_embedding("Adagrad", topology=topology)
        optimizer = fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.05))
        model = clicks.make_model(embedding, schedule, optimizer, features)
        (group,) = embedding.internals.groups
        assert group.sends_sums
        group.sends_sums = with_sums
        model.fit(data, verbose=0)
        results.append((clicks.state(model, embedding), group.traffic.numpy()))
    return results


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_train_with_sums_as_with_rows(schedule):
    ranks, topology = SCHEDULES[schedule]
    for (state, traffic), (expected, in_rows) in run_ranks(
        _scheduled, ranks, topologies=[topology], schedule=schedule, topology=topology
    ):
        assert traffic[2] < 2 / 3 * in_rows[2]
        for field, values in expected.items():
            np.testing.assert_allclose(state[field], values, rtol=0, atol=2e-5, err_msg=field)


def _means():
    """Body: by the place of float16, the mean of bags of 40 rows of 3,000 each."""
    means = {}
    for place in ("dtype", "wire_dtype", "output_dtype"):
        options = {place: "float16"}
        table = fr.TableConfig(
            "a", DIM, fr.optimizers.SGD(0.1), fr.Constant(3000.0), dtype=options.pop("dtype", "float32")
        )
        feature = fr.FeatureConfig("f", "a", combiner="mean", output_dtype=options.pop("output_dtype", None))
        embedding = fr.FusedEmbedding([feature], [table], name=f"of_{place}", **options)
        rows = embedding({"f": tf.reshape(tf.range(160, dtype=tf.int64), [4, 40])}, training=True)["f"]
        means[place] = tf.cast(rows, tf.float32).numpy()
    return means


def test_no_sum_is_above_the_largest_float16():
    for means in run_ranks(_means, 2):
        for rows in means.values():
            np.testing.assert_array_equal(rows, 3000)
