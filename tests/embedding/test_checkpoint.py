"""Checkpoints of real layers: 1 to 4 real ranks write, any other number reads, and all ranks refuse or none."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.layers import layer_of, merged, train
from tests.support.ranks import error_of, run_ranks
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint.loading import read_tables
from tf_fusedrec.exchange.collectives import all_reduce_sum
from tf_fusedrec.files import disk
from tf_fusedrec.files.saves import read_manifest

INPUTS = {"a": [1, 2, 5, 9, 1], "b": [2, 2, 7, 11, 40]}


def _model(backend="native", **options):
    dtype = {"dtype": "bfloat16"} if backend == "tfra" else {"storage": fr.Storage(dtype="bfloat16")}
    native = {"record_tombstones": True} if backend == "native" else {}
    emb = fr.FusedEmbedding(
        tables=[
            fr.TableConfig(name="item", dim=4, optimizer=keras.optimizers.Adam(0.1), **native),
            fr.TableConfig(name="tag", dim=4, optimizer=keras.optimizers.Adam(0.1), **dtype, **native),
        ],
        features=[fr.FeatureConfig(name="a", table="item"), fr.FeatureConfig(name="b", table="tag")],
        backend=backend,
        **options,
    )
    a, b = keras.Input([], dtype=tf.int64), keras.Input([], dtype=tf.int64)
    rows = emb({"a": a, "b": b})
    wide = keras.layers.Activation("linear", dtype="float32")
    out = keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Add()([rows["a"], wide(rows["b"])]))
    return keras.Model({"a": a, "b": b}, out), emb, keras.optimizers.Adam(0.1)


def _train(model, optimizer, steps, inputs=None):
    """Trains on this rank's part of INPUTS. Losses are sums over ranks, so any number of ranks makes equal steps."""
    rank, size = fr.rank(), fr.size()
    inputs = {name: tf.constant(ids[rank::size], tf.int64) for name, ids in (inputs or INPUTS).items()}
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs) ** 2) * size
        gradients = tape.gradient(loss, model.trainable_variables)
        if size > 1:
            gradients = [all_reduce_sum(g, name=f"g{i}") / size for i, g in enumerate(gradients)]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def _held(emb):
    """Returns (table, id) -> bytes of the record on this rank."""
    held = {}
    for group in emb.internals.groups:
        for name in group.table.names:
            ids, records = group.table.snapshot(name)
            held.update({(name, i): record.tobytes() for i, record in zip(ids.tolist(), records)})
    return held


def _together(ranks):
    """Returns the rows of all ranks. No row may be on two ranks."""
    merged = {}
    for held in ranks:
        assert not set(merged) & set(held)
        merged.update(held)
    return merged


def save_after_two_steps(folder, backend="native"):
    """Body: makes two steps, then a checkpoint."""
    model, emb, optimizer = _model(backend)
    _train(model, optimizer, 2)
    fr.checkpoint.save(folder, model, optimizer, extra={"epoch": 3})
    return _held(emb)


def load_and_train_two_more(folder, backend="native"):
    """Body: loads and continues. Returns the loaded state and the tables after two more steps."""
    model, emb, optimizer = _model(backend)
    extra = fr.checkpoint.load(folder, model, optimizer)
    found = _held(emb)
    _train(model, optimizer, 2)
    dense = [v.numpy() for v in model.weights]
    return extra, {name: emb.export_table(name) for name in ("item", "tag")}, dense, found


def four_steps(backend="native"):
    """Body: returns the tables of training without a checkpoint."""
    model, emb, optimizer = _model(backend)
    _train(model, optimizer, 4)
    return None, {name: emb.export_table(name) for name in ("item", "tag")}, [v.numpy() for v in model.weights]


@pytest.mark.parametrize(("ranks", "then", "backend"), [(3, 2, "native"), (2, 3, "tfra")])
def test_training_goes_on_as_if_nothing_had_happened(ranks, then, backend, tmp_path):
    """Rows, slots, dense weights and Adam's counted steps must return, or the next two steps differ."""
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(save_after_two_steps, ranks, folder=folder, backend=backend)
    results = run_ranks(load_and_train_two_more, then, folder=folder, backend=backend)
    want = run_ranks(four_steps, 1, backend=backend)
    assert [r[0] for r in results] == [{"epoch": 3}] * then
    assert _together([r[3] for r in results]) == _together(saved)
    for table, tolerance in (("item", 1e-4), ("tag", 2**-7)):  # one float32 sum in another order; one bfloat16 step
        (ids, rows), (want_ids, want_rows) = (merged([r[1][table] for r in of]) for of in (results, want))
        np.testing.assert_array_equal(ids, want_ids)
        rows, want_rows = (part.astype(np.float32) for part in (rows, want_rows))
        np.testing.assert_allclose(rows, want_rows, rtol=tolerance, atol=tolerance / 10)
    for got, dense in zip(results[0][2], want[0][2]):
        np.testing.assert_allclose(got, dense, rtol=1e-3, atol=1e-4)


