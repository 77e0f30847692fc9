"""Question: how long do the first step and a step of fit take under Keras 3, against tf_keras?

    python -m benchmarks.keras [--quick] [--json FILE]

Two processes, one for each Keras, train the same small model on the same batches, in turns of TURN steps. Small models
show what Keras adds to a step. `first_step_s` is a fit of one step, with its trace. `step_ms` is wall clock and
`cpu_ms` processor time, medians over turns. `ratio` and `cpu_ratio` are medians, over pairs of turns, of Keras 3 /
tf_keras.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.harness import harness, processes
from benchmarks.harness.processes import Remote

CONFIGS = harness.ROOT / "configs"
MODELS = {
    "grm": ("grm_tiny", []),
    "dlrm": ("grm_tiny", ["model={kind: dlrm, contextual: [user_budget, user_device]}"]),
    "hstu": ("hstu_tiny", []),
}
TURN, WARMUP, TURNS, QUICK_TURNS = 50, 2, 40, 4


def train(model: str, data: str) -> None:
    """Runs the child of a Remote."""
    import tf_fusedrec as fr
    from tf_fusedrec import keras
    from tf_fusedrec.models.build import columns, make_embedding, make_model, no_rows
    from tf_fusedrec.models.data_sets.layouts import read_items
    from tf_fusedrec.models.experiment import load
    from tf_fusedrec.models.fit_calls import fit_calls
    from tf_fusedrec.models.prepare import prepare_data

    name, overrides = MODELS[model]
    experiment = load(CONFIGS / f"{name}.yaml", overrides)
    keras.utils.set_random_seed(experiment.seed)
    folder = prepare_data(experiment, pathlib.Path(data))
    trained = make_model(experiment, make_embedding(experiment), *read_items(folder))
    trained.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(experiment.train.learning_rate)))
    trained(no_rows(columns(experiment.model, "train")))
    dataset = next(fit_calls(experiment, folder, None)).dataset.cache().repeat()
    begin = time.perf_counter()
    trained.fit(dataset, steps_per_epoch=1, verbose=0)
    first_step_s = time.perf_counter() - begin
    callbacks = keras.callbacks.CallbackList(model=trained, add_history=True)
    train_function, iterator = trained.train_function, iter(dataset)
    times: list[float] = []

    def turn(_: int) -> None:
        """The steps of an epoch as `fit` makes them."""
        begin = time.process_time()
        for step in range(TURN):
            callbacks.on_train_batch_begin(step)
            callbacks.on_train_batch_end(step, train_function(iterator))
        times.append(time.process_time() - begin)

    processes.serve({"turn": turn}, lambda: times, {"first_step_s": first_step_s})


def measure(model: str, turns: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"tf_keras": [], "keras_3": []}
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                Remote(sys.executable, train, variables={"TF_USE_LEGACY_KERAS": switch}, model=model, data=data)
            )
            for name, switch in zip(seconds, ("1", "0"))
        }
        for repeat, name in harness.in_turns(list(seconds), turns, WARMUP):
            seconds[name] += sides[name].steps("turn", 1) if repeat >= 0 else []
        cpu = {name: side.check()[-turns:] for name, side in sides.items()}
        fields: dict[str, Any] = {f"first_step_s_{name}": side.facts["first_step_s"] for name, side in sides.items()}
    for of_turns, unit, ratio in ((seconds, "step_ms", "ratio"), (cpu, "cpu_ms", "cpu_ratio")):
        fields |= {f"{unit}_{name}": float(np.median(times)) * 1e3 / TURN for name, times in of_turns.items()}
        fields[ratio] = float(np.median(np.divide(of_turns["keras_3"], of_turns["tf_keras"])))
    return fields


def main() -> None:
    arguments = harness.parser(__doc__, f"{QUICK_TURNS} turns of {TURNS}").parse_args()
    cases = []
    for model in MODELS:
        cases.append({"model": model, **measure(model, QUICK_TURNS if arguments.quick else TURNS)})
        harness.print_fields(f"{model} under both Keras", cases[-1])
    harness.write_json(arguments.json, {"cases": cases})


if __name__ == "__main__":
    processes.program(main)
