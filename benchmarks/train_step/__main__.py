"""Question: what does a training step with many features cost with TFRA, TFRA-fused and FusedEmbedding?

    python -m benchmarks.train_step [--quick] [--json FILE]

The command starts two processes. TFRA makes an exchange per feature. TFRA-fused joins all features with TFRA's own
parts (FusedRec section 4). FusedEmbedding runs over TFRA's table and over its own. Model, data,
optimizer and the rule over ranks are the same. A check comes first: the losses of all variants must agree at every
step. Then the variants take turns on new batches, at the end with graphs of lookup and forward pass alone. Clocks
inside the graph measure the stages of the native step.

`fr.init` keeps Gloo's loop from taking cores from computing threads, and TFRA's layers gain from that too.
`tfra_as_launched` is TFRA without this policy, as in a job that only calls `hvd.init`.

`phases_ms` has the milliseconds of lookup, forward and backward pass by variant.

`ratio_native_vs_tfra` in the JSON file equals the native step's `ratio_vs_tfra`.
"""

import contextlib
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.graph_count import count_nodes
from benchmarks.harness.stage_times import MarkedStep, stage_ms
from benchmarks.harness.synthetic import Batch, Batches
from benchmarks.train_step.phases import phases_ms
from benchmarks.train_step.variants import VARIANTS, Variant
from tf_fusedrec import tf
from tf_fusedrec.exchange import horovod_threads

RANKS = 2
FEATURES = 26
BATCH_SIZE = 512
IDS_PER_FEATURE = 4
ZIPF_ALPHA = 1.05
CHECKED_STEPS = 12
# float32 sums in another order differ by about 1e-7, and a dozen training steps amplify that.
LOSS_TOLERANCE = 1e-5
AS_LAUNCHED = "tfra_as_launched"


class StepTimes(NamedTuple):
    """Times per step of one variant. The slowest rank decides the wall time of a step."""

    wall_s: list[float]
    cpu_s: list[float]  # user and system time of a rank's process, mean over ranks


def _tensors(names: Sequence[str], batch: Batch) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    return {name: tf.constant(ids) for name, ids in zip(names, batch.ids)}, tf.constant(batch.labels)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raises CheckFailed unless all variants have the first one's losses at every step, and the losses change."""
    names = list(losses)
    for name in names[1:]:
        harness.check_close(
            f"losses of {name} by step against the losses of {names[0]}", losses[name], losses[names[0]],
            relative=LOSS_TOLERANCE, reason="float32 sums in another order, amplified by training",
        )  # fmt: skip
    if np.ptp(losses[names[0]]) < 100 * LOSS_TOLERANCE:
        raise harness.CheckFailed(f"losses of {names[0]} do not move, so they compare nothing: {losses[names[0]]}.")


def summary(times: Mapping[str, StepTimes], all_to_alls: Mapping[str, int]) -> dict[str, Any]:
    """Returns the fields of the JSON file, with times in milliseconds per step."""
    fields: dict[str, Any] = {}
    for name, (wall_s, cpu_s) in times.items():
        wall = harness.timing(wall_s)
        fields[f"ms_{name}"] = 1e3 * wall.median_s
        fields[f"ms_p90_{name}"] = 1e3 * wall.p90_s
        fields[f"ms_p10_{name}"] = 1e3 * float(np.percentile(wall_s, 10))  # near the time on a quiet machine
        fields[f"cpu_ms_{name}"] = 1e3 * float(np.median(cpu_s))
    for name in times:
        if name != "ours":
            fields[f"ratio_vs_{name}"] = fields[f"ms_{name}"] / fields["ms_ours"]
            fields[f"p10_ratio_vs_{name}"] = fields[f"ms_p10_{name}"] / fields["ms_p10_ours"]
            fields[f"cpu_ratio_vs_{name}"] = fields[f"cpu_ms_{name}"] / fields["cpu_ms_ours"]
    fields["ratio_native_vs_tfra"] = fields["ratio_vs_tfra"]
    fields["alltoalls_per_step"] = dict(all_to_alls)
    return fields


