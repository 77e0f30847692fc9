"""The screen of a run: text of 80 and 100 columns, in a terminal and in a pipe. The figures are of no real run."""

import contextlib
import os
import pty
import re
import sys
import types

import pytest

from tf_fusedrec.models import screen

RECORD = {
    "folder": "runs/clicks/2026-11-25_2342",
    "resumed": [],
    "config": "clicks.yaml",
    "overrides": ["train.epochs=3"],
    "code": {"commit": "63dbaa3a1e4b", "changed_files": 2},
    "ranks": 2,
    "hosts": ["vm", "vm"],
    "experiment": {"seed": 0, "train": {"learning_rate": 0.002, "patience": 0}, "evaluate": {"cutoffs": [10, 50]}},
    "labels": {"ctr": "click", "ctcvr": "cart"},
    "validates": "validation",
    "epochs_wanted": 3,
    "data": {
        "source": "table, clicks.csv, 1 file, 200001 of 200001 rows",
        "users": 3799,
        "items": 1478,
        "splits": {
            "train": {
                "events": 160_000, "users": 3700, "first": 1709251200, "last": 1710252060,
                "labels": {"click": 0.203, "cart": 0.061}, "missing": {"brand": 0.03, "price": 0.08},
            },
            "validation": {"events": 20_000, "users": 2900, "first": 1710252061, "last": 1710328000},
            "test": {"events": 20_001, "users": 3069, "first": 1710328800, "last": 1710460799},
        },
    },
    "model": {
        "kind": "dlrm", "dense_weights": 9602, "schedule": "sync", "all_to_alls": 15,
        "tables": {
            "item": {"rows": 1472, "dim": 16, "rule": "Adam 0.004"},
            "user_id": {"rows": 3790, "dim": 16, "rule": "Adam 0.004"},
        },
    },
    "epochs": [],
    "state": "running",
}  # fmt: skip


def epoch(number, loss, val_loss, ctr, val_ctr, ctcvr, val_ctcvr, left, best):
    return {
        "epoch": number, "loss": loss, "val_loss": val_loss, "ctr_auc": ctr, "val_ctr_auc": val_ctr,
        "ctcvr_auc": ctcvr, "val_ctcvr_auc": val_ctcvr, "events_per_s": 21500.0, "seconds": 12.4, "left": left,
        "saved": True, "is_best": best,
    }  # fmt: skip


EPOCHS = [
    epoch(1, 0.719, 0.712, 0.61, 0.641, 0.58, 0.59, 84.0, True),
    epoch(2, 0.696, 0.708, 0.66, 0.653, 0.62, 0.598, 9.0, True),
    epoch(3, 0.675, 0.714, 0.69, 0.648, 0.65, float("nan"), 0.0, False),
]
METRICS = {
    "loss": {"value": 0.712},
    "ctr_auc": {"value": 0.6539, "baseline": 0.6533, "difference": 0.0006, "low": -0.0054, "high": 0.0066},
    "ctr_ne": {"value": 0.95},
    "ctr_calibration": {"value": 1.02},
    "ctcvr_auc": {"value": 0.598, "baseline": 0.6011, "difference": -0.0031, "low": -0.02, "high": -0.001},
}
RATES = {"events_per_s": 21500.0, "samples_per_s": 900.0, "tokens_per_s": 40000.0, "gflops_per_s": 1.25, "mfu": 0.031}
DONE = {**RECORD, "epochs": EPOCHS, "metrics": METRICS, "results": {"test": {}, **RATES}, "state": "done"}

