"""The main job: prepares data, trains with Keras fit, evaluates, exports, and prints the results: `fusedrec train`.

With data.follow, the folder of training data may grow while the job reads it, partition by partition (fit_calls.py).
The output folder gets run.json (run_folder.py), checkpoint/ saved_model/ tensorboard/ samples.npz (for models.compare),
and timeline/ with train.timeline_steps. Results are written before the export. An export replaces that of an earlier
run once it is whole and checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from logging import basicConfig, getLogger
from typing import Any

import numpy as np
from absl import logging

import tf_fusedrec as fr
from tf_fusedrec import callbacks, keras, tf
from tf_fusedrec.callbacks.progressive import ProgressiveMetrics
from tf_fusedrec.callbacks.timeline import Timeline
from tf_fusedrec.config import Normal, TruncatedNormal
from tf_fusedrec.data.columns import check_features
from tf_fusedrec.exchange import collectives
from tf_fusedrec.files.saves import read_manifest
from tf_fusedrec.models import report, screen
from tf_fusedrec.models.build import (
    columns,
    features,
    made_features,
    make_embedding,
    make_model,
    no_rows,
)
from tf_fusedrec.models.check_export import check_export, expected_answer
from tf_fusedrec.models.compare import SAMPLES, against_baseline
from tf_fusedrec.models.data_profile import profile_of
from tf_fusedrec.models.data_sets.layouts import REQUEST, read_info, read_items
from tf_fusedrec.models.evaluate import evaluator
from tf_fusedrec.models.experiment import Experiment
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.export import export
from tf_fusedrec.models.fit_calls import fit_calls
from tf_fusedrec.models.parts.dense_inputs import read_statistics
from tf_fusedrec.models.prepare import prepare_data, with_new_data
from tf_fusedrec.models.ranking import RankingModel
from tf_fusedrec.models.retrieval import HSTURetrieval
from tf_fusedrec.models.run_callbacks import (
    Board,
    HeldOut,
    Progress,
    check_tracker,
    line_width,
    terminal_width,
    tracker,
)
from tf_fusedrec.models.run_folder import RunRecord, circumstances, claim
from tf_fusedrec.models.saved_run import saved_experiment
from tf_fusedrec.models.utilization import ModelFlopsUtilization

_MOST_ROWS = 100_000  # of a rank, by which a table is judged
_MOST_BYTES = 1 << 28  # of a checkpoint whose tables are in the report that the run writes
_TRUNCATED = 0.774  # variance of a normal distribution that is cut at two standard deviations, over the whole one's
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells.


def started(
    experiment: Experiment, output: pathlib.Path, config: str = "", overrides: Sequence[str] = (), resume: bool = False
) -> RunRecord:
    """Prepares the data and returns the record of a run that begins in an output folder. Collective.

    Args:
      experiment: Experiment.
      output: Folder that this job has claimed.
      config: File of the experiment.
      overrides: Replacements of its fields.
      resume: Whether the run goes on from the checkpoint in the folder.
    """
    record = RunRecord(output, resume)
    record.update(
        **circumstances(), name=experiment.name, folder=str(output), config=config, overrides=[*overrides],
        experiment=experiment.to_dict(), state="running",
    )  # fmt: skip
    with _told(record):
        folder = prepare_data(experiment, experiment.data.cache)
        profile = profile_of(experiment, folder) if fr.rank() == 0 else None
        record.update(data={"folder": str(folder), **fr.collectives.all_gather_object(profile)[0]})
    return record


@contextlib.contextmanager
def _told(record: RunRecord) -> Iterator[None]:
    """Puts an error of the body into the record, unless the disk is full."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            record.update(state="failed", error=f"{type(error).__name__}: {error}")
        raise


def run(
    experiment: Experiment, record: RunRecord, resume: bool, go_on: str = "", rows_of: pathlib.Path | None = None
) -> int:
    """Trains, evaluates and exports into record.folder. Collective. Returns the exit code, 0 or EXIT_INTERRUPTED."""
    with _told(record):
        return _run(experiment, record, resume, go_on, rows_of)


