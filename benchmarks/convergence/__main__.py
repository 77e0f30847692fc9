"""Question: does a ranking model converge alike with this project's tables and with TFRA's?

    python -m benchmarks.convergence --data DIR [--quick] [--json FILE] [--run DIR]

DIR holds KuaiRand or MovieLens-1M. GRM trains from the configuration of benchmarks.ranking, once with rows in the
native hash table and once with rows in TFRA's variable (FusedEmbedding's backend). AUC and GAUC of both tasks are
measured on the test split four times per epoch, as in MTGRBoost, figure 11. Both trainings see equal initial weights
and batches, so the first point must agree. Later points differ by rounding, whose scale a third training shows: the
native table with another seed.

`curves` has the points of each variant by seed. `gauc_difference` is the largest difference of the click task's GAUC
between the two tables at any point, `gauc_difference_seeds` that of the two seeds, and `second_` precedes the fields of
the second task. `steps` is the number of steps of each training. --quick trains one epoch, without the second seed.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, training
from benchmarks.ranking.data_sets import DataSet, data_set_of
from models.build import features
from models.evaluate import evaluator
from models.experiment import Experiment, from_dict
from models.fit_calls import fit_calls
from tf_fusedrec import keras

POINTS_PER_EPOCH = 4
EQUAL = 1e-5  # relative, of metrics before the first step


class Curve(keras.callbacks.Callback):
    """Evaluates the model before the first step, and after every `every` steps."""

    def __init__(self, evaluate: Callable[[], Mapping[str, float]], every: int):
        super().__init__()
        self._evaluate, self._every, self._steps = evaluate, every, 0
        self.points: list[dict[str, float]] = []

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.points.append({"step": 0, **self._evaluate()})

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self.points.append({"step": self._steps, **self._evaluate()})


def layer(config: Experiment, backend: str) -> fr.FusedEmbedding:
    """Returns the embedding layer of an experiment with the rule adam. Keras' Adam trains the rows on both backends."""
    tables = []
    for table in config.tables:
        rule = table.optimizer
        adam = keras.optimizers.legacy.Adam(rule.learning_rate, rule.beta_1, rule.beta_2, rule.epsilon)
        tables.append(dataclasses.replace(table, optimizer=adam))
    return fr.FusedEmbedding(tables, features(config.model), seed=config.seed, backend=backend, key_encoding="hash")


def train(experiment: Mapping[str, Any], backend: str, data: str) -> list[dict[str, float]]:
    """Trains the experiment. Returns the points of the curve: step, and the held-out metrics by name."""
    config, source = from_dict(experiment), pathlib.Path(data)
    model = training.compiled(config, source, lambda config: layer(config, backend))
    evaluate = evaluator(config, model)
    (call,) = fit_calls(config, source, None)
    curve = Curve(lambda: evaluate(source).results, max(1, call.steps // POINTS_PER_EPOCH))
    training.fit(model, call, [curve])
    return curve.points


class Variant(NamedTuple):
    """One training."""

    backend: str
    seed: int


NATIVE, TFRA, OTHER_SEED = Variant("native", 0), Variant("tfra", 0), Variant("native", 1)


def largest_difference(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]], name: str) -> float:
    """Returns the largest difference of a metric at equal steps, except the point before the first step."""
    harness.check_equal("steps of the points", [p["step"] for p in one], [p["step"] for p in other])
    return max(abs(a[name] - b[name]) for a, b in zip(one[1:], other[1:]))


def measure(data: DataSet, folder: pathlib.Path, epochs: int, variants: Sequence[Variant]) -> dict[str, Any]:
    """Returns the fields of the JSON file."""
    points: dict[Variant, list[dict[str, float]]] = {}
    for variant in variants:  # each in a process of its own
        experiment = data.experiment("grm", [f"train.epochs={epochs}", f"seed={variant.seed}"]).to_dict()
        points[variant] = processes.ask(train, experiment=experiment, backend=variant.backend, data=str(folder))
    names = {
        f"{prefix}{metric}": f"{task}_{metric}"
        for prefix, task in zip(("", "second_"), data.tasks)
        for metric in ("gauc", "auc")
    }  # fmt: skip
    fields: dict[str, Any] = {"data": data.name, "tasks": list(data.tasks), "epochs": epochs}
    fields["steps"] = points[NATIVE][-1]["step"]
    for field, name in names.items():
        reason = "rows and weights are equal, and few users of nearly equal scores change places by rounding"
        first = [points[variant][0][name] for variant in (TFRA, NATIVE)]
        harness.check_close(f"{name} before the first step", *first, relative=EQUAL, reason=reason)
        fields[field] = {variant.backend: points[variant][-1][name] for variant in (NATIVE, TFRA)}
        fields[f"{field}_difference"] = largest_difference(points[NATIVE], points[TFRA], name)
        if OTHER_SEED in points:
            fields[f"{field}_difference_seeds"] = largest_difference(points[NATIVE], points[OTHER_SEED], name)
    fields["curves"] = [
        {**variant._asdict(), "points": [{"step": p["step"], **{name: p[name] for name in names.values()}} for p in of]}
        for variant, of in points.items()
    ]
    return fields


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, "one epoch, one seed")
    parser.add_argument("--data", type=pathlib.Path, required=True, metavar="DIR", help="KuaiRand or MovieLens-1M")
    parser.add_argument("--run", type=pathlib.Path, default="runs/convergence", help="folder of the prepared data")
    arguments = parser.parse_args(argv)
    data = data_set_of(arguments.data)
    folder = data.prepared(arguments.data.resolve(), arguments.run.resolve())["test"]
    variants = (NATIVE, TFRA) if arguments.quick else (NATIVE, TFRA, OTHER_SEED)
    fields = measure(data, folder, 1 if arguments.quick else 3, variants)
    curves, click = fields["curves"], f"{data.tasks[0]}_gauc"
    rows = [
        {"step": step[0]["step"],
         **{f"{curve['backend']}, seed {curve['seed']}": point[click] for curve, point in zip(curves, step)}}
        for step in zip(*(curve["points"] for curve in curves))
    ]  # fmt: skip
    harness.print_table(f"{click} of the test split", rows)
    harness.print_fields("largest differences between the tables, and between seeds", fields)
    harness.write_json(arguments.json, {"benchmark": "convergence", **fields})


if __name__ == "__main__":
    processes.program(main)
