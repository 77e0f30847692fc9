"""The benchmarks on a GPU and their session name what is missing. tests/gpu tests the rest on a GPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.gpu import session

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ["tests.gpu.session", *(f"benchmarks.{name}" for name in session.BENCHMARKS)]


@pytest.mark.skipif(session.lacking() is None, reason="there is a GPU: tests/gpu runs the real thing")
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_says_what_it_lacks(program, tmp_path):
    arguments = [] if program.endswith("session") else ["--quick", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace"
    )
    assert done.returncode != 0 and done.stderr.startswith("error: "), done.stderr
    assert any(word in done.stderr for word in ("PyTorch", "GPU", "is not built"))
    assert "Traceback" not in done.stderr and not (tmp_path / "out.json").exists()


def test_the_session_knows_every_op_and_benchmark():
    assert {"segment_unique", "rank_partition", "recovery", "hash_table"} <= set(session.OPS)
    assert {"gpu_segment_unique", "gpu_recovery", "gpu_table"} <= set(session.BENCHMARKS)
