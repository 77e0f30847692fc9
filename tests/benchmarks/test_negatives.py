"""benchmarks.negatives, tiny: both forms must agree before any timing, and the JSON has its documented fields."""

import itertools
import json

import pytest

from benchmarks.harness import harness, processes
from benchmarks.negatives import __main__ as negatives
from tf_fusedrec import tf

WIRE = {"wire_bytes_float32": {"others_rows": 8}, "wire_bytes_float16": {"negative_rows": 4}, "wire_ratio": 0.5}


def test_the_fields_of_the_json(tmp_path, monkeypatch):
    monkeypatch.setattr(negatives, "QUICK_POSITIONS", 32)
    monkeypatch.setattr(negatives.Case.__init__, "__defaults__", (500,))
    peaks = {"plain": itertools.cycle([8.0, 9.0, 4.0]), "ours": itertools.cycle([2.0, 9.0, 1.0])}  # medians 8 and 2
    monkeypatch.setattr(processes, "ask", lambda function, form, **request: next(peaks[form]))
    monkeypatch.setattr(processes, "ask_ranks", lambda function, ranks: WIRE)
    monkeypatch.setattr("sys.argv", ["negatives", "--quick", "--json", str(tmp_path / "r.json")])
    negatives.main()
    results = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert results["peak_memory_ratio"] == 0.25 and results["step_time_ratio"] > 0 and results["wire_ratio"] == 0.5
    case = results["cases"][0]
    assert (case["negatives"], case["positions"]) == (128, 32) and case["rows"] <= 500
    assert case["loss_ours"] == pytest.approx(case["loss_plain"], rel=1e-5)
    # Rows have 11 bits, so that logits up to 20 have errors of a few hundredths at most.
    assert case["loss_float16_rows"] == pytest.approx(case["loss_plain"], rel=1e-2)


def test_a_wrong_gradient_is_not_measured(monkeypatch):
    honest = negatives.losses.sampled_softmax
    monkeypatch.setattr(negatives.losses, "sampled_softmax", lambda *a, **k: honest(*a, **k) + 1e-3 * tf.norm(a[0]))
    with pytest.raises(harness.CheckFailed, match="gradients"):
        negatives.check_gradients()
