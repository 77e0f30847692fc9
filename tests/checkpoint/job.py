"""A job with a model and a table in a dict, which saves repeatedly. Tests inject the faults."""

from __future__ import annotations

import pathlib

import numpy as np

from tests.checkpoint.tables import DictTable, contents, embedding_of
from tf_fusedrec import checkpoint, keras


def model():
    return keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])


def trained(table, seed=0):
    table.train("item", np.random.default_rng(seed).integers(-(2**63), 2**63, 40).tolist(), np.random.default_rng(seed))
    return table


class Job:
    """The model and the table of a training job."""

    def __init__(self, directory, **options):
        self.directory = pathlib.Path(directory)
        self.model, self.table = model(), trained(DictTable("item"))
        self.embedding = embedding_of(self.table)
        self.checkpointer = checkpoint.Checkpointer(self.directory, self.model, layers=[self.embedding], **options)

    def train(self):
        trained(self.table, self.table.clock)
        self.model.set_weights([w + 1 for w in self.model.get_weights()])

    def state(self):
        return contents([self.table]), [w.tolist() for w in self.model.get_weights()]

    def loaded(self, which=None):
        """Returns extra and state that a new job loads from one of the saves, by default the last."""
        other = Job(self.directory)
        other.table.clear()
        extra = checkpoint.load(self.directory, other.model, layers=[other.embedding], save=which)
        return extra, other.state()


def save(job, extra=None):
    job.checkpointer.save(extra)
    job.checkpointer.wait()


class Nth:
    """Wraps a function. The n-th call raises instead."""

    def __init__(self, function, n, error):
        self.function, self.left, self.error = function, n, error
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls - 1 == self.left:
            raise self.error
        return self.function(*args, **kwargs)
