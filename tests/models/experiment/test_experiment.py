"""Experiments: refusals and their messages, overrides, and every file of configs/ loads."""

import dataclasses
import pathlib

import numpy as np
import pytest
import yaml

from models import build
from models.experiment import records as experiment
from tests.models import batches
from tf_fusedrec import keras, schedules, tf
from tf_fusedrec.optimizers import rules as optimizers

ROOT = pathlib.Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
HEADER = ("Reproduces:", "Source:", "Date:", "Machine:", "Command:", "Expected:")


def fields(**sections):
    return {
        "name": "x",
        "task": "ranking",
        "data": {"source": "synthetic-ranking"},
        "model": {},
        **sections,
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_tells_its_provenance(path):
    loaded = experiment.load(path)
    assert loaded.name == path.stem
    assert experiment.from_dict(loaded.to_dict()) == loaded
    comment = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    for word in HEADER:
        assert any(word in line for line in comment), f"{path.name} does not say {word}"
    assert f"--config {path.relative_to(ROOT)}" in path.read_text(encoding="utf-8")


def test_overrides_are_yaml(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("name: x\ntask: ranking\ndata: {source: synthetic-ranking}\n", encoding="utf-8")
    loaded = experiment.load(
        path, ["train.epochs=3", "model.contextual=[a, b]", "embedding.learning_rate=1e-3", "seed=5"]
    )
    assert loaded.train.epochs == 3
    assert loaded.model.contextual == ("a", "b")
    assert loaded.embedding.learning_rate == 1e-3
    assert loaded.seed == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.seed = 6


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"train": {"epoch": 1}},
            r"train has an unknown field 'epoch'. Known fields: \['accumulate_steps', 'balance', 'beta_2', 'cluster",
        ),
        ({"trian": {}}, r"the top level has an unknown field 'trian'. Known fields: \['data', 'embedding'"),
        ({"model": {"num_negatives": 5}}, "model has an unknown field 'num_negatives'"),
        ({"train": {"epochs": "two"}}, r"train.epochs must be int, got 'two' \(str\)"),
        ({"train": {"epochs": True}}, "train.epochs must be int, got True"),
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate must be float, got 'fast'"),
        ({"train": [1]}, r"train must hold fields, got \[1\]"),
        ({"model": {"contextual": "user_id"}}, "model.contextual must be a list of str, got 'user_id'"),
        ({"model": {"contextual": ["a", 3]}}, r"model.contextual\[1\] must be str, got 3"),
        ({"model": {"contextual": ["a", "a"]}}, "model.contextual names a column twice"),
        ({"model": {"contextual": ["größe"]}}, "model: the name of a column must .*, got 'größe'"),
        ({"model": {"exposed_dense": ["home-town"]}}, "the name of a column must .*, got 'exposed_home-town'"),
        (
            {"model": {"contextual_lists": ["a"], "contextual": ["a_row_splits"]}},
            "model names two columns 'a_row_splits'",
        ),
        ({"model": {"item_lists": ["a"], "item_features": ["a_count"]}}, "two columns 'history_a_count'"),
        ({"train": {"keep_best": "auc"}}, r"train.keep_best must be one of \['ctr_auc', 'ctr_gauc', .*, got 'auc'"),
        ({"name": "../../x"}, "name must be a non-empty string without '/'.*, got '../../x'"),
        ({"model": {"top_k": 9}}, "model.top_k must be 1 .. num_experts = 4, got 9"),
        ({"model": {"dropout": 1.0}}, "model.dropout must be 0 <= dropout < 1, got 1.0"),
        ({"model": {"dim": 0}}, "model.dim must be >= 1, got 0"),
        ({"task": "clustering"}, r"task must be one of \['ranking', 'retrieval'\], got 'clustering'"),
        ({"data": {}}, "data lacks the field 'source'"),
        ({"data": {"source": "movielens"}}, "data.source 'movielens' is retrieval data, but task is 'ranking'"),
        ({"data": {"source": "kuairand", "users": 5}}, "data.users is a size of a synthetic data set"),
        ({"data": {"source": "synthetic-ranking", "users": -1}}, "data.users must be >= 1, got -1"),
        ({"train": {"epsilon": 0.0}}, "train.epsilon must be > 0, got 0.0"),
        (
            {"embedding": {"optimizer": "adam", "arguments": {"beta_2": 1.0}}},
            "embedding.arguments: Adam.beta_2 must be a finite number .*, got 1.0",
        ),
        (
            {"embedding": {"optimizer": "sgd", "arguments": {"epsilon": 1e-8, "beta": 1}}},
            r"embedding.arguments names \['beta', 'epsilon'\], and 'sgd' takes \['clipnorm', 'momentum', 'nesterov'\]",
        ),
        (
            {"embedding": {"optimizer": "sgd", "arguments": {"nesterov": "yes"}}},
            r"embedding.arguments.nesterov must be bool, got 'yes' \(str\)",
        ),
        (
            {"embedding": {"arguments": ["epsilon"]}},
            r"embedding.arguments must hold names and their values, got \['eps",
        ),
        ({"embedding": {"optimizer": "lion"}}, r"embedding.optimizer must be one of \['adagrad'"),
        ({"embedding": {"stddev": 0.0}}, "embedding.stddev must be > 0, got 0.0"),
        ({"train": {"beta_2": 1.0}}, "train.beta_2 must lie between 0 and 1, got 1.0"),
        (
            {"data": {"source": "synthetic-ranking", "follow": True}, "train": {"epochs": 2}},
            "data.follow trains every partition once, so train.epochs must be 1, got 2",
        ),
        ({"data": {"source": "synthetic-ranking", "poll_seconds": 0}}, "data.poll_seconds must be > 0, got 0"),
        ({"data": {"source": "synthetic-ranking", "timeout_seconds": -1}}, "data.timeout_seconds must be >= 0, got -1"),
        ({"data": {"source": "synthetic-ranking", "max_partitions": -1}}, "data.max_partitions must be >= 0, got -1"),
        (
            {"task": "retrieval", "data": {"source": "movielens"}, "train": {"progressive_steps": 5}},
            "train.progressive_steps is for ranking only, but task is 'retrieval'",
        ),
        ({"train": {"schedule": "nest"}}, "train.schedule: schedule must be .* one of the registered .*, got 'nest'"),
        ({"train": {"schedule": "sync(2)"}}, "train.schedule: schedule 'sync\\(2\\)' does not have the arguments"),
        ({"train": {"schedule": "nested(2, lead)"}}, "train.schedule: schedule must be .* got 'nested\\(2, lead\\)'"),
        ({"train": {"schedule": "dual_buffer(lead=9)"}}, "train.schedule: lead must be an int from 1 to 4, got 9"),
        ({"train": {"schedule": "pipelined(7)"}}, "train.schedule: .*depth"),
        (
            {"train": {"schedule": "dual_buffer", "cluster_samples": True}},
            "train.cluster_samples is True, but train.schedule 'dual_buffer' has no micro-batches .*nested.M. with",
        ),
        ({"train": {"schedule": "nested(1)", "cluster_samples": True}}, r"train.schedule 'nested\(1\)' has no micro-b"),
        (
            {"data": {"source": "synthetic-ranking", "bad_rows": "drop"}},
            r"data.bad_rows must be one of \['error', 'skip",
        ),
        (
            {"data": {"source": "kuairand", "split": "week"}},
            r"data.split must be one of \['time', 'user'\], got 'week'",
        ),
        ({"train": {"accumulate_steps": 0}}, "train.accumulate_steps must be >= 1, got 0"),
        ({"train": {"precision": "float64"}}, r"train.precision must be one of \['float32', 'mixed_b.*, got 'float64'"),
        (
            {"train": {"precision": "mixed_float16", "schedule": "nested(2)"}},
            r"train.precision is 'mixed_float16', but train.schedule 'nested\(2\)' .*Set train.precision to 'mixed_bf",
        ),
        (
            {"train": {"precision": "mixed_float16", "accumulate_steps": 2}},
            "train.precision is 'mixed_float16', but .* train.accumulate_steps 2 lets gradients wait",
        ),
        ({"train": {"balance": "host"}}, r"train.balance must be one of \['rank', 'global'\], got 'host'"),
        ({"train": {"quadratic_cost": -1.0}}, "train.quadratic_cost must be >= 0, got -1.0"),
        ({"train": {"progressive_steps": -1}}, "train.progressive_steps must be >= 0, got -1"),
        ({"train": {"patience": -1}}, "train.patience must be >= 0, got -1"),
        ({"train": {"epochs": 2, "patience": 2}}, "train.patience must be below train.epochs = 2, got 2"),
        ({"model": {"item_dropout": 0.1}}, "model.item_dropout 0.1 trains the row of unknown items, which needs"),
        ({"model": {"attention_dropout": 1.0}}, "model.attention_dropout must be 0 <= attention_dropout < 1, got 1.0"),
        ({"train": {"stochastic_length": 1.0}}, "train.stochastic_length must be > 1 and <= 2, or 0 .*, got 1.0"),
        ({"model": {"history_dropout": 1.0}}, "model.history_dropout must be 0 <= history_dropout < 1, got 1.0"),
        ({"model": {"profiles": -1}}, "model.profiles must be >= 0, got -1"),
        ({"model": {"kind": "dlrm", "top_units": [0]}}, "model.top_units must be >= 1, got 0"),
        ({"model": {"kind": "din", "attention_units": []}}, "model.attention_units must have a layer, got none"),
        ({"model": {"kind": "din", "top_units": [3, 0]}}, "model.top_units must be >= 1, got 0"),
        ({"model": {"kind": "dcn", "cross_layers": 0}}, "model.cross_layers must be >= 1, got 0"),
        ({"model": {"kind": "dcn", "cross_rank": -1}}, "model.cross_rank must be >= 0, got -1"),
        ({"embedding": {"groups": 0}}, "embedding.groups must be >= 1, got 0"),
        ({"embedding": {"rule": "vote"}}, "embedding.rule must be one of .*, got 'vote'"),
        ({"embedding": {"sync_every": 0}}, "embedding.sync_every must be >= 1, got 0"),
        (
            {"embedding": {"sync_every": 3}},
            "embedding: Topology.sync_every and moment_scale need the rule 'weight_sync'",
        ),
        ({"embedding": {"wire_dtype": "int8"}}, "embedding.wire_dtype must be one of .*, got 'int8'"),
        ({"data": {"source": "netflix"}}, r"data.source must be one of .*, got 'netflix'"),
        ({"embedding": {"learning_rate": 0.0}}, "embedding.learning_rate must be > 0, got 0.0"),
        (
            {"embedding": {"optimizer": "rowwise_adagrad", "arguments": {"epsilon": 0.0}}},
            "embedding.arguments: RowWiseAdagrad.epsilon must be a finite number > 0 .*, got 0.0",
        ),
        ({"train": {"epochs": 0}}, "train.epochs must be >= 1, got 0"),
        ({"train": {"target_tokens": 0}}, "train.target_tokens must be >= 1, got 0"),
        ({"train": {"learning_rate": 0.0}}, "train.learning_rate must be > 0, got 0.0"),
        ({"evaluate": {"target_tokens": 0}}, "evaluate.target_tokens must be >= 1, got 0"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"model": {"kind": "gru"}}, r"model.kind must be one of .*, got 'gru'"),
        ({"evaluate": {"cutoffs": []}}, "evaluate.cutoffs must name at least one K"),
        ({"evaluate": {"cutoffs": [0]}}, "evaluate.cutoffs must be >= 1, got 0"),
    ],
)
def test_refusals_name_section_field_and_value(sections, message):
    with pytest.raises(ValueError, match=message):
        experiment.from_dict(fields(**sections))


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("sync", schedules.Sync()),
        ("semi_async", schedules.SemiAsync()),
        ("dual_buffer", schedules.DualBuffer()),
        ("frozen_window(3)", schedules.FrozenWindow(3)),
        ("nested(8)", schedules.Nested(8)),
        ("nested", schedules.Nested(4)),
        ("nested(4, lead=3)", schedules.Nested(4, lead=3)),
        ("dual_buffer(lead=2)", schedules.DualBuffer(2)),
        ("pipelined(6)", schedules.Pipelined(6)),
    ],
)
def test_a_model_gets_the_schedule_that_the_experiment_names(text, schedule):
    loaded = experiment.from_dict(fields(train={"schedule": text}))
    model = build.make_model(loaded, keras.layers.Layer(), np.arange(1), np.ones(1, np.int64))
    assert type(model.schedule) is type(schedule) and model.schedule == schedule


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"encoder": "gru"},
            r"model.encoder must be one of \['hstu', 'fuxi_alpha', 'fuxi_beta', 'sasrec'\], got 'gru'",
        ),
        ({"time_encoding": "sine"}, r"model.time_encoding must be one of \['none', 'buckets'"),
        ({"output_slots": -1}, "model.output_slots must be >= 0, got -1"),
        ({"ffn_multiple": 0}, "model.ffn_multiple must be >= 1, got 0"),
        ({"whole_catalogue": True, "share_negatives": True}, "set model.share_negatives to false"),
        ({"expansion": 2, "share_negatives": True}, "model.expansion 2 is for own negatives"),
        ({"expansion": 0}, "model.expansion must be >= 1, got 0"),
        ({"num_negatives": 0}, "model.num_negatives must be >= 1, got 0"),
        (
            {"sampling": "popular"},
            r"model.sampling must be one of \['uniform', 'frequency', 'in_batch'\], got 'popular'",
        ),
        ({"sharing": "rows"}, r"model.sharing must be one of \['negatives', 'logits'\], got 'rows'"),
        ({"log_q": True}, "model.log_q corrects nothing where model.sampling is 'uniform'"),
        ({"negatives_dtype": "int8"}, r"model.negatives_dtype must be one of .*, got 'int8'"),
        (
            {"negatives_dtype": "float16", "sampling": "in_batch"},
            "model.negatives_dtype 'float16' needs a lookup of negatives",
        ),
        ({"temperature": 0.0}, "model.temperature must be > 0, got 0.0"),
    ],
)
def test_refusals_of_retrieval(model, message):
    sections = fields(task="retrieval", data={"source": "synthetic-retrieval"}, model=model)
    with pytest.raises(ValueError, match=message):
        experiment.from_dict(sections)


