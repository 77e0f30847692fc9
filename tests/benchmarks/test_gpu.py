"""The benchmarks on a GPU name what is missing, and their cases run over the emulation."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.harness import gpu_device
from benchmarks.harness.roofline import Rates
from tests.cuda import libraries
from tests.gpu import benchmarks_over_emulation, session

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = [f"benchmarks.{name}" for name in session.BENCHMARKS]


@pytest.mark.skipif(session.lacking() is None, reason="there is a GPU: tests/gpu runs the real thing")
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_says_what_it_lacks(program, tmp_path):
    arguments = ["--quick", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace"
    )
    assert done.returncode != 0 and done.stderr.startswith("error: "), done.stderr
    assert any(word in done.stderr for word in ("PyTorch", "GPU", "is not built"))
    assert "Traceback" not in done.stderr and not (tmp_path / "out.json").exists()


def test_every_case_runs_over_the_emulation():
    """Checks, calls and fields of the benchmarks, so that a machine with a GPU is not lent to find a wrong name."""
    folder = libraries.ROOT / "build/emulation"
    for op in benchmarks_over_emulation.OPS:
        libraries.build(op, folder)
    done = libraries.under_sanitizers("tests.gpu.benchmarks_over_emulation", str(folder))
    assert done.returncode == 0 and "the cases of the benchmarks run" in done.stdout, done.stdout + done.stderr


def test_a_report_has_every_case_as_soon_as_it_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_device, "device", lambda: {"name": "a device"})
    path = tmp_path / "folder/results.json"
    report = gpu_device.Report(path, Rates(1.0, 2.0, 3.0), {"cupy": "it is not installed"})
    for n in range(3):
        report.add([{"name": "find", "us": 1.5 * n}])
        written = json.loads(path.read_text(encoding="utf-8"))
        assert [line["us"] for line in written["results"]] == [1.5 * m for m in range(n + 1)]
    assert written["rates"] == {"copy_bytes_per_s": 1.0, "matrix_flops": 2.0, "link_bytes_per_s": 3.0}
    assert written["device"] == {"name": "a device"} and written["left_out"] == {"cupy": "it is not installed"}
    assert "left out: cupy: it is not installed" in capsys.readouterr().out


def test_the_session_knows_every_op_and_benchmark():
    assert {"segment_unique", "rank_partition", "recovery", "hash_table"} <= set(session.OPS)
    assert {"gpu_segment_unique", "gpu_recovery", "gpu_table"} <= set(session.BENCHMARKS)
