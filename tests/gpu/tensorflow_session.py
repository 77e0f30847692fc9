"""What TensorFlow does with the ops on a GPU: placement, memory, streams, bits, a fitted model, two ranks.

    python -m tests.gpu.tensorflow_session [--minutes 10] [--folder FOLDER] [--only NAME ...]

Needs TensorFlow with its CUDA libraries, a GPU, and this package built with nvcc against that TensorFlow
(FUSEDREC_CUDA=1 python setup.py build_ext --inplace); Horovod for two ranks. One process runs each step
(tensorflow_steps.py). Records, order and exit codes are those of tests.gpu.session; FOLDER is
build/gpu_tensorflow_session by default.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from tests.gpu import steps
from tests.gpu.steps import ROOT, Step

LIBRARY = ROOT / "tf_fusedrec/ops/libfusedrec_cuda.so"
OP_LIBRARY = ROOT / "tf_fusedrec/ops/_fusedrec_ops.so"
# Rough seconds by step, most of them the start of TensorFlow on a GPU.
EXPECTED_S = {"placement": 20.0, "memory": 21.0, "bits": 22.0, "streams": 23.0, "ranks": 40.0, "model": 60.0}
LIMIT_S = 240.0


def lacking() -> str | None:
    """Returns what is missing for a session; None when nothing is."""
    if importlib.util.find_spec("tensorflow") is None:
        return "TensorFlow is not installed"
    missing = [path.name for path in (OP_LIBRARY, LIBRARY) if not path.exists()]
    if missing:
        return f"{missing[0]} is not built"
    from tf_fusedrec import tf  # before any other import of TensorFlow, because it chooses the Keras

    if not tf.test.is_built_with_cuda():
        return "this TensorFlow is built without CUDA; pip install 'tensorflow[and-cuda]'"
    if not tf.config.list_physical_devices("GPU"):
        return "TensorFlow sees no GPU"
    return None


def step(name: str, device: str) -> Step:
    command = (sys.executable, "-m", "tests.gpu.tensorflow_steps", name, "--device", device)
    return Step(name, command, EXPECTED_S[name], LIMIT_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = steps.options(__doc__, "gpu_tensorflow_session")
    options = parser.parse_args(arguments)
    missing = lacking()
    if missing is not None:
        print(f"error: no session of TensorFlow on a GPU: {missing}. Remedy: see `--help`.", file=sys.stderr)
        return 2
    try:
        return steps.session([step(name, "/GPU:0") for name in EXPECTED_S], LIBRARY, options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
