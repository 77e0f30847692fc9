"""Learning rates of tables in fit: callbacks on two ranks, checkpoints, and refusals."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.layers import layer_of, train
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY
from tf_fusedrec.callbacks import learning_rates

DIM = 2


def make_model(rate=0.5, tables=("item", "user"), dense_rate=0.25, **options):
    """Returns a model that sums rows, so a row has the same gradient in every step. Features pad with -1."""
    emb = fr.FusedEmbedding(
        [fr.FeatureConfig(name, name, "sum", padding_id=-1) for name in tables],
        [fr.TableConfig(name, DIM, fr.optimizers.SGD(rate), fr.Constant(0.0)) for name in tables],
        **options,
    )
    inputs = {name: keras.Input([None], dtype=tf.int64, name=name) for name in tables}
    total = keras.layers.Lambda(lambda rows: tf.reduce_sum(tf.add_n(rows), axis=1, keepdims=True))
    score = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)
    model = keras.Model(inputs, score(total(list(emb(inputs).values()))))
    optimizer = keras.optimizers.SGD(dense_rate)
    model.compile(fr.collectives.distributed_optimizer(optimizer), lambda y, predicted: tf.reduce_mean(predicted))
    return model, emb


class Measured(keras.callbacks.Callback):
    """Puts a validation loss of this rank's own into the logs, and notes the rates of each epoch."""

    def __init__(self, embedding, losses):
        super().__init__()
        self.embedding, self.losses, self.rates = embedding, losses, []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append({name: float(o.learning_rate) for name, o in self.embedding.optimizers.items()})
        logs["val_loss"] = self.losses[epoch]


# By the mean, epochs 1 and 2 are worse than epoch 0. Rank 0 by itself would never reduce, rank 1 after epoch 1.
LOSSES = ([4.0, 3.0, 2.0, 1.0], [1.0, 9.0, 9.0, 1.0])
IDS = np.array([[3, -1, 7], [-1, -1, -1], [7, 7, -1], [8, -1, -1]])


def trained():
    """Body of the ranks."""
    rank = fr.rank()
    model, emb = make_model()
    data = tf.data.Dataset.from_tensors(({"item": IDS, "user": IDS}, np.zeros([4, 1])))
    measured = Measured(emb, LOSSES[rank])
    plateau = learning_rates.ReduceLROnPlateau(emb, factor=0.5, patience=2, min_delta=0)
    history = model.fit(data, epochs=4, callbacks=[measured, plateau], verbose=0).history
    traffic = emb.internals.groups[0].traffic.numpy().tolist()
    reduced = measured.rates
    # Ranks that disagree: rank 0 counts.
    scheduled, other = make_model(name="scheduled")
    noted = Measured(other, [0.0] * 3)
    setter = learning_rates.TableLearningRate(other, lambda epoch, rate: rate / 2 if rank == 0 else 7.0)
    scheduled.fit(data, epochs=3, callbacks=[setter, noted], verbose=0)
    return {
        "lr": history["lr" if KERAS_IS_LEGACY else "learning_rate"],
        "reduced": reduced, "scheduled": noted.rates, "traffic": traffic,
        "rows": {name: other.export_table(name) for name in ("item", "user")},
    }  # fmt: skip


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(trained, 2)


def test_rates_of_tables_fall_with_the_dense_one_on_all_ranks(on_two_ranks):
    for result in on_two_ranks:
        assert result["lr"] == [0.25, 0.25, 0.25, 0.125]
        assert result["reduced"] == [{"item": rate, "user": rate} for rate in (0.5, 0.5, 0.5, 0.25)]


def test_a_schedule_over_epochs_is_that_of_rank_0(on_two_ranks):
    for result in on_two_ranks:
        assert result["scheduled"] == [{"item": rate, "user": rate} for rate in (0.25, 0.125, 0.0625)]
    rows = {i: row for result in on_two_ranks for i, row in zip(*result["rows"]["item"])}
    # The mean over four samples; both ranks have the same data, and gradients are averaged.
    for i, count in ((3, 1), (7, 3), (8, 1)):
        np.testing.assert_array_equal(rows[i], np.full(DIM, -count / 4 * (0.25 + 0.125 + 0.0625)))
    assert sorted(rows) == [3, 7, 8]


def test_padding_does_not_travel(on_two_ranks):
    """Counts 24 places, 10 ids and 6 distinct ids in each of 4 steps."""
    for result in on_two_ranks:
        assert result["traffic"][:2] == [4 * 10, 4 * 6]


SAVERS = [
    ("checkpoint", fr.checkpoint.save, fr.checkpoint.load),
    ("c.weights.h5", lambda path, model: model.save_weights(path), lambda path, model: model.load_weights(path)),
]


@pytest.mark.parametrize(("name", "save", "load"), SAVERS)
def test_an_assigned_rate_is_saved_and_yields_to_another_record(name, save, load, tmp_path):
    model, emb = make_model(0.1)
    train(emb, {name: tf.constant([1]) for name in emb.optimizers})
    emb.optimizers["item"].learning_rate = 0.025
    assert float(emb.optimizers["user"].learning_rate) == np.float32(0.025)  # one group
    save(tmp_path / name, model)
    for record, wanted in ((0.1, 0.025), (0.2, 0.2)):
        other, again = make_model(record)
        load(tmp_path / name, other)
        assert float(again.optimizers["item"].learning_rate) == np.float32(wanted)
        assert int(again.optimizers["item"].iterations) == 1
    emb.optimizers["item"].learning_rate = 0.1
    save(tmp_path / name, model)
    again.optimizers["item"].learning_rate = 0.5
    other, again = make_model(0.1)
    again.optimizers["item"].learning_rate = 0.5
    load(tmp_path / name, other)
    assert float(again.optimizers["item"].learning_rate) == np.float32(0.1)


def test_unsuitable_rates_are_refused():
    _, emb = make_model()
    with pytest.raises(ValueError, match=r"tables has \['tag'\], want names of \['item', 'user'\]"):
        learning_rates.TableLearningRate(emb, lambda epoch, rate: rate, ["tag"])
    with pytest.raises(
        ValueError, match=r"tables lacks \['user'\], which share the learning rate of \['item'\] in one"
    ):
        learning_rates.TableLearningRate(emb, lambda epoch, rate: rate, ["item"])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    for optimizer, backend in (
        (fr.optimizers.SGD(schedule), "native"),
        (keras.optimizers.SGD(schedule), "tfra"),
        (keras.optimizers.legacy.SGD(schedule), "tfra"),
        (tf.compat.v1.train.GradientDescentOptimizer(0.1), "tfra"),
    ):
        emb = layer_of(fr.TableConfig("item", DIM, optimizer), backend=backend)
        for make in (
            lambda emb: learning_rates.TableLearningRate(emb, lambda epoch, rate: rate),
            learning_rates.ReduceLROnPlateau,
        ):
            with pytest.raises(
                ValueError, match=r"learning rate of tables \['item'\] cannot be set: it follows a sched"
            ):
                make(emb)
