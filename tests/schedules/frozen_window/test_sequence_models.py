"""Retrieval under FrozenWindow; GRM under accumulation, the reference of ../test_matrix.py."""

import copy

import numpy as np
import pytest

from tests.models.batches import of_any_size, ranking_batch, retrieval_batch
from tests.models.experiments import RETRIEVAL
from tests.schedules import clicks
from tests.schedules.frozen_window.rank_sums import RankSums

M = 2
COUNTED = ("ids", "last", "count", "updated", "pool")


def _sizes(step, rank):
    """Returns the number of users by batch and rank: uneven, fewer than M, or none."""
    return [6, 9, 1][(step + rank) % 3] * (step != 1 or rank != 1)


def _ranking_batch(step, rank):
    random = np.random.default_rng([step, rank])
    users = _sizes(step, rank)
    return ranking_batch(
        random.integers(0, 12, users).tolist(), random.integers(0, 5, users).tolist(), 100 * step + rank
    )


def _make(fields, gradient_op="average", plain=None):
    """Returns (model, embedding) of a configuration without dropout. Dense weights are equal on every rank.

    plain: a function from the embedding to the layer that the model looks up instead.
    """
    import tf_fusedrec as fr
    from models.build import make_embedding, make_model
    from models.experiment import from_dict
    from tf_fusedrec import keras

    fields = copy.deepcopy(fields)
    fields["model"]["dropout"] = 0.0
    experiment = from_dict(fields)
    config = make_embedding(experiment).get_config()
    embedding = fr.FusedEmbedding.from_config({**config, "gradient_op": gradient_op})
    keras.utils.set_random_seed(3)
    rows = plain(embedding) if plain else embedding
    return make_model(experiment, rows, np.arange(1, 60), np.ones(59, np.int64)), embedding


def _trained(schedule, fields, batches):
    """Returns the states after each of Keras' training steps, and the losses."""
    import tf_fusedrec as fr
    from tf_fusedrec import keras, tf
    from tf_fusedrec._tf_compat import unconverted
    from tf_fusedrec.schedules.model import make_optimizer_slots

    model, embedding = _make(fields)
    model.schedule = schedule
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.01)))
    model(batches[0], training=False)
    make_optimizer_slots(model)
    step = tf.function(unconverted(model.train_step), input_signature=[of_any_size(batches[0])])
    states, losses = [], []
    for batch in batches:
        model.reset_metrics()
        losses.append(float(step(batch)["loss"]))
        states.append(clicks.state(model, embedding))
    return states, losses


def accumulated(fields, batches, ranks, optimizer):
    """GRM's oracle: a pass per micro-batch, which weighs its part of all ranks' exposures; batches by rank and step.

    Yields (model, embedding) after every step.
    """
    import tf_fusedrec as fr
    from tf_fusedrec import tf
    from tf_fusedrec._tf_compat import unconverted

    model, embedding = _make(fields, gradient_op="sum")
    sums_of_rows = RankSums(embedding, 1 / ranks)
    model.compile(optimizer)
    rank = fr.rank()
    model(batches[rank][0], training=False)

    def gradients(batch, weight):
        with sums_of_rows.collecting(), tf.GradientTape() as tape:
            loss = model.compute_loss(batch, None, model(batch, training=True), None) * weight
            return tape.gradient(loss, model.trainable_variables)

    signature = [of_any_size(batches[rank][0]), tf.TensorSpec([])]
    gradients = tf.function(unconverted(gradients), input_signature=signature)
    for step, mine in enumerate(batches[rank]):
        positions = np.sum([_positions(batches[r][step]) for r in range(ranks)], axis=0, dtype=np.float32)
        sums = None
        for piece, weight in zip([_piece(mine, i) for i in range(M)], positions / positions.sum()):
            grads = gradients(piece, tf.constant(weight, tf.float32))
            sums = grads if sums is None else [total + g for total, g in zip(sums, grads)]
        if ranks > 1:
            import horovod.tensorflow as hvd

            sums = [hvd.allreduce(g, op=hvd.Average, name=f"dense.{i}") for i, g in enumerate(sums)]
        model.optimizer.apply_gradients(zip(sums, model.trainable_variables))
        sums_of_rows.update()
        yield model, embedding


def _positions(batch):
    """Returns the number of exposures of each micro-batch."""
    return np.diff(batch["exposed_item"].row_splits.numpy()[_bounds(batch)])


def _piece(batch, i):
    begin, end = _bounds(batch)[i : i + 2]
    return {name: tensor[begin:end] for name, tensor in batch.items()}


def _bounds(batch):
    """Returns M + 1 bounds by tokens. Each user and each value of a ragged feature is one token."""
    from tf_fusedrec import tf
    from tf_fusedrec.data.batches import token_bounds

    tokens = 1 + sum(tensor.row_lengths() for tensor in batch.values() if isinstance(tensor, tf.RaggedTensor))
    return [int(bound) for bound in token_bounds(tokens, M)]


def assert_near(states, others, rtol):
    """Asserts equality except for rounding. Ids and counters of tables must be equal."""
    for got, wanted in zip(states, others):
        assert got.keys() == wanted.keys()
        for what in wanted:
            if what.split()[-1] in COUNTED:
                np.testing.assert_array_equal(got[what], wanted[what], err_msg=what)
            else:
                np.testing.assert_allclose(got[what], wanted[what], rtol=rtol, atol=rtol / 10, err_msg=what)


@pytest.mark.slow
def test_retrieval_with_shared_negatives_equals_whole_batches():
    from tf_fusedrec.schedules import FrozenWindow

    fields = copy.deepcopy(RETRIEVAL)
    fields["model"]["share_negatives"] = True
    batches = [
        retrieval_batch(lengths, seed) for seed, lengths in enumerate([[5, 2, 9, 1, 4], [3, 0, 7, 8], [2, 6, 5, 5]])
    ]
    (states, losses), (whole, wanted) = (_trained(schedule, fields, batches) for schedule in (FrozenWindow(M), "sync"))
    assert_near(states, whole, rtol=1e-3)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)


def test_micro_batches_draw_negatives_of_their_own():
    from tf_fusedrec.schedules.uneven_batches import MicroBatch, working_on

    model, _ = _make(RETRIEVAL)
    batch = retrieval_batch([6, 4])

    def draw():
        predictions = model(batch)
        return predictions.negative_ids.numpy()[predictions.chosen]

    draws = []
    for number in (0, 1):
        with working_on(model, MicroBatch(number, 0.5)):
            draws.append(draw())
    np.testing.assert_array_equal(draws[0], draw())
    assert (draws[0] != draws[1]).any()
