"""Builds the wheels for the TensorFlow here, tagged for any Python and the oldest Linux that suits: `make wheel`.

    python -m tools.wheel [FOLDER]     # dist/

The wheel of tf_fusedrec has the ops without GPU kernels, so it is small. Where FUSEDREC_CUDA asks for GPU kernels
(setup.py), the wheel of tf_fusedrec_cuda has the ops with them, and the library of the device code. tf_fusedrec loads
these ops in place of its own (tf_fusedrec/ops/_library.py). Both have one version. Horovod's wheel comes beside them.

TensorFlow loads the libraries, which use nothing of Python. One wheel therefore serves every Python.

auditwheel finds that Linux by the symbols that the libraries need, and refuses libraries that no wheel may expect.
TensorFlow's library is left out, because the wheel requires TensorFlow. The libraries lose their debugging symbols.
"""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from tools import gloo_sources, horovod_wheel
from tools.steps import StepFailed, clean_environment

ROOT = pathlib.Path(__file__).resolve().parents[1]
OF_TENSORFLOW = "libtensorflow*.so.2"
CUDA, DEVICE_CODE = "tf_fusedrec_cuda", "libfusedrec_cuda.so"
CUDA_SUMMARY = "The custom ops of tf_fusedrec with GPU kernels"
KEPT_FIELDS = ("Metadata-Version", "Name", "Version", "License", "License-File", "Classifier", "Requires-Python")


def run(*command: str, env: dict[str, str] | None = None) -> None:
    subprocess.run([sys.executable, *command], cwd=ROOT, env=env, check=True)


def build(output: pathlib.Path) -> list[pathlib.Path]:
    """Writes the wheels into `output`, and returns their paths.

    Raises:
      subprocess.CalledProcessError: The build failed, or auditwheel refused a wheel.
      StepFailed: Horovod could not be built.
    """
    # auditwheel looks for patchelf on PATH.
    env = clean_environment(pathlib.Path(sys.prefix))
    key = horovod_wheel.cache_key(ROOT, importlib.metadata.version("tensorflow"))
    horovod = horovod_wheel.wheel(ROOT, pathlib.Path(sys.executable), key, env)
    gloo_sources.fetch(pathlib.Path(sys.executable), env)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pip = ("-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps")
        run(*pip, "--wheel-dir", name, ".", env={**os.environ, "FUSEDREC_CUDA": "0"})
        run("-m", "wheel", "tags", "--remove", *horovod_wheel.TAGS, str(*folder.glob("tf_fusedrec-*.whl")))
        wheels = list(folder.glob("tf_fusedrec-*.whl"))
        run("setup.py", "-q", "build_ext", "--build-lib", str(folder / "built"))
        ops = folder / "built/tf_fusedrec/ops"
        if (ops / DEVICE_CODE).exists():
            wheels.append(pack_cuda(ops, wheels[0], folder))
        options = ("--plat", "auto", "--strip", "--exclude", OF_TENSORFLOW, "--wheel-dir", str(folder / "tagged"))
        for untagged in [*wheels, horovod]:
            run("-m", "auditwheel", "repair", *options, str(untagged), env=env)
        output.mkdir(parents=True, exist_ok=True)
        return [pathlib.Path(shutil.move(path, output / path.name)) for path in sorted((folder / "tagged").iterdir())]


def pack_cuda(ops: pathlib.Path, plain: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """Writes the wheel of tf_fusedrec_cuda into `output`, and returns its path.

    setup.py cannot describe a second project, so the metadata come from tf_fusedrec's wheel.

    Args:
      ops: Folder of the libraries, as `setup.py build_ext` made them.
      plain: Wheel of tf_fusedrec.
      output: Folder.
    """
    with zipfile.ZipFile(plain) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        files = {name: archive.read(f"{info}/{name}") for name in ("METADATA", "WHEEL", "LICENSE")}
    metadata = email.message.Message()
    for field, value in email.message_from_bytes(files["METADATA"]).items():
        if field in KEPT_FIELDS:
            metadata[field] = CUDA if field == "Name" else value
    metadata["Summary"] = CUDA_SUMMARY
    metadata["Classifier"] = "Environment :: GPU :: NVIDIA CUDA"
    metadata["Requires-Dist"] = f"tf_fusedrec (=={metadata['Version']})"
    package = output / CUDA / CUDA
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'"""{CUDA_SUMMARY}."""\n', encoding="utf-8")
    for name in ("_fusedrec_ops.so", DEVICE_CODE, "_build_info.py"):
        shutil.copy2(ops / name, package)
    folder = output / CUDA / f"{CUDA}-{metadata['Version']}.dist-info"
    folder.mkdir()
    for name, content in {**files, "METADATA": metadata.as_bytes()}.items():
        (folder / name).write_bytes(content)
    run("-m", "wheel", "pack", str(output / CUDA), "--dest-dir", str(output))
    return next(output.glob(f"{CUDA}-*.whl"))


if __name__ == "__main__":
    try:
        for wheel in build(pathlib.Path(sys.argv[1]) if sys.argv[1:] else ROOT / "dist"):
            print(f"wheel: {wheel}, {wheel.stat().st_size / 1e6:.1f} MB")
    except StepFailed as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: this command ended with {error.returncode}: {' '.join(map(str, error.cmd))}")