WIDE = """\
run     runs/clicks/2026-11-25_2342 (new) · clicks.yaml + train.epochs=3 · seed 0
        git 63dbaa3 + 2 changed files
data    table · clicks.csv · 1 file · 200001 of 200001 rows · 3,799 users · 1,478 items
        2024-03-01 00:00 to 2024-03-14 23:59
        train 160,000 events · validation 20,000 events · test 20,001 events from 2024-03-13 11:20
        click 20.3 % · cart 6.1 % · missing: brand 3 %, price 8 %
model   DLRM · 2 tables, 5,262 rows so far (Adam 0.004) · 9,602 dense weights (Adam 0.002)
ranks   2 ranks on 1 host · schedule sync · 15 all-to-alls a step

   epoch    loss  val loss  click AUC     val  cart AUC     val  events/s    time    left
     1/3  0.7190    0.7120     0.6100  0.6410    0.5800  0.5900    21,500    12 s    1:24  saved *
     2/3  0.6960    0.7080     0.6600  0.6530    0.6200  0.5980    21,500    12 s     9 s  saved *
     3/3  0.6750    0.7140     0.6900  0.6480    0.6500            21,500    12 s          saved

test    20,001 events, 3,069 users        value  baseline          difference  surely better?
  loss                                   0.7120
  click AUC                              0.6539    0.6533    +0.0006 ± 0.0060  no
  click NE (below 1 is good)             0.9500
  click calibration (1 is right)         1.0200
  cart AUC (= click and cart)            0.5980    0.6011    -0.0031 ± 0.0095  worse
speed   21,500 events/s · 900 samples/s · 40,000 tokens/s · 1.2 gflops/s, mfu 0.0310

        !  no metric is surely above the baseline. Ideas: more epochs (train.epochs), a larger
           train.learning_rate, more columns, crosses of ids (model.crosses), train.keep_best.
        !  validation loss rises since epoch 2: the model begins to overfit. --set train.patience=1
           stops there; the best epoch so far is 2.
report  fusedrec report runs/clicks/2026-11-25_2342
resume  fusedrec train --resume runs/clicks/2026-11-25_2342 --set train.epochs=6
serve   fusedrec serve runs/clicks/2026-11-25_2342
"""
NARROW = """\
run     runs/clicks/2026-11-25_2342 (new) · clicks.yaml + train.epochs=3
        seed 0 · git 63dbaa3 + 2 changed files
data    table · clicks.csv · 1 file · 200001 of 200001 rows · 3,799 users
        1,478 items · 2024-03-01 00:00 to 2024-03-14 23:59
        train 160,000 events · validation 20,000 events
        test 20,001 events from 2024-03-13 11:20
        click 20.3 % · cart 6.1 % · missing: brand 3 %, price 8 %
model   DLRM · 2 tables, 5,262 rows so far (Adam 0.004)
        9,602 dense weights (Adam 0.002)
ranks   2 ranks on 1 host · schedule sync · 15 all-to-alls a step

   epoch    loss  val loss  click AUC     val  events/s    time    left
     1/3  0.7190    0.7120     0.6100  0.6410    21,500    12 s    1:24  saved *
     2/3  0.6960    0.7080     0.6600  0.6530    21,500    12 s     9 s  saved *
     3/3  0.6750    0.7140     0.6900  0.6480    21,500    12 s          saved

test    20,001 events, 3,069 users
                            value  baseline          difference  surely better?
  loss                     0.7120
  click AUC                0.6539    0.6533    +0.0006 ± 0.0060  no
  click NE                 0.9500
  click calibration        1.0200
  cart AUC                 0.5980    0.6011    -0.0031 ± 0.0095  worse
speed   21,500 events/s · 900 samples/s · 40,000 tokens/s
        1.2 gflops/s, mfu 0.0310

        !  no metric is surely above the baseline. Ideas: more epochs
           (train.epochs), a larger train.learning_rate, more columns, crosses
           of ids (model.crosses), train.keep_best.
        !  validation loss rises since epoch 2: the model begins to overfit.
           --set train.patience=1 stops there; the best epoch so far is 2.
report  fusedrec report runs/clicks/2026-11-25_2342
resume  fusedrec train --resume runs/clicks/2026-11-25_2342 --set train.epochs=6
serve   fusedrec serve runs/clicks/2026-11-25_2342
"""


def whole(width):
    lines = [screen.header(RECORD, width), "", screen.epochs_heading(RECORD, width)]
    lines += [screen.epoch_line(RECORD, entry, width) for entry in EPOCHS]
    return "\n".join([*lines, "", screen.ending(DONE, width), ""])


@pytest.mark.parametrize(("width", "golden"), [(100, WIDE), (80, NARROW)])
def test_the_screen_of_a_run(width, golden):
    assert whole(width) == golden
    assert max(map(len, golden.splitlines())) <= width


@pytest.mark.parametrize("width", [20, 40, 80, 100])
def test_the_live_bar_is_shorter_than_the_terminal(width):
    progress = {"epoch": 3, "loss": 0.675, "step": 412, "steps": 764, "events_per_s": 23100.0, "left": 4.0}
    line = screen.bar_line(RECORD, progress, width)
    assert len(line) < width
    if width >= 80:
        assert line == "     3/3  0.6750  [================              ] 412/764  23,100/s  4 s left"


def test_a_run_above_its_baseline_that_goes_on_learning_gets_no_hint():
    metrics = {"ctr_auc": {**METRICS["ctr_auc"], "low": 0.001}}
    assert screen.hints({**DONE, "epochs": EPOCHS[:2], "metrics": metrics}) == []


def test_a_conversion_that_is_the_click_itself_is_not_shown_and_hides_no_hint():
    metrics = {"ctr_auc": METRICS["ctr_auc"], "ctcvr_auc": {**METRICS["ctcvr_auc"], "low": 0.001}}
    record = {**DONE, "labels": {"ctr": "click", "ctcvr": "click"}, "epochs": EPOCHS[:2], "metrics": metrics}
    assert "no metric is surely above the baseline" in " ".join(screen.hints(record))
    assert [line.split()[:2] for line in screen.test_table(record, 100)][1:-1] == [["click", "AUC"]]