def _run(experiment: Experiment, record: RunRecord, resume: bool, go_on: str, rows_of: pathlib.Path | None) -> int:
    # Ranks must draw different dropout masks. Their initial weights are equal, because rank 0 broadcasts its own.
    keras.utils.set_random_seed(experiment.seed + fr.rank())
    output, folder, train = record.folder, pathlib.Path(record.fields["data"]["folder"]), experiment.train
    checkpoint = output / "checkpoint"
    validates = (folder / "validation").is_dir() and not experiment.data.follow
    keep_best = train.keep_best or (experiment.metrics[0] if validates else "")
    monitor = f"val_{keep_best}" if keep_best else "loss"
    with _without_traceback():
        if train.tracker:
            check_tracker(train.tracker)
        embedding = make_embedding(experiment)
        read = columns(experiment.model, "train")
        check_features(read, features(experiment.model), made=made_features(experiment.model))
        saved = _saved_input(experiment, folder, checkpoint) if resume else None
        if resume and saved is None:
            record.begin_new_data()
        calls = fit_calls(experiment, folder, saved)

        items = read_items(folder)
        if resume and saved is None:  # The checkpoint has the items, of the catalog's size when the run began.
            number = max(read_manifest(checkpoint)["extra"]["items"], 1)
            items = (np.arange(number), np.ones(number, np.int64))
        statistics = read_statistics(experiment.model, folder)
        model = _compiled(experiment, make_model(experiment, embedding, *items, statistics))

        if rows_of is not None:
            _say(_take_rows(model, rows_of))
        best: dict[str, Any] | None = None
        if resume:
            best = fr.checkpoint.load(checkpoint, model, model.optimizer).get("best")
            best = best if saved is not None and best is not None and best["monitor"] == monitor else None
            if saved is None and isinstance(model, HSTURetrieval):
                items = read_items(folder)
                model = _with_weights_of(model, _compiled(experiment, make_model(experiment, embedding, *items)))
            model.optimizer.learning_rate = train.learning_rate  # a checkpoint has that of the earlier run
        first = next(calls, None)  # reads the columns of the data
    extra = {
        "experiment": experiment.to_dict(),
        "items": len(items[0]),
        "id_kinds": read_info(folder).id_kinds,
        "data": str(folder.resolve()),  # has the text of ids, for people
    }
    record.update(
        validates="validation" if validates else "test" if keep_best else "",
        epochs_wanted=0 if experiment.data.follow else train.epochs,
        labels=model.config.label_of_task if isinstance(model, RankingModel) else {},
        model=_model_facts(experiment, model),
    )
    if _is_chief():
        print(screen.header(record.fields, line_width(terminal_width())), flush=True)
        # What an earlier run, or this run's earlier end, left must not stand in a report beside this run's figures.
        (output / SAMPLES).unlink(missing_ok=True)
        for earlier in () if resume else ("tensorboard", "timeline"):
            shutil.rmtree(output / earlier, ignore_errors=True)
    interrupt = callbacks.Interrupt()
    throughput = callbacks.Throughput(counts=("events", "samples", "tokens", "gflops"))
    utilization = ModelFlopsUtilization()
    evaluate = evaluator(experiment, model)
    listeners: list[keras.callbacks.Callback] = [interrupt]
    if isinstance(model, RankingModel):
        getLogger("tf_fusedrec.callbacks.progressive").setLevel("INFO" if train.progressive_steps else "WARNING")
        model.progressive = ProgressiveMetrics(
            model.config.tasks,
            every_steps=train.progressive_steps or sys.maxsize,
            kinds=("window", "cumulative", "epoch") if train.progressive_steps else ("epoch",),
            folder=output / "tensorboard" / "progressive" if train.progressive_steps else None,
            first_step=int(model.step),
        )
        listeners.append(model.progressive)
    split = "validation" if validates else "test"
    listeners.append(HeldOut((lambda: evaluate(folder, split)) if keep_best else None, interrupt))
    reporters: list[keras.callbacks.Callback] = [throughput, utilization]
    if train.embedding_metrics:
        reporters.append(callbacks.EmbeddingMetrics(embedding, folder=output / "tensorboard" / "tables"))
    if train.timeline_steps and _is_chief():
        reporters.append(Timeline(output / "timeline", steps=train.timeline_steps))
    if _is_chief():
        reporters.append(Board(output / "tensorboard", record.fields["experiment"]))
    if train.tracker and _is_chief():
        reporters.append(tracker(train.tracker, record))
    if train.patience:
        watched = screen.watched(record.fields)
        reporters.append(callbacks.EarlyStopping(watched, patience=train.patience, verbose=1 if _is_chief() else 0))
    reporters.append(Progress(record, lambda: saving))
    for call in itertools.chain([] if first is None else [first], calls):
        if resume:
            _say(f"resumed from {checkpoint} in epoch {call.epoch + 1}, with {call.steps - call.step} steps left of it")
            resume = False
        saving = callbacks.Checkpoint(
            checkpoint, call.steps, extra, first_step=call.step, input_position=call.position,
            save_best=bool(keep_best), monitor=monitor,
        )  # fmt: skip
        saving.best = best
        model.fit(
            call.dataset,
            initial_epoch=call.epoch,
            epochs=call.end,
            steps_per_epoch=call.steps - call.step,
            shuffle=False,  # Keras 3 warns that it shuffles no data set
            callbacks=[*listeners, saving, *reporters],
            verbose=0,
        )
        best = saving.best
        if interrupt.signal_name is not None:
            break
    if interrupt.signal_name is not None:
        record.update(state="interrupted")
        _say(f"interrupted by {interrupt.signal_name}; checkpoint: {checkpoint}; continue with: {go_on}")
        if _is_chief():
            record.update(report=_report(output))
            print(screen.report_line(record.fields), flush=True)
        fr.collectives.barrier()  # The first rank to leave ends the others, whose output may not be written yet.
        return EXIT_INTERRUPTED
    rates = throughput.rates
    rates["mfu"] = utilization.utilization(rates["gflops_per_s"])
    if best is not None:
        kept = fr.checkpoint.load(checkpoint, model, model.optimizer, save="best")["best"]
        title = screen.title_of(keep_best, record.fields["labels"])
        _say(f"best epoch: {kept['epoch'] + 1}, {title} {kept['value']:.4f}")
    results, samples = evaluate(folder)
    facts = _model_facts(experiment, model)
    for name, share in _moved(experiment, model).items():
        facts["tables"][name]["moved"] = share
    if _is_chief():
        np.savez(output / SAMPLES, **samples)
        _write_test(output / "tensorboard" / "test", results)
        record.update(best=best, model=facts, metrics=_metrics(results, samples), results={"test": results, **rates})
    inputs, expected = expected_answer(experiment, model, folder)
    exported = output / "saved_model.new"
    if _is_chief():
        shutil.rmtree(exported, ignore_errors=True)  # A killed run may have left one.
    export(model, exported, experiment=experiment, data=folder)
    if _is_chief():
        difference = check_export(exported, inputs, expected)
        _replace(exported, output / "saved_model")
        if (folder / REQUEST).is_file():
            shutil.copyfile(folder / REQUEST, output / REQUEST)
            record.update(request=str(output / REQUEST))
        record.update(state="done", results={**record.fields["results"], "served_difference": difference})
        record.update(report=_report(output))
        print("\n" + screen.ending(record.fields, line_width(terminal_width())), flush=True)
    fr.collectives.barrier()  # horovodrun ends the job when a rank leaves, and rank 0 may still be working.
    return 0


