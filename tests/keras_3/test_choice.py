"""The environment chooses the Keras of the package; parts of the other Keras are refused by name, with the remedy."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# TensorFlow has its Keras before the package comes: there is no rule about the order of imports.
MIXED = """
import os
import keras, tensorflow as tf, tf_fusedrec as fr, tf_keras

legacy = os.environ["TF_USE_LEGACY_KERAS"] == "1"
chosen, stranger = (tf_keras, keras) if legacy else (keras, tf_keras)
assert fr.keras is chosen and tf.keras.Model is chosen.Model

table = fr.TableConfig("item", 4, fr.optimizers.Adagrad(0.5))
embedding = fr.FusedEmbedding([fr.FeatureConfig("item", table)])

class Wrapped(stranger.Model):
    def call(self, ids):
        return embedding({"item": ids})["item"]

def rows():
    ids = chosen.Input([], dtype="int64", name="item")
    return ids, embedding({"item": ids})["item"]

def model(kind=fr.schedules.PipelinedModel, **attributes):
    ids, of_ids = rows()
    made = kind(ids, chosen.layers.Dense(1)(of_ids))
    vars(made).update(attributes)
    return made

dense = stranger.layers.Dense(1, name="dense", kernel_initializer="ones")
sequential = stranger.Sequential([stranger.Input([4]), dense], name="sequential")
squares = stranger.losses.MeanSquaredError()
acts = [
    lambda: model().compile("sgd", squares),
    lambda: model().compile(stranger.optimizers.SGD(), "mse"),
    lambda: model().compile("sgd", "mse", metrics=["mae", stranger.metrics.MeanSquaredError()]),
    lambda: model(head=dense).compile("sgd", "mse"),
    lambda: model(head=[dense]).compile("sgd", "mse"),
    lambda: model(head={"a": [dense]}).compile("sgd", "mse"),
    lambda: Wrapped()(tf.range(3)),
    lambda: embedding({"item": stranger.Input([], dtype="int64")}),
    lambda: fr.checkpoint.save("nowhere", sequential),
    lambda: fr.export(sequential, "nowhere"),
]
acts += [
    lambda: model(chosen.Model).compile("sgd", squares),
    lambda: dense(rows()[1]),
    lambda: sequential(rows()[1]),
] if legacy else [lambda: fr.tfra]
for act in acts:
    try:
        act()
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    else:
        print("accepted")
    assert embedding({"item": tf.range(3)})["item"].shape == (3, 4)  # the refused call has ended
"""


@pytest.mark.parametrize(("switch", "stranger"), [("0", "tf_keras"), ("1", "Keras 3")])
def test_parts_of_the_other_keras_are_refused(switch, stranger):
    counterpart = f"which comes from {stranger}. Use its counterpart in tf_fusedrec.keras"
    remedy = counterpart + ", or set TF_USE_LEGACY_KERAS=1" * (switch == "0")
    held = ("ValueError", f"attribute 'head' is or holds Dense, {remedy}")
    expected = [
        ("ValueError", f"compile got MeanSquaredError, {remedy}"),
        ("ValueError", f"compile got SGD, {remedy}"),
        ("ValueError", f"compile got MeanSquaredError, {remedy}"),
        held,
        held,
        held,
        (
            "ValueError",
            f"is called inside 'wrapped', which would not train its rows: it comes from {stranger}. Use its",
        ),
        ("ValueError", "feature 'item' must be ", f"got KerasTensor, {remedy}"),
        ("TypeError", f"got Sequential, {remedy}"),
        ("ValueError", f"export got 'sequential', {remedy}"),
    ]
    of_one = {
        "0": [("ImportError", "tf_fusedrec.tfra needs tf_keras, ", "Remedy: set TF_USE_LEGACY_KERAS=1")],
        "1": [
            ("ValueError", f"compile got MeanSquaredError, {remedy}"),
            ("ValueError", "layer 'dense' got a tensor of ", f"It is a Dense, {remedy}"),
            ("ValueError", "layer 'sequential' got a tensor of ", f"It is a Sequential, {remedy}"),
        ],
    }
    env = {**os.environ, "TF_USE_LEGACY_KERAS": switch, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", MIXED], env=env, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    for line, (kind, *words) in zip(done.stdout.strip().splitlines(), expected + of_one[switch], strict=True):
        assert line.startswith(kind) and all(part in line for part in words), line
