"""Experiments: refusals and their messages, overrides, and every file of configs/ loads."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest
import yaml

from tests.models import batches
from tf_fusedrec import keras, schedules, tf
from tf_fusedrec.models import build
from tf_fusedrec.models.experiment import records as experiment
from tf_fusedrec.optimizers import rules as optimizers

ROOT = pathlib.Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def fields(**sections):
    return {"name": "x", "task": "ranking", "data": {"source": "synthetic-ranking"}, "model": {}, **sections}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_tells_its_command(path):
    loaded = experiment.load(path)
    assert loaded.name == path.stem
    assert experiment.from_dict(loaded.to_dict()) == loaded
    name = path.relative_to(ROOT / "configs").with_suffix("")
    assert f"fusedrec train {name}" in path.read_text(encoding="utf-8")


def test_overrides_are_yaml(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("name: x\ntask: ranking\ndata: {source: synthetic-ranking}\n", encoding="utf-8")
    overrides = ["train.epochs=3", "model.contextual=[a, b]", "embedding.learning_rate=1e-3", "seed=5"]
    loaded = experiment.load(path, overrides)
    assert (loaded.train.epochs, loaded.model.contextual, loaded.seed) == (3, ("a", "b"), 5)
    assert loaded.embedding.learning_rate == 1e-3
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.seed = 6


RETRIEVAL = "task=retrieval; data.source=synthetic-retrieval; "
TABLE = "{user: u, item: i, time: t}; data.source=table"
# Bounds of fields, by the fields that they need.
BOUNDS = {
    "": "seed>=0 model.dim>=1 model.profiles>=0 data.max_partitions>=0 data.poll_s>0 data.timeout_s>=0 "
    "train.epochs>=1 train.target_tokens_per_rank>=1 train.accumulate_steps>=1 train.progressive_steps>=0 "
    "train.patience>=0 train.quadratic_cost>=0 train.learning_rate>0 train.epsilon>0 "
    "evaluate.target_tokens_per_rank>=1 embedding.groups>=1 embedding.sync_every>=1 embedding.learning_rate>=0 "
    "embedding.stddev>0",
    "model.kind=dcn; ": "model.cross_layers>=1 model.cross_rank>=0",
    RETRIEVAL: "model.output_slots>=0 model.ffn_multiple>=1 model.expansion>=1 model.num_negatives>=1 "
    "model.temperature>0",
}
# 10^9 values by nine aliases.
BOMB = "[&a0 [x], " + ", ".join(f"&a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(9)) + "]"
REFUSED = [
    ("train.epoch=1", r"train has an unknown field 'epoch'. Did you mean 'epochs'. Known fields: \['accumulate_steps'"),
    ("trian={}", r"the top level has an unknown field 'trian'. Did you mean 'train'. Known fields: \['data', "),
    ("model.num_negatives=5", "model has an unknown field 'num_negatives'"),
    ("train.epochs=two", r"train.epochs must be int, got 'two' \(str\)"),
    ("train.epochs=true", "train.epochs must be int, got True"),
    ("train.learning_rate=fast", "train.learning_rate must be float, got 'fast'"),
    ("train=[1]", r"train must hold fields, got \[1\]"),
    ("model.contextual=user_id", "model.contextual must be a list of str, got 'user_id'"),
    ("model.contextual=[a, 3]", r"model.contextual\[1\] must be str, got 3"),
    ("model.contextual=[a, a]", "model.contextual names a column twice"),
    ("model.contextual=[größe]", "model: the name of a column must .*, got 'größe'"),
    ("model.exposed_dense=[home-town]", "the name of a column must .*, got 'exposed_home-town'"),
    ("model.contextual_lists=[a]; model.contextual=[a_row_splits]", "model names two columns 'a_row_splits'"),
    ("model.item_lists=[a]; model.item_features=[a_count]", "two columns 'history_a_count'"),
    ("train.keep_best=auc", r"train.keep_best must be one of \['ctr_auc', 'ctr_gauc', .*, got 'auc'"),
    ("name=../../x", "name must be a non-empty string without '/'.*, got '../../x'"),
    ("model.top_k=9", "model.top_k must be 1 .. num_experts = 4, got 9"),
    ("model.dropout=1.0", "model.dropout must be 0 <= dropout < 1, got 1.0"),
    ("model.attention_dropout=1.0", "model.attention_dropout must be 0 <= attention_dropout < 1, got 1.0"),
    ("model.history_dropout=1.0", "model.history_dropout must be 0 <= history_dropout < 1, got 1.0"),
    ("model.item_dropout=0.1", "model.item_dropout 0.1 trains the row of unknown items, which needs"),
    ("model={item_lists: [genre], crosses: ['item*genre']}", r"'item\*genre', want a\*b of two names of \['item'"),
    ("model={contextual: [gender], crosses: ['gender*gender']}", "at least one of .*'item', 'hour'"),
    ("model.crosses=[year]", "model.crosses has 'year'"),
    ("model={exposed_dense: [count], log1p: [rate]}", r"log1p names 'rate', want one of the dense names \['count'\]"),
    ("model.exposed_dense=[a, a]", "model.exposed_dense names a column twice"),
    ("model.list_combiner=max", "model.list_combiner must be one of .*, got 'max'"),
    ("model={kind: dlrm, time_features: false}", "the bottom network has no input"),
    ("model.kind=gru", r"model.kind must be one of .*, got 'gru'"),
    ("model.kind=dlrm; model.top_units=[0]", "model.top_units must be >= 1, got 0"),
    ("model.kind=din; model.top_units=[3, 0]", "model.top_units must be >= 1, got 0"),
    ("model.kind=din; model.attention_units=[]", "model.attention_units must have a layer, got none"),
    ("task=clustering", r"task must be one of \['ranking', 'retrieval'\], got 'clustering'"),
    ("data={}", "data lacks the field 'source'"),
    ("data.source=movielens", "data.source 'movielens' is retrieval data, but task is 'ranking'"),
    ("data.source=netflix", r"data.source must be one of .*, got 'netflix'"),
    ("data.source=kuairand; data.users=5", "data.users is a size of a synthetic data set"),
    ("data.source=kuairand; data.split=week", r"data.split must be one of \['time', 'user'\], got 'week'"),
    ("data.users=-1", "data.users must be >= 1, got -1"),
    ("data.follow=true; train.epochs=2", "data.follow trains every partition once, so train.epochs must be 1, got 2"),
    ("data.bad_rows=drop", r"data.bad_rows must be one of \['error', 'skip"),
    ("embedding.optimizer=lion", r"embedding.optimizer must be one of \['adagrad'"),
    ("embedding.rule=vote", "embedding.rule must be one of .*, got 'vote'"),
    ("embedding.sync_every=3", "embedding: Topology.sync_every and moment_scale need the rule 'weight_sync'"),
    ("embedding.wire_dtype=int8", "embedding.wire_dtype must be one of .*, got 'int8'"),
    ("embedding.arguments=[epsilon]", r"embedding.arguments must hold names and their values, got \['eps"),
    ("embedding={optimizer: adam, arguments: {beta_2: 1.0}}", "embedding.arguments: Adam.beta_2 must be a finite "),
    ("embedding={optimizer: sgd, arguments: {epsilon: 1, beta: 1}}", r"\['beta', 'epsilon'\], and 'sgd' takes \['clip"),
    ("embedding={optimizer: sgd, arguments: {nesterov: 'yes'}}", r"arguments.nesterov must be bool, got 'yes' \(str\)"),
    ("embedding={optimizer: rowwise_adagrad, arguments: {epsilon: 0.0}}", "RowWiseAdagrad.epsilon .* > 0 .*, got 0.0"),
    ("train.beta_2=1.0", "train.beta_2 must lie between 0 and 1, got 1.0"),
    ("train.schedule=nest", "train.schedule: schedule must be .* one of the registered .*, got 'nest'"),
    ("train.schedule=dual_buffer(lead=9)", "train.schedule: lead must be an int from 1 to 4, got 9"),
    ("train={schedule: dual_buffer, cluster_samples: true}", "schedule 'dual_buffer' has no micro-batches .*nested.M"),
    ("train={schedule: nested(1), cluster_samples: true}", r"train.schedule 'nested\(1\)' has no micro-b"),
    ("train.precision=float64", r"train.precision must be one of \['float32', 'mixed_b.*, got 'float64'"),
    ("train={precision: mixed_float16, schedule: nested(2)}", r"'nested\(2\)' .*Set train.precision to 'mixed_bf"),
    ("train={precision: mixed_float16, accumulate_steps: 2}", "train.accumulate_steps 2 lets gradients wait"),
    ("train.balance=host", r"train.balance must be one of \['rank', 'global'\], got 'host'"),
    ("train.stochastic_length=1.0", "train.stochastic_length must be > 1 and <= 2, or 0 .*, got 1.0"),
    ("evaluate.cutoffs=[]", "evaluate.cutoffs must name at least one K"),
    ("evaluate.cutoffs=[0]", "evaluate.cutoffs must be >= 1, got 0"),
    (RETRIEVAL + "train.progressive_steps=5", "train.progressive_steps is for ranking only, but task is 'retrieval'"),
    (RETRIEVAL + "data.held_out=all", r"data.held_out must be one of \['both', 'test', 'validation'\], got 'all'"),
    (RETRIEVAL + f"data.columns={TABLE}; data.columns.labels=[y]", "data.columns.labels is for the task 'ranking'"),
    (RETRIEVAL + f"data.columns={TABLE}; data.earlier=[a]", r"data.earlier of a table is for .*got \('a',\)"),
    (RETRIEVAL + f"data.columns={TABLE}; data.follow=true", "data.follow of a table is for the task 'ranking'"),
    (f"data.columns={TABLE}", "data.columns.labels names no label, want at least"),
    (RETRIEVAL + "model.encoder=gru", r"must be one of \['hstu', 'fuxi_alpha', 'fuxi_beta', 'sasrec'\], got 'gru'"),
    (RETRIEVAL + "model.time_encoding=sine", r"model.time_encoding must be one of \['none', 'buckets'"),
    (RETRIEVAL + "model={whole_catalogue: true, share_negatives: true}", "set model.share_negatives to false"),
    (RETRIEVAL + "model={expansion: 2, share_negatives: true}", "model.expansion 2 is for own negatives"),
    (RETRIEVAL + "model.sampling=popular", r"one of \['uniform', 'frequency', 'in_batch'\], got 'popular'"),
    (RETRIEVAL + "model.sharing=rows", r"model.sharing must be one of \['negatives', 'logits'\], got 'rows'"),
    (RETRIEVAL + "model.log_q=true", "model.log_q corrects nothing where model.sampling is 'uniform'"),
    (RETRIEVAL + "model.negatives_dtype=int8", r"model.negatives_dtype must be one of .*, got 'int8'"),
    (RETRIEVAL + "model={negatives_dtype: float16, sampling: in_batch}", "'float16' needs a lookup of negatives"),
    # Overrides that are none.
    ("train.epochs", "--set must be section.field=value, got 'train.epochs'"),
    ("a.b.c=1", "the top level has an unknown field 'a'"),
    ("a..c=1", "--set must be section.field=value, got 'a..c=1'"),
    ("train.epochs.of=1", "--set 'train.epochs.of=1': 'epochs' is a field, not a section"),
    ("name.x=1", "'name' is a field, not a section"),
    ("train.epochs=[", "the value is not YAML"),
    ("train={epochs: 1, epochs: 2}", "'epochs' occurs twice"),
    ("train={[epochs]: 1}", "a key must be a name"),
    ("train.epochs=010", "'010' is a number of base 60 or 8 in YAML; write it in base 10"),
    ("train.epochs=1:30", "'1:30' is a number of base 60"),
    ("data.columns=&a [*a]", "its aliases stand for more than 100,000 values"),
    (f"model={BOMB}", "its aliases stand for more than 100,000 values"),
]
for needed, bounds in BOUNDS.items():
    for name, relation, bound in re.findall(r"([\w.]+)(>=?)(\d)", bounds):
        value = int(bound) - (relation == ">=")
        REFUSED.append((f"{needed}{name}={value}", f"{name} must be {relation} {bound}, got {value}"))


def refused(folder, overrides, message):
    """An experiment that is valid but for its overrides, separated by semicolons, is refused."""
    path = folder / "x.yaml"
    path.write_text("name: x\ntask: ranking\ndata: {source: synthetic-ranking}\ntrain: {epochs: 1}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        experiment.load(path, overrides.split("; "))


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_refusals_name_section_field_and_value(tmp_path, overrides, message):
    refused(tmp_path, overrides, message)


def test_a_model_gets_the_schedule_that_the_experiment_names():
    """tests/schedules/test_schedule.py has every text."""
    loaded = experiment.from_dict(fields(train={"schedule": "nested(4, lead=3)"}))
    model = build.make_model(loaded, keras.layers.Layer(), np.arange(1), np.ones(1, np.int64))
    assert model.schedule == schedules.Nested(4, lead=3)


@pytest.mark.parametrize("kind", sorted(optimizers.RULES))
def test_every_update_rule_of_tables_is_reachable_with_all_its_arguments(kind):
    """Each argument of the record gets a value other than its default, in the words of a YAML file."""
    (name,) = [name for name, rule in experiment.TABLE_OPTIMIZERS.items() if rule is optimizers.RULES[kind]]
    others = {"variant": "torchrec", "epsilon_inside": True, "nesterov": True, "learning_rate_power": -0.25}
    names = [field.name for field in dataclasses.fields(optimizers.RULES[kind]) if field.name != "learning_rate"]
    arguments = {one: others.get(one, 0.625) for one in names}
    text = yaml.safe_dump(fields(embedding={"optimizer": name, "learning_rate": 0.5, "arguments": arguments}))
    loaded = experiment.from_dict(yaml.safe_load(text))
    assert loaded.embedding.rule_of_tables == optimizers.RULES[kind](0.5, **arguments)
    assert experiment.from_dict(loaded.to_dict()) == loaded
    (table, *_) = build.make_embedding(loaded).tables
    assert table.optimizer == loaded.embedding.rule_of_tables


def test_an_argument_may_be_a_number_in_text():
    """YAML 1.1 reads 1e-8 as text."""
    loaded = experiment.from_dict(fields(embedding={"arguments": {"epsilon": "1e-8"}}))
    assert loaded.embedding.rule_of_tables.epsilon == 1e-8


BASE = "name: x\ntask: ranking\ndata: {source: synthetic-ranking}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "CONFIG must be a YAML file, but there is no file"),
        ("a: [", "is not YAML"),
        ("- 1", "must hold sections, got list"),
        ("", "must hold sections, got an empty file"),
        ("name: Zürich", "x.yaml is not YAML: 'utf-8' codec"),
        (BASE + "train: {epochs: 1}\ntrain: {seed: 2}\n", r"'train' occurs twice\n.*x.yaml\", line \d"),
        (BASE + "train:\n  epochs: 1\n  epochs: 2\n", r"'epochs' occurs twice\n.*x.yaml\", line \d"),
    ],
)
def test_files_that_are_no_experiments_are_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "x.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        experiment.load(tmp_path / "x.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "precision"),
    [
        ("grm", "mixed_bfloat16"),
        ("retrieval", "mixed_float16"),
        *(("dlrm", precision) for precision in ("float32", "mixed_float16")),
        ("din", "mixed_bfloat16"),
        ("dcn", "mixed_bfloat16"),
    ],
)
def test_models_learn_in_every_precision(task, precision):
    ranking = task != "retrieval"
    small = {"grm": {"num_blocks": 1}, "retrieval": {"num_blocks": 1, "num_negatives": 4}}.get(task, {})
    sections = fields(
        task="ranking" if ranking else "retrieval", train={"precision": precision},
        data={"source": "synthetic-ranking" if ranking else "synthetic-retrieval"},
        model={"dim": 8, **({"kind": task} if ranking else {}), **small}, embedding={"learning_rate": 0.2},
    )  # fmt: skip
    loaded = experiment.from_dict(sections)
    keras.utils.set_random_seed(2)
    batch = batches.ranking_batch([4, 0, 2], [2, 1, 3]) if ranking else batches.retrieval_batch([4, 1, 3])
    model = build.make_model(loaded, build.make_embedding(loaded), np.arange(1, 60), np.ones(59, np.int64))
    try:
        assert model.compute_dtype == precision.removeprefix("mixed_")
        model.compile(keras.optimizers.Adam(0.01))
        losses = model.fit(tf.data.Dataset.from_tensors(batch).repeat(10), epochs=5, verbose=0).history["loss"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_accumulated_steps_reach_the_tables_and_the_dense_weights():
    loaded = experiment.from_dict(fields(train={"accumulate_steps": 2}))
    model = build.make_model(loaded, build.make_embedding(loaded), np.arange(1, 60), np.ones(59, np.int64))
    model.compile(keras.optimizers.Adam(0.01))
    batch = batches.ranking_batch([4, 0, 2], [2, 1, 3])
    model(batch)
    weights = []
    for _ in range(4):
        model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
        weights.append((model.heads[0].weights[0].numpy().sum(), model.embedding.export_table("item")[1].sum()))
    assert [a == b for a, b in zip(weights[0], weights[1])] == [False, False]
    assert weights[1] == weights[2] and weights[2] != weights[3]
