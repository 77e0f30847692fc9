"""FrozenWindow(M) on 1 and 3 processes: gradient accumulation, bit for bit.

The oracle is a loop of single passes, with gradients added up in Python: of rows per rank over micro-batches, then over
ranks (rank_sums.py). On one process, a loop of single steps with FusedEmbedding(accumulate_steps=M) is a second oracle.
Ids, rows, slots, dense weights and their slots must be equal after every step.
"""

import contextlib

import numpy as np
import pytest

from tests.schedules import clicks
from tests.schedules.rank_sums import RankSums
from tests.support.ranks import run_ranks

STEPS = 4
# Micro-batches, rule of the tables, gradient_op. The oracle of "average" divides by M again, which is exact for powers
# of two only.
SCENARIOS = {
    "adam_1": (1, "Adam", "average"),  # one process has it
    "adam_2": (2, "Adam", "average"),
    "rowwise_3": (3, "RowWiseAdagrad", "sum"),
}


def _batches(rank):
    """Yields batches whose sizes M does not divide or exceeds, and ranks without samples."""
    return [
        clicks.batch([9, 2, 7, 5][(step + rank) % 4] * (step != 2 or rank != 1), 10 * step + rank)
        for step in range(STEPS)
    ]


def _optimizer(distributed):
    import tf_fusedrec as fr
    from tf_fusedrec import keras

    adam = keras.optimizers.legacy.Adam(0.01)
    return fr.collectives.distributed_optimizer(adam) if distributed else adam


def _frozen(micro_batches, rule, gradient_op):
    import tf_fusedrec as fr
    from tf_fusedrec.schedules import FrozenWindow

    embedding = clicks.make_embedding(rule, gradient_op=gradient_op, name=f"frozen_{micro_batches}_{rule}")
    model = clicks.make_model(embedding, FrozenWindow(micro_batches), _optimizer(distributed=True))
    step, states = clicks.train_function(model), []
    for data in _batches(fr.rank()):
        step(*data)
        states.append(clicks.state(model, embedding))
    return states


def _accumulated(micro_batches, rule, gradient_op, by_table=False):
    """Makes one pass per micro-batch, whose weight is its share of the samples. `by_table`: the table accumulates."""
    import tf_fusedrec as fr
    from tf_fusedrec import tf
    from tf_fusedrec.data.batches import token_bounds

    options = {"gradient_op": gradient_op, "accumulate_steps": micro_batches} if by_table else {"gradient_op": "sum"}
    embedding = clicks.make_embedding(rule, **options, name=f"accumulated_{micro_batches}_{rule}_{by_table}")
    model = clicks.make_model(embedding, "sync")
    model.optimizer = _optimizer(distributed=False)  # compile would let its own wait as long as the tables
    undo = micro_batches if by_table and gradient_op == "average" else 1
    sums_of_rows = RankSums(embedding, 1 / fr.size() if gradient_op == "average" else 1)

    @tf.function(input_signature=[*clicks.SIGNATURE, tf.TensorSpec([2]), tf.TensorSpec([])])
    def gradients(x, y, sample_weight, samples, weight):
        mine, of_all = samples[0], samples[1]
        of_rank = tf.where(of_all > 0, fr.size() * tf.math.divide_no_nan(mine, of_all), 1.0)
        with contextlib.nullcontext() if by_table else sums_of_rows.collecting(), tf.GradientTape() as tape:
            loss = model.compiled_loss(y, model(x, training=True), sample_weight) * of_rank * weight
            return tape.gradient(loss, model.trainable_variables)

    states = []
    for x, y, sample_weight in _batches(fr.rank()):
        sums, n = None, len(y)
        samples = np.array([n, fr.collectives.all_gather(np.array([n])).sum()], np.float32)
        bounds = [int(bound) for bound in token_bounds(1 + x["past"].row_lengths(), micro_batches)]
        for i in range(micro_batches):
            part = slice(*bounds[i : i + 2])
            weight = np.float32(part.stop - part.start) / np.float32(max(n, 1)) * np.float32(undo)
            piece = {name: tensor[part] for name, tensor in x.items()}
            of_piece = [g / undo for g in gradients(piece, y[part], sample_weight[part], samples, weight)]
            sums = of_piece if sums is None else [total + g for total, g in zip(sums, of_piece)]
        if fr.size() > 1:
            import horovod.tensorflow as hvd

            sums = [hvd.allreduce(g, op=hvd.Average, name=f"{embedding.name}.{i}") for i, g in enumerate(sums)]
        model.optimizer.apply_gradients(zip(sums, model.trainable_variables))
        if not by_table:
            sums_of_rows.update()
        states.append(clicks.state(model, embedding))
    return states


def _all():
    import tf_fusedrec as fr

    alone = fr.size() == 1
    return {
        name: (
            _frozen(*options),
            [_accumulated(*options, by_table) for by_table in ([False, True] if alone else [False])],
        )
        for name, options in SCENARIOS.items()
        if alone or name != "adam_1"
    }


def assert_equals_accumulation(got, wanted, where):
    """Compares two states bit for bit, except for the counters that lookups advance."""
    assert got.keys() == wanted.keys()
    for what in wanted:
        # Accumulation looks up every micro-batch, FrozenWindow once per step, so counters of lookups differ.
        if what.split()[-1] not in ("last", "count", "updated"):
            np.testing.assert_array_equal(got[what], wanted[what], err_msg=f"{where}: {what}")


@pytest.mark.parametrize("world_size", [1, 3])
def test_it_equals_accumulation_bit_for_bit(world_size, monkeypatch):
    # A ring's order of additions depends on the place in the buffer, so tensors must not share one.
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    for rank, results in enumerate(run_ranks(_all, world_size)):
        for scenario, (frozen, oracles) in results.items():
            assert len(oracles) == 1 + (world_size == 1)
            for accumulated in oracles:
                assert len(frozen) == len(accumulated) == STEPS
                for step, (got, wanted) in enumerate(zip(frozen, accumulated)):
                    assert_equals_accumulation(got, wanted, f"{scenario}, rank {rank}, step {step}")
