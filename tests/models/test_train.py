"""The main job from its command line: a run on two ranks, an interruption with its resumption, a failing rank."""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.models import experiments, job
from tests.support.graphs import saved_operations
from tests.support.ranks import run_ranks
from tests.support.tensorboard import scalars
from tf_fusedrec import tf
from tf_fusedrec.checkpoint import read_tables
from tf_fusedrec.checkpoint.loading import dense_prefix
from tf_fusedrec.cli.main import main as fusedrec
from tf_fusedrec.models import evaluate, screen, train
from tf_fusedrec.models.data_sets.synthetic import write_synthetic_retrieval
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.export import trained_model
from tf_fusedrec.models.prepare import prepare_data
from tf_fusedrec.models.run_folder import RunRecord, read_record


@pytest.mark.parametrize(
    ("fields", "metrics"),
    [
        pytest.param(experiments.RANKING, ["ctr_auc", "ctcvr_gauc"], marks=pytest.mark.both, id="ranking"),
        pytest.param(experiments.RETRIEVAL, ["hr@10", "ndcg@50", "mrr"], id="retrieval"),
    ],
)
def test_two_ranks_train_evaluate_and_export(tmp_path, fields, metrics):
    """The launcher starts the job of ranking. The other one runs in forks, which saves the imports."""
    # Such large steps make an epoch worse than the one before it sooner or later.
    arguments = ["--set", "train.epochs=40", "--set", "train.patience=1", "--set", "train.learning_rate=1.0"]
    (tmp_path / "run/saved_model").mkdir(parents=True)
    (tmp_path / "run/saved_model/of_an_earlier_run").touch()
    if follows := fields is experiments.RANKING:  # a folder of partitions
        folder = experiments.in_partitions(prepare_data(from_dict(fields), tmp_path / "data"), 3)
        (folder / "train" / "_STOP").touch()
        arguments = ["--data", str(folder), "--set", "data.follow=true", "--set", "train.progressive_steps=2"]
        arguments += ["--set", "train.embedding_metrics=true"]
        code, output = job.output_of(tmp_path, fields, 2, *arguments)
    else:
        arguments = job.training(tmp_path, fields) + arguments
        (code, output), (_, of_rank_1) = run_ranks(trained, 2, arguments=arguments)
        assert of_rank_1 == ""
    assert code == 0, output
    written, record = scalars(tmp_path / "run" / "tensorboard"), read_record(tmp_path / "run")
    if follows:
        samples = [epoch["samples"] for epoch in record["epochs"]]
        assert sum(samples) == fields["data"]["users"] and len(samples) == 3  # Keras' epochs are the partitions
        assert saved(tmp_path)["input"]["partition"] == [2, "hour=10"]
        assert re.search(r"step 2: progressive/ctr_auc_window [0-9.na]+ progressive/ctr_auc_cumulative ", output)
        assert "ends after 3 partitions: _STOP exists" in output
        assert list((tmp_path / "run" / "tensorboard" / "progressive").glob("events.*"))
        rows, growth = written["epoch_rows/item"], written["epoch_growth/item"]
        np.testing.assert_array_equal(rows, np.cumsum(growth))  # the first fit, once for each partition
        assert len(rows) == 3 and 0 < rows[-1] <= fields["data"]["items"] and written["epoch_all_to_all_bytes"][0] > 0
    else:
        rates = written["epoch_hr@10"]  # of validation
        ended = next(i for i, rate in enumerate(rates) if i and rate <= max(rates[:i]))
        assert len(rates) == ended + 1 == saved(tmp_path)["epoch"] < 40
        best = int(np.argmax(rates))
        assert f"best epoch: {best + 1}, HR@10 {rates[best]:.4f}" in output and "  val HR@10  " in output
        assert f"Epoch {ended + 1}: early stopping" in output and not [tag for tag in written if "rows/" in tag]
    results = record["results"]
    assert not (tmp_path / "run/saved_model/of_an_earlier_run").exists()
    assert not list((tmp_path / "run").glob("*.new")) and not list((tmp_path / "run").glob("*.old"))
    for name in metrics:
        assert 0.0 <= results["test"][name] <= 1.0
        assert 0.0 <= results["test"][f"baseline_{name}"] <= 1.0
        assert name in record["metrics"]
    # Both ranks measure at once, and a model this small uses next to nothing of the measured rate.
    assert 0.0 < results["mfu"] < 1.0 and results["gflops_per_s"] > 0.0
    for line in ("samples/s", "tokens/s", "gflops/s", "mfu ", "resume ", "serve "):
        assert line in output
    assert results["served_difference"] <= 1e-4
    assert (
        not {"epoch_samples", "epoch_tokens", "epoch_gflops"} & set(written)
        and "_hparams_/session_start_info" in written
    )
    assert all(table["moved"] > 0 for table in record["model"]["tables"].values())
    assert f"report  {record['report']}\n" in output and "<svg" in pathlib.Path(record["report"]).read_text("utf-8")
    assert record["state"] == "done" and record["ranks"] == 2 and len(record["hosts"]) == 2
    assert record["exchange"] in ("gloo", "horovod")
    lines = [line for line in output.splitlines() if line.endswith((" saved", " saved *"))]
    assert len(lines) == len(record["epochs"]) and not [line for line in lines if line.startswith("[1]")]
    assert "\r" not in output and "\b" not in output
    assert list((tmp_path / "run" / "tensorboard").rglob("events.*"))
    assert not [op for op in saved_operations(tmp_path / "run/saved_model") if ">" in op or "Horovod" in op]
    evaluated_again(tmp_path, results["test"], ranks=1 if follows else 2)


