import re

import pytest

import tf_fusedrec as fr
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding.group import group_tables

Adagrad = keras.optimizers.Adagrad


def table(name, dim=4, optimizer=None, **kwargs):
    return fr.TableConfig(name=name, dim=dim, optimizer=optimizer or Adagrad(0.1), **kwargs)


def features_of(tables):
    return [fr.FeatureConfig(name=f"f_{t.name}", table=t.name) for t in tables]


def names(groups):
    return sorted(tuple(t.name for t in group.tables) for group in groups)


def test_tables_of_equal_spec_are_fused():
    """By FusedRec eq. 1, another dim, dtype, optimizer, hyperparameter or initializer makes another group.

    Limits and budgets of memory may differ in a group. Other options of storage may not.
    """
    limits = {
        "ttl": fr.Limits(ttl=3), "rows": fr.Limits(max_rows_per_rank=3, eviction="lru"),
        "admission": fr.Limits(admission_count=2), "lfu": fr.Limits(max_rows_per_rank=3, eviction="lfu"),
    }  # fmt: skip
    tiers = {
        "tier1": fr.Tier(4096, "folder"), "tier2": fr.Tier(8192, "folder"), "host": fr.Tier(host_rows=True),
        "hot1": fr.Tier(host_rows=True, hot_rows_per_rank=30), "hot2": fr.Tier(host_rows=True, hot_rows_per_rank=9),
    }  # fmt: skip
    tables = [
        table("b"), table("a"), table("dim", dim=8), table("dtype", dtype="float16"),
        table("lr", optimizer=Adagrad(0.2)), table("rule", optimizer=keras.optimizers.SGD(0.1)),
        table("init", initializer=fr.Zeros()), table("half", storage=fr.Storage("float16")),
        table("tombstones", record_tombstones=True), *(table(name, limits=of) for name, of in limits.items()),
        *(table(name, tier=tier) for name, tier in tiers.items()),
    ]  # fmt: skip
    assert names(group_tables(tables, features_of(tables))) == [
        ("a", "admission", "b", "lfu", "rows", "ttl"), ("dim",), ("dtype",), ("half",), ("host",), ("hot1", "hot2"),
        ("init",), ("lr",), ("rule",), ("tier1", "tier2"), ("tombstones",),
    ]  # fmt: skip


def test_groups_do_not_depend_on_the_order_written():
    tables = [table("b"), table("a"), table("w", dim=8)]
    one, other = (group_tables(t, features_of(t)) for t in (tables, tables[::-1]))
    assert [g.name for g in one] == [g.name for g in other]
    assert [g.tables[0].name for g in one] == [g.tables[0].name for g in other]


def test_names_of_groups_are_those_of_the_other_ranks():
    """Names leave out folders and TF1 optimizers, which differ by process. Otherwise no all-to-all would find its
    peers.
    """

    def group_names(folders):
        tiers = [
            table(f, optimizer=fr.optimizers.SGD(0.1), tier=fr.Tier(memory_budget_per_rank=4096, folder=f))
            for f in folders
        ]
        tf1 = [table(n, optimizer=tf.compat.v1.train.GradientDescentOptimizer(0.1)) for n in ("y", "z")]
        return [group.name for group in group_tables([*tiers, *tf1], features_of([*tiers, *tf1]))]

    here, there = group_names(["a", "b"]), group_names(["c", "d"])
    assert here == there and len(set(here)) == 4