def save_in_the_background(folder):
    """Body: makes a full save and two deltas during training. The last delta holds the tables at its begin."""
    model, emb, optimizer = _model()
    job = fr.checkpoint.Checkpointer(folder, model, optimizer, full_every=5)
    for ids in ([1, 2, 5, 9, 1], [1, 2, 70, 71, 72], [2, 3, 70, 80, 81]):
        _train(model, optimizer, 2, {"a": ids, "b": ids})
        emb.internals.groups[0].table.remove(emb.internals.groups[0].table.names[0], np.array([9, 72]))
        held = _held(emb)
        job.save(len(held))
    _train(model, optimizer, 3)
    job.wait()
    parts = read_manifest(folder)["tables"]["item"]["parts"]
    return held, [part["ranks"] for part in parts]


def load_what_is_there(folder):
    """Body: loads. Returns this rank's state."""
    model, emb, optimizer = _model()
    fr.checkpoint.load(folder, model, optimizer)
    return _held(emb)


def test_deltas_of_two_ranks_are_read_by_three(tmp_path):
    saved = run_ranks(save_in_the_background, 2, folder=str(tmp_path / "c"))
    assert [parts for _, parts in saved] == [[2, 2]] * 2
    found = run_ranks(load_what_is_there, 3, folder=str(tmp_path / "c"))
    assert _together(found) == _together([held for held, _ in saved])


def refused_on_one_rank(folder):
    """Body: loads a checkpoint that is damaged for the last rank. Returns this rank's error and its state after it."""
    model, emb, optimizer = _model()
    _train(model, optimizer, 1)
    before = _held(emb)
    return error_of(fr.checkpoint.load, folder, model, optimizer), before, _held(emb)


def test_damage_that_one_rank_meets_is_refused_by_all(tmp_path):
    model, emb, optimizer = _model()
    many = list(range(8000))
    _train(model, optimizer, 1, {"a": many, "b": many})
    fr.checkpoint.save(tmp_path / "c", model, optimizer)
    (path,) = (tmp_path / "c").glob("save-*/item.rows-0.shard")
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1  # of the last rows in hash order
    path.write_bytes(data)
    results = run_ranks(refused_on_one_rank, 2, folder=str(tmp_path / "c"))
    words = "item.rows-0.shard is damaged"
    assert (
        words in results[1][0]
        and results[0][0].startswith("RuntimeError: It failed on rank 1")
        and words in results[0][0]
    )
    for _, before, after in results:
        assert after == before != {}


def full_disk_on_rank_1(folder):
    """Body: saves on a full disk of rank 1, and again with room. Returns the error and `extra` after either save."""
    model, emb, optimizer = _model()
    _train(model, optimizer, 1)
    job = fr.checkpoint.Checkpointer(folder, model, optimizer, timeout_s=30)
    job.save("old")
    job.wait()
    _train(model, optimizer, 1)
    write = disk.write
    if fr.rank() == 1:

        def full(file, data):
            raise OSError(28, "No space left on device")

        disk.write = full
    failure = error_of(lambda: (job.save("new"), job.wait()))
    disk.write = write
    fr.collectives.barrier()
    between = read_manifest(folder)["extra"]
    fr.collectives.barrier()
    job.save("new")
    job.wait()
    return failure, between, read_manifest(folder)["extra"]


def test_a_full_disk_on_one_rank_fails_on_all_and_the_last_checkpoint_stands(tmp_path):
    results = run_ranks(full_disk_on_rank_1, 2, folder=str(tmp_path / "c"))
    assert results[0][0].startswith("RuntimeError: Rank 1 could not write its part of save-2-")
    assert "OSError: [Errno 28] No space left on device" in results[1][0]
    assert [r[1:] for r in results] == [("old", "new")] * 2
    assert read_manifest(tmp_path / "c")["extra"] == "new"
    assert not list((tmp_path / "c").glob("*.partial")) and len(fr.checkpoint.saves(tmp_path / "c")) == 2


@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_a_checkpoint_has_all_rows_and_replaces_earlier_ones_of_the_same_spec(backend, tmp_path):
    model, emb, optimizer = _model(backend)
    _train(model, optimizer, 1)
    fr.checkpoint.save(tmp_path, model, optimizer)
    tables = read_tables(tmp_path)
    assert sorted(tables) == ["item", "tag"]
    for name, (ids, rows, lookups, *_) in tables.items():
        assert (lookups is None) == (backend == "tfra")
        np.testing.assert_array_equal(ids, emb.export_table(name)[0])
        np.testing.assert_array_equal(rows.astype(np.float32), emb.export_table(name)[1].astype(np.float32))
        assert rows.dtype.name == ("float32" if name == "item" else "bfloat16")
    saved = _held(emb)
    _train(model, optimizer, 2, {"a": [1, 100], "b": [2, 100]})
    assert _held(emb) != saved
    fr.checkpoint.load(tmp_path, model, optimizer)
    assert _held(emb) == saved
    other = layer_of(fr.TableConfig("item", 4, keras.optimizers.Adagrad(0.1)), backend=backend)
    words = r"Table 'item' of checkpoint .* has another spec. Saved: .*'slots': \['m', 'v'\].*Now: .*'accumulator'"
    with pytest.raises(ValueError, match=words):
        fr.checkpoint.load(tmp_path, other)


