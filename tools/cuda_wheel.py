"""Packs the wheel of tf_fusedrec_cuda: the custom ops with their GPU kernels, and the library of the device code.

tf_fusedrec loads these ops in place of its own (tf_fusedrec/ops/_library.py). The package is of one version with
tf_fusedrec, and requires it. setup.py cannot describe a second project, so the metadata come from tf_fusedrec's wheel.
"""

from __future__ import annotations

import email
import email.message
import pathlib
import shutil
import subprocess
import sys
import zipfile

NAME = "tf_fusedrec_cuda"
DEVICE_CODE = "libfusedrec_cuda.so"
FILES = ("_fusedrec_ops.so", DEVICE_CODE, "_build_info.py")
KEPT = ("Metadata-Version", "Name", "Version", "License", "License-File", "Classifier", "Requires-Python")


def metadata_of(plain: email.message.Message) -> email.message.Message:
    """Returns the metadata of this package, from the metadata of tf_fusedrec."""
    ours = email.message.Message()
    for field, value in plain.items():
        if field in KEPT:
            ours[field] = NAME if field == "Name" else value
    ours["Summary"] = "The custom ops of tf_fusedrec with GPU kernels"
    ours["Classifier"] = "Environment :: GPU :: NVIDIA CUDA"
    ours["Requires-Dist"] = f"tf_fusedrec (=={plain['Version']})"
    return ours


def pack(ops: pathlib.Path, plain: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """Writes the wheel into `output`, and returns its path.

    Args:
      ops: Folder with FILES, as `setup.py build_ext` made them.
      plain: Wheel of tf_fusedrec, without a platform's tag by auditwheel.
      output: Folder.
    """
    with zipfile.ZipFile(plain) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata, wheel, licence = (archive.read(f"{info}/{name}") for name in ("METADATA", "WHEEL", "LICENSE"))
    ours = metadata_of(email.message_from_bytes(metadata))
    folder = output / NAME
    package, info_folder = folder / NAME, folder / f"{NAME}-{ours['Version']}.dist-info"
    package.mkdir(parents=True)
    info_folder.mkdir()
    (package / "__init__.py").write_text('"""The custom ops of tf_fusedrec with GPU kernels."""\n', encoding="utf-8")
    for name in FILES:
        shutil.copy2(ops / name, package)
    (info_folder / "METADATA").write_bytes(ours.as_bytes())
    (info_folder / "WHEEL").write_bytes(wheel)
    (info_folder / "LICENSE").write_bytes(licence)
    subprocess.run([sys.executable, "-m", "wheel", "pack", str(folder), "--dest-dir", str(output)], check=True)
    (packed,) = output.glob(f"{NAME}-*.whl")
    return packed
