"""Every registered op has a shape function and documentation, and its library has its kernel for the CPU."""

from __future__ import annotations

import pathlib
import re

import pytest

from tf_fusedrec import tf
from tf_fusedrec.exchange import gloo
from tf_fusedrec.ops._library import library

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "custom_ops").rglob("*_op.cc"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_registrations_have_shape_functions_docs_and_kernels(source):
    from tensorflow.python.framework.kernels import get_registered_kernels_for_op

    ops = library
    if source.parent.name == "gloo_exchange":
        if not gloo.LIBRARY_PATH.exists():
            pytest.skip("built without Gloo's sources")
        ops = tf.load_op_library(str(gloo.LIBRARY_PATH))
    text = source.read_text(encoding="utf-8")
    names = re.findall(r'^(?:REGISTER|FUSEDREC_\w+)_OP\("(.+?)"\)', text, re.M)
    assert names and all(name.startswith("Fusedrec>") for name in names)
    assert text.count(".SetShapeFn(") == text.count(".Doc(") == len(names)
    for name in names:
        assert hasattr(ops, "fusedrec_" + re.sub(r"\B([A-Z])", r"_\1", name.partition(">")[2]).lower()), name
        assert "CPU" in {kernel.device_type for kernel in get_registered_kernels_for_op(name).kernel}, name