# 10^9 values by nine aliases.
BOMB = "[&a0 [x], " + ", ".join(f"&a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(9)) + "]"


@pytest.mark.parametrize(
    ("override", "message"),
    [
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
    ],
)
def test_bad_overrides_are_refused(tmp_path, override, message):
    path = tmp_path / "x.yaml"
    path.write_text("name: x\ntask: ranking\ndata: {source: synthetic-ranking}\ntrain: {epochs: 1}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        experiment.load(path, [override])


def test_a_missing_file_and_no_yaml_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--config must be a YAML file, but there is no file"):
        experiment.load(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(ValueError, match="is not YAML"):
        experiment.load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold sections, got list"):
        experiment.load(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ValueError, match="must hold sections, got an empty file"):
        experiment.load(tmp_path / "empty.yaml")
    (tmp_path / "latin.yaml").write_bytes("name: Zürich".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.yaml is not YAML: 'utf-8' codec"):
        experiment.load(tmp_path / "latin.yaml")


@pytest.mark.parametrize("text", ["train: {epochs: 1}\ntrain: {seed: 2}\n", "train:\n  epochs: 1\n  epochs: 2\n"])
def test_a_key_that_occurs_twice_is_refused(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text("name: x\ntask: ranking\ndata: {source: synthetic-ranking}\n" + text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"'(train|epochs)' occurs twice\n.*x.yaml\", line \d"):
        experiment.load(path)


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
        model.compile(keras.optimizers.legacy.Adam(0.01))
        losses = model.fit(tf.data.Dataset.from_tensors(batch).repeat(10), epochs=5, verbose=0).history["loss"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_accumulated_steps_reach_the_tables_and_the_dense_weights():
    loaded = experiment.from_dict(fields(train={"accumulate_steps": 2}))
    model = build.make_model(loaded, build.make_embedding(loaded), np.arange(1, 60), np.ones(59, np.int64))
    model.compile(keras.optimizers.legacy.Adam(0.01))
    batch = batches.ranking_batch([4, 0, 2], [2, 1, 3])
    model(batch)
    weights = []
    for _ in range(4):
        model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
        weights.append((model.heads[0].weights[0].numpy().sum(), model.embedding.export_table("item")[1].sum()))
    assert [a == b for a, b in zip(weights[0], weights[1])] == [False, False]
    assert weights[1] == weights[2] and weights[2] != weights[3]
