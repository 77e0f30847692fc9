"""One training step: TFRA, TFRA-fused (FusedRec section 4) and FusedEmbedding, over both backends, in two processes.

    python -m benchmarks.train_step [--quick] [--json FILE]

Question: what does a step with many features cost when each feature pays for its own exchange, when they are fused
with TFRA's own parts, when tf_fusedrec fuses them over TFRA's table, and when over its own? Same model, data, optimizer
and rule over ranks; first the losses of all must agree step by step, then they take turns on fresh batches. At the end
the stages of the native step, measured by clocks inside its graph.

`fr.init` keeps Gloo's loop from taking cores from threads that compute, for TFRA's layers too. TFRA takes turns with
and without: `tfra_as_launched` is a job that has only called `hvd.init`, as TFRA's users have it before they come.

`ratio_native_vs_tfra` in the JSON file is the native step's `ratio_vs_tfra` under the name by which it is asked for.
"""

import contextlib
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks import harness
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.graph_count import count_nodes
from benchmarks.stage_times import MarkedStep, stage_ms
from benchmarks.synthetic import Batch, Batches
from tf_fusedrec import tf
from tf_fusedrec.exchange import horovod_threads

RANKS = 2
FEATURES = 26
BATCH_SIZE = 512
IDS_PER_FEATURE = 4
ZIPF_ALPHA = 1.05
CHECKED_STEPS = 12
# float32 sums in another order differ by about 1e-7 of their size; a dozen steps of training amplify that.
LOSS_TOLERANCE = 1e-5
AS_LAUNCHED = "tfra_as_launched"


class StepTimes(NamedTuple):
    """Of one contender, per step; the slowest rank decides how long a step takes."""

    wall_s: list[float]
    cpu_s: list[float]  # user and system time of one rank's process, mean over ranks


def _tensors(names: Sequence[str], batch: Batch) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    return {name: tf.constant(ids) for name, ids in zip(names, batch.ids)}, tf.constant(batch.labels)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raises CheckFailed unless all contenders had the first one's losses at every step, and the losses moved."""
    names = list(losses)
    for name in names[1:]:
        harness.check_close(
            f"losses of {name} by step against those of {names[0]}", losses[name], losses[names[0]],
            relative=LOSS_TOLERANCE, reason="float32 sums in another order, amplified by training",
        )  # fmt: skip
    if np.ptp(losses[names[0]]) < 100 * LOSS_TOLERANCE:
        raise harness.CheckFailed(f"losses of {names[0]} do not move, so they compare nothing: {losses[names[0]]}.")


def summary(times: Mapping[str, StepTimes], alltoalls: Mapping[str, int]) -> dict[str, Any]:
    """The fields of the JSON file; times in milliseconds per step."""
    fields: dict[str, Any] = {}
    for name, (wall_s, cpu_s) in times.items():
        wall = harness.timing(wall_s)
        fields[f"ms_{name}"] = 1e3 * wall.median_s
        fields[f"ms_p90_{name}"] = 1e3 * wall.p90_s
        fields[f"ms_p10_{name}"] = 1e3 * float(np.percentile(wall_s, 10))  # near what a quiet machine would show
        fields[f"cpu_ms_{name}"] = 1e3 * float(np.median(cpu_s))
    for name in times:
        if name != "ours":
            fields[f"ratio_vs_{name}"] = fields[f"ms_{name}"] / fields["ms_ours"]
            fields[f"p10_ratio_vs_{name}"] = fields[f"ms_p10_{name}"] / fields["ms_p10_ours"]
            fields[f"cpu_ratio_vs_{name}"] = fields[f"cpu_ms_{name}"] / fields["cpu_ms_ours"]
    fields["ratio_native_vs_tfra"] = fields["ratio_vs_tfra"]
    fields["alltoalls_per_step"] = dict(alltoalls)
    return fields


def _train_and_check(contenders: Sequence[Contender], names: Sequence[str], batches: Batches) -> None:
    losses: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        begin = time.perf_counter()
        for step in range(CHECKED_STEPS):
            ids, labels = _tensors(names, batches.batch(step, fr.collectives.rank()))
            losses[contender.name].append(float(contender.step(ids, labels)))
        if fr.collectives.rank() == 0:
            seconds = time.perf_counter() - begin
            print(f"{contender.name}: traced and ran {CHECKED_STEPS} steps in {seconds:.1f} s", flush=True)
    check_losses(losses)


