"""Options of tables in experiments: every field of TableConfig is documented and within reach, others are refused."""

import dataclasses
import functools
import inspect

import numpy as np
import pytest
import yaml

import tf_fusedrec as fr
from tests.models.batches import ranking_batch
from tests.models.experiment.test_experiment import fields, refused
from tf_fusedrec import config, keras, optimizers, tf
from tf_fusedrec.models import build
from tf_fusedrec.models.experiment import records as experiment

# By path of a field of TableConfig or of its records: a value other than the default and 7, in the words of YAML files,
# and the options it needs.
VALUES = {
    "dim": (16, {}),
    "optimizer": ({"name": "rowwise_adagrad", "learning_rate": 0.5, "variant": "torchrec"}, {}),
    "initializer": ({"name": "uniform", "minval": -0.25, "maxval": 0.5}, {}),
    "dtype": ("bfloat16", {}),
    "unknown": ("zeros", {}),
    "trainable": (False, {}),
    "storage.dtype": ("float16", {}),
    "storage.stochastic_rounding": (True, {"storage.dtype": "bfloat16"}),
    "storage.hot_after": (3, {"storage.dtype": "mixed"}),
    "limits.eviction": ("lfu", {"limits.max_rows_per_rank": 1000}),
    "limits.exact_eviction": (True, {"limits.max_rows_per_rank": 1000, "limits.eviction": "lru"}),
    "limits.max_candidates_per_rank": (300, {"limits.admission_count": 2}),
    "limits.frequency_decay_steps": (500, {"storage.dtype": "mixed", "storage.hot_after": 3}),
    "record_tombstones": (True, {}),
    "tier.memory_budget_per_rank": (1 << 20, {"tier.folder": "rows"}),
    "tier.folder": ("rows", {"tier.memory_budget_per_rank": 1 << 20}),
    "tier.host_rows": (True, {}),
    "tier.hot_rows_per_rank": (4096, {"tier.host_rows": True}),
    "external.folder": ("runs/other/checkpoint", {}),
    "external.table": ("items", {"external.folder": "runs/other/checkpoint"}),
}
EXPECTED = {
    "optimizer": optimizers.RowWiseAdagrad(0.5, variant="torchrec"),
    "initializer": config.Uniform(-0.25, 0.5),
}


def tables(**embedding):
    return {table.name: table for table in experiment.from_dict(fields(embedding=embedding)).tables}


def at(table, path):
    """Returns the value at a path of a TableConfig; None where a record on the way is None."""
    return functools.reduce(lambda value, name: value and getattr(value, name), path.split("."), table)


def paths():
    """Yields the paths of all fields but the name. Every one has a line in the docstring of its record."""
    for record, prefix in ((fr.TableConfig, ""), *((kind, f"{name}.") for name, kind in config.RECORDS.items())):
        for field in dataclasses.fields(record):
            assert f"\n  {field.name}: " in inspect.getdoc(record)
            if prefix or field.name not in ("name", *config.RECORDS):
                yield prefix + field.name


@pytest.mark.parametrize("path", list(paths()))
def test_every_field_of_a_table_is_within_reach_of_yaml_and_set(path, tmp_path):
    value, others = VALUES.get(path, (7, {}))  # an integer that stands alone
    wanted = EXPECTED.get(path, value)
    overrides = {key: yaml.safe_dump(v, default_flow_style=True) for key, v in {path: value, **others}.items()}
    file = tmp_path / "x.yaml"
    file.write_text("name: x\ntask: ranking\ndata: {source: synthetic-ranking}\n", encoding="utf-8")
    overridden = experiment.load(file, [f"embedding.tables.item.{key}={text}" for key, text in overrides.items()])
    loaded = experiment.from_dict(yaml.safe_load(yaml.safe_dump(overridden.to_dict())))
    assert loaded == overridden
    found = {table.name: at(table, path) for table in loaded.tables}
    assert found.pop("item") == wanted
    assert found and wanted not in found.values(), "other tables have the option too"


def test_options_of_all_tables_and_of_one():
    found = tables(
        optimizer="adam", learning_rate=0.5, arguments={"beta_2": 0.5}, stddev=0.25,
        all_tables={"limits": {"ttl": 9, "max_rows_per_rank": 8}, "dim": 4},
        tables={"item": {"limits": {"ttl": 3}, "optimizer": {"beta_1": 0.25}}, "action": {"optimizer": "sgd"}},
    )  # fmt: skip
    assert (found["item"].limits, found["action"].limits) == (fr.Limits(8, ttl=3), fr.Limits(8, ttl=9))
    assert (found["item"].dim, found["action"].dim) == (4, 4)
    assert found["item"].optimizer == optimizers.Adam(0.5, beta_1=0.25, beta_2=0.5)
    assert found["action"].optimizer == optimizers.SGD(0.5)
    assert {table.initializer for table in found.values()} == {fr.TruncatedNormal(stddev=0.25)}


def test_a_rule_without_a_learning_rate_has_its_own():
    found = tables(tables={"item": {"optimizer": "adamw"}})
    assert found["item"].optimizer == optimizers.AdamW(0.001)
    assert found["action"].optimizer == optimizers.Adagrad(0.05)