def test_hashed_keys_come_back(tmp_path):
    model, emb, optimizer = _model("tfra", key_encoding="hash")
    _train(model, optimizer, 2)
    fr.checkpoint.save(tmp_path / "c", model)
    other, loaded, _ = _model("tfra")
    fr.checkpoint.load(tmp_path / "c", other)
    assert _held(loaded) == _held(emb)


def test_ids_that_merged_bits_have_no_room_for_are_refused(tmp_path):
    """In two tables of one group, an id of more than 61 bits would become a row of the other table."""

    def layer(encoding):
        tables = [fr.TableConfig(name, 4, keras.optimizers.SGD(0.1)) for name in ("one", "two")]
        return layer_of(*tables, backend="tfra", key_encoding=encoding)

    hashed = layer("hash")
    fr.checkpoint.warm_start(hashed, "one", np.array([-1, 2**62]), np.ones([2, 4]))
    fr.checkpoint.save(tmp_path / "c", hashed)
    merged = layer("bits")
    with pytest.raises(ValueError, match=r"ids of table 'one' must lie in \[0, 2\^61\) with key_encoding='bits', got"):
        fr.checkpoint.load(tmp_path / "c", merged)
    assert len(merged.export_table("one")[0]) == len(merged.export_table("two")[0]) == 0
    fr.checkpoint.warm_start(merged, "two", np.array([3]), np.ones([1, 4]))
    with pytest.raises(ValueError, match=r"ids of table 'one' must lie in \[0, 2\^61\)"):
        fr.checkpoint.load(tmp_path / "c", merged)
    assert merged.export_table("two")[0].tolist() == [3], "a refused load leaves what a table held"


@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_steps_belong_to_tables_not_to_the_group_they_were_in(backend, tmp_path):
    """A model that drops the first table of a group continues the other table's Adam."""

    def layer(*names):
        return layer_of(*(fr.TableConfig(name, 4, keras.optimizers.Adam(0.1)) for name in names), backend=backend)

    both, second = layer("first", "second"), layer("second")
    for _ in range(3):
        train(both, {name: tf.constant([1]) for name in ("first", "second")})
    fr.checkpoint.save(tmp_path / "c", both)
    fr.checkpoint.load(tmp_path / "c", second)
    assert int(second.optimizers["second"].iterations) == 3
    np.testing.assert_array_equal(second.export_table("second")[1], both.export_table("second")[1])


def test_rows_that_a_clear_or_a_load_removed_do_not_come_back_with_a_delta(tmp_path):
    model, emb, optimizer = _model()
    job = fr.checkpoint.Checkpointer(tmp_path / "c", model, optimizer, full_every=9)

    def saved_and_loaded(extra):
        job.save(extra)
        job.wait()
        other, its_tables, its_optimizer = _model()
        assert fr.checkpoint.load(tmp_path / "c", other, its_optimizer) == extra
        assert _held(its_tables) == _held(emb)

    _train(model, optimizer, 1)
    fr.checkpoint.save(tmp_path / "other", model, optimizer)
    _train(model, optimizer, 1, {"a": [77], "b": [88]})
    saved_and_loaded("full")
    for group in emb.internals.groups:
        group.table.clear()
    _train(model, optimizer, 1, {"a": [99], "b": [99]})
    saved_and_loaded("cleared")
    fr.checkpoint.load(tmp_path / "other", model, optimizer)
    saved_and_loaded("loaded")


def test_a_delta_holds_the_rows_that_were_demoted(tmp_path):
    """Rows of a mixed table that cool change without a lookup."""

    def layer():
        config = fr.TableConfig(
            "t", 3, fr.optimizers.Adagrad(0.1), storage=fr.Storage("mixed", True, hot_after=3),
            limits=fr.Limits(frequency_decay_steps=8), record_tombstones=True,
        )  # fmt: skip
        return layer_of(config)

    def look_up_and_train(ids):
        train(emb, {"t": tf.constant(ids, tf.int64)}, lambda rows: tf.reduce_sum((rows - 1 / 3) ** 2))

    emb, loaded = layer(), layer()
    table, other = (one.internals.groups[0].table for one in (emb, loaded))
    for _ in range(4):
        look_up_and_train(range(20))
    checkpointer = fr.checkpoint.Checkpointer(tmp_path, emb, full_every=8)
    checkpointer.save()
    for _ in range(16):
        look_up_and_train([99])
    assert table.memory["rows"] == 1, "no row but 99 was looked up since the full save"
    checkpointer.save()
    checkpointer.wait()
    fr.checkpoint.load(tmp_path, loaded)
    assert _held(loaded) == _held(emb) and other.clock == table.clock and other.memory["rows"] == 1
    ids, rows = loaded.export_table("t")
    np.testing.assert_array_equal(rows, loaded({"t": tf.constant(ids)}, training=False)["t"])
