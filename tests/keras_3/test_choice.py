"""The environment chooses the Keras of the package; parts of the other Keras are refused by name, with the remedy."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# TensorFlow has its Keras before the package comes: there is no rule about the order of imports.
MIXED = """
import keras, tensorflow as tf, tf_fusedrec as fr, tf_keras
assert fr.keras is keras and tf.keras.Model is keras.Model

table = fr.TableConfig("item", 4, fr.optimizers.Adagrad(0.5))
embedding = fr.FusedEmbedding([fr.FeatureConfig("item", table)])

class Wrapped(tf_keras.Model):
    def call(self, ids):
        return embedding({"item": ids})["item"]

def model(**attributes):
    ids = keras.Input([], dtype="int64", name="item")
    made = fr.schedules.PipelinedModel(ids, keras.layers.Dense(1)(embedding({"item": ids})["item"]))
    vars(made).update(attributes)
    return made

legacy = tf_keras.Sequential([tf_keras.layers.Dense(1)])
for act in (
    lambda: fr.tfra,
    lambda: model().compile("sgd", tf_keras.losses.MeanSquaredError()),
    lambda: model().compile(tf_keras.optimizers.SGD(), "mse"),
    lambda: model(head=[tf_keras.layers.Dense(1)]).compile("sgd", "mse"),
    lambda: Wrapped()(tf.range(3)),
    lambda: embedding({"item": tf_keras.Input([], dtype="int64")}),
    lambda: fr.checkpoint.save("nowhere", legacy),
    lambda: fr.export(legacy, "nowhere"),
):
    try:
        act()
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    else:
        print("accepted")
"""
COUNTERPART = "which comes from tf_keras. Use its counterpart in tf_fusedrec.keras, or set TF_USE_LEGACY_KERAS=1"
EXPECTED = (
    ("ImportError", "tf_fusedrec.tfra needs tf_keras, ", "Remedy: set TF_USE_LEGACY_KERAS=1"),
    ("ValueError", f"compile got MeanSquaredError, {COUNTERPART}"),
    ("ValueError", f"compile got SGD, {COUNTERPART}"),
    ("ValueError", f"attribute 'head' is or holds Dense, {COUNTERPART}"),
    ("ValueError", "is called inside 'wrapped', which would not train its rows: it comes from tf_keras. Use its"),
    ("ValueError", "feature 'item' must be ", f"got KerasTensor, {COUNTERPART}"),
    ("TypeError", f"got Sequential, {COUNTERPART}"),
    ("ValueError", f"export got 'sequential', {COUNTERPART}"),
)


def run(program: str, **variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "TF_USE_LEGACY_KERAS": "0", "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    return subprocess.run([sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, encoding="utf-8")


def test_parts_of_tf_keras_are_refused_in_a_program_of_keras_3():
    done = run(MIXED)
    assert done.returncode == 0, done.stderr
    for line, (kind, *words) in zip(done.stdout.strip().splitlines(), EXPECTED, strict=True):
        assert line.startswith(kind) and all(part in line for part in words), line


@pytest.mark.parametrize(
    ("version", "variables", "words"),
    [
        ("3.15.0", {"KERAS_BACKEND": "jax"}, "has KERAS_BACKEND=jax. Remedy: unset KERAS_BACKEND or set it to tensor"),
        ("3.8.0", {}, "needs Keras 3.9 or newer, but keras 3.8.0 is installed. Remedy: pip install --upgrade keras"),
    ],
)
def test_another_backend_and_an_old_keras_are_refused_before_tensorflow_is_loaded(tmp_path, version, variables, words):
    record = tmp_path / f"keras-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: keras\nVersion: {version}\n", encoding="utf-8")
    program = "import sys; sys.modules['tensorflow'] = None; import tf_fusedrec"
    last = run(program, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", **variables).stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and words in last
