"""`import tf_fusedrec` chooses legacy Keras, and names the remedy when it comes too late."""

import os
import re
import subprocess
import sys

from tests.support.blocked import run_without


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


def test_layers_after_a_seed_draw_whole_numbers():
    """Python 3.12 refuses a bound of 1e9 for them, and earlier ones warn of it."""
    done = python(
        "import warnings, tf_fusedrec as fr\n"
        "warnings.filterwarnings('error', 'non-integer arguments to randrange')\n"
        "def kernel(seed):\n"
        "    fr.keras.utils.set_random_seed(seed)\n"
        "    layer = fr.keras.layers.Dense(3)\n"
        "    layer(fr.tf.ones([1, 2]))\n"
        "    return layer.kernel.numpy().tolist()\n"
        "print(kernel(1) == kernel(1), kernel(1) == kernel(2))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True False\n"


def test_a_missing_tf_keras_is_named_with_its_number():
    done = run_without(["tf_keras"], "import tf_fusedrec")
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"^ImportError: .*, but none is installed. Remedy: pip install 'tf-keras==2\.\d+\.\*'", last)


def test_a_tf_keras_of_another_number_is_named():
    done = python("import tf_keras; tf_keras.__version__ = '2.9.1'; import tf_fusedrec", TF_USE_LEGACY_KERAS="1")
    assert done.returncode != 0
    assert re.search(
        r"but tf_keras 2\.9\.1 is installed beside TensorFlow 2.*. Remedy: pip install 'tf-keras==2\.\d+\.\*'",
        done.stderr,
    )
