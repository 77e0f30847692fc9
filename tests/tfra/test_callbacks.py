"""B2: checkpoints of weights alone save and restore the rows of all ranks, which share one decision and one path.

Models with native tables write and read the files of single layers, also with their SavedModels.
"""

import pathlib

import numpy as np
import pytest

from tests.support.ranks import run_ranks
from tests.tfra import models
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.tfra import dynamic_embedding as de
from tf_fusedrec.tfra import fuse


def save_and_load(folder, tables, whole):
    """Body: saves by the callback to a path with the loss and loads into a new model. Returns the rows of both."""

    def build():
        model = models.SumOfRows([models.layer_of(models.OURS, f"w{n}") for n in range(2)])
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adam(0.1), synchronous=True)
        model.compile(optimizer, "mse")
        fuse(model, tables=tables)
        return model

    rank = collectives.rank()
    ids = tuple(np.random.default_rng([rank, n]).integers(0, 90, [16, 3]) for n in range(2))
    data = tf.data.Dataset.from_tensor_slices((ids, np.full(16, 1.0 + rank, np.float32))).batch(4)
    model, path = build(), f"{folder}/weights-{{loss:.4f}}"
    checkpoint = de.keras.callbacks.ModelCheckpoint(
        path, save_weights_only=not whole, save_best_only=True, monitor="loss"
    )
    model.fit(data, verbose=0, callbacks=[checkpoint], epochs=1)
    before = [layer.export() for layer in model.embeddings]
    if whole:
        (saved,) = (str(path) for path in pathlib.Path(folder).iterdir())
        served = tf.saved_model.load(saved).signatures["serving_default"]
        inputs = {f"input_{n + 1}": tf.constant(part) for n, part in enumerate(ids)}
        np.testing.assert_allclose(served(**inputs)["output_1"], model.predict(data, verbose=0), rtol=1e-6)
    else:
        saved = tf.train.latest_checkpoint(folder)
    tf.compat.v1.reset_default_graph()  # Otherwise TFRA gives a new layer of the same name the same table.
    keras.backend.clear_session()
    again = build()
    again.predict(data, verbose=0)
    assert not any(len(layer.export()[0]) for layer in again.embeddings)
    again.load_weights(saved)
    after = [layer.export() for layer in again.embeddings]
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations) == 4
    losses = [float(one.fit(data, verbose=0).history["loss"][0]) for one in (model, again)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)

    def fails(filepath, **_):
        raise OSError("no space left")

    model.save_weights = fails
    failing = de.keras.callbacks.ModelCheckpoint(f"{folder}/more", save_weights_only=True)
    failing.set_model(model)
    with pytest.raises((OSError, RuntimeError), match="no space left"):
        failing.on_epoch_end(0, {"loss": 1.0})
    return before, after


@pytest.mark.parametrize(("tables", "whole"), [("tfra", False), ("native", False), ("native", True)])
def test_weights_alone_are_saved_with_the_rows_of_all_ranks(tmp_path, tables, whole):
    for before, after in run_ranks(save_and_load, 2, folder=str(tmp_path), tables=tables, whole=whole):
        for (keys, rows), (got_keys, got_rows) in zip(before, after):
            assert len(keys) > 5
            np.testing.assert_array_equal(got_keys, keys)
            np.testing.assert_array_equal(got_rows, rows)
    assert whole or len(list(tmp_path.glob("weights-*.index"))) == 1
    if tables == "native":
        files = sorted({path.name for path in tmp_path.rglob("w0-parameter*-keys")})
        slots = [f"_DynamicEmbedding_w0-shadow_{slot}" for slot in "mv"]
        assert files == sorted(
            f"w0-parameter{slot}_mht_1of1_rank{rank}_size2-keys" for slot in ("", *slots) for rank in range(2)
        )
