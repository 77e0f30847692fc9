"""With memory_budget, a table four times as large as its memory trains as one in memory, bit for bit."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import optimizers, tf
from tf_fusedrec.data import lookahead

DIM = 8
ROW_BYTES = {"rowwise": 56, "adam": 112}  # header 16, numbers 4 each, rounded up to 8
RULES = {"rowwise": optimizers.RowWiseAdagrad(0.1), "adam": optimizers.Adam(0.01)}
ROWS = 512  # of each of two tables


def layer(rule, folder=None, *, budget_rows=0, accumulate_steps=1, name="emb", **table):
    """Returns tables "a" and "b" of one group. Together, budget_rows of their rows stay in memory."""
    if budget_rows:
        table = {"tier": fr.Tier(memory_budget=budget_rows * ROW_BYTES[rule] // 2, folder=str(folder)), **table}
    tables = [fr.TableConfig(name=t, dim=DIM, optimizer=RULES[rule], **table) for t in "ab"]
    features = [fr.FeatureConfig(name=t, table=t) for t in "ab"]
    return fr.FusedEmbedding(tables, features, accumulate_steps=accumulate_steps, name=name)


def batches(seed, count, ids=20):
    """Yields skewed ids of a shifting window, so rows go to the file and return. Every row is read at times."""
    random = np.random.default_rng(seed)
    for n in range(count):
        hot = (random.zipf(1.2, ids) + 37 * n) % ROWS
        cold = random.integers(0, ROWS, ids)
        yield {"a": tf.constant(np.concatenate([hot, cold])), "b": tf.constant(np.concatenate([cold, -hot]))}


def train(emb, inputs):
    with tf.GradientTape() as tape:
        out = emb(inputs)
        loss = sum(tf.reduce_sum(tf.sin(10 * rows)) for rows in out.values())
    tape.gradient(loss, emb.trainable_variables)
    return out


def table_of(emb):
    return emb.internals.groups[0].table


def assert_same_tables(tiered, plain):
    for name in "ab":
        (ids, records), (want_ids, want) = (table_of(emb).snapshot(name) for emb in (tiered, plain))
        np.testing.assert_array_equal(ids, want_ids)
        for field in set(records.dtype.names) - {"pool"}:  # whole records: row, slots, ages, counts, versions
            np.testing.assert_array_equal(records[field], want[field], err_msg=f"{name} {field}")
    assert table_of(tiered).statistics == table_of(plain).statistics


@pytest.mark.slow
@pytest.mark.parametrize("accumulate_steps", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_a_table_four_times_its_memory_trains_bit_equal_to_one_in_memory(rule, accumulate_steps, tmp_path):
    """Compares every lookup of 60 steps and every bit of every row, with prefetches and evaluations between."""
    budget = 2 * ROWS // 4
    tiered = layer(rule, tmp_path, budget_rows=budget, accumulate_steps=accumulate_steps)
    plain = layer(rule, accumulate_steps=accumulate_steps)
    everything = {name: tf.range(ROWS, dtype=tf.int64) for name in "ab"}
    for begin in range(0, ROWS, 32):  # three steps can bring no more than the budget
        part = {name: ids[begin : begin + 32] for name, ids in everything.items()}
        for emb in (tiered, plain):
            train(emb, part)
    assert table_of(tiered).memory["second_rows"] >= 3 * budget
    for n, (inputs, coming) in enumerate(zip(batches(1, 60), batches(2, 60))):
        tiered.prefetch(coming)
        got, want = train(tiered, inputs), train(plain, inputs)
        for name in "ab":
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"step {n}")
        memory = table_of(tiered).memory
        assert memory["rows"] <= budget and memory["second_rows"] > 0
        if n % 10 == 0:  # reads rows where they are
            for name in "ab":
                evaluated = [emb(everything, training=False)[name] for emb in (tiered, plain)]
                np.testing.assert_array_equal(*evaluated)
            assert table_of(tiered).memory == memory
    assert_same_tables(tiered, plain)


def test_with_eviction_the_same_rows_leave(tmp_path):
    tiered = layer(
        "adam", tmp_path, budget_rows=300, limits=fr.Limits(max_rows=400, eviction="lru"), record_tombstones=True
    )
    plain = layer("adam", limits=fr.Limits(max_rows=400, eviction="lru"), record_tombstones=True)
    for inputs in batches(3, 60):
        for emb in (tiered, plain):
            train(emb, inputs)
    assert table_of(tiered).statistics["a"]["evictions"] > 0 and table_of(tiered).memory["second_rows"] > 0
    assert_same_tables(tiered, plain)
    for name in "ab":
        np.testing.assert_array_equal(table_of(tiered).tombstones(name), table_of(plain).tombstones(name))


def test_rows_come_back_from_a_snapshot_into_both_places(tmp_path):
    plain, tiered = layer("adam"), layer("adam", tmp_path, budget_rows=200)
    for inputs in batches(4, 40):
        train(plain, inputs)
    for name in "ab":
        table_of(tiered).restore(name, "rows", *table_of(plain).snapshot(name))
    table_of(tiered).clock = table_of(plain).clock
    table_of(tiered).optimizer.iterations.assign(table_of(plain).optimizer.iterations)
    assert table_of(tiered).memory["rows"] <= 200 < table_of(tiered).memory["second_rows"]
    for inputs in batches(5, 10):
        np.testing.assert_array_equal(train(tiered, inputs)["a"], train(plain, inputs)["a"])
    for name in "ab":
        np.testing.assert_array_equal(table_of(tiered).snapshot(name)[1]["m"], table_of(plain).snapshot(name)[1]["m"])


def test_look_ahead_in_a_graph_changes_nothing(tmp_path):
    """Runs the loop of the documentation, with two batches ahead and no prefetch at the end."""
    embs = {name: layer("rowwise", tmp_path, budget_rows=160, name=name) for name in ("plain", "ahead")}
    source = tf.data.Dataset.from_generator(
        lambda: batches(6, 30), output_signature={name: tf.TensorSpec([None], tf.int64) for name in "ab"}
    )

    @tf.function(reduce_retracing=True)
    def step(batch, coming):
        embs["ahead"].prefetch(coming)
        train(embs["ahead"], batch)

    steps = 0
    for batch, coming in lookahead(source, steps=2):
        step(batch, coming)
        train(embs["plain"], batch)
        steps += 1
    assert steps == 30
    assert_same_tables(embs["ahead"], embs["plain"])


def test_prefetch_inserts_and_touches_nothing(tmp_path):
    emb = layer("adam", tmp_path, budget_rows=100)
    for inputs in batches(7, 10):
        train(emb, inputs)
    before = table_of(emb).statistics, table_of(emb).memory, table_of(emb).clock, table_of(emb).snapshot("a")
    emb.prefetch({"a": tf.constant([1, 2, 10**9]), "b": tf.zeros([0], tf.int64)})
    after = table_of(emb).statistics, table_of(emb).memory, table_of(emb).clock, table_of(emb).snapshot("a")
    assert before[:3] == after[:3]
    np.testing.assert_array_equal(before[3][1], after[3][1])
    with pytest.raises(ValueError, match=r"hold unknown features \['c'\]"):
        emb.prefetch({"c": tf.constant([1])})
    layer("adam").prefetch({"a": tf.constant([1])})  # all in memory: nothing to do


def test_a_batch_beyond_memory_is_refused_and_the_table_stays_readable(tmp_path):
    emb, plain = layer("adam", tmp_path, budget_rows=100), layer("adam")
    some = {"a": tf.range(60, dtype=tf.int64)}
    for layer_ in (emb, plain):
        train(layer_, some)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="memory_budget holds 100 rows, .* smaller batches"):
        train(emb, {"a": tf.range(1000, 1101, dtype=tf.int64)})
    np.testing.assert_array_equal(emb(some, training=False)["a"], plain(some, training=False)["a"])
    train(emb, {"a": tf.range(1000, 1090, dtype=tf.int64)})


def test_a_batch_that_just_fits_is_not_refused_for_ids_that_two_ranks_asked_for(tmp_path):
    """The table makes room for distinct rows: 60 of 100 return from the file, each requested twice."""
    emb = layer("adam", tmp_path, budget_rows=100)
    for begin in (0, 60, 120):
        train(emb, {"a": tf.range(begin, begin + 60, dtype=tf.int64)})
    table, segments = table_of(emb), 2
    ids = list(range(60))
    message = tf.constant([*([60, 0] + ids), *([60, 0] + ids)], tf.int64)
    rows = table.lookup((message, tf.constant([60 + segments] * 2))).rows
    np.testing.assert_array_equal(rows[:60], rows[60:120])
    assert table.memory["rows"] <= 100


def test_the_file_is_gone_when_the_process_is(tmp_path):
    """The file never has a name, so a killed job leaves none behind."""
    emb = layer("adam", tmp_path, budget_rows=100)
    for inputs in batches(8, 5):
        train(emb, inputs)
    assert table_of(emb).memory["second_rows"] > 0 and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(tf.errors.InvalidArgumentError, match="tier_folder '.*nowhere' must be a folder that can be"):
        layer("adam", tmp_path / "nowhere", budget_rows=10)