def test_features_follow_their_segments():
    tables = [table("b"), table("a")]
    features = [fr.FeatureConfig(f"f{n}", t) for n, t in zip("1234", "baba")]
    (group,) = group_tables(tables, features)
    assert [f.name for f in group.features] == ["f2", "f4", "f1", "f3"]
    assert group.segments == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("tables", "features", "words"),
    [
        (["a", "a"], ["a"], r"Names of tables must be unique, got \['a'\]"),
        (["a"], ["a", "a"], r"Names of features must be unique, got \['f_a'\]"),
        (["a"], ["a", "b"], r"must name one of the tables \['a'\], got 'b' for feature 'f_b'"),
        (["a", "b"], ["a"], r"got no feature for \['b'\]"),
        ([], [], "tables must hold at least one config"),
        ([], ["zz"], r"must name one of the tables \[\], got 'zz'"),
    ],
)
def test_wrong_names_are_refused(tables, features, words):
    with pytest.raises(ValueError, match=words):
        group_tables([table(t) for t in tables], [fr.FeatureConfig(name=f"f_{f}", table=f) for f in features])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 0}, "TableConfig.dim of table 't' must be an int in .1, 1048576., got 0"),
        ({"dim": 4.0}, "TableConfig.dim must be int, got 4.0"),
        ({"dtype": "float64"}, "TableConfig.dtype must be one of .* got 'float64'"),
        ({"dtype": tf.float32}, "TableConfig.dtype must be one of .* got tf.float32"),
        ({"initializer": "glorot_uniform"}, "initializer must be a record"),
        ({"initializer": keras.initializers.Orthogonal()}, "initializer must be a record"),
        ({"initializer": "no such"}, "initializer must be a record .*got 'no such'"),
        ({"optimizer": "no such"}, "optimizer must be a record, a Keras optimizer or its name, got 'no such'"),
        ({"optimizer": keras.optimizers.Adam}, "TableConfig.optimizer must be an optimizer, got <class"),
        ({"optimizer": None}, "TableConfig.optimizer must be an optimizer, got None"),
        *[
            ({"name": name}, "TableConfig.name must be a non-empty string without '/'.* of at most 200 bytes")
            for name in ("", ".", "..", "a/b", "a\\b", "a\0b", "a\nb", "\ud800", "x" * 201, "ö" * 101, 7)
        ],
        ({"name": "a/b"}, "TableConfig.name must be .* without '/'.* got 'a/b'"),
        ({"storage": fr.Storage("int8")}, "storage.dtype must be one of .*'mixed'.*got 'int8' for table 't'"),
        ({"limits": fr.Limits(eviction="fifo")}, "eviction must be one of .*got 'fifo'"),
        ({"limits": fr.Limits(eviction="lru")}, "eviction of table 't' is 'lru' with .*max_rows_per_rank 0: a policy"),
        (
            {"limits": fr.Limits(9, "lru", frequency_decay_steps=9)},
            "decay_steps of table 't' is 9 with limits.eviction",
        ),
        ({"tier": fr.Tier(hot_rows_per_rank=-1, host_rows=True)}, r"hot_rows_per_rank of table 't' .* \[0, .* got -1"),
        ({"tier": fr.Tier(hot_rows_per_rank=5)}, "hot_rows_per_rank of table 't' is 5 with .*False: .* Use host_rows"),
        (
            {"storage": fr.Storage("mixed")},
            "storage.hot_after of table 't' is 0 with storage.dtype 'mixed': a number > 0",
        ),
        ({"storage": fr.Storage(hot_after=3)}, "storage.hot_after of table 't' is 3 with storage.dtype 'float32'"),
        ({"tier": fr.Tier(10)}, "memory_budget_per_rank of table 't' is 10 with tier.folder '': a budget needs"),
        (
            {"tier": fr.Tier(folder="x")},
            "memory_budget_per_rank of table 't' is 0 with tier.folder 'x': a folder needs",
        ),
        ({"tier": fr.Tier(9, "x"), "storage": fr.Storage("mixed", hot_after=2)}, "a budget does not work with 'mixed'"),
        ({"storage": fr.Storage(stochastic_rounding=True)}, "stochastic_rounding of table 't' is True with .*16-bit"),
        ({"limits": fr.Limits(ttl=1.5)}, "limits.ttl must be int, got 1.5 for table 't'"),
        ({"limits": fr.Limits(ttl=True)}, "limits.ttl must be int, got True for table 't'"),
        ({"limits": fr.Limits(admission_count=0)}, r"admission_count of table 't' must be an int in \[1, .* got 0"),
        ({"external": fr.External("folder")}, r"'t' is external, .* its config sets \['optimizer'\]"),
        (
            {"external": fr.External("folder"), "initializer": fr.Zeros(), "limits": fr.Limits(4, "lru")},
            r"\['optimizer', 'initializer', 'limits.max_rows_per_rank', 'limits.eviction'\]",
        ),
        ({"external": fr.External(""), "optimizer": None}, "external.folder must be .* got '' for table 't'"),
    ],
)
def test_wrong_table_configs_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        fr.TableConfig(**{"name": "t", "dim": 4, "optimizer": Adagrad(0.1), **change})


