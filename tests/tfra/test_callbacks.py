"""B2: checkpoints of weights alone save and restore the rows of all ranks, which share one decision and one path."""

import numpy as np
import pytest

from tests.support.ranks import run_ranks


def save_and_load(folder):
    """Body: saves by the callback to a path with the loss and loads into a new model. Returns the rows of both."""
    from tests.tfra import models
    from tf_fusedrec import keras, tf
    from tf_fusedrec.exchange import collectives
    from tf_fusedrec.tfra import dynamic_embedding as de
    from tf_fusedrec.tfra import fuse

    def build():
        model = models.SumOfRows([models.layer_of(models.OURS, f"w{n}") for n in range(2)])
        fuse(model)
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adagrad(0.1), synchronous=True)
        model.compile(optimizer, "mse")
        return model

    rank = collectives.rank()
    ids = tuple(np.random.default_rng([rank, n]).integers(0, 90, [16, 3]) for n in range(2))
    data = tf.data.Dataset.from_tensor_slices((ids, np.full(16, 1.0 + rank, np.float32))).batch(4)
    model, path = build(), f"{folder}/weights-{{loss:.4f}}"
    checkpoint = de.keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_best_only=True, monitor="loss")
    model.fit(data, verbose=0, callbacks=[checkpoint], epochs=1)
    before = [layer.export() for layer in model.embeddings]
    saved = tf.train.latest_checkpoint(folder)
    tf.compat.v1.reset_default_graph()  # Otherwise TFRA gives a new layer of the same name the same table.
    keras.backend.clear_session()
    again = build()
    again.predict(data, verbose=0)
    assert not any(len(layer.export()[0]) for layer in again.embeddings)
    again.load_weights(saved)
    after = [layer.export() for layer in again.embeddings]

    def fails(filepath, **_):
        raise OSError("no space left")

    model.save_weights = fails
    failing = de.keras.callbacks.ModelCheckpoint(f"{folder}/more", save_weights_only=True)
    failing.set_model(model)
    with pytest.raises((OSError, RuntimeError), match="no space left"):
        failing.on_epoch_end(0, {"loss": 1.0})
    return before, after


def test_weights_alone_are_saved_with_the_rows_of_all_ranks(tmp_path):
    for before, after in run_ranks(save_and_load, 2, folder=str(tmp_path)):
        for (keys, rows), (got_keys, got_rows) in zip(before, after):
            assert len(keys) > 5
            np.testing.assert_array_equal(got_keys, keys)
            np.testing.assert_array_equal(got_rows, rows)
    assert len(list(tmp_path.glob("weights-*.index"))) == 1