def test_options_of_all_tables_leave_external_tables_alone():
    found = tables(all_tables={"limits": {"ttl": 9}}, tables={"item": {"external": {"folder": "runs/a"}}})
    assert (found["item"].limits.ttl, found["item"].optimizer, found["action"].limits.ttl) == (0, None, 9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("tables.itm={}", r"embedding.tables names \['itm'\], and the model has the tables \['action', '"),
        ("tables.item.rows=5", r"embedding.tables.item names \['rows'\], and a table takes \['dim"),
        ("tables.item.name=x", r"embedding.tables.item names \['name'\], and a table takes"),
        ("tables.item=5", "embedding.tables.item must hold options of a table, got 5"),
        ("tables=[item]", "embedding.tables must hold names and their values"),
        ("all_tables.rows=5", r"embedding.all_tables names \['rows'\], and a table takes"),
        ("all_tables.optimizer=adam", "all_tables.optimizer is not taken: for all tables, set embedding.optimiz"),
        ("all_tables.initializer=zeros", "for all tables, set embedding.stddev; for one table, embed"),
        ("tables.item.limits=3", "embedding.tables.item.limits must hold options of a table, got 3"),
        ("tables.item.tier.ttl=3", r"item.tier names \['ttl'\], and a table takes \['fol"),
        ("tables.item.limits.ttl=long", "item: TableConfig.limits.ttl must be int, got 'long'"),
        ("tables.item.limits.ttl=null", "item: TableConfig.limits.ttl must be int, got None"),
        ("tables.item.tier.host_rows=1", "item: TableConfig.tier.host_rows must be bool, got 1"),
        ("tables.item.dim=0", "embedding.tables.item: TableConfig.dim of table 'item' must be an int in"),
        ("tables.item.limits.eviction=lru", "limits.eviction of table 'item' is 'lru' with limits.max_rows_per_rank 0"),
        ("tables.item.limits.eviction=3", "limits.eviction must be one of 'lru', 'lfu', None, got 3"),
        ("tables.item.optimizer=lion", r"item.optimizer.name must be one of \['adagrad'"),
        ("tables.item.optimizer=3", r"item.optimizer must be a name, or hold a name and arguments, got 3"),
        (
            "tables.item.optimizer={name: sgd, beta: 1}",
            r"item.optimizer names \['beta'\], and 'sgd' takes \['clipnorm', 'mom",
        ),
        ("tables.item.optimizer={beta_2: 0.5}", r"tables.item.optimizer names \['beta_2'\], and 'adagrad' takes"),
        ("tables.item.optimizer={learning_rate: fast}", "item.optimizer.learning_rate must be float, got 'fast'"),
        ("tables.item.optimizer={learning_rate: -1}", "item.optimizer: Adagrad.learning_rate must be a finite number"),
        ("tables.item.initializer=glorot", r"item.initializer.name must be one of \['con"),
        (
            "tables.item.initializer={name: uniform, stddev: 1.0}",
            r"names \['stddev'\], and 'uniform' takes \['maxval', 'minval'\]",
        ),
        (
            "tables.item={external: {folder: a}, optimizer: sgd}",
            r"Table 'item' is external, .* config sets \['optimizer'\]",
        ),
        # A retrieval model has one number of columns.
        (
            "tables.item.dim=8; task=retrieval; data.source=movielens",
            "item.dim is 8, but model.dim is 50, .*Set model.d",
        ),
    ],
)
def test_unknown_and_unfit_options_are_refused(tmp_path, overrides, message):
    refused(tmp_path, f"embedding.{overrides}", message)


def test_a_schedule_keeps_rows_that_wait_for_their_update():
    loaded = experiment.from_dict(
        fields(embedding={"all_tables": {"limits": {"ttl": 9}}}, train={"schedule": "semi_async"})
    )
    model = build.make_model(loaded, build.make_embedding(loaded), np.arange(1), np.ones(1, np.int64))
    model.compile(keras.optimizers.SGD(0.1))  # refuses a table whose rows may move


@pytest.mark.parametrize("kind", sorted(build.RANKING_MODELS))
def test_ranking_models_project_rows_of_other_sizes_and_train_the_projection(kind):
    sections = fields(model={"kind": kind, "dim": 8}, embedding={"tables": {"item": {"dim": 3}}})
    loaded = experiment.from_dict(sections)
    batch = ranking_batch([4, 0, 2], [2, 1, 3])
    model = build.make_model(loaded, build.make_embedding(loaded), np.arange(1, 60), np.ones(59, np.int64))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.position_losses(batch, model(batch, training=True)))
    (projection,) = model.projections["item"].trainable_weights
    assert projection.shape == (3, 8)
    assert float(tf.norm(tape.gradient(loss, projection))) > 0
    ids = int(tf.size(batch["history_item"].values)) + int(tf.size(batch["exposed_item"].values))
    assert float(model.projection_flops(batch)) == 2 * 3 * 8 * ids
