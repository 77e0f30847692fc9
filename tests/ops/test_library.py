"""The loader takes the ops of tf_fusedrec_cuda where they add GPU kernels, and refuses those of another version."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from tf_fusedrec.ops import _library

DEVICE_CODE = "libfusedrec_cuda.so"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """An empty folder in the place of tf_fusedrec/ops, of version 0.1.0.2.16.2. No tf_fusedrec_cuda is there."""
    record = types.ModuleType("tf_fusedrec.ops._build_info")
    record.VERSION, record.TENSORFLOW_VERSION = "0.1.0.2.16.2", "2.16.2"
    monkeypatch.setitem(sys.modules, record.__name__, record)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in [name for name in sys.modules if name.startswith("tf_fusedrec_cuda")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "ops"
    folder.mkdir()
    monkeypatch.setattr(_library, "_HERE", folder)
    yield folder
    for name in [name for name in sys.modules if name.startswith("tf_fusedrec_cuda")]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path, own):
    """Installs a tf_fusedrec_cuda with these lines of _build_info.py, or without that file. Returns its folder."""

    def write(lines):
        package = tmp_path / "site/tf_fusedrec_cuda"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        if lines is not None:
            (package / "_build_info.py").write_text(lines, encoding="utf-8")
        importlib.invalidate_caches()
        return package

    return write


def test_alone_the_package_loads_its_own_ops(own):
    assert _library.find_library() == own / "_fusedrec_ops.so"


def test_the_ops_with_gpu_kernels_take_the_place_of_those_without(install):
    package = install('VERSION = "0.1.0.2.16.2"\n')
    assert _library.find_library() == package / "_fusedrec_ops.so"


def test_a_clone_that_has_compiled_gpu_kernels_keeps_its_own(own, install):
    install('VERSION = "9.9.2.16.2"\n')
    (own / DEVICE_CODE).touch()
    assert _library.find_library() == own / "_fusedrec_ops.so"


@pytest.mark.parametrize(
    ("lines", "version"),
    [('VERSION = "0.2.0.2.16.2"\n', "0.2.0.2.16.2"), ('VERSION = "0.1.0.2.21.0"\n', "0.1.0.2.21.0"),
     ("", "unknown"), (None, "unknown")],
)  # fmt: skip
def test_gpu_kernels_of_another_version_are_refused_by_name(install, lines, version):
    install(lines)
    with pytest.raises(ImportError) as refused:
        _library.find_library()
    told = str(refused.value)
    assert told.startswith(f"tf_fusedrec_cuda {version} is installed beside tf_fusedrec 0.1.0.2.16.2; ")
    assert "Remedy: pip install the wheel of tf_fusedrec_cuda 0.1.0.2.16.2, or pip uninstall tf_fusedrec_cuda" in told