def _compiled(experiment: Experiment, model: RankingModel | HSTURetrieval) -> RankingModel | HSTURetrieval:
    """Returns the model with its optimizer and with the weights that a checkpoint restores."""
    train = experiment.train
    optimizer = keras.optimizers.Adam(train.learning_rate, beta_2=train.beta_2, epsilon=train.epsilon)
    model.compile(optimizer=fr.collectives.distributed_optimizer(optimizer))
    model(no_rows(columns(experiment.model, "train")))
    return model


def _with_weights_of(trained: HSTURetrieval, model: HSTURetrieval) -> HSTURetrieval:
    """Returns `model`, which has the trained model's tables and another catalog, with its weights and optimizer."""
    for each in (trained, model):
        each.optimizer.build(each.trainable_variables)
    before = [*trained.weights, *trained.optimizer.variables]
    for weight, value in zip([*model.weights, *model.optimizer.variables], before, strict=True):
        if weight is not model.catalogue:
            weight.assign(value)
    return model


def _take_rows(model: RankingModel | HSTURetrieval, checkpoint: pathlib.Path) -> str:
    """Gives tables of the model the rows that a checkpoint has under the same names. Returns a line about them."""
    saved = fr.checkpoint.read_tables(checkpoint)
    known = [config.name for config in model.embedding.tables if config.name in saved]
    for name in known:
        fr.checkpoint.warm_start(model, name, saved[name].ids, saved[name].rows)
    taken = ", ".join(f"{len(saved[name].ids):,} of {name}" for name in known)
    return f"rows of {checkpoint}: {taken}"


