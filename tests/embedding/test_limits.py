"""Tables of one group keep limits of their own: each behaves as it would in a group of its own, bit for bit."""

import dataclasses

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.hash_table import pack
from tf_fusedrec import tf
from tf_fusedrec.embedding.group import group_tables
from tf_fusedrec.tables import places
from tf_fusedrec.tables.native import NativeTable

TABLES, STEPS, DIM = 26, 48, 3
RULES = {
    "adagrad": (fr.optimizers.Adagrad(0.1), {}),
    # The random bits of the rounding come from the version, so a table that counts another one has other rows.
    "adam_16_bit": (fr.optimizers.Adam(0.1), {"storage": fr.Storage(dtype="bfloat16", stochastic_rounding=True)}),
    "mixed": (fr.optimizers.Adam(0.1), {"storage": fr.Storage(dtype="mixed", hot_after=2, stochastic_rounding=True)}),
}


def limits_of(n):
    """No two tables have equal limits, and all policies meet."""
    limits = {"ttl": (0 if n < 12 else 20 + n, 2 + n // 3, 32 + n)[n % 3], "admission_count": 1 + n % 5 % 3}
    if n % 4 < 3:
        limits.update(max_rows=10 + n // 3, eviction=("lru", "lfu", "lru")[n % 4])
    if n % 8 == 5:
        limits["frequency_decay_steps"] = 2 + n
    if n % 5 == 2:
        limits["max_candidates"] = 3 + n
    return fr.Limits(**limits)


def configs_of(rule, **more):
    optimizer, storage = RULES[rule]
    return [
        fr.TableConfig(f"t{n:02}", DIM, optimizer, record_tombstones=True, **storage, limits=limits_of(n), **more)
        for n in range(TABLES)
    ]


def features_of(configs):
    return [fr.FeatureConfig(config.name, config.name) for config in configs]


def test_26_tables_of_26_limits_are_one_group():
    configs = configs_of("adagrad")
    assert len({config.limits for config in configs}) == TABLES
    (group,) = group_tables(configs, features_of(configs))
    assert group.tables == tuple(configs)
    plain = [fr.TableConfig("plain", DIM, RULES["adagrad"][0], record_tombstones=True)]
    assert group_tables(plain, features_of(plain))[0].name == group.name, "the name of a group is that of its spec"


def train(table, batch, grads):
    """Looks up and updates. Returns the rows of the lookup."""
    message, splits, received = pack(batch)
    found = table.lookup((tf.constant(message), tf.constant(splits)))
    given = tf.constant(np.reshape(grads, [-1, DIM]), tf.float32)
    table.update([(found, given)], 0.5)
    return found.rows.numpy()[: len(received)]


def state_of(table, name):
    """Everything that can be read of a table: arrays by what they are."""
    state = {}
    for section in table.sections_of(name):
        ids, records = table.snapshot(name, section)
        state[f"ids of {section}"], state[section] = ids, records.view(np.uint8)
    state["tombstones"] = table.tombstones(name)
    return state


def assert_same(group, table, name):
    assert group.statistics[name] == table.statistics[name]
    assert group.clock == table.clock and group.size(name) == table.size(name)
    assert group.sections_of(name) == table.sections_of(name)
    wanted = state_of(table, name)
    for what, got in state_of(group, name).items():
        np.testing.assert_array_equal(got, wanted[what], err_msg=f"{what} of {name}")


@pytest.mark.parametrize("rule", RULES)
def test_a_table_in_a_group_is_as_a_table_alone(rule):
    configs, random = configs_of(rule), np.random.default_rng(8)
    group = NativeTable("group", configs, seed=3)
    alone = [NativeTable(config.name, [config], seed=3) for config in configs]
    for step in range(STEPS):
        batch = [[(random.zipf(1.4, random.integers(0, 6)) % 50 - 2).tolist() for _ in configs] for _ in range(2)]
        grads = [[random.standard_normal([len(ids), DIM]) for ids in source] for source in batch]
        rows = train(group, batch, np.concatenate([part for source in grads for part in source]))
        of_received = [s for source in batch for s, ids in enumerate(source) for _ in ids]
        for s, table in enumerate(alone):
            own = train(table, [[source[s]] for source in batch], np.concatenate([source[s] for source in grads]))
            np.testing.assert_array_equal(rows[np.equal(of_received, s)], own, err_msg=configs[s].name)
        if step % 12 == 11:
            for config, table in zip(configs, alone):
                assert_same(group, table, config.name)
    counts = group.statistics
    for config in configs:
        of = counts[config.name]
        assert of["evictions"] > 0 or not 0 < config.limits.ttl < 12, config
        assert (of["refused"] > 0) == (config.limits.admission_count > 1), config
        assert of["keys"] <= (config.limits.max_rows or 50)
    without_ttl = [config for config in configs if not config.limits.ttl and counts[config.name]["evictions"] > 0]
    assert {config.limits.eviction for config in without_ttl} == {"lru", "lfu"}, "the case is too easy"


def test_rows_are_evicted_by_hand_by_the_policy_of_their_table():
    configs = configs_of("adagrad")[:4]  # by LRU, LFU, LRU and without a policy
    table = NativeTable("by hand", configs, seed=3)
    often, late = [5, 6], [7]
    for ids in [often] * 8 + [late] * 6:
        train(table, [[ids] * len(configs)], np.ones([len(ids) * len(configs), DIM]))
    gone = {config.name: table.evict(config.name, 1) for config in configs}
    left = {config.name: sorted(table.snapshot(config.name)[0].tolist()) for config in configs}
    assert gone == {"t00": 1, "t01": 0, "t02": 1, "t03": 0}
    assert left == {"t00": [6, 7], "t01": [7], "t02": [6, 7], "t03": [5, 6, 7]}


def test_a_full_table_is_named():
    optimizer = fr.optimizers.SGD(0.1)
    configs = [
        fr.TableConfig("large", DIM, optimizer, limits=fr.Limits(max_rows=50)),
        fr.TableConfig("small", DIM, optimizer, limits=fr.Limits(max_rows=2)),
    ]
    table = NativeTable("full", configs, seed=0)
    message, splits, _ = pack([[[1, 2, 3], [1, 2, 3]]])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="max_rows of table 'small' is 2, but a batch needs 1"):
        table.lookup((tf.constant(message), tf.constant(splits)))


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_place_lacks_is_refused_whichever_table_has_it(first):
    plain = fr.TableConfig("plain", DIM, fr.optimizers.SGD(0.1))
    counted = fr.TableConfig("counted", DIM, fr.optimizers.SGD(0.1), limits=fr.Limits(admission_count=2))
    tables = [plain, counted][:: 1 - 2 * first]
    host_rows = [dataclasses.replace(table, tier=fr.Tier(host_rows=True)) for table in tables]
    records = lambda of, **group: [table.record(lookups_per_update=1, **group) for table in of]  # noqa: E731
    places.check(places.DEVICE, records(tables), accumulate_steps=1)
    with pytest.raises(ValueError, match="admission_count of table 'counted' is 2, and must be 1 on a GPU"):
        places.check(places.HOST_ROWS, records(host_rows), accumulate_steps=1)
    with pytest.raises(ValueError, match="must be 1 where replicas are averaged"):
        places.check(places.CPU, records(tables, averaged=True), accumulate_steps=1)
    with pytest.raises(ValueError, match="rule 'weight_sync'.*Use Topology.rule='gradient_sync'"):
        places.check(places.HOST_ROWS, records(host_rows[:1], averaged=True), accumulate_steps=1)


@pytest.mark.parametrize("first", [0, 1])
def test_lookups_ahead_know_that_one_table_of_a_group_moves_rows(first):
    optimizer = fr.optimizers.SGD(0.1)
    tables = [
        fr.TableConfig("stays", DIM, optimizer),
        fr.TableConfig("leaves", DIM, optimizer, limits=fr.Limits(ttl=5)),
    ]
    with pytest.raises(ValueError, match="may evict or move rows"):
        NativeTable("moving", tables[:: 1 - 2 * first], seed=0).check_deferrable(2)
    NativeTable("staying", tables[:1], seed=0).check_deferrable(2)


def layer_of(configs):
    return fr.FusedEmbedding(configs, features_of(configs))


def test_a_checkpoint_of_groups_of_their_own_goes_into_one_group(tmp_path):
    """Earlier versions made a group of each limit. Layers make them here: a file knows tables by their names."""
    configs = configs_of("adagrad")[:6]
    layers = [layer_of([config]) for config in configs]
    joined = layer_of(configs)
    random = np.random.default_rng(4)

    def look_up(layer, ids):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(rows**2) for rows in layer(ids).values())
        tape.gradient(loss, layer.trainable_variables)

    for _ in range(8):
        ids = {config.name: tf.constant(random.integers(0, 20, 5)) for config in configs}
        for config, layer in zip(configs, layers):
            look_up(layer, {config.name: ids[config.name]})
    fr.checkpoint.save(tmp_path, layers[0], layers=layers[1:])
    fr.checkpoint.load(tmp_path, joined)
    (group,) = [group.table for group in joined.internals.groups]
    for _ in range(8):
        for config, layer in zip(configs, layers):
            for what, wanted in state_of(layer.internals.groups[0].table, config.name).items():
                if what != "tombstones":  # a load begins them anew
                    np.testing.assert_array_equal(state_of(group, config.name)[what], wanted, err_msg=what)
        ids = {config.name: tf.constant(random.integers(0, 20, 5)) for config in configs}
        look_up(joined, ids)
        for config, layer in zip(configs, layers):
            look_up(layer, {config.name: ids[config.name]})