def test_retrieval_shows_its_cutoffs_and_a_run_without_a_split_no_column_of_it():
    fields = {**RECORD, "labels": {}, "validates": "test"}
    words = " ".join(screen.epochs_heading(fields, 100).split())
    assert words == "epoch loss test HR@10 test NDCG@10 events/s time left"
    fields = {**RECORD, "labels": {"ctr": "click", "ctcvr": "click"}, "validates": ""}
    words = " ".join(screen.epochs_heading(fields, 100).split())
    assert words == "epoch loss click AUC events/s time left"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_a_live_bar_and_a_pipe_a_line_for_each_epoch(tmp_path, monkeypatch, is_terminal):
    from tf_fusedrec.models import run_callbacks
    from tf_fusedrec.models.run_folder import RunRecord

    source, target = pty.openpty() if is_terminal else os.pipe()
    with open(target, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(run_callbacks, "_REDRAW_S", 0.0)
        monkeypatch.setattr(run_callbacks, "terminal_width", lambda: 60 if sys.stdout.isatty() else 0)
        record = RunRecord(tmp_path)
        record.update(**RECORD)
        progress = run_callbacks.Progress(record, lambda: types.SimpleNamespace(best={"epoch": 1}))
        model = types.SimpleNamespace(step=0)
        progress.set_model(model)
        progress.set_params({"steps": 3})
        progress.on_train_begin()
        for number in range(2):
            progress.on_epoch_begin(number)
            losses = [0.9 - number, 0.8 - number, 0.4 - number]
            for batch in range(3):
                model.step += 1
                mean = sum(losses[: batch + 1]) / (batch + 1)
                progress.on_train_batch_end(batch, {"loss": mean, "events": 100.0 * (batch + 1)})
            progress.on_epoch_end(number, {**EPOCHS[number], "loss": mean})
        monkeypatch.undo()
    shown = b""
    with open(source, "rb", buffering=0) as file, contextlib.suppress(OSError):  # the end of a terminal
        while block := file.read(4096):
            shown += block
    shown = shown.decode().replace("\r\n", "\n")
    lines = [re.sub(r".*\r\x1b\[K", "", line).split() for line in shown.strip().split("\n")]
    assert [line[:2] for line in lines] == [["epoch", "loss"], ["1/3", "0.7000"], ["2/3", "-0.3000"]]
    assert lines[1][-1] == "saved" and lines[2][-2:] == ["saved", "*"]
    bars = re.findall(r"\r( +\d/3 [^\r]*)\x1b\[K", shown)
    assert len(bars) == (6 if is_terminal else 0) and all(len(bar) < 60 for bar in bars)
    assert is_terminal or not set("\r\b\x1b") & set(shown)
    assert record.fields["steps"]["step"] == [1, 2, 3, 4, 5, 6]
    assert record.fields["steps"]["loss"] == pytest.approx([0.9, 0.8, 0.4, -0.1, -0.2, -0.6])


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_a_tracker_gets_the_settings_and_is_refused_without_its_package(tmp_path, monkeypatch, kind):
    from tf_fusedrec.models import run_callbacks
    from tf_fusedrec.models.run_folder import RunRecord

    record = RunRecord(tmp_path / "2026-11-25_2342")
    record.fields["experiment"] = {"name": "clicks", "train": {"epochs": 3}}
    monkeypatch.setattr(run_callbacks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"tracker is '{kind}', which is not installed. Use `pip install {kind}`"):
        run_callbacks.tracker(kind, record)
    monkeypatch.setattr(run_callbacks.importlib.util, "find_spec", lambda name: name)
    told, logged = {}, {}

    class Callback:
        """As MLflow's and W&B's callbacks, of which MLflow's refuses the names of an epoch together."""

        def on_epoch_end(self, epoch, logs=None):
            assert kind == "wandb" or all(re.fullmatch(r"[\w\-. :/]+", name) for name in logs), logs
            logged[epoch] = logs

    package = types.ModuleType(kind)
    package.set_experiment = lambda name: told.update(project=name)
    package.start_run = lambda run_name: told.update(name=run_name)
    package.log_dict = lambda fields, file: told.update(config=fields["experiment"])
    package.init = told.update
    package.keras = types.ModuleType(f"{kind}.keras")
    package.keras.MlflowCallback = package.keras.WandbMetricsLogger = Callback
    modules = {kind: package, "wandb.integration": package, "wandb.integration.keras": package.keras}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    run_callbacks.tracker(kind, record).on_epoch_end(0, {"loss": 2.0, "val_hr@10": 0.5})
    assert logged == {0: {"loss": 2.0, {"mlflow": "val_hr_at_10", "wandb": "val_hr@10"}[kind]: 0.5}}
    assert told == {"project": "clicks", "name": "2026-11-25_2342", "config": record.fields["experiment"]}
