"""TFRA files become native tables and TFRA files again (2 ranks, 3, 2) without loss; damaged files are refused."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.layers import layer_of
from tests.support.ranks import run_ranks
from tests.tfra import models
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.tfra import checkpoints, export_checkpoint, import_checkpoint

LAYERS = ("user", "item")


def tfra_layers():
    layers = [models.layer_of(models.UPSTREAM, name) for name in LAYERS]
    model = models.SumOfRows(layers)
    step = models.training_step(model, keras.optimizers.legacy.Adam(0.05))
    return layers, step


def contents(layers):
    """Returns keys and values of this rank's tables, by name."""
    found = {}
    for layer in layers:
        for variable in (layer.params, *layer.optimizer_vars):
            keys, values = (tensor.numpy() for tensor in variable.export())
            order = np.argsort(keys)
            found[variable.name] = keys[order], values[order]
    return found


def train_and_save(folder):
    """Body on 2 ranks: TFRA trains, and its savers save."""
    layers, step = tfra_layers()
    random = np.random.default_rng(collectives.rank())
    for _ in range(4):
        ids = [tf.constant(random.integers(-(1 << 62), 1 << 62, [50, 2]) // (1 + 10**16 * n)) for n in range(2)]
        step(ids, tf.constant(random.random(50).astype(np.float32)))
    place = {"proc_size": collectives.size(), "proc_rank": collectives.rank()}
    for layer in layers:
        for variable in (layer.params, *layer.optimizer_vars):
            variable.save_to_file_system(folder, **place)
    return contents(layers)


def through_native(folder, out):
    """Body on 3 ranks: imports into native tables, exports again and returns this rank's rows."""
    embedding = native()
    taken = import_checkpoint(folder, embedding, iterations=4)
    tables = {name: embedding.export_table(name) for name in LAYERS}
    assert taken == {name: len(ids) for name, (ids, _) in tables.items()}
    assert {int(o.iterations) for o in embedding.optimizers.values()} == {4}
    export_checkpoint(out, embedding, ranks=2)
    return tables


def native(optimizer=None, **options):
    optimizer = optimizer or optimizers.Adam(0.05)
    return layer_of(*(fr.TableConfig(name, 4, optimizer, **options) for name in LAYERS))


def load_in_tfra(folder):
    """Body on 2 ranks: calls TFRA's own restore function, which its savers and checkpoints call."""
    layers, step = tfra_layers()
    step([tf.zeros([0, 2], tf.int64)] * 2, tf.zeros([0]))  # Creates the slots.
    for layer in layers:
        for variable in (layer.params, *layer.optimizer_vars):
            variable.load_from_file_system_with_restore_function(
                folder, proc_size=collectives.size(), proc_rank=collectives.rank()
            )
    return contents(layers)


def test_round_trip_over_other_numbers_of_ranks(tmp_path):
    before = run_ranks(train_and_save, 2, folder=str(tmp_path / "TFRADynamicEmbedding"))
    middle = run_ranks(through_native, 3, folder=str(tmp_path), out=str(tmp_path / "out"))
    after = run_ranks(load_in_tfra, 2, folder=str(tmp_path / "out"))
    for rank in range(2):
        assert len(before[rank]) == 6 and set(after[rank]) == set(before[rank])  # rows, m, v of two layers
        for name, (keys, values) in before[rank].items():
            assert len(keys) > 50
            np.testing.assert_array_equal(after[rank][name][0], keys)
            np.testing.assert_array_equal(after[rank][name][1], values)
    for layer in LAYERS:
        rows = [before[rank][f"{layer}-parameter"] for rank in range(2)]
        want = dict(zip(np.concatenate([k for k, _ in rows]).tolist(), np.concatenate([v for _, v in rows]).tolist()))
        got = {}
        for tables in middle:
            got.update(zip(tables[layer][0].tolist(), tables[layer][1].tolist()))
        assert got == want and all(len(tables[layer][0]) for tables in middle)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "TFRADynamicEmbedding").iterdir()
    )


def test_slots_of_layers_with_short_file_names(tmp_path):
    embedding = native()
    import_checkpoint(both(tmp_path / "rows", [[2, 3]]), embedding, slots=False)
    export_checkpoint(tmp_path / "out", embedding, short_file_name=True)
    variables = {path.name.split("_mht_")[0] for path in (tmp_path / "out").iterdir()}
    assert variables == {f"{layer}-parameter{slot}" for layer in LAYERS for slot in ("", "_m", "_v")}
    assert import_checkpoint(tmp_path / "out", native()) == {"user": 2, "item": 2}


# Any program may write such files: they are raw arrays.


def write(folder, variable, shards, dtype="<f4", dim=4, keys_dtype="<i8"):
    """Writes the keys of each rank in `shards`, with the row k + column / 10 for key k. Returns the folder."""
    folder.mkdir(exist_ok=True)
    for rank, keys in enumerate(shards):
        keys = np.asarray(keys, np.int64)
        rows = (keys[:, None] + np.arange(dim) / 10).astype(dtype)
        keys.astype(keys_dtype).tofile(folder / checkpoints.file_name(variable, rank, len(shards), "keys"))
        rows.tofile(folder / checkpoints.file_name(variable, rank, len(shards), "values"))
    return folder


