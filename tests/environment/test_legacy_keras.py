"""With TF_USE_LEGACY_KERAS=1, `import tf_fusedrec` takes tf_keras, and names the remedy where it does not fit."""

import os
import subprocess
import sys

from tests.support.blocked import run_without

# A module that looks as if TensorFlow, which takes seconds to load, had been imported.
STUBS = """
import importlib.machinery, sys, types
for name in ("tensorflow", "tf_keras"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
sys.modules["tensorflow"].version = types.SimpleNamespace(VERSION="2.16.2")
sys.modules["tf_keras"].__version__ = "2.9.1"
"""
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


def python(program: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, encoding="utf-8", errors="replace"
    )


def test_tensorflow_first_is_good():
    """An import reaches every room. Layers after a seed draw whole numbers: Python 3.12 refuses a bound of 1e9."""
    done = python(AFTER_TENSORFLOW)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\nTrue False\n"


def test_a_tf_keras_of_another_number_is_refused_with_the_remedy():
    done = python(f"{STUBS}\nimport tf_fusedrec")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    words = "but tf_keras 2.9.1 is installed beside TensorFlow 2.16.2. Remedy: pip"
    assert last.startswith("ImportError: tf_fusedrec ") and words in last, done.stderr


def test_a_missing_tf_keras_is_named_with_its_number(monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    last = run_without(["tf_keras"], "import tf_fusedrec").stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "but none is installed. Remedy: pip install 'tf-keras==2.16.*' for 2.16." in last