def _measure(
    contenders: Sequence[Contender], names: Sequence[str], batches: Batches, *, warmup: int, repeats: int
) -> dict[str, StepTimes]:
    threads = horovod_threads.threads_without_preemption()
    turns = {contender.name: (contender, False) for contender in contenders}
    turns = {AS_LAUNCHED: (contenders[0], True), **turns}
    names_of_turns = list(turns)
    wall = np.zeros([len(turns), repeats])
    cpu = np.zeros([len(turns), repeats])
    for repeat in range(-warmup, repeats):
        step = CHECKED_STEPS + warmup + repeat
        ids, labels = _tensors(names, batches.batch(step, fr.collectives.rank()))
        for turn in range(len(turns)):
            t = (repeat + turn) % len(turns)
            contender, as_launched = turns[names_of_turns[t]]
            with horovod_threads.with_preemption(threads) if as_launched else contextlib.nullcontext():
                fr.collectives.barrier()
                wall_begin, cpu_begin = time.perf_counter(), _cpu_s()
                contender.step(ids, labels)
                if repeat >= 0:
                    wall[t, repeat], cpu[t, repeat] = time.perf_counter() - wall_begin, _cpu_s() - cpu_begin
                fr.collectives.barrier()  # the other rank's step ends under the same policy
    wall_by_rank = fr.collectives.all_gather(wall[np.newaxis])
    cpu_by_rank = fr.collectives.all_gather(cpu[np.newaxis])
    return {
        name: StepTimes(wall_by_rank[:, t].max(axis=0).tolist(), cpu_by_rank[:, t].mean(axis=0).tolist())
        for t, name in enumerate(turns)
    }


def _stages(
    contender: Contender, names: Sequence[str], batches: Batches, *, warmup: int, repeats: int
) -> dict[str, float]:
    """Milliseconds that each stage adds to a step, mean over ranks."""
    marked, runs = MarkedStep(contender.plain_step), []
    for repeat in range(-warmup, repeats):
        # Far from the batches that were measured: their new ids are as many as those of any other batch.
        tensors = _tensors(names, batches.batch(10_000 + repeat, fr.collectives.rank()))
        fr.collectives.barrier()
        run = marked.run(*tensors)
        if repeat >= 0:
            runs.append(run)
    by_rank = fr.collectives.all_gather_object(stage_ms(runs))
    return {stage: float(np.mean([ms.get(stage, 0.0) for ms in by_rank])) for stage in by_rank[0]}


def _alltoalls(contender: Contender, names: Sequence[str], batch: Batch) -> int:
    graph = contender.step.get_concrete_function(*_tensors(names, batch)).graph
    return count_nodes(graph.as_graph_def(), "HorovodAlltoall")


def main() -> None:
    arguments = harness.parse_arguments("One training step of TFRA, TFRA-fused and FusedEmbedding on 2 processes.")
    harness.on_ranks("benchmarks.train_step", RANKS)
    fr.init()
    tf.get_logger().setLevel("ERROR")  # TFRA warns once per layer about savers, which this run does not use
    names = [f"f{f:02d}" for f in range(FEATURES)]
    batches = Batches(
        features=FEATURES, batch_size=BATCH_SIZE, ids_per_feature=IDS_PER_FEATURE, alpha=ZIPF_ALPHA
    )  # fmt: skip
    contenders = [contender(names) for contender in CONTENDERS]
    _train_and_check(contenders, names, batches)
    repeats = 200 if arguments.quick else 600
    times = _measure(contenders, names, batches, warmup=20, repeats=repeats)
    stages = _stages(contenders[-1], names, batches, warmup=10, repeats=repeats // 4)
    if fr.collectives.rank() != 0:
        return
    alltoalls = {c.name: _alltoalls(c, names, batches.batch(0, 0)) for c in contenders}
    fields = summary(times, alltoalls)
    rows = [
        {
            "contender": name,
            "ms/step": fields[f"ms_{name}"],
            "p10 ms": fields[f"ms_p10_{name}"],
            "p90 ms": fields[f"ms_p90_{name}"],
            "cpu ms/step": fields[f"cpu_ms_{name}"],
            "all2alls": alltoalls["tfra" if name == AS_LAUNCHED else name],
            "ours is faster by": fields[f"ms_{name}"] / fields["ms_ours"],
        }
        for name in times
    ]
    setting = {
        "ranks": RANKS, "features": FEATURES, "batch_size": BATCH_SIZE, "ids_per_feature": IDS_PER_FEATURE,
        "zipf_alpha": ZIPF_ALPHA, "repeats": repeats,
    }  # fmt: skip
    harness.print_table(f"train_step: {setting}", rows)
    harness.print_table(
        "stages of the native step, ms", [{"stage": stage, "ms": ms} for stage, ms in stages.items()]
    )  # fmt: skip
    harness.write_json(arguments.json, {**fields, "stages_ms": stages, "setting": setting})


if __name__ == "__main__":
    harness.run(main)
