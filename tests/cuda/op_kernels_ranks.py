"""Two ranks whose ops run their GPU OpKernels have the bits of two ranks on CPU kernels.

TensorFlow places no op on an emulated device. So each rank asks for the emulated kernels by their label, as
op_kernels_model.py does, and the collectives are Horovod's own for a CPU. Tables form two groups, so that the messages
of one step are joined and split. The ids of the ranks differ in number.

`run` calls the stages of a step: micro-batches that share rows, with a look-ahead. `run_models` fits a Keras model
under each schedule, by night.
"""

from __future__ import annotations

import numpy as np

import tf_fusedrec as fr
from tests.cuda.op_kernels import same
from tests.cuda.op_kernels_model import on_device
from tests.schedules import clicks
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.embedding import Step
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync

STEPS, M = 2, 2
OF_STAGES = {
    f"Fusedrec>{op}"
    for op in (
        "FuseIds", "SegmentUnique", "RankPartition", "JoinMessages", "SplitMessages", "TableLookAhead", "TableLookup",
        "TableAccumulateGradients", "TableApplyAccumulated", "RecoverGrad", "PooledRecoverParts",
    )
}  # fmt: skip
SCHEDULES = ("sync", DualBuffer(), FrozenWindow(M), Nested(M), SemiAsync(), Pipelined(6))


def make_embedding(name=None, host_rows=False):
    """Makes two groups of tables: their dimensions differ. `host_rows`: of users, whose ids then travel apart."""
    tables = [
        fr.TableConfig(name, dim, fr.optimizers.Adagrad(0.1), fr.Uniform(-1, 1), tier=fr.Tier(host_rows=rows_of_host))
        for name, dim, rows_of_host in (("item", 4, False), ("user", 8, host_rows))
    ]
    features = [
        fr.FeatureConfig("item", "item"),
        fr.FeatureConfig("past", "item", combiner="mean"),
        fr.FeatureConfig("user", "user"),
    ]
    embedding = fr.FusedEmbedding(features, tables, name=name)
    assert len(embedding.internals.groups) == 2
    return embedding


def run_stages(host_rows):
    """Calls the stages of Nested in its order, outside a graph. Returns the rows of all steps, and the tables."""
    embedding, results, waiting = make_embedding("embedding", host_rows), {}, None
    rank = fr.rank()
    for step in range(STEPS):
        lookups = []
        for piece in range(M):
            inputs, _, _ = clicks.batch(5 + 3 * rank, seed=100 * step + 10 * piece + rank)
            features = embedding.internals.flat_features(inputs, None, None)
            lookups += embedding.internals.lookups_of(features, training=True, micro_batch=piece)
        coming = Step(tuple(lookups)).send_ids().look_ahead()
        if waiting is not None:
            update(*waiting, step)
        current = coming.look_up()
        waiting = current, current.return_rows()
        results.update({f"rows {i} of step {step}": rows.numpy() for i, rows in enumerate(waiting[1])})
    update(*waiting, STEPS)
    return {**results, **clicks.records(embedding)}


def update(step, rows, seed):
    random = np.random.default_rng([seed, fr.rank()])
    grads = {i: tf.constant(random.normal(size=part.shape), tf.float32) for i, part in enumerate(rows)}
    step.update(step.send_gradients(grads))


def fit_model(schedule):
    """Returns the trained state of a Keras model."""
    embedding = make_embedding()
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.05))
    model = clicks.make_model(embedding, schedule, optimizer)
    samples = clicks.batch(16, seed=fr.rank())
    model.fit(tf.data.Dataset.from_tensor_slices(samples).batch(4), verbose=0)
    return clicks.state(model, embedding)


def compare(what, run, *arguments):
    """Asserts that a run on the device ends as one on the CPU. Returns what agrees."""
    wanted = run(*arguments)
    with on_device() as placed:
        assert placed >= OF_STAGES, OF_STAGES - placed
        got = run(*arguments)
    assert got.keys() == wanted.keys() and len(got) > 4
    for name, array in wanted.items():
        same(np.ascontiguousarray(got[name]), np.ascontiguousarray(array), f"{name}, {what}, rank {fr.rank()}")
    return what


def stages(library):
    """Body of a rank."""
    tf.load_op_library(library)
    return [compare(f"stages, host_rows={host_rows}", run_stages, host_rows) for host_rows in (False, True)]


def models(library):
    """Body of a rank."""
    tf.load_op_library(library)
    return [compare(str(schedule), fit_model, schedule) for schedule in SCHEDULES]


def run(library):
    run_ranks(stages, 2, library=library)


def run_models(library):
    (agreed, _) = run_ranks(models, 2, timeout_s=900, library=library)
    assert len(agreed) == len(SCHEDULES)
    print(f"models of two ranks agree: {', '.join(agreed)}", flush=True)