def _train_and_check(variants: Sequence[Variant], names: Sequence[str], batches: Batches) -> None:
    losses: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for variant in variants:
        begin = time.perf_counter()
        for step in range(CHECKED_STEPS):
            ids, labels = _tensors(names, batches.batch(step, fr.collectives.rank()))
            losses[variant.name].append(float(variant.step(ids, labels)))
        if fr.collectives.rank() == 0:
            seconds = time.perf_counter() - begin
            print(f"{variant.name}: traced and ran {CHECKED_STEPS} steps in {seconds:.1f} s", flush=True)
    check_losses(losses)


def _measure(
    variants: Sequence[Variant], names: Sequence[str], batches: Batches, *, warmup: int, repeats: int
) -> dict[str, StepTimes]:
    threads = horovod_threads.threads_without_preemption()
    turns = {variant.name: (variant, False) for variant in variants}
    turns = {AS_LAUNCHED: (variants[0], True), **turns}
    names_of_turns = list(turns)
    wall = np.zeros([len(turns), repeats])
    cpu = np.zeros([len(turns), repeats])
    for repeat in range(-warmup, repeats):
        step = CHECKED_STEPS + warmup + repeat
        ids, labels = _tensors(names, batches.batch(step, fr.collectives.rank()))
        for turn in range(len(turns)):
            t = (repeat + turn) % len(turns)
            variant, as_launched = turns[names_of_turns[t]]
            with horovod_threads.with_preemption(threads) if as_launched else contextlib.nullcontext():
                fr.collectives.barrier()
                wall_begin, cpu_begin = time.perf_counter(), _cpu_s()
                variant.step(ids, labels)
                if repeat >= 0:
                    wall[t, repeat], cpu[t, repeat] = time.perf_counter() - wall_begin, _cpu_s() - cpu_begin
                fr.collectives.barrier()  # lets the other rank's step end under the same policy
    wall_by_rank = fr.collectives.all_gather(wall[np.newaxis])
    cpu_by_rank = fr.collectives.all_gather(cpu[np.newaxis])
    return {
        name: StepTimes(wall_by_rank[:, t].max(axis=0).tolist(), cpu_by_rank[:, t].mean(axis=0).tolist())
        for t, name in enumerate(turns)
    }


def _stages(variant: Variant, names: Sequence[str], batches: Batches, *, warmup: int, repeats: int) -> dict[str, float]:
    """Returns the milliseconds that each stage adds to a step, mean over ranks."""
    marked, runs = MarkedStep(variant.plain_step), []
    for repeat in range(-warmup, repeats):
        # These batches were not measured before, so that they have as many new ids as any other batch.
        tensors = _tensors(names, batches.batch(10_000 + repeat, fr.collectives.rank()))
        fr.collectives.barrier()
        run = marked.run(*tensors)
        if repeat >= 0:
            runs.append(run)
    by_rank = fr.collectives.all_gather_object(stage_ms(runs))
    return {stage: float(np.mean([ms.get(stage, 0.0) for ms in by_rank])) for stage in by_rank[0]}


def _all_to_alls(variant: Variant, names: Sequence[str], batch: Batch) -> int:
    graph = variant.step.get_concrete_function(*_tensors(names, batch)).graph
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
    variants = [variant(names) for variant in VARIANTS]
    _train_and_check(variants, names, batches)
    repeats = 200 if arguments.quick else 600
    times = _measure(variants, names, batches, warmup=20, repeats=repeats)
    stages = _stages(variants[-1], names, batches, warmup=10, repeats=repeats // 4)
    new = (_tensors(names, batches.batch(20_000 + n, fr.collectives.rank())) for n in range(10 + repeats // 4))
    phases = phases_ms(variants, new, warmup=10)
    if fr.collectives.rank() != 0:
        return
    all_to_alls = {c.name: _all_to_alls(c, names, batches.batch(0, 0)) for c in variants}
    fields = summary(times, all_to_alls)
    rows = [
        {
            "variant": name,
            "ms/step": fields[f"ms_{name}"],
            "p10 ms": fields[f"ms_p10_{name}"],
            "p90 ms": fields[f"ms_p90_{name}"],
            "cpu ms/step": fields[f"cpu_ms_{name}"],
            "all-to-alls": all_to_alls["tfra" if name == AS_LAUNCHED else name],
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
    harness.print_table("phases, ms", [{"variant": name, **ms} for name, ms in phases.items()])
    harness.write_json(arguments.json, {**fields, "phases_ms": phases, "stages_ms": stages, "setting": setting})


if __name__ == "__main__":
    harness.run(main)
