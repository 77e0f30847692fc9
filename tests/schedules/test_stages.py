"""Training calls that differ from embedding_inputs are refused. Each context restores the steps of a call."""

import pytest

import tf_fusedrec as fr
from tf_fusedrec import tf
from tf_fusedrec.embedding.call_steps import CallSteps
from tf_fusedrec.schedules import EmbeddingCall, FrozenWindow, PipelinedModel


class Clicks(PipelinedModel):
    """Looks up all features `calls` times, and plans the lookups that `planned` returns for the inputs."""

    def __init__(self, planned, calls=1):
        super().__init__(schedule=FrozenWindow(1))
        tables = [fr.TableConfig(name, 4, fr.optimizers.SGD(0.1)) for name in ("item", "user")]
        self.embedding = fr.FusedEmbedding(tables, [fr.FeatureConfig(table.name, table.name) for table in tables])
        self.planned, self.calls = planned, calls

    def call(self, x):
        return tf.add_n([tf.add_n([*self.embedding(x).values()]) for _ in range(self.calls)])

    def embedding_inputs(self, x):
        return [EmbeddingCall(self.embedding, inputs) for inputs in self.planned(x)]


def train(planned, calls=1):
    model = Clicks(planned, calls)
    model.compile("sgd", "mse", run_eagerly=True)
    x = {"item": tf.constant([1, 2], tf.int64), "user": tf.constant([3, 4], tf.int64)}
    try:
        model.train_on_batch(x, tf.zeros([2, 4]))
    finally:
        assert model.embedding.call_steps == CallSteps()


def twice_as_many_ids(x):
    return [{name: tf.repeat(ids, 2) for name, ids in x.items()}]


@pytest.mark.parametrize("calls", [1, 2])
def test_planned_calls_take_the_rows_that_were_found_ahead(calls):
    train(lambda x: [x] * calls, calls)


@pytest.mark.parametrize(
    "planned, calls, error, message",
    [
        (lambda x: [x, x], 1, ValueError, "1 calls of 'fused_embedding' were looked up ahead and never came"),
        (lambda x: [x], 2, ValueError, "more often in a training step, than was looked up ahead"),
        (twice_as_many_ids, 1, tf.errors.InvalidArgumentError, "called with other ids in a training step than"),
    ],
)
def test_other_calls_are_refused(planned, calls, error, message):
    with pytest.raises(error, match=message):
        train(planned, calls)