def model_and_batch(experiment: Experiment) -> tuple[RankingModel | HSTURetrieval, Any]:
    """Returns a compiled, untrained model of an experiment, and a batch of its training data. Collective."""
    folder = prepare_data(experiment, experiment.data.cache)
    call = next(fit_calls(experiment, folder, None))
    item_ids, popularity = read_items(folder)
    statistics = read_statistics(experiment.model, folder)
    model = make_model(experiment, make_embedding(experiment), item_ids, popularity, statistics)
    model.compile(optimizer=keras.optimizers.Adam(experiment.train.learning_rate))
    return model, next(iter(call.dataset))


def _model_facts(experiment: Experiment, model: RankingModel | HSTURetrieval) -> dict[str, Any]:
    """Returns sizes of the model and its tables, summed over the ranks. Collective."""
    config, embedding = experiment.model, model.embedding
    here = {name: counts["keys"] for name, counts in embedding.statistics().items()}
    rows = fr.collectives.all_gather(np.array([[*here.values()]], np.int64)).sum(axis=0)
    tables, groups = {table.name: table for table in experiment.tables}, len(embedding.internals.groups)
    return {
        "kind": config.kind if isinstance(config, RankingConfig) else config.encoder,
        "dense_weights": int(sum(np.prod(weight.shape) for weight in model.trainable_variables)),
        "schedule": experiment.train.schedule,
        "all_to_alls": 3 if collectives.joins(groups, embedding.layout.group) else 2 * groups + 1,
        "tables": {
            name: {"rows": int(count), "dim": tables[name].dim, "rule": _rule(tables[name].optimizer)}
            for name, count in zip(here, rows)
        },
    }


def _moved(experiment: Experiment, model: RankingModel | HSTURetrieval) -> dict[str, float]:
    """Returns how far the mean square of a table's numbers is from that of new rows, by table. Collective.

    Tables with rows of other initial values than a normal distribution are left out.
    """
    distances = {}
    for table in experiment.tables:
        initializer = table.initializer
        scale = {Normal: 1.0, TruncatedNormal: _TRUNCATED}.get(type(initializer))
        if scale is None or not initializer.stddev or table.external is not None:
            continue
        rows = model.embedding.export_table(table.name)[1][:_MOST_ROWS].astype(np.float64)
        squares, count = fr.collectives.all_gather(np.array([[np.sum(rows**2), rows.size]])).sum(axis=0)
        if count:
            distances[table.name] = abs(float(squares / count / (scale * initializer.stddev**2)) - 1.0)
    return distances


def _rule(optimizer: Any) -> str:
    rate = getattr(optimizer, "learning_rate", None)
    return type(optimizer).__name__ + (f" {rate:g}" if isinstance(rate, float) else "")


