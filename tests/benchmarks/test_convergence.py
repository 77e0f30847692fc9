"""benchmarks.convergence on a small KuaiRand log: equal rows in both tables, its points, differences and refusals."""

import json

import pytest

from benchmarks.convergence import __main__ as benchmark
from benchmarks.convergence import job
from benchmarks.harness import children, harness
from benchmarks.ranking import data_sets
from tests.benchmarks import kuairand_log


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return kuairand_log.write(tmp_path_factory.mktemp("log"))


def test_both_tables_train_the_same_model(source, tmp_path):
    pytest.importorskip("tensorflow_recommenders_addons", reason="TFRA is not installed")
    data = data_sets.data_set_of(source)
    folder = data.prepared(source, tmp_path)["test"]
    experiment = data.experiment("grm", ["train.epochs=2"]).to_dict()
    native, tfra = [job.main(experiment, backend, 1, str(folder)) for backend in ("native", "tfra")]
    assert [point["step"] for point in native] == [point["step"] for point in tfra] == list(range(len(native)))
    assert len(native) > 2
    assert native[-1]["loss"] != native[0]["loss"], "the model trained"
    for one, other in zip(native, tfra):
        # Sums of float32 in another order, over a few steps.
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def _answers(changed):
    """Returns a stand-in of children.ask: GAUC and AUC rise by 0.1 per point, and `changed` adds to one backend."""

    def ask(module, *, experiment, backend, every, data):
        assert module == "benchmarks.convergence.job" and every == 1
        add = changed.get((backend, experiment["seed"]), lambda point: 0.0)
        names = [f"{task}_{metric}" for task in ("ctr", "long_view") for metric in ("gauc", "auc")]
        return [{"step": point, **{name: 0.5 + 0.1 * point + add(point) for name in names}} for point in range(3)]

    return ask


def test_the_largest_difference_at_any_point_is_reported(source, tmp_path, monkeypatch, capsys):
    changed = {("tfra", 0): lambda point: 0.01 * (point == 1), ("native", 1): lambda point: 0.02 * point}
    monkeypatch.setattr(children, "ask", _answers(changed))
    given = ["--data", str(source), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")]
    benchmark.main(given)
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert result["gauc_difference"] == result["second_auc_difference"] == pytest.approx(0.01)
    assert result["auc_difference_seeds"] == pytest.approx(0.04)
    assert result["gauc"] == pytest.approx({"native": 0.7, "tfra": 0.7}) and result["steps"] == 2
    assert [(one["backend"], one["seed"]) for one in result["curves"]] == [("native", 0), ("tfra", 0), ("native", 1)]
    assert "between two seeds 0.04" in capsys.readouterr().out
    benchmark.main([*given, "--quick"])
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert "gauc_difference_seeds" not in result and len(result["curves"]) == 2


def test_tables_that_begin_otherwise_are_no_comparison(source, tmp_path, monkeypatch):
    monkeypatch.setattr(children, "ask", _answers({("tfra", 0): lambda point: 0.01 * (point == 0)}))
    with pytest.raises(harness.CheckFailed, match="ctr_gauc before the first step"):
        benchmark.main(["--data", str(source), "--run", str(tmp_path)])
