"""fr.plan: the times of collectives in a Cluster, its choices, its refusals, and a model that stays unchanged."""

import dataclasses
import json

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules.planning.models import SAMPLES, make_batch, make_model
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras_api
from tf_fusedrec.data import batches
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, SemiAsync, Sync
from tf_fusedrec.schedules.planning.choice import Plan
from tf_fusedrec.schedules.planning.forecast import Workload
from tf_fusedrec.schedules.planning.measure import REPEATS, Lookup, Measured, lookups_of, measure

GIGABYTE = 1e9
ALL = ("stale_rows", "bfloat16_wire", "weight_sync")
# 2 hosts of 2 ranks, 8 bytes per second inside a host and 1 between hosts, without latency.
CLUSTER = fr.Cluster(4, 1e9, 2, inside_bytes_per_s=8.0, between_bytes_per_s=1.0, latency_s=0.0)
FAST, SLOW = (0, 1), (0, 2)


@pytest.fixture(scope="module")
def model():
    return make_model()[0]


def workload(compute=1.0, lookup=0.0, update=0.0, unique=1000, of_half=500, table_bytes=8 * GIGABYTE):
    """Returns a step of 100 samples. All ids are distinct, unless a half has more than half of them."""
    measured = Measured(100, 0.0, lookup, update, compute, compute / 2, 0)
    lookups = {m: [Lookup(*[(unique // m,) * m] * 3, 1, 256, 4, 2048)] for m in (1, 2, 4, 8)}
    lookups[2] = [lookups[2][0]._replace(unique=(of_half, of_half))]
    return Workload(measured, lookups, table_bytes)


def forecast(work, schedule, groups=1, wire=None, **cluster):
    fields = {
        "ranks": 4,
        "memory_bytes_per_rank": 80 * GIGABYTE,
        "between_bytes_per_s": 1e6,
        "latency_s": 0.0,
        **cluster,
    }
    return work.forecast(fr.Cluster(**fields), fr.Topology(groups), schedule, wire)


def test_a_slow_network_calls_for_micro_batches_and_slow_tables_for_a_look_ahead():
    # 768 of 1,024 kB travel each way: 0.768 s each at 1 MB/s.
    sync, frozen = (forecast(workload(), one).step_s for one in (Sync(), FrozenWindow(4)))
    assert sync == pytest.approx(1 + 2 * 0.768 + 0.006, rel=1e-3)
    assert frozen < 0.75 * sync
    quick = {"between_bytes_per_s": 1e9}
    slow_tables = workload(lookup=0.8)
    assert forecast(slow_tables, DualBuffer(), **quick).step_s < 0.6 * forecast(slow_tables, Sync(), **quick).step_s


def test_a_wire_of_16_bits_halves_rows_and_gradients():
    whole, half = (forecast(workload(), Sync(), wire=wire) for wire in (None, "bfloat16"))
    ids = 750 * 8 + 3 * 8
    assert whole.embedding_bytes == ids + 2 * 750 * 256 * 4
    assert half.embedding_bytes == ids + 2 * 750 * 256 * 2


def test_groups_cost_memory_and_what_does_not_fit_is_left_out():
    each = [forecast(workload(), Sync(), groups) for groups in (1, 2, 4)]
    assert [one.memory_bytes_per_rank / GIGABYTE for one in each] == [2, 4, 8]
    assert [one.replica_bytes > 0 for one in each] == [False, True, True]
    assert each[2].embedding_bytes == 0
    # All ids are distinct. Of two replicas, each sends the other its shard's 1,000 ids and sums.
    assert each[1].replica_bytes == pytest.approx(1000 * (8 + 1024) + 8)
    # A group of one rank has 1,000 at its shard and all four have 4,000.
    assert each[2].replica_bytes == pytest.approx(0.75 * (1000 + 4000) * (8 + 1024) + 2 * 3 * 8)
    assert forecast(workload(), Sync(), 4, memory_bytes_per_rank=5 * GIGABYTE) is None


def test_rows_beyond_the_memory_lie_in_files_and_cost_time():
    tight = {"memory_bytes_per_rank": 1 * GIGABYTE, "file_bytes_per_rank": 10 * GIGABYTE, "file_bytes_per_s": 1e6}
    whole, tiered = forecast(workload(), Sync()), forecast(workload(), Sync(), **tight)
    assert (whole.memory_budget_per_rank, tiered.memory_budget_per_rank) == (0, GIGABYTE)
    # Half of the 1,000 rows of 2,048 bytes come from the file.
    assert tiered.step_s == pytest.approx(whole.step_s + 500 * 2048 / 1e6)


def test_what_a_step_waits_for_costs_its_time():
    quick = {"between_bytes_per_s": 1e12}  # exchanges take no time
    # Two batches have 1,000 / 700 times the ids of one, so the batch before has updated 4 / 7 of the rows ahead.
    repeating = workload(lookup=0.5, of_half=700)
    assert forecast(repeating, DualBuffer(), **quick).step_s == pytest.approx(1 + 0.5 * 4 / 7, rel=1e-3)
    # Each of two replicas updates the rows of both, or its own where their mean is taken later.
    updating = workload(update=0.25)
    assert forecast(updating, Sync(), 2, **quick).step_s == pytest.approx(1 + 2 * 0.25, rel=1e-3)
    averaged = updating.forecast(fr.Cluster(4, 80 * GIGABYTE, **quick), fr.Topology(2, "weight_sync"), Sync(), None)
    assert averaged.step_s == pytest.approx(1 + 0.25, rel=1e-3)
    # A lookup ahead runs beside a device's compute, and in turns with that of the host's own cores.
    slow_tables = workload(lookup=0.8)
    for on_device, seconds in ((True, 1), (False, 1.8)):
        ahead = forecast(slow_tables, DualBuffer(), compute_on_device=on_device, **quick)
        assert ahead.step_s == pytest.approx(seconds, rel=1e-3)


def test_a_plan_compares_with_sync_in_one_group_on_the_wire_of_the_tables():
    halves, whole = (forecast(workload(), Sync(), wire=wire) for wire in ("bfloat16", None))
    others = forecast(workload(), Sync(), 2), forecast(workload(), DualBuffer())
    *_, reference = str(Plan(fr.Cluster(4, GIGABYTE), (halves, *others, whole))).splitlines()
    assert reference.startswith("sync, one group") and "as the tables" in reference
    assert f"{1e3 * whole.step_s:.3g}" in reference.split() and whole.step_s > halves.step_s


@pytest.mark.slow
def test_a_plan_prints_its_choice_and_the_runner_up_and_applies_in_one_line_each(model):
    cluster = fr.Cluster(8, GIGABYTE, 4)
    found = fr.plan(model, make_batch(), cluster, rows={"item": 10**6}, tolerate=ALL)
    assert found.best.step_s <= 1.01 * min(one.step_s for one in found.forecasts)
    assert list(found.forecasts[1:]) == sorted(found.forecasts[1:], key=lambda one: one.step_s)
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["groups", "schedule", "wire"]
    assert [line.split("  ")[0] for line in lines[1:]] == ["chosen", "runner-up", "sync, one group"]
    model.schedule = found.schedule
    assert json.loads(json.dumps(found.to_dict()))["forecasts"][0]["schedule"]["name"]
    other, _ = make_model(schedule=found.schedule, wire_dtype=found.wire_dtype)
    assert other.schedule == found.schedule
    model.schedule = "sync"
    assert fr.Topology(**found.to_dict()["forecasts"][0]["topology"]) == found.topology


@pytest.mark.slow
def test_only_what_is_tolerated_is_considered(model):
    cluster = fr.Cluster(4, GIGABYTE)
    exact = fr.plan(model, make_batch(), cluster)
    assert not any(isinstance(one.schedule, SemiAsync) or one.wire_dtype for one in exact.forecasts)
    assert {one.topology.rule for one in exact.forecasts} == {"gradient_sync"}
    free = fr.plan(model, make_batch(), cluster, tolerate=ALL)
    assert any(isinstance(one.schedule, SemiAsync) for one in free.forecasts)
    assert {one.wire_dtype for one in free.forecasts} == {None, "bfloat16"}
    assert {one.topology.rule for one in free.forecasts} == {"gradient_sync", "weight_sync"}


@pytest.mark.slow
def test_tables_that_evict_take_every_schedule():
    evicts, _ = make_model(limits=fr.Limits(max_rows_per_rank=1000, eviction="lru"))
    found = fr.plan(evicts, make_batch(), fr.Cluster(4, GIGABYTE), tolerate=["stale_rows"])
    assert {one.schedule for one in found.forecasts} >= {Sync(), DualBuffer(), Nested(2)}
    assert any(isinstance(one.schedule, SemiAsync) for one in found.forecasts)
    # max_rows_per_rank is a limit of each rank.
    assert found.best.memory_bytes_per_rank > 2 * 1000 * (2 * 16 * 4)


@pytest.mark.slow
def test_the_model_stays_as_it_was():
    model, embedding = make_model()
    model.fit(*make_batch(1), batch_size=32, verbose=0)
    model.reset_metrics()
    ids, rows = embedding.export_table("item")
    before = [weight.numpy() for weight in (*model.weights, *keras_api.optimizer_variables(model.optimizer))]
    updates = [group.traffic.numpy() for group in embedding.internals.groups]
    statistics = [group.table.statistics for group in embedding.internals.groups]
    fr.plan(model, make_batch(2), fr.Cluster(4, GIGABYTE), tolerate=ALL)
    after = [weight.numpy() for weight in (*model.weights, *keras_api.optimizer_variables(model.optimizer))]
    assert len(before) == len(after)
    assert all(np.array_equal(*pair) for pair in zip(before, after))
    assert np.array_equal(embedding.export_table("item")[0], ids)
    assert np.array_equal(embedding.export_table("item")[1], rows)
    assert [group.table.statistics for group in embedding.internals.groups] == statistics
    assert np.array_equal([group.traffic.numpy() for group in embedding.internals.groups], updates)
    assert not any(map(float, tf.nest.flatten([metric.result() for metric in model.metrics])))


def test_senseless_arguments_are_refused(model):
    cluster, batch = fr.Cluster(4, GIGABYTE), make_batch()
    for arguments, words in [
        ({"micro_batches": [128]}, f"ints from 2 to the {SAMPLES} samples of the sample, got 128. Use fewer micro"),
        ({"micro_batches": [1]}, "micro_batches must hold ints from 2 .* got 1"),
        ({"tolerate": ["speed"]}, r"tolerate must hold some of \('stale_rows', .*\), got \['speed'\]"),
        ({"tolerate": "stale_rows"}, "tolerate must hold some of"),
        ({"rows": {"items": 5}}, r"rows must name tables of the model, \['item', 'tag', 'user'\], got \['items'\]"),
        ({"rows": {"item": -5}}, r"rows\['item'\] must be an int >= 0, got -5"),
        ({"rows": {"item": 10**9}}, r"1 GB of memory and 0 GB of files .* One .* needs 43 GB .* Use 172 ranks"),
    ]:
        with pytest.raises(ValueError, match=words):
            fr.plan(model, batch, cluster, **arguments)
    with pytest.raises(ValueError, match="schedules need a tf_fusedrec.schedules.PipelinedModel"):
        fr.plan(keras.Sequential(), batch, cluster)


@pytest.mark.slow
def test_a_model_that_cannot_train_and_one_of_several_ranks_are_refused(monkeypatch):
    model, embedding = make_model()
    embedding.trainable = False
    with pytest.raises(ValueError, match="make no training lookups, .* Use trainable = True"):
        fr.plan(model, make_batch(), fr.Cluster(4, GIGABYTE))
    embedding.trainable = True
    if KERAS_IS_LEGACY:  # a loss of Keras 3 that nothing is added to is 0
        model.compile(keras.optimizers.Adam(0.01))
        with pytest.raises(ValueError, match=r"without a loss. Use compile\(loss=...\)"):
            fr.plan(model, make_batch(), fr.Cluster(4, GIGABYTE))
    monkeypatch.setattr("tf_fusedrec.exchange.collectives.size", lambda: 2)
    with pytest.raises(RuntimeError, match="plan was called on rank 0 of 2, and it times one process. Use"):
        fr.plan(model, make_batch(), fr.Cluster(4, GIGABYTE))


def test_a_batch_of_one_sample_has_no_micro_batches(model):
    found = fr.plan(model, make_batch(samples=1), fr.Cluster(4, GIGABYTE))
    assert {one.schedule for one in found.forecasts} == {Sync(), DualBuffer(), fr.schedules.Pipelined(3)}


def test_ids_of_a_batch_are_counted_as_the_ops_count_them(model):
    features, _ = batch = make_batch()
    history, user = features["history"].values.numpy(), features["user"].numpy()
    (whole, tags), (cut, _) = lookups_of(model, batch, 1), lookups_of(model, batch, 2)
    assert whole.unique == (len(set(history)) + len(set(user)),)
    assert (whole.dim, whole.tables, whole.number_bytes) == (16, 2, 4)
    assert (tags.dim, tags.tables, tags.number_bytes) == (8, 1, 2)
    pieces = [features for features, _ in batches.cut(batch, 2)]
    assert cut.unique == tuple(
        len(set(piece["history"].values.numpy())) + len(set(piece["user"].numpy())) for piece in pieces
    )
    assert sum(cut.unique) > sum(whole.unique)
    # An id in both micro-batches travels once: its row with the first, its gradient with the last.
    assert sum(cut.new) == sum(cut.ended) == sum(whole.new) == sum(whole.unique)
    assert cut.new[0] == cut.unique[0] and cut.ended[1] == cut.unique[1]


def test_the_time_of_dense_compute_has_the_backward_pass_in_it():
    calls = []

    def count(value: np.ndarray) -> np.ndarray:
        calls.append(len(value))
        return value

    @tf.custom_gradient
    def counted(rows):
        # An op without side effects, like those of a dense layer: TensorFlow may remove it.
        return tf.identity(rows), lambda grad: tf.ensure_shape(
            tf.numpy_function(count, [grad], grad.dtype, stateful=False), grad.shape
        )

    table = fr.TableConfig("item", 8, fr.optimizers.SGD(0.1))
    embedding = fr.FusedEmbedding([fr.FeatureConfig("item", "item")], [table])
    item = keras.Input([], dtype=tf.int64, name="item")
    outputs = keras.layers.Dense(1)(keras.layers.Lambda(counted)(embedding({"item": item})["item"]))
    model = fr.schedules.PipelinedModel({"item": item}, outputs)
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.1)), loss="mse")
    measure(model, ({"item": tf.range(8, dtype=tf.int64)}, tf.zeros([8, 1])), ranks=2)
    assert sorted(calls) == [4] * (1 + REPEATS) + [8] * (1 + REPEATS)


def test_all_to_alls_between_hosts_share_the_card():
    assert CLUSTER.all_to_all_s(FAST, 16.0) == 16 / 8
    assert CLUSTER.all_to_all_s(SLOW, 16.0) == 2 * 16 / 1  # both ranks of a host send at once
    # Two thirds of the bytes leave the host.
    assert CLUSTER.all_to_all_s((0, 1, 2, 3), 16.0) == pytest.approx(2 * 16 * 2 / 3)
    assert CLUSTER.all_to_all_s((0,), 16.0) == 0


def test_a_ring_leaves_a_host_once_for_all_its_ranks():
    assert CLUSTER.all_reduce_s((0, 1, 2, 3), 16.0) == 2 * 3 / 4 * 16 / 1
    assert CLUSTER.all_reduce_s(SLOW, 16.0) == 2 * (2 * 1 / 2 * 16)  # two such rings share the card
    assert CLUSTER.all_reduce_s(FAST, 16.0) == 2 * 1 / 2 * 16 / 8


def test_latency_is_paid_per_message():
    late = dataclasses.replace(CLUSTER, latency_s=0.5)
    assert late.all_to_all_s((0, 1, 2, 3), 0.0) == 3 * 0.5
    assert late.all_reduce_s((0, 1, 2, 3), 0.0) == 6 * 0.5


def test_topologies_divide_the_ranks():
    found = [(one.groups, one.replicas_together) for one in CLUSTER.topologies()]
    assert found == [(1, False), (2, False), (2, True), (4, False)]


def test_it_comes_back_from_its_dict():
    assert fr.Cluster(**CLUSTER.to_dict()) == CLUSTER


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ranks": 0}, "Cluster.ranks must be an int >= 1, got 0"),
        ({"ranks": 10**6}, "Cluster.ranks must be at most 65,536, got 1000000"),
        ({"ranks": True}, "Cluster.ranks must be an int >= 1, got True"),
        ({"ranks_per_host": 3}, r"ranks_per_host must divide Cluster.ranks, which is 4, got 3. Use one of \[1, 2,"),
        ({"between_bytes_per_s": -1e9}, "Cluster.between_bytes_per_s must be a finite number > 0, got -1000000000.0"),
        ({"inside_bytes_per_s": 0}, "Cluster.inside_bytes_per_s must be a finite number > 0, got 0"),
        ({"memory_bytes_per_rank": float("nan")}, "Cluster.memory_bytes_per_rank must be a finite number > 0, got nan"),
        ({"memory_bytes_per_rank": "80GB"}, "Cluster.memory_bytes_per_rank must be a finite number > 0, got '80GB'"),
        ({"latency_s": -1.0}, "Cluster.latency_s must be a finite number >= 0, got -1.0"),
        ({"file_bytes_per_rank": -1.0}, "Cluster.file_bytes_per_rank must be a finite number >= 0, got -1.0"),
        ({"file_bytes_per_s": 0.0}, "Cluster.file_bytes_per_s must be a finite number > 0, got 0.0"),
    ],
)
def test_senseless_fields_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CLUSTER, **fields)