def trained(arguments):
    """Body: one rank of `fusedrec train`. Returns its exit code and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = fusedrec(["train", *arguments])
    return code, output.getvalue()


def evaluated(arguments):
    """Body: returns the output of `fusedrec evaluate`, which rank 0 prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert fusedrec(["evaluate", *arguments]) == 0
    return output.getvalue()


def evaluated_again(tmp_path, results, ranks):
    """`fusedrec evaluate` computes the job's own metrics."""
    arguments = [str(tmp_path / "run"), "--json"]
    output = evaluated(arguments) if ranks == 1 else run_ranks(evaluated, ranks, arguments=arguments)[0]
    again = json.loads(output)["test"]
    assert set(again) == set(results)
    for name, value in results.items():
        # The weights and rows are equal. Other numbers of ranks have other batches and sum float32 in another order.
        np.testing.assert_allclose(again[name], value, rtol=1e-5, err_msg=name)
    assert all(
        screen.title_of(name, {}) in evaluate.table(again, {}) for name in results if not name.startswith("baseline_")
    )


def samples_of(tmp_path, epoch):
    """Returns the rows of all ranks that a job has trained of an epoch; the first epoch is 0."""
    (entry,) = (one for one in read_record(tmp_path / "run")["epochs"] if one["epoch"] == epoch + 1)
    return entry["samples"]


