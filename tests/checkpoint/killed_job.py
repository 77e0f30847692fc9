"""A small training job with the Checkpoint callback, which kills itself on request. test_killed.py runs it."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import threading

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import callbacks, keras, tf
from tf_fusedrec._tf_compat import keras_api

EPOCHS, STEPS, BATCH = 12, 70, 16


def batches(epoch: int) -> tf.data.Dataset:
    """Returns the batches of an epoch, a pure function of (epoch, step)."""
    random = np.random.default_rng(epoch)
    ids = random.zipf(1.3, (STEPS, BATCH)) % 97 - 5
    labels = (ids % 3).astype(np.float32) + random.random((STEPS, BATCH), np.float32)
    users = random.integers(0, 40, (STEPS, BATCH))
    return tf.data.Dataset.from_tensor_slices(({"item": ids, "user": users}, labels))


class Model(keras.Model):
    """A model of two tables, noise seeded by the step's number, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        optimizers, limits = keras.optimizers, fr.Limits(max_rows_per_rank=25, eviction="lru")
        self.embedding = fr.FusedEmbedding(
            tables=[
                fr.TableConfig("item", 4, optimizers.Adam(0.05), record_tombstones=True),
                fr.TableConfig("user", 4, optimizers.Adagrad(0.1), record_tombstones=True, limits=limits),
            ],
            features=[fr.FeatureConfig("item", "item"), fr.FeatureConfig("user", "user")],
        )
        self.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.5))
        self.steps = self.add_weight(name="steps", shape=[], dtype="int64", trainable=False, initializer="zeros")

    def call(self, inputs, training=None):
        rows = self.embedding(inputs, training=training)
        noise = tf.random.stateless_normal([4], seed=tf.stack([self.steps.assign_add(1), 7]))
        return self.dense(rows["item"] * rows["user"] + 0.1 * noise)[:, 0]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_operation(n: int) -> None:
    """Kills the process in the middle of a save: before its n-th operation on the disk, or after half a write."""
    left = n

    def told(module, name):
        original = getattr(module, name)

        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                if name == "write" and len(args[1]) > 1:
                    original(args[0], args[1][: len(args[1]) // 2])
                die()
            left -= 1
            return original(*args, **kwargs)

        setattr(module, name, call)

    for module, name in [(os, "write"), (os, "fsync"), (os, "replace"), (shutil, "rmtree")]:
        told(module, name)


class KillAfter(keras.callbacks.Callback):
    """Kills the process a given time after its first step, at any point of its work."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        if self.seconds is not None:
            threading.Timer(self.seconds, die).start()
            self.seconds = None


def run(directory: str, result: str, kill: tuple[str, float] | None) -> None:
    """Resumes the job from its last checkpoint, and trains to the end or to its death.

    Args:
      directory: of the checkpoint.
      result: file that gets all weights in the end.
      kill: ("operation", n), ("seconds", s) or None.
    """
    model = Model()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model({name: tf.zeros([0], tf.int64) for name in ("item", "user")}, training=False)
    model.steps.assign(0)
    # These appear in the first step, which a life that finds a finished job does not make.
    keras_api.make_slots(model.optimizer, model.trainable_variables)
    checkpoint = callbacks.Checkpoint(directory, STEPS, {}, every_steps=8, full_every=3)
    listeners = [checkpoint, KillAfter(kill[1] if kill and kill[0] == "seconds" else None)]
    epoch, step = checkpoint.load(model)
    if kill and kill[0] == "operation":
        at_operation(int(kill[1]))
    if step:
        model.fit(
            batches(epoch).skip(step), initial_epoch=epoch, epochs=epoch + 1, steps_per_epoch=STEPS - step,
            callbacks=listeners, verbose=0,
        )  # fmt: skip
        epoch += 1
    for e in range(epoch, EPOCHS):
        model.fit(batches(e), initial_epoch=e, epochs=e + 1, steps_per_epoch=STEPS, callbacks=listeners, verbose=0)
    slots = [variable.numpy() for variable in keras_api.optimizer_variables(model.optimizer)]
    found = {f"dense-{n}": weight for n, weight in enumerate([*model.get_weights(), *slots])}
    found["steps"] = model.steps.numpy()
    for group in model.embedding.internals.groups:
        for name in group.table.names:
            found[f"{name}-ids"], found[f"{name}-records"] = group.table.snapshot(name)
            found[f"{name}-clock"] = group.table.clock
    partial = pathlib.Path(result + ".partial.npz")
    np.savez(partial, **found)
    os.replace(partial, result)