def both(folder, shards, **options):
    for name in LAYERS:
        write(folder, f"{name}-parameter", shards, **options)
    return folder


def test_rows_alone_renamed_layers_and_other_dtypes(tmp_path):
    write(tmp_path, "old_user-parameter", [[2, 4], [], [-5]])
    sgd = optimizers.SGD(0.1)
    embedding = native(sgd)
    assert import_checkpoint(tmp_path, embedding, names={"user": "old_user"}) == {"user": 3}
    ids, rows = embedding.export_table("user")
    np.testing.assert_array_equal(ids, [-5, 2, 4])
    np.testing.assert_allclose(rows, ids[:, None] + np.arange(4) / 10, rtol=1e-6)
    assert len(embedding.export_table("item")[0]) == 0
    halves = native(optimizers.Adam(0.1), storage=fr.Storage(dtype="bfloat16"))
    other = both(tmp_path / "i32", [[1], [3]], dtype="<f8", keys_dtype="<i4")
    import_checkpoint(other, halves, value_dtype="float64", key_dtype="int32", slots=False)
    np.testing.assert_allclose(halves.export_table("item")[1], [[1, 1.1, 1.2, 1.3], [3, 3.1, 3.2, 3.3]], rtol=2**-8)


def test_slots_of_new_style_momentum_are_those_of_sgd(tmp_path):
    for name in LAYERS:
        write(tmp_path, f"{name}-parameter", [[1, 2]])
        write(tmp_path, f"{name}-parameter_m", [[2]])  # Key 1 lacks a slot.
    embedding = native(optimizers.SGD(0.1, momentum=0.9))
    import_checkpoint(tmp_path, embedding)
    (table,) = {id(group.table): group.table for group in embedding.internals.groups}.values()
    ids, records = table.snapshot("user")
    np.testing.assert_allclose(records["momentum"][np.argsort(ids)], [[0] * 4, [2, 2.1, 2.2, 2.3]], rtol=1e-6)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    embedding = native(optimizers.SGD(0.1))

    def refused(folder, message, **options):
        with pytest.raises(ValueError, match=message):
            import_checkpoint(folder, embedding, **options)
        assert not any(len(embedding.export_table(name)[0]) for name in LAYERS)

    refused(tmp_path, r"has no TFRA table files .* Save with a FileSystemSaver")
    one = write(tmp_path / "one", "user-parameter", [[1]])
    refused(one, r"has no variable 'item-parameter' for table 'item'. It has \['user-parameter'\]")
    slots = both(tmp_path / "slots", [[1]])
    write(slots, "user-parameter_DynamicEmbedding_user-shadow_vhat", [[1]])
    refused(slots, r"has slots \['vhat'\] for layer 'user', but table 'user' is trained by .*'sgd'.*slots=False")
    stale = both(tmp_path / "stale", [[1], [2]])
    write(stale, "user-parameter", [[1]])
    refused(stale, r"'user-parameter' in .* was saved by different numbers of ranks, \[1, 2\]")
    lost = both(tmp_path / "lost", [[1], [2]])
    (lost / checkpoints.file_name("item-parameter", 1, 2, "values")).unlink()
    refused(lost, "'item-parameter' in .* lacks the values of rank 1 of 2")
    short = both(tmp_path / "short", [[1, 2]])
    (short / checkpoints.file_name("item-parameter", 0, 1, "values")).write_bytes(b"\0" * 20)
    refused(short, "has 20 bytes and .* 16, which are not int64 keys and rows of 4 float32s")
    parted = both(tmp_path / "parted", [[1], [2]])
    write(parted, "user-parameter_momentum", [[1]])
    with pytest.raises(ValueError, match="slots of layer 'user' were saved by another number of ranks than its rows"):
        import_checkpoint(parted, native(optimizers.SGD(0.1, momentum=0.9)), names={"user": "user"})
    several = tmp_path / "several"
    several.mkdir()
    for save in ("TFRADynamicEmbedding-1", "TFRADynamicEmbedding-2"):
        both(several / save, [[1]])
    refused(several, "has TFRA table files of several checkpoints: .*Name one")
    refused(both(tmp_path / "double", [[1, 2]], dtype="<f8"), "another dim, value_dtype or key_dtype")
    refused(both(tmp_path / "again", [[1, 2], [2]]), "Key 2 of table 'item' is in the files of two ranks")
    refused(one, "names must name tables of .*, got \\['nobody'\\]", names={"nobody": "user"})


def test_targets_that_cannot_be_written_are_refused(tmp_path):
    embedding = native(optimizers.RowWiseAdagrad(0.1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(ValueError, match="full holds files, which TFRA would merge; it must be"):
        export_checkpoint(tmp_path / "full", embedding, slots=False)
    with pytest.raises(ValueError, match=r"slots \['accumulator'\] of table 'item' are one number per row"):
        export_checkpoint(tmp_path / "new", embedding)
    with pytest.raises(ValueError, match="ranks must be an int >= 1, got 0"):
        export_checkpoint(tmp_path / "new", embedding, ranks=0)
    assert not (tmp_path / "new").exists() and (tmp_path / "full" / "something").exists()
