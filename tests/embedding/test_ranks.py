"""FusedEmbedding on 3 real processes trains the tables of one process: rows, slots, ages, counts and statistics.

Initial rows, admission and TTL are functions of the id and the number of steps, which all ranks share. Evictions
at max_rows_per_rank depend on the owner's other rows, so no scenario has it.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.rank_partition import mix64
from tests.support.graphs import count_ops
from tests.support.ids import INT64_MIN
from tests.support.layers import layer_of, merged, train
from tests.support.ranks import choose_exchange, run_ranks
from tf_fusedrec import Limits, Storage, Tier, keras, optimizers, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY
from tf_fusedrec.exchange import gloo
from tf_fusedrec.exchange.collectives import ALL_TO_ALLS

WORLD_SIZE, STEPS, SAMPLES = 3, 6, 12
TABLES = {"item": 4, "user": 4, "wide": 8}
# Part of the hash range of the first of three ranks.
OWNED_BY_RANK_0 = [i for i in range(200) if mix64(i) < 2**62]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """`calls`: calls of the layer in a step. `is_exact`: sums of gradients have no rounding, so all bits are equal."""

    rule: str = "Adagrad"
    layer: dict[str, Any] = dataclasses.field(default_factory=lambda: {"gradient_op": "sum"})
    table: dict[str, Any] = dataclasses.field(default_factory=dict)
    ids: str = "few"
    calls: int = 1
    is_exact: bool = False
    has_empty_rank: bool = False


TFRA = {"backend": "tfra"}
SCENARIOS = {
    "uneven": Scenario(),
    "one_id": Scenario(ids="one"),
    "ids_of_one_rank": Scenario(ids="of rank 0"),
    "any_int64": Scenario("RowWiseAdagrad", ids="any"),
    "any_int64_of_tfra": Scenario(layer={**TFRA, "key_encoding": "hash", "gradient_op": "sum"}, ids="any"),
    "two_calls": Scenario("Adam", layer={}, calls=2),
    "two_calls_of_tfra": Scenario(layer=TFRA, calls=2),
    "a_rank_with_nothing": Scenario("RowWiseAdagrad", calls=2, has_empty_rank=True),
    "admission_and_ttl": Scenario(
        layer={}, table={"limits": Limits(admission_count=2, ttl=2), "record_tombstones": True}, ids="some"
    ),
    "accumulation": Scenario("Adam", layer={"accumulate_steps": 3}),
    # Random bits are of the number, its column and the step.
    "stochastic_rounding": Scenario(
        "SGD", table={"storage": Storage(dtype="bfloat16", stochastic_rounding=True)}, is_exact=True
    ),
    "tier_with_look_ahead": Scenario(
        "Adam", layer={}, table={"tier": Tier(memory_budget_per_rank=60 * 80)}, ids="many"
    ),
}
if not KERAS_IS_LEGACY:  # TFRA needs tf_keras
    SCENARIOS = {name: scenario for name, scenario in SCENARIOS.items() if "backend" not in scenario.layer}


def _batches(name):
    """The global batches of a scenario, a pure function of its name. A sample is a list of ids by feature."""
    random = np.random.default_rng(len(name))
    draws = {
        "few": lambda n: random.integers(0, 20, n),
        "some": lambda n: random.integers(0, 60, n),
        "many": lambda n: random.integers(0, 200, n),
        "one": lambda n: np.full(n, 7),
        "of rank 0": lambda n: random.choice(OWNED_BY_RANK_0, n),
        "any": lambda n: np.where(random.random(n) < 0.3, INT64_MIN, -(2**62)) + random.integers(0, 9, n),
    }
    draw = draws[SCENARIOS[name].ids]
    sizes = {"a": 5, "b": 5, "d": 3}  # of each sample below that
    return [
        [
            {"c": draw(2).tolist(), **{f: draw(random.integers(0, n)).tolist() for f, n in sizes.items()}}
            for _ in range(SAMPLES)
        ]
        for _ in range(STEPS)
    ]


def _inputs(scenario, batch, rank, size):
    """This rank's uneven part of a batch. A scenario's empty rank, the first, has samples only if it is alone."""
    weights = np.arange(1, size + 1)
    if scenario.has_empty_rank and size > 1:
        weights[0] = 0
    bounds = np.round(np.concatenate([[0], np.cumsum(weights)]) / weights.sum() * SAMPLES).astype(int)
    part = batch[bounds[rank] : bounds[rank + 1]]
    ragged = functools.partial(tf.ragged.constant, ragged_rank=1, dtype=tf.int64, row_splits_dtype=tf.int64)
    inputs = {name: ragged([sample[name] for sample in part]) for name in "abd"}
    return {**inputs, "c": tf.constant(np.array([sample["c"] for sample in part], np.int64).reshape(len(part), 2))}


def _train(name, folder):
    """What training leaves on this rank, and the rows of feature "a" in an evaluation and in the first step."""
    scenario, rank, size = SCENARIOS[name], fr.rank(), fr.size()
    is_tfra = scenario.layer.get("backend") == "tfra"
    options = dict(scenario.table)
    if "tier" in options:
        options["tier"] = dataclasses.replace(options["tier"], folder=folder)
    rule = getattr(keras.optimizers.legacy if is_tfra else optimizers, scenario.rule)(0.125)
    pooled = ("sum", "sum") if scenario.is_exact else ("mean", "sqrtn")
    features = [("a", "item", None), ("b", "item", pooled[0]), ("c", "user", None), ("d", "wide", pooled[1])]
    emb = fr.FusedEmbedding(
        [fr.FeatureConfig(*feature) for feature in features],
        [fr.TableConfig(table, dim, rule, **options) for table, dim in TABLES.items()], name=name, **scenario.layer,
    )  # fmt: skip

    @tf.function(reduce_retracing=True)
    def step(inputs, coming):
        if "tier" in options:
            emb.prefetch(coming)
        with tf.GradientTape() as tape:
            out = {}
            for called in ("abcd",) if scenario.calls == 1 else ("ad", "bc"):  # a and b share a table
                out.update(emb({feature: inputs[feature] for feature in called}))
            a, b, c, d = out["a"].flat_values, out["b"], out["c"], out["d"]
            if scenario.is_exact:
                loss = tf.reduce_sum(a * 0.25) + tf.reduce_sum(b * 0.125) + tf.reduce_sum(c) + tf.reduce_sum(d)
            else:
                loss = tf.reduce_sum(a**2) + tf.reduce_sum(tf.sin(5 * b)) + tf.reduce_sum(c**3)
                loss += tf.reduce_sum(tf.cos(d))
            # Losses are sums here, so an average over ranks must be undone to compare with one process.
            loss *= size if scenario.layer.get("gradient_op", "average") == "average" else 1
        tape.gradient(loss, emb.trainable_variables)
        return a

    batches = [_inputs(scenario, batch, rank, size) for batch in [*_batches(name), [], []]]
    first = batches[0]["a"].flat_values.numpy(), emb(batches[0], training=False)["a"].flat_values.numpy()
    rows = [step(batches[n], batches[n + 2]).numpy() for n in range(STEPS)]
    records, statistics, gone, in_file = {}, {}, [], 0
    for table in (group.table for group in emb.internals.groups):
        for of in table.names:
            if is_tfra:
                ids, values = emb.export_table(of)
                records[of] = ids, values.view([("row", values.dtype, values.shape[1:])])[:, 0]
            else:
                records[of] = table.snapshot(of)
                gone += [(of, i) for i in table.tombstones(of).tolist()]
        if not is_tfra:
            statistics.update(table.statistics)
            in_file += table.memory["second_rows"]
    return {
        "records": records, "statistics": statistics, "tombstones": gone, "in_file": in_file,
        "first": [dict(zip(first[0].tolist(), of)) for of in (first[1], rows[0])],
    }  # fmt: skip


def _read_external(checkpoint):
    """Looks up ids of all ranks. Returns the rows of the checkpoint, and the ids that this rank holds."""
    table = fr.TableConfig("author", 4, external=fr.External(checkpoint, table="user"))
    emb = layer_of(table, name="external")
    ids = np.arange(-3, 60)[fr.rank() :: fr.size()]
    return dict(zip(ids.tolist(), emb({"author": tf.constant(ids)})["author"].numpy())), emb.export_table("author")[0]


def train_all(folder, checkpoint):
    """Body: trains every scenario, so one launch serves all. Over Gloo, the rows of both groups share messages."""
    gloo.Gloo.joined_from = 2
    return {name: _train(name, folder) for name in SCENARIOS}, _read_external(checkpoint)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of one process, for an external table: ids 0 to 49 with their rows."""
    folder = str(tmp_path_factory.mktemp("source"))
    table = fr.TableConfig("user", 4, fr.optimizers.SGD(0.1))
    emb = layer_of(table, name="source")
    rows = emb({"user": tf.range(50)})["user"].numpy()
    fr.checkpoint.save(folder, emb)
    return folder, rows


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory):
    """The results of each rank, by number of ranks."""
    folder = str(tmp_path_factory.mktemp("tier"))
    return {ranks: run_ranks(train_all, ranks, folder=folder, checkpoint=source[0]) for ranks in (1, WORLD_SIZE)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_together_equal_one_process(trained, name):
    of_ranks, (alone,) = ([results[name] for results, _ in trained[ranks]] for ranks in (WORLD_SIZE, 1))
    for table in TABLES:
        (ids, records), (want_ids, want) = (merged([r["records"][table] for r in of]) for of in (of_ranks, [alone]))
        np.testing.assert_array_equal(ids, want_ids, err_msg=table)
        for field in set(records.dtype.names) - {"pool"}:
            where = f"{table} {field}"
            if records[field].dtype.kind == "u" or SCENARIOS[name].is_exact:  # ages, counts, versions; bfloat16 bits
                np.testing.assert_array_equal(records[field], want[field], err_msg=where)
            else:
                # Sums over ranks are added in another order than over samples: float32 rounding (6e-8) of sums of up to
                # 50 terms, over some steps. Adam divides tiny gradients by their own size, hence the absolute part.
                np.testing.assert_allclose(
                    records[field], want[field], rtol=2e-5, atol=2e-6, err_msg=f"{table} {field}"
                )
        for kind, count in alone["statistics"].get(table, {}).items():  # only its owner counts an id
            assert sum(of_rank["statistics"][table][kind] for of_rank in of_ranks) == count, (table, kind)
    assert sorted(key for of_rank in of_ranks for key in of_rank["tombstones"]) == sorted(alone["tombstones"])
    for of_rank in of_ranks:
        for rows, of_alone in zip(of_rank["first"], alone["first"]):
            for i, row in rows.items():
                np.testing.assert_array_equal(row, of_alone[i], err_msg=f"initial row of {i}")
    if name == "ids_of_one_rank":
        assert [len(of_rank["records"]["item"][0]) > 0 for of_rank in of_ranks] == [True, False, False]


def test_the_scenarios_are_not_too_easy(trained):
    """In one process, rows were refused, expired and returned, and some lay in the file."""
    ((results, _),) = trained[1]
    counts = results["admission_and_ttl"]["statistics"]["item"]
    assert counts["refused"] > 10 and counts["evictions"] > 3 and counts["inserts"] > counts["keys"] > 0
    assert results["admission_and_ttl"]["tombstones"] and results["tier_with_look_ahead"]["in_file"] > 20
    assert INT64_MIN in results["any_int64"]["records"]["item"][0]


@pytest.mark.parametrize("ranks", [1, WORLD_SIZE])
def test_an_external_table_has_the_rows_of_its_checkpoint(trained, source, ranks):
    answers, held = {}, []
    for _, (rows, ids) in trained[ranks]:
        answers.update(rows)
        held += ids.tolist()
    assert sorted(held) == list(range(50))
    for i in range(-3, 60):
        np.testing.assert_array_equal(answers[i], source[1][i] if 0 <= i < 50 else np.zeros(4))


def all_to_alls(groups):
    """Body: returns the number of all-to-alls in a step and in an evaluation of two tables in each group."""
    tables = [fr.TableConfig(f"t{i}", 4 + i % groups, fr.optimizers.Adagrad(0.1)) for i in range(2 * groups)]
    emb, inputs = layer_of(*tables), {table.name: tf.range(5 + i) for i, table in enumerate(tables)}
    functions = tf.function(lambda: train(emb, inputs)), tf.function(lambda: emb(inputs))
    counts = [count_ops(function.get_concrete_function()) for function in functions]
    return [sum(count[op] for op in ALL_TO_ALLS) for count in counts]


def remove_rows():
    """Body: each rank removes another id. Returns the number of removed rows and the ids that this rank holds then."""
    table = fr.TableConfig("item", 4, fr.optimizers.SGD(0.1))
    emb = layer_of(table, name="forgets")
    emb({"item": tf.range(20)})
    with pytest.raises(ValueError, match="ids to remove from table 'item' are <U1, and must be integers"):
        emb.remove("item", ["7"])
    return emb.remove("item", [3 * fr.rank(), 7, 99]), emb.export_table("item")[0]


def _of_two():
    return remove_rows(), [all_to_alls(groups) for groups in (1, 7, 8)]


@pytest.mark.parametrize("exchange", ["horovod", "gloo"])
def test_removed_ids_leave_all_ranks_and_a_group_sends_its_rows_once(exchange, monkeypatch):
    choose_exchange(exchange, monkeypatch)
    removals, counts = zip(*run_ranks(_of_two, 2))
    removed, held = zip(*removals)
    assert removed == (3, 3)
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), sorted({*range(20)} - {0, 3, 7}))
    # The ids of all groups travel together; each group sends rows, and in training gradients. So do 8 groups together.
    assert counts == ([[3, 2], [15, 8], [3, 2] if exchange == "gloo" else [17, 9]],) * 2
    assert all_to_alls(8) == [0, 0]
