"""benchmarks.ops runs with --quick, checks its ops and writes its fields; its GPU cases run over the emulation."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.harness import gpu, harness
from benchmarks.harness.gpu import Rates, Work, bounded
from benchmarks.ops import __main__ as benchmark
from benchmarks.ops import cases
from tests.cuda import libraries
from tests.gpu import session

RATES = Rates(copy_bytes_per_s=2e12, matrix_flops=5e14, link_bytes_per_s=4e10)


@pytest.fixture(autouse=True)
def few_turns(monkeypatch):
    measure = harness.measure
    monkeypatch.setattr(harness, "Copy", functools.partial(harness.Copy, megabytes_each=1))
    monkeypatch.setattr(harness, "measure", lambda variants, **_: measure(variants, warmup=0, repeats=1))


def test_a_wrong_result_is_not_measured(monkeypatch):
    honest = cases.segment_unique_oracle

    def wrong(ids, splits):
        unique, unique_splits, inverse = honest(ids, splits)
        return unique, unique_splits, np.roll(inverse, 1)

    monkeypatch.setattr(cases, "segment_unique_oracle", wrong)
    with pytest.raises(harness.CheckFailed, match="result 2 of segment_unique, ours"):
        cases.measure("segment_unique", quick=True)


def test_an_unknown_op_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setattr("sys.argv", ["ops", "fuse_ids", "--device", "gpu"])
    with pytest.raises(SystemExit, match="NAME fuse_ids has no case on this device. Use segment_unique, recovery"):
        benchmark.main()


@pytest.mark.skipif(session.lacking() is None, reason="there is a GPU: tests/gpu runs the real thing")
def test_a_machine_without_a_gpu_is_told_what_it_lacks(tmp_path):
    command = [sys.executable, "-m", "benchmarks.ops", "table", "--device", "gpu", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode != 0 and done.stderr.startswith("error: "), done.stderr
    assert any(word in done.stderr for word in ("PyTorch", "GPU", "is not built"))
    assert "Traceback" not in done.stderr and not (tmp_path / "r.json").exists()


def test_every_case_runs_over_the_emulation():
    """Checks, calls and fields of the benchmarks, so that a machine with a GPU is not lent to find a wrong name."""
    done = libraries.under_sanitizers("tests.gpu.benchmarks_over_emulation", str(libraries.build()))
    assert done.returncode == 0 and "the cases of the benchmarks run" in done.stdout, done.stdout + done.stderr


def test_a_run_that_is_cut_off_leaves_the_cases_before(tmp_path, monkeypatch):
    from benchmarks.ops import gpu as gpu_cases

    def measure(kernels, rates, libraries, size):
        if size == 2:
            raise KeyboardInterrupt
        return [{"name": "find", "us": 1.5}, {"name": "torch", "published": 2}]

    for name, value in {"open_kernels": None, "measured_rates": RATES, "device": {"name": "a device"}}.items():
        monkeypatch.setattr(gpu, name, lambda value=value: value)
    monkeypatch.setitem(gpu_cases.CASES, "table", gpu_cases.Cases([measure], [[1], [2]], [], ["no_such_library"]))
    with pytest.raises(KeyboardInterrupt):
        benchmark.on_gpu(["table"], True, tmp_path / "folder/r.json")
    written = json.loads((tmp_path / "folder/r.json").read_text(encoding="utf-8"))
    assert [line["name"] for line in written["results"]] == ["find", "torch"]
    assert written["device"] == {"name": "a device"} and list(written["left_out"]) == ["no_such_library"]


@pytest.mark.parametrize(
    ("work", "bound_by", "seconds"),
    [
        (Work(bytes=2 * 10**9, flops=1e9), "bytes", 1e-3),
        (Work(bytes=3 * 2 * 8192**2, flops=2.0 * 8192**3), "flops", 2 * 8192**3 / 5e14),
        (Work(bytes=10**6, flops=1e9, host_bytes=4 * 10**6), "host_bytes", 1e-4),
    ],
)
def test_the_bound_is_the_longest_of_three_times(work, bound_by, seconds):
    fields = bounded(2e6 * seconds, work, RATES)
    assert (fields["bound_by"], fields["bytes"], fields["flops"]) == (bound_by, work.bytes, work.flops)
    assert fields["bound_us"] == pytest.approx(1e6 * seconds) and fields["fraction_of_bound"] == pytest.approx(0.5)


def test_a_call_without_work_has_no_bound():
    with pytest.raises(ValueError, match="needs bytes, flops or host_bytes above 0"):
        bounded(1.0, Work(), RATES)


def test_libraries_that_are_missing_or_broken_are_left_out_by_name(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise OSError('libcuda.so.1 is missing')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    modules, left_out = gpu.libraries(["numpy", "broken_library", "no_such_library"])
    assert modules == {"numpy": np} and left_out["broken_library"] == "OSError: libcuda.so.1 is missing"
    assert "no_such_library" in left_out["no_such_library"] and len(left_out) == 2
