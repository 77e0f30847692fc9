"""A save that fails validation is refused by name, and earlier checkpoints stay."""

import logging

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.checkpoint import simulated
from tests.checkpoint.job import Job, save
from tests.checkpoint.tables import DictTable
from tf_fusedrec import checkpoint, keras, tf
from tf_fusedrec._tf_compat import keras_api
from tf_fusedrec.checkpoint import dense, saving
from tf_fusedrec.checkpoint.saving import NotFinite
from tf_fusedrec.exchange import model_state
from tf_fusedrec.files.manifest import exists
from tf_fusedrec.files.saves import read_manifest


def spoil_weight(job, value):
    kernel, bias = job.model.get_weights()
    job.model.set_weights([np.where(np.arange(kernel.size).reshape(kernel.shape) == 3, value, kernel), bias])


def spoil(field, at=0):
    def spoiled(job, value):
        (wanted,) = [i for i, n in zip(sorted(job.table.rows["rows"]["item"]), range(40)) if n == 7]
        record = job.table.rows["rows"]["item"][wanted]
        numbers = np.atleast_1d(record[field])
        numbers[at] = value
        record[field] = numbers if record[field].shape else numbers[0]
        record["updated"] = 100  # a delta has it
        return f"{field!r} of id {wanted} of table 'item'"

    return spoiled


KINDS = {
    "weight": (spoil_weight, "dense weight '.*dense.*/kernel:0'"),
    "row": (spoil("row", 3), None),
    "slot": (spoil("accumulator"), None),
    "scalar": (spoil("scale"), None),
}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_number_that_is_not_finite_refuses_the_save_by_name(kind, value, tmp_path):
    spoiled, words = KINDS[kind]
    job = Job(tmp_path / "c", keep=1)
    save(job, "good")
    good = job.state()
    words = spoiled(job, value) or words
    job.checkpointer.save("bad")  # written and validated in the background
    with pytest.raises(NotFinite, match=rf"{words} \(rank 0\) is not finite.*earlier checkpoints stay"):
        job.checkpointer.wait()
    assert job.loaded() == ("good", good)
    assert len(list(job.directory.iterdir())) == 2  # the refused save leaves no file
    job.table.rows["rows"]["item"].clear()
    job.model.set_weights([np.zeros_like(w) for w in job.model.get_weights()])
    save(job, "later")
    assert job.loaded()[0] == "later"


def test_training_goes_on_when_asked_and_the_refusal_is_logged(tmp_path, caplog):
    job = Job(tmp_path / "c", not_finite="skip", full_every=4)
    save(job, "good")
    good = job.state()
    words = KINDS["row"][0](job, np.nan)
    with caplog.at_level(logging.ERROR):
        save(job, "bad")
    assert words in caplog.text and "is not finite" in caplog.text
    assert job.loaded() == ("good", good) and len(list(job.directory.iterdir())) == 2
    job.table.rows["rows"]["item"].clear()
    save(job, "later")
    parts = read_manifest(job.directory)["tables"]["item"]["parts"]
    assert len(parts) == 1 and job.loaded() == ("later", job.state()), "the next save is full"


def test_it_is_written_when_asked(tmp_path):
    job = Job(tmp_path / "c", not_finite="save")
    words = KINDS["slot"][0](job, np.inf)
    save(job, words)
    assert job.loaded() == (words, job.state())


def test_a_slot_of_the_dense_optimizer_is_looked_at(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,), name="top")])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.train_on_batch(np.ones([1, 2]), np.ones([1]))
    slot = keras_api.tf_variable(keras_api.slots(model.optimizer, model.trainable_variables)["velocities"][0])
    slot.assign(np.full(slot.shape, np.inf))
    embedding = fr.FusedEmbedding([fr.FeatureConfig("f", "item")], [fr.TableConfig("item", 2, fr.optimizers.SGD(0.1))])
    with pytest.raises(NotFinite, match="dense weight '.*top.kernel.*'"):
        checkpoint.save(tmp_path, model, model.optimizer, layers=[embedding])
    checkpoint.save(tmp_path, model, layers=[embedding])
    # A metric is no dense weight, so its NaN refuses no save.
    model.loss_seen = keras.metrics.Mean()
    model.loss_seen.update_state(np.nan)
    checkpoint.save(tmp_path, model, layers=[embedding])


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_rows_of_every_storage_are_looked_at(storage, tmp_path):
    layer = fr.FusedEmbedding(
        [fr.FeatureConfig("f", "item")],
        [fr.TableConfig("item", 2, fr.optimizers.Adagrad(0.1), storage=fr.Storage(dtype=storage))],
    )
    layer({"f": tf.constant([4, 5], tf.int64)})
    (table,) = (group.table for group in layer.internals.groups)
    checkpoint.save(tmp_path, layer)
    ids, records = table.snapshot("item")
    for field in ("row", "accumulator"):
        bad = records.copy()
        bad[field][1, 1] = 0x7FC0 if bad[field].dtype == "<u2" else np.nan
        table.restore("item", "rows", ids, bad)
        with pytest.raises(NotFinite, match=f"'{field}' of id {ids[1]} of table 'item'"):
            checkpoint.save(tmp_path, layer)
        with pytest.raises(NotFinite):
            checkpoint.save(tmp_path / "first", layer)
        assert not exists(tmp_path / "first")
        table.restore("item", "rows", ids, records)


def save_of_three(directory, weights, tables=None):
    plan = saving.make_plan(directory, 3, None, {})
    for rank in range(3):
        table = (tables or [DictTable("item")] * 3)[rank]
        saving.write_shard(
            directory, plan, saving.copy_tables([table], plan, rank), rank, dense.Weights(weights[rank], [])
        )  # fmt: skip
    saving.commit(directory, plan, simulated.DENSE, None, timeout_s=5)


def test_dense_weights_that_differ_between_ranks_refuse_the_save_by_name(tmp_path):
    equal = [("kernel:0", np.ones([2, 3], np.float32)), ("bias:0", np.zeros(3))]
    save_of_three(tmp_path, [equal] * 3)
    # One unit in the last place, and a zero of the other sign.
    for value in (np.nextafter(np.float32(1), np.float32(2)), -0.0):
        other = [("kernel:0", np.ones([2, 3], np.float32)), ("bias:0", np.array([0.0, value, 0.0]))]
        words = r"'bias:0' has other values on rank 0 than on ranks \[1\].*collectives.distributed_optimizer"
        with pytest.raises(ValueError, match=words):
            save_of_three(tmp_path, [equal, other, equal])
    with pytest.raises(ValueError, match="rank 2 has 1 dense weights and slots, rank 0 has 2"):
        save_of_three(tmp_path, [equal, equal, equal[:1]])
    tables = [DictTable("item"), DictTable("item", dim=5), DictTable("item")]
    with pytest.raises(ValueError, match="Rank 1 has the tables .*'dim': 5.* but rank 0 has .*'dim': 4"):
        save_of_three(tmp_path / "other", [equal] * 3, tables)
    assert len(checkpoint.saves(tmp_path)) == 1


def test_digests_take_scalars_and_any_dtype():
    weights = [("a", np.float32(1)), ("b", np.zeros([0, 2])), ("c", tf.ones([2], tf.bfloat16).numpy())]
    found = model_state.digests(weights)
    assert [digest.name for digest in found] == ["a", "b", "c"]
    assert len({digest.content for digest in found}) == 3
    assert saving.non_finite_weight([("c", np.array([1, np.inf], tf.bfloat16.as_numpy_dtype))]) == "dense weight 'c'"
    assert saving.non_finite_weight([("n", np.array([7])), *weights[1:]]) is None