def _metrics(results: Mapping[str, float], samples: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Returns each result and, where there is a baseline, the interval of the difference from it."""
    compared = against_baseline(samples)
    rows = {}
    for name, value in results.items():
        if name.startswith("baseline_") or name in ("exposures", "users"):
            continue
        rows[name] = {"value": value}
        if name in compared:
            row = compared[name]
            rows[name] |= {"baseline": row["a"], **{part: row[part] for part in ("difference", "low", "high")}}
    return rows


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    """Shows a ValueError of the body without its traceback, because a user can correct settings and data."""
    try:
        yield
    except ValueError:
        sys.tracebacklimit = 0
        raise


def _write_test(folder: pathlib.Path, results: Mapping[str, float]) -> None:
    """Writes the results to TensorBoard. Rank 0 only."""
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default(step=0):
        for name, value in results.items():
            tf.summary.scalar(f"test/{name}", value)
    writer.close()


def _report(folder: pathlib.Path) -> str:
    """Writes the report and returns its path, or "" if it cannot be written."""
    path = folder / "report.html"
    try:
        path.write_text(report.html(report.facts(folder, _MOST_BYTES)), encoding="utf-8")
    except (Exception, KeyboardInterrupt):  # The run is whole without it, and `fusedrec report` shows the error.
        return ""
    return str(path)


def _replace(new: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a folder its name by a rename. The folder of an earlier run goes last."""
    old = path.with_name(f"{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def with_history(experiment: Experiment, checkpoint: pathlib.Path) -> Experiment:
    """Returns the experiment of a run to resume. If its data are new, events that the run has seen are history."""
    data, before = experiment.data, saved_experiment(checkpoint).data
    known = dataclasses.replace(experiment, data=dataclasses.replace(data, input=before.input, earlier=before.earlier))
    return known if data.input == before.input else with_new_data(known, data.input, held_out=data.held_out)


def _saved_input(experiment: Experiment, folder: pathlib.Path, checkpoint: pathlib.Path) -> dict[str, Any] | None:
    """Returns the checkpoint's input position, None if the data are new.

    Raises ValueError for a checkpoint of other ids.
    """
    saved = read_manifest(checkpoint)["extra"]
    now = experiment.to_dict()
    kinds = read_info(folder).id_kinds
    if saved.get("id_kinds", {}) != kinds:
        raise ValueError(
            f"--resume: {checkpoint} was trained with the kinds of ids {saved.get('id_kinds', {})}, but {folder} has "
            f"{kinds}. Use the data.columns.kinds of that run, or another --output."
        )
    if saved["experiment"]["data"]["input"] != now["data"]["input"]:
        _say(f"goes on with {now['data']['input']}, epochs 1 to {experiment.train.epochs}; {read_info(folder).source}")
        return None
    return saved["input"]


def _is_chief() -> bool:
    return fr.rank() == 0


def _say(line: str) -> None:
    if _is_chief():
        print(line, flush=True)


def main(
    experiment: Experiment, output: pathlib.Path, config: str, overrides: Sequence[str], resume: bool, go_on: str,
    rows_of: pathlib.Path | None,
) -> int:  # fmt: skip
    """Does the job. Collective.

    Args:
      experiment: All settings.
      output: Folder that gets what the job writes.
      config: File of the experiment.
      overrides: Replacements of its fields.
      resume: Whether to go on from the checkpoint in the output folder.
      go_on: Command line that goes on with this job, shown after an interruption.
      rows_of: Checkpoint whose rows the tables begin with; None: with initial rows.

    Returns:
      0; 1 for an error that the user can correct, which is written to stderr; 130 after SIGINT or SIGTERM, with a
      checkpoint.
    """
    logging.set_verbosity(logging.WARNING)  # TensorFlow logs every file of a checkpoint at INFO.
    getLogger("tensorflow").propagate = False  # TensorFlow and absl would both print its warnings.
    basicConfig(format="%(message)s")  # shows INFO, which Python's handler of last resort leaves out
    getLogger("tf_fusedrec.data").setLevel("INFO")
    try:
        _ = experiment.tables  # checks their options
        fr.init(experiment.embedding.topology, timeline=experiment.train.timeline_steps > 0)
        claimed = claim(output)
        experiment = with_history(experiment, output / "checkpoint") if resume else experiment
        record = started(experiment, output, config, overrides, resume)
    except (ValueError, RuntimeError) as error:  # RuntimeError: what rank 0 met, on the other ranks
        # A user can correct these errors without a traceback.
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    with claimed or contextlib.nullcontext():
        return run(experiment, record, resume, go_on, rows_of)