def saved(tmp_path):
    manifest = json.loads((tmp_path / "run" / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
    return manifest["extra"]


def test_interrupted_jobs_save_on_all_ranks_and_go_on(tmp_path):
    endless = {**experiments.RANKING, "train": {"target_tokens_per_rank": 32, "epochs": 10_000}}
    of_earlier_run = [tmp_path / "run" / name for name in ("samples.npz", "timeline/steps.json")]
    for path in of_earlier_run:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with job.running(2, *job.training(tmp_path, endless)) as running:
        job.read_until(running, " saved")  # the first epoch, with its checkpoint, is done
        job.rank_processes(running)[1].send_signal(signal.SIGTERM)
        output = running.communicate(timeout=300)[0]
    assert "interrupted by another rank's signal; checkpoint: " in output
    assert running.returncode == 130, output
    assert f"\nreport  {tmp_path / 'run/report.html'}\n" in output
    assert "interrupted" in (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert not any(path.exists() for path in of_earlier_run)
    of_earlier_run[0].touch()  # as if the run had ended before it goes on
    words = shlex.split(re.search(r"continue with: (.*)", output).group(1))
    resume = words[words.index("train") :]
    assert resume == ["train", "--resume", str(tmp_path / "run"), "-n", "2"]
    assert shutil.which(words[0], path=f"{job.ROOT}:{os.environ['PATH']}"), words
    first = saved(tmp_path)
    assert first["epoch"] >= 1
    trained = read_record(tmp_path / "run")["epochs"][-1]["samples"]
    rows = experiments.RANKING["data"]["users"]
    # Where the first epoch has the most steps, the second ends with empty batches, which other ranks leave out.
    begun = first["step"] > 0 and any(first["input"]["left"])
    epoch = first["epoch"] + (first["step"] > 0 and not begun)

    # Another number of ranks trains the rest of the epoch without losing or repeating a row.
    with job.running(1, *resume[1:-2]) as running:
        output = job.read_until(running, f" {epoch + 1}/10000")
        output += job.read_until(running, " saved")
        assert re.search(rf"resumed from \S+ in epoch {epoch + 1}, with \d+ steps left of it", output), output
        assert trained + samples_of(tmp_path, epoch) == (rows if begun else 2 * rows)
        running.send_signal(signal.SIGINT)
        output = running.communicate(timeout=300)[0]
    assert "interrupted by SIGINT; checkpoint: " in output and running.returncode == 130
    assert not of_earlier_run[0].exists()
    second = saved(tmp_path)
    assert (second["epoch"], second["step"]) > (first["epoch"], first["step"])


@pytest.mark.both
def test_a_retrieval_run_goes_on_with_a_catalog_that_has_grown(tmp_path):
    """Dense weights stay, which a step of 1e-30 cannot move, and all rows. The second catalog has 13 more items."""
    trained = []
    (tmp_path / "run").mkdir()
    for day, (items, rate) in {"monday": (20, 0.01), "tuesday": (33, 1e-30)}.items():
        folder = tmp_path / day
        write_synthetic_retrieval(folder, seed=items, users=40, items=items, clusters=4, mean_history=6)
        fields = {**experiments.RETRIEVAL, "train": {**experiments.RETRIEVAL["train"], "learning_rate": rate}}
        experiment = from_dict({**fields, "data": {**fields["data"], "input": str(folder)}})
        resume = day == "tuesday"
        assert train.run(experiment, train.started(experiment, tmp_path / "run", resume=resume), resume) == 0
        weights = trained_model(tmp_path / "run/checkpoint").trainable_variables
        rows = read_tables(tmp_path / "run/checkpoint")["item"]
        name = "dense_slot_iterations/0/.ATTRIBUTES/VARIABLE_VALUE"
        iterations = tf.train.load_variable(dense_prefix(tmp_path / "run/checkpoint"), name)
        trained.append(([weight.numpy() for weight in weights], {*rows.ids.tolist()}, iterations))
        assert saved(tmp_path)["items"] == items
    (before, known, steps), (after, more, all_steps) = trained
    assert all_steps > steps + 1 > 2  # the optimizer went on; without it, both days have as many steps
    for weight, same in zip(before, after, strict=True):
        np.testing.assert_array_equal(weight, same)
    assert known <= more and len(more) > 20


def test_a_failed_export_leaves_the_earlier_one_and_the_results(tmp_path, monkeypatch):
    data = {**experiments.RANKING["data"], "users": 8, "cache": str(tmp_path / "data")}
    settings = {**experiments.RANKING["train"], "epochs": 6, "timeline_steps": 1}  # It begins with the sixth step.
    experiment = from_dict({**experiments.RANKING, "data": data, "train": settings})
    (tmp_path / "run/saved_model").mkdir(parents=True)
    (tmp_path / "run/saved_model/of_an_earlier_run").touch()

    def full(*_, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train, "export", full)
    with pytest.raises(OSError, match="No space left"):
        train.run(experiment, train.started(experiment, tmp_path / "run"), False)
    assert (tmp_path / "run/saved_model/of_an_earlier_run").exists()
    record = read_record(tmp_path / "run")
    assert 0 <= record["results"]["test"]["ctr_auc"] <= 1 and record["state"] == "failed"
    assert record["error"] == "OSError: [Errno 28] No space left on device"
    assert (tmp_path / "run/samples.npz").exists()
    assert len(json.loads((tmp_path / "run/timeline/steps.json").read_text(encoding="utf-8"))) == 1


def test_settings_that_do_not_fit_the_data_are_told_without_a_traceback(tmp_path, monkeypatch):
    fields = {**experiments.RANKING, "model": {**experiments.RANKING["model"], "contextual": ["no_such_column"]}}
    experiment = from_dict({**fields, "data": {**fields["data"], "cache": str(tmp_path / "data")}})
    (tmp_path / "run").mkdir()
    record = train.started(experiment, tmp_path / "run")
    for resume, message in (
        (True, "folder must hold a checkpoint"),
        (False, "column 'no_such_column' is missing; the file has"),
    ):
        with monkeypatch.context() as shown:
            shown.setattr(sys, "tracebacklimit", 1000, raising=False)
            with pytest.raises(ValueError, match=message):
                train.run(experiment, record, resume)
            assert sys.tracebacklimit == 0


def test_a_rank_that_fails_ends_the_job_on_all_ranks_with_its_message(tmp_path):
    folder = prepare_data(from_dict(experiments.RANKING), tmp_path / "data")
    (part,) = (folder / "train").glob("*.parquet")
    table = pq.read_table(part)
    # One of two row groups has a null label. One rank reads it while the other waits in a collective.
    clicks = table["exposed_click"].to_pylist()
    clicks[-1] = [None] * len(clicks[-1])
    column = pa.array(clicks, pa.list_(pa.float32()))
    broken = table.set_column(table.schema.get_field_index("exposed_click"), "exposed_click", column)
    pq.write_table(broken, part, row_group_size=20)
    begin = time.monotonic()
    settings = ["--data", str(folder), "--set", "train.timeline_steps=1"]
    code, output = job.output_of(tmp_path, experiments.RANKING, 2, *settings)
    assert code == 3
    assert re.search(r"\nrank \d failed first \(host .+, pid \d+, after \d+ s\):\n", output), output
    assert "column 'exposed_click' has 4 null values inside its lists" in output
    assert "joined without a timeline" not in output
    # A rank that waits for the other would wait for ever. The limit includes start and tracing on a loaded machine.
    assert time.monotonic() - begin < 300


@pytest.mark.slow
def test_a_run_begins_with_the_rows_of_another(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FUSEDREC_RANK", "0")  # this process is the rank
    words = ["train", *job.training(tmp_path, experiments.RANKING)]
    assert fusedrec(words) == 0
    rows = len(read_tables(tmp_path / "run/checkpoint")["item"].ids)
    assert fusedrec([*words, "--output", str(tmp_path / "other"), "--warm-start", str(tmp_path / "run")]) == 0
    assert re.search(rf"rows of \S+/run/checkpoint: .*\b{rows:,} of item", capsys.readouterr().out)


def test_a_full_disk_is_named_and_hides_no_other_error(tmp_path):
    record = RunRecord(tmp_path)
    (tmp_path / "run.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/run.json.new'"):
        record.update(state="running")
    with pytest.raises(ValueError, match="^the cause$"), train._told(record):
        raise ValueError("the cause")