def test_wrong_features_and_initializers_are_refused():
    with pytest.raises(ValueError, match="combiner must be one of .* got 'max' for feature 'f'"):
        fr.FeatureConfig(name="f", table="t", combiner="max")
    for name in ("größe", "home-town", "a b", "a:b", "a[0]", "_a", "self", "class", "a.b", "a/b", "1a"):
        with pytest.raises(ValueError, match=f"FeatureConfig.name must .* got {re.escape(repr(name))}. Rename it"):
            fr.FeatureConfig(name, "t")
    with pytest.raises(ValueError, match="FeatureConfig.table must be a TableConfig or the name of one, got 3"):
        fr.FeatureConfig("f", 3)
    with pytest.raises(ValueError, match=r"features must hold FeatureConfig records, .*Use FusedEmbedding\("):
        fr.FusedEmbedding([table("t")], [fr.FeatureConfig("f", "t")])
    feature = fr.FeatureConfig("f", "t")
    for features, tables in ((feature, [table("t")]), ([feature], table("t")), ({"f": feature}, [table("t")])):
        with pytest.raises(ValueError, match="features and tables must be lists"):
            fr.FusedEmbedding(features, tables)
    with pytest.raises(ValueError, match="FeatureConfig.name must be a non-empty string"):
        fr.FeatureConfig(name="", table="t")
    with pytest.raises(ValueError, match="Uniform.minval must be below maxval"):
        fr.Uniform(minval=1.0, maxval=1.0)
    with pytest.raises(ValueError, match="TruncatedNormal.stddev must be >= 0"):
        fr.TruncatedNormal(stddev=-1.0)
    with pytest.raises(ValueError, match="Zeros.value must be 0"):
        fr.Zeros(value=1.0)


@pytest.mark.parametrize(
    ("keras_one", "record"),
    [
        ("zeros", fr.Zeros()),
        ("constant", fr.Constant()),
        (keras.initializers.Zeros, fr.Zeros()),
        ({"class_name": "Ones", "config": {}}, fr.Constant(1.0)),
        (keras.initializers.RandomUniform(0.0, 0.0), fr.Constant(0.0)),
        ("ones", fr.Constant(1.0)),
        (keras.initializers.Constant(0.5), fr.Constant(0.5)),
        ("uniform", fr.Uniform()),
        (keras.initializers.RandomUniform(-1.0, 2.0, seed=3), fr.Uniform(-1.0, 2.0)),
        ("normal", fr.Normal()),
        (keras.initializers.TruncatedNormal(1.0, 0.5), fr.TruncatedNormal(1.0, 0.5)),
    ],
)
def test_initializers_of_keras_become_records(keras_one, record):
    config = fr.TableConfig("t", 4, "adagrad", keras_one)
    assert config.initializer == record and type(config.initializer) is type(record)
    assert isinstance(config.optimizer, keras.optimizers.Adagrad)


def test_features_that_hold_their_tables_need_no_list():
    """Equal to the form with names: tables in the order of the features, a shared one once, after the given ones."""
    a, b, c = (table(name, optimizer=fr.optimizers.Adagrad(0.1)) for name in "abc")
    features = [
        fr.FeatureConfig("x", c),
        fr.FeatureConfig("y", "a", "mean"),
        fr.FeatureConfig("z", b),
        fr.FeatureConfig("w", c),
    ]
    layer = fr.FusedEmbedding(features, [a])
    assert layer.tables == [a, c, b]
    config = layer.get_config()
    assert [(f["name"], f["table"]) for f in config["features"]] == [("x", "c"), ("y", "a"), ("z", "b"), ("w", "c")]
    assert fr.FusedEmbedding.from_config(config).get_config() == config
    with pytest.raises(ValueError, match=r"Names of tables must be unique, got \['a'\]"):
        fr.FusedEmbedding([fr.FeatureConfig("x", table("a", dim=3))], [a])
