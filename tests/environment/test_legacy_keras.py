"""`import tf_fusedrec` chooses legacy Keras, and names the remedy when it comes too late."""

import os
import subprocess
import sys


def python(program: str, **variables: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    env.update(variables, TF_CPP_MIN_LOG_LEVEL="3")
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, encoding="utf-8", errors="replace"
    )


def test_the_package_first_gives_legacy_keras():
    done = python(
        "import tf_fusedrec, tensorflow as tf; import tf_keras; print(tf.keras.layers.Layer is tf_keras.layers.Layer)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_tensorflow_first_with_keras_3_is_refused_with_the_remedy():
    done = python("import tensorflow, tf_fusedrec")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tf_fusedrec needs legacy Keras")
    assert "import tf_fusedrec before tensorflow" in last and "TF_USE_LEGACY_KERAS=1" in last


def test_tensorflow_first_with_the_switch_set_is_good():
    done = python("import tensorflow, tf_fusedrec", TF_USE_LEGACY_KERAS="1")
    assert done.returncode == 0, done.stderr


def test_the_opposite_switch_is_refused():
    done = python("import tf_fusedrec", TF_USE_LEGACY_KERAS="0")
    assert done.returncode != 0
    assert "the environment has TF_USE_LEGACY_KERAS=0" in done.stderr
