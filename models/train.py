"""The main job: prepares data, trains with Keras fit, evaluates, exports, and prints the results.

    horovodrun -np 2 python -m tf_fusedrec.models.train --config configs/grm_tiny.yaml
    python -m tf_fusedrec.models.train --config configs/hstu_ml1m_tiny.yaml --data path/to/ml-1m --set train.epochs=2

Flags: --config FILE · --data PATH (replaces data.input) · --set section.field=value (repeatable) ·
--output DIR (default runs/<name>) · --resume (continues from the checkpoint in the output folder).
With data.follow, the folder of training data may grow while the job reads it, partition by partition (fit_calls.py).
The output folder gets data/ checkpoint/ saved_model/ tensorboard/ results.json samples.npz (for models.compare), and
timeline/ with train.timeline_steps. Results are written before the export. An export replaces that of an earlier run
once it is whole and checked.

Exit codes: 0 done; 1 an error, written to stderr; 130 interrupted by SIGINT or SIGTERM, with a checkpoint to resume.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
from absl import app, flags, logging

import tf_fusedrec as fr
from tf_fusedrec import callbacks, keras, tf
from tf_fusedrec.callbacks.progressive import ProgressiveMetrics
from tf_fusedrec.callbacks.timeline import Timeline
from tf_fusedrec.data.columns import check_features
from tf_fusedrec.files.saves import read_manifest
from tf_fusedrec.models.build import (
    columns,
    features,
    made_features,
    make_embedding,
    make_model,
    no_rows,
)
from tf_fusedrec.models.check_export import check_export, expected_answer
from tf_fusedrec.models.data_sets.layouts import read_info, read_items
from tf_fusedrec.models.evaluate import Evaluation, evaluator, name_width, table
from tf_fusedrec.models.experiment import Experiment, load
from tf_fusedrec.models.export import export
from tf_fusedrec.models.fit_calls import fit_calls
from tf_fusedrec.models.parts.dense_inputs import read_statistics
from tf_fusedrec.models.prepare import prepare_data
from tf_fusedrec.models.ranking import RankingModel
from tf_fusedrec.models.run_folder import claim
from tf_fusedrec.models.utilization import ModelFlopsUtilization

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells.


class HeldOut(keras.callbacks.Callback):
    """Puts a metric of the held-out split into the logs of every whole epoch. Collective.

    Args:
      evaluation: Function from the folder of the data to the evaluation of the model.
      folder: Folder of the data.
      metric: Name of one of the results.
      interrupt: Callback that ends training; an interrupted epoch is not evaluated.
    """

    def __init__(
        self,
        evaluation: Callable[[pathlib.Path], Evaluation],
        folder: pathlib.Path,
        metric: str,
        interrupt: callbacks.Interrupt,
    ):
        super().__init__()
        self._evaluation, self._folder, self._metric, self._interrupt = evaluation, folder, metric, interrupt

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._interrupt.signal_name is None and logs is not None:
            self.model.drain()
            self.model.embedding.synchronize()
            logs[self._metric] = self._evaluation(self._folder).results[self._metric]


def run(experiment: Experiment, folder: pathlib.Path, output: pathlib.Path, resume: bool) -> int:
    """Trains, evaluates and exports. Collective. Returns the exit code, 0 or EXIT_INTERRUPTED."""
    # Ranks must draw different dropout masks. Their initial weights are equal, because rank 0 broadcasts its own.
    keras.utils.set_random_seed(experiment.seed + fr.rank())
    checkpoint, train = output / "checkpoint", experiment.train
    with _without_traceback():
        embedding = make_embedding(experiment)
        read = columns(experiment.model, "train")
        check_features(read, features(experiment.model), made=made_features(experiment.model))
        calls = fit_calls(experiment, folder, _saved_input(experiment, folder, checkpoint) if resume else None)

        item_ids, popularity = read_items(folder)
        model = make_model(experiment, embedding, item_ids, popularity, read_statistics(experiment.model, folder))
        optimizer = keras.optimizers.Adam(train.learning_rate, beta_2=train.beta_2, epsilon=train.epsilon)
        model.compile(optimizer=fr.collectives.distributed_optimizer(optimizer))
        model(no_rows(read))  # Creates the weights that a checkpoint restores.

        best: dict[str, Any] | None = None
        if resume:
            best = fr.checkpoint.load(checkpoint, model, model.optimizer).get("best")
            best = best if best is not None and best["monitor"] == train.keep_best else None
        first = next(calls, None)  # reads the columns of the data
    extra = {
        "experiment": experiment.to_dict(),
        "items": len(item_ids),
        "id_kinds": read_info(folder).id_kinds,
    }
    interrupt = callbacks.Interrupt()
    throughput = callbacks.Throughput(counts=("samples", "tokens", "gflops"))
    utilization = ModelFlopsUtilization()
    listeners: list[keras.callbacks.Callback] = [interrupt]
    evaluate = evaluator(experiment, model)
    if train.keep_best:
        listeners.append(HeldOut(evaluate, folder, train.keep_best, interrupt))
    others: list[keras.callbacks.Callback] = [throughput, utilization]
    if train.progressive_steps and isinstance(model, RankingModel):
        model.progressive = ProgressiveMetrics(
            model.config.tasks, every_steps=train.progressive_steps, folder=output / "tensorboard" / "progressive",
            first_step=int(model.step),
        )  # fmt: skip
        others.append(model.progressive)
    if train.embedding_metrics:
        others.append(callbacks.EmbeddingMetrics(embedding, folder=output / "tensorboard" / "tables"))
    if train.timeline_steps and _is_chief():
        others.append(Timeline(output / "timeline", steps=train.timeline_steps))
    if _is_chief():
        others.append(keras.callbacks.TensorBoard(output / "tensorboard", write_graph=False))
    if train.patience:
        others.append(callbacks.EarlyStopping("loss", patience=train.patience, verbose=1 if _is_chief() else 0))
    for call in itertools.chain([] if first is None else [first], calls):
        if resume:
            _say(f"resumed from {checkpoint} in epoch {call.epoch + 1}, with {call.steps - call.step} steps left of it")
            resume = False
        saving = callbacks.Checkpoint(
            checkpoint, call.steps, extra, first_step=call.step, input_position=call.position,
            save_best=bool(train.keep_best), monitor=train.keep_best or "loss",
        )  # fmt: skip
        saving.best = best
        model.fit(
            call.dataset,
            initial_epoch=call.epoch,
            epochs=call.end,
            steps_per_epoch=call.steps - call.step,
            shuffle=False,  # Keras 3 warns that it shuffles no data set
            callbacks=[*listeners, saving, *others],
            verbose=1 if _is_chief() else 0,
        )
        best = saving.best
        if interrupt.signal_name is not None:
            break
    if interrupt.signal_name is not None:
        _say(f"interrupted by {interrupt.signal_name}; checkpoint: {checkpoint}; continue with: {_resuming_command()}")
        fr.collectives.barrier()  # The first rank to leave ends the others, whose output may not be written yet.
        return EXIT_INTERRUPTED
    rates = throughput.rates
    rates["mfu"] = utilization.utilization(rates["gflops_per_s"])
    if best is not None:
        kept = fr.checkpoint.load(checkpoint, model, model.optimizer, save="best")["best"]
        _say(f"best epoch: {kept['epoch'] + 1}, {train.keep_best}: {kept['value']:.4f}")
    results, samples = evaluate(folder)
    if _is_chief():
        np.savez(output / "samples.npz", **samples)  # tf_fusedrec.models.compare reads it.
        _report(output, results, rates)
    inputs, expected = expected_answer(experiment, model, folder)
    exported = output / "saved_model.new"
    if _is_chief():
        shutil.rmtree(exported, ignore_errors=True)  # A killed run may have left one.
    export(model, exported)
    if _is_chief():
        difference = check_export(exported, inputs, expected)
        _replace(exported, output / "saved_model")
        _write_results(output, {"test": results, **rates, "served_difference": difference})
        width = name_width(results)
        print(f"{'checkpoint':<{width}}{checkpoint}")
        print(f"{'saved model':<{width}}{output / 'saved_model'} (another process agrees within {difference:.1e})")
        sys.stdout.flush()
    fr.collectives.barrier()  # horovodrun ends the job when a rank leaves, and rank 0 may still be working.
    return 0


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    """Shows a ValueError of the body without its traceback, because a user can correct settings and data."""
    try:
        yield
    except ValueError:
        sys.tracebacklimit = 0
        raise


def _report(output: pathlib.Path, results: dict[str, float], rates: dict[str, float]) -> None:
    """Writes the results to TensorBoard, JSON and standard output. Rank 0 only."""
    writer = tf.summary.create_file_writer(str(output / "tensorboard" / "test"))
    with writer.as_default(step=0):
        for name, value in results.items():
            tf.summary.scalar(f"test/{name}", value)
    writer.close()
    _write_results(output, {"test": results, **rates})
    width = name_width(results)
    print("\n" + table(results))
    for name, value in rates.items():
        shown = f"{value:.4f}" if name == "mfu" else f"{value:.1f}" if name == "gflops_per_s" else f"{value:.0f}"
        print(f"{name.replace('_per_s', '/s'):<{width}}{shown:>10}")
    sys.stdout.flush()


def _write_results(output: pathlib.Path, results: Mapping[str, Any]) -> None:
    (output / "results.json.new").write_text(json.dumps(results, indent=1), encoding="utf-8")
    (output / "results.json.new").replace(output / "results.json")


def _replace(new: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a folder its name by a rename. The folder of an earlier run goes last."""
    old = path.with_name(f"{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _saved_input(experiment: Experiment, folder: pathlib.Path, checkpoint: pathlib.Path) -> dict[str, Any]:
    """Returns the checkpoint's input position, or raises ValueError for a checkpoint of another model or other ids."""
    saved = read_manifest(checkpoint)["extra"]
    now = experiment.to_dict()
    for section in ("task", "model", "embedding"):
        if saved["experiment"][section] != now[section]:
            raise ValueError(
                f"--resume: {checkpoint} was trained with another {section!r}: {saved['experiment'][section]}, "
                f"now {now[section]}. Use the same section, or another --output."
            )
    kinds = read_info(folder).id_kinds
    if saved.get("id_kinds", {}) != kinds:
        raise ValueError(
            f"--resume: {checkpoint} was trained with the kinds of ids {saved.get('id_kinds', {})}, but {folder} has "
            f"{kinds}. Use the data.columns.kinds of that run, or another --output."
        )
    return saved["input"]


def _is_chief() -> bool:
    return fr.rank() == 0


def _say(line: str) -> None:
    if _is_chief():
        print(line, flush=True)


def _resuming_command() -> str:
    """Returns the command of this job with --resume, for a shell in this folder."""
    flags_given = [word for word in sys.argv[1:] if word.strip("-") != "resume"]
    size = fr.size()
    gloo = ["--gloo"] if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ else []
    launcher = [_program("horovodrun"), "-np", str(size), *gloo] if size > 1 else []
    return shlex.join([*launcher, _program(sys.executable), "-m", "tf_fusedrec.models.train", *flags_given, "--resume"])


def _program(name: str) -> str:
    """Returns the path of a program beside this interpreter, which need not be in the PATH of a shell."""
    path = pathlib.Path(sys.executable).parent / name
    return str(path.relative_to(pathlib.Path.cwd())) if path.is_relative_to(pathlib.Path.cwd()) else str(path)


def _define_flags() -> None:
    flags.DEFINE_string("config", None, "Experiment file, for example configs/grm_tiny.yaml.", required=True)
    flags.DEFINE_string("data", None, "Raw or converted data set; replaces data.input.")
    flags.DEFINE_multi_string("set", [], "Replacement section.field=value with a YAML value. Repeatable.")
    flags.DEFINE_string("output", None, "Output folder; default runs/<name of the experiment>.")
    flags.DEFINE_bool("resume", False, "Whether to continue from the checkpoint in the output folder.")


def main(argv: Sequence[str]) -> int:
    given = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {list(argv[1:])}; see --help")
    logging.set_verbosity(logging.WARNING)  # TensorFlow logs every file of a checkpoint at INFO.
    getLogger("tensorflow").propagate = False  # TensorFlow and absl would both print its warnings.
    for name in ("tf_fusedrec.data", "tf_fusedrec.callbacks.progressive"):
        getLogger(name).setLevel("INFO")
    try:
        overrides = given["set"].value + ([f"data.input={json.dumps(given.data)}"] if given.data else [])
        experiment = load(given.config, overrides)
        fr.init(experiment.embedding.topology, timeline=experiment.train.timeline_steps > 0)
        output = pathlib.Path(given.output or os.path.join("runs", experiment.name))
        claimed = claim(output)
        folder = prepare_data(experiment, output / "data")
    except (ValueError, RuntimeError) as error:  # RuntimeError: what rank 0 met, on the other ranks
        # A user can correct these errors without a traceback.
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    with claimed or contextlib.nullcontext():
        return run(experiment, folder, output, given.resume)


if __name__ == "__main__":
    _define_flags()
    app.run(main)
