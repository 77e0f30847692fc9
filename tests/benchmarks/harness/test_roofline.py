"""The bound beside a time, against NumPy's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness.gpu_peers import Libraries
from benchmarks.harness.roofline import Rates, Work, beside

RATES = Rates(copy_bytes_per_s=2e12, matrix_flops=5e14, link_bytes_per_s=4e10)


def test_the_bound_is_the_longest_of_three_times():
    random = np.random.default_rng(0)
    names, met = ("bytes", "flops", "host_bytes"), set()
    for _ in range(200):
        work = Work(*(int(10 ** random.uniform(3, most)) for most in (11, 15, 10)))
        us = float(random.uniform(1, 1e4))
        seconds = np.array([work.bytes, work.flops, work.host_bytes], np.float64) / np.array([2e12, 5e14, 4e10])
        fields = beside(us, work, RATES)
        assert fields["bound_by"] == names[int(np.argmax(seconds))]
        np.testing.assert_allclose(fields["bound_us"], 1e6 * seconds.max(), rtol=1e-12)
        np.testing.assert_allclose(fields["fraction_of_bound"], seconds.max() / (us * 1e-6), rtol=1e-12)
        assert (fields["us"], fields["bytes"], fields["flops"], fields["host_bytes"]) == (us, *work)
        met.add(fields["bound_by"])
    assert met == set(names)


def test_a_copy_and_a_product_at_the_measured_rates_reach_their_bounds():
    assert beside(1000.0, Work(bytes=2 * 10**9), RATES)["fraction_of_bound"] == pytest.approx(1.0)
    product = beside(2 * 8192**3 / 5e14 * 1e6, Work(bytes=3 * 2 * 8192**2, flops=2.0 * 8192**3), RATES)
    assert product["bound_by"] == "flops" and product["fraction_of_bound"] == pytest.approx(1.0)


def test_a_call_without_work_has_no_bound():
    with pytest.raises(ValueError, match="needs bytes, flops or host_bytes above 0"):
        beside(1.0, Work(), RATES)


def test_libraries_that_are_missing_or_broken_are_left_out_by_name(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise OSError('libcuda.so.1 is missing')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    libraries = Libraries(["numpy", "broken_library", "no_such_library"])
    assert libraries.get("numpy") is np and libraries.get("broken_library") is None
    assert libraries.left_out["broken_library"] == "OSError: libcuda.so.1 is missing"
    assert "no_such_library" in libraries.left_out["no_such_library"] and len(libraries.left_out) == 2
