"""Tables of an ops="ours" export live as long as a function that reads them, and no longer."""

import gc
import importlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.saved_model.signatures import Signature

ROWS, DIM = 120_000, 64
IDS = np.arange(ROWS)
ROOT = pathlib.Path(__file__).resolve().parents[2]
# A server that loads repeatedly. Linux gives the memory in use, which moves by 90 MB from load to load, because
# TensorFlow frees parts of a load later. So the test compares the least of three loads.
RELOADS = """
import gc, sys
import tf_fusedrec
from tf_fusedrec import tf

def kibibytes():
    gc.collect()
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

in_use = []
for _ in range(12):
    answer = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
    rows = answer(x=tf.constant([1, 2], tf.int64))["rows"]
    del answer
    in_use.append(kibibytes())
print("grown", min(in_use[9:]) - min(in_use[1:4]))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    table = fr.TableConfig("t", DIM, fr.optimizers.SGD(0.1))
    embedding = fr.FusedEmbedding([fr.FeatureConfig("x", "t")], [table])
    inputs = {"x": keras.Input([], dtype=tf.int64, name="x")}
    model = keras.Model(inputs, embedding(inputs)["x"])
    rows = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    fr.checkpoint.warm_start(embedding, "t", IDS, rows)
    signature = Signature(lambda given: {"rows": model(given, training=False)}, {"x": tf.TensorSpec([None], tf.int64)})
    fr.export(model, folder / "ours", "ours", signatures={"serving_default": signature})
    return str(folder / "ours"), rows


def test_a_signature_keeps_its_tables_and_each_load_has_its_own(served):
    folder, rows = served
    first, second = tf.saved_model.load(folder), tf.saved_model.load(folder)
    answer = second.signatures["serving_default"]
    del first, second
    gc.collect()
    np.testing.assert_array_equal(answer(x=tf.constant(IDS[:9]))["rows"], rows[:9])


def test_a_layer_and_a_session_keep_their_tables(served):
    folder, rows = served
    # Keras 3, which servers have; this package trains with the one before.
    layer = importlib.import_module("keras").layers.TFSMLayer(folder, call_endpoint="serving_default")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        signature = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
        gc.collect()
        for _ in range(2):
            got = session.run(signature.outputs["rows"].name, {signature.inputs["x"].name: IDS[:9]})
            np.testing.assert_array_equal(got, rows[:9])
    np.testing.assert_array_equal(layer({"x": tf.constant(IDS[:9])})["rows"], rows[:9])


def test_loads_leave_no_table_behind(served):
    """A table has 33 MB, so 8 tables have 264. TensorFlow keeps 1 to 2 MB of each load, for any size of the table."""
    command = [sys.executable, "-c", RELOADS, served[0]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", timeout=300)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.split("grown")[1])
    assert grown < 100_000, f"{grown} KiB"
