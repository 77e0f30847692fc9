"""With TF_USE_LEGACY_KERAS=1, `import tf_fusedrec` takes tf_keras, and names the remedy where it does not fit."""

import os
import subprocess
import sys

from tests.support.blocked import run_without

ROOMS = "callbacks.stopping, checkpoint, data.TokenBatches, layers, losses.negatives, losses.global_mean"
AFTER_TENSORFLOW = f"""
import warnings, tensorflow as tf, tf_fusedrec as fr, tf_keras
warnings.filterwarnings("error", "non-integer arguments to randrange")
for room in {ROOMS!r}.split(", "):
    eval("fr." + room)

def kernel(seed):
    fr.keras.utils.set_random_seed(seed)
    layer = fr.keras.layers.Dense(3)
    layer(tf.ones([1, 2]))
    return layer.kernel.numpy().tolist()

print(tf.keras.layers.Layer is tf_keras.layers.Layer is fr.keras.layers.Layer)
print(kernel(1) == kernel(1), kernel(1) == kernel(2))
"""


def test_tensorflow_first_is_good():
    """An import reaches every room. Layers after a seed draw whole numbers: Python 3.12 refuses a bound of 1e9."""
    env = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", AFTER_TENSORFLOW], env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\nTrue False\n"


def test_a_missing_tf_keras_is_named_with_its_number(monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    last = run_without(["tf_keras"], "import tf_fusedrec").stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "but none is installed. Remedy: pip install 'tf-keras==2.16.*' for 2.16." in last
