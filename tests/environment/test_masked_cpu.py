"""The ops run on processors without AVX-512 and without AVX2: the kernels are chosen when the library loads.

A test links the objects of the set-up once more, with features of the processor hidden from the compiler's own
functions that report them. The loader's choice among the functions of simd.h and the engines of jagged_attention ask
these functions alone. So the ops then run as on the older processor, and must give the golden bits.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

from tests.golden import hashes
from tests.support.setup_py import names_of_setup
from tests.support.shared import ROOT
from tf_fusedrec import ops, tf
from tf_fusedrec.ops import _library
from tf_fusedrec.ops._library import LIBRARY_PATH

# What remains -> the engine of attention, and the numbers of the features that are hidden, which are part of GCC's ABI.
HIDDEN = {"AVX2 (x86-64-v3)": ("avx2", (98,)), "SSE2 (x86-64)": ("generic", (97, 98))}
LEVELS = ("SSE2 (x86-64)", "AVX2 (x86-64-v3)", "AVX-512 (x86-64-v4)")
MASK = """
extern "C" {
extern unsigned __cpu_features2[];  // one bit for each feature from number 32 on
int __real___cpu_indicator_init();
__attribute__((constructor(101))) int __wrap___cpu_indicator_init() {
  const int answer = __real___cpu_indicator_init();
  const int hidden[] = {%s};
  for (const int feature : hidden) __cpu_features2[feature / 32 - 1] &= ~(1u << feature %% 32);
  return answer;
}
}
"""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64, whose features it hides")


@pytest.fixture(scope="module")
def linking() -> list[str]:
    """Returns the command that links the ops; the objects are those of the set-up."""
    kernels = LIBRARY_PATH.parent / "libfusedrec_cuda.so"
    return names_of_setup()["op_library"](kernels if kernels.exists() else None)[0].words()


def masked_package(folder: pathlib.Path, features: tuple[int, ...], linking: list[str]) -> pathlib.Path:
    """Makes a copy of the package in `folder`, whose ops do not see these features."""
    package = folder / "tf_fusedrec"
    shutil.copytree(ROOT / "tf_fusedrec", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in LIBRARY_PATH.parent.glob("lib*.so"):
        (package / "ops" / path.name).symlink_to(path)
    source = folder / "mask.cc"
    source.write_text(MASK % ", ".join(map(str, features)), encoding="utf-8")
    command = [*linking, "-Wl,--wrap=__cpu_indicator_init", str(source)]
    subprocess.run([*command, "-o", str(package / "ops/_fusedrec_ops.so")], cwd=ROOT, check=True)
    return package


def pooled() -> list[list[float]]:
    """Means of rows of 19 columns, which leave a rest in every vector."""
    rows = tf.reshape(tf.sin(tf.range(50 * 19, dtype=tf.float32)), [50, 19])
    index, splits = tf.range(300) * 7 % 50, tf.constant([0, 100, 107, 107, 300], tf.int64)
    scale = tf.constant([1 / 100, 1 / 7, 0, 1 / 193], tf.float32)
    return ops.pooled_recover(rows, index, splits, scale).numpy().tolist()


CHILD = """
import json, tf_fusedrec
from tests.environment.test_masked_cpu import pooled
from tests.golden import attention, tables
from tf_fusedrec.ops import _library
print(json.dumps({
    "package": tf_fusedrec.__file__, "kernels": _library.cpu_kernels(), "pooled": pooled(),
    "attention": attention.digests(), "tables": tables.differing(range(tables.PROGRAMS)),
}))
"""


@pytest.mark.parametrize("level", HIDDEN)
def test_the_ops_answer_alike_on_an_older_processor(level, linking, tmp_path):
    if LEVELS.index(level) >= LEVELS.index(_library.cpu_kernels()):
        pytest.skip(f"this processor has {_library.cpu_kernels()}; there is nothing to hide")
    engine, features = HIDDEN[level]
    package = masked_package(tmp_path, features, linking)
    path = f"{package.parent}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=tmp_path, capture_output=True, encoding="utf-8", errors="replace",
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "package": str(package / "__init__.py"), "kernels": level, "pooled": pooled(),
        "attention": hashes.read("attention")[engine], "tables": [],
    }  # fmt: skip


def test_only_chosen_functions_have_instructions_of_newer_processors():
    """An inline function that a file for AVX2 shares with others could otherwise bring them everywhere."""
    listed = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(LIBRARY_PATH)], capture_output=True, encoding="utf-8",
        errors="replace", check=True,
    ).stdout  # fmt: skip
    function, users = "", set()
    for line in listed.splitlines():
        if line.endswith(">:"):
            function = line
        elif "%ymm" in line or "%zmm" in line or "\tv" in line:
            users.add(function)
    assert users
    chosen = re.compile(r"\.arch_x86_64_v[34]|fusedrec::tiles_avx(2|512)::")
    assert [name for name in users if not chosen.search(name)] == []
