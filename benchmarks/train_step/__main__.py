"""Question: what does a training step with many features cost with TFRA, TFRA-fused and FusedEmbedding?

    python -m benchmarks.train_step [--quick] [--json FILE]

On two ranks, TFRA makes an exchange per feature. TFRA-fused joins all features with TFRA's own parts (FusedRec section
4). FusedEmbedding runs over TFRA's table and over its own. Model, data, optimizer and the rule over ranks are the same.
A check comes first: the losses of all variants must agree at every step. Then the variants take turns on new batches.
`fr.init` keeps Gloo's loop from taking cores from computing threads, and TFRA's layers gain from that too.
`tfra_as_launched` is TFRA without this policy, as in a job that only calls `hvd.init`.

`stages_ms`: clocks inside the graph of the native step. `phases_ms`: lookup, forward and backward pass by variant
(MTGRBoost, section 6, figure 12). Graphs of the lookup, of the lookup with the dense layers, and of the whole step take
turns. "lookup" is the time of the first, with the exchange, the others what the next graph takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, ranks
from benchmarks.harness.stage_times import MarkedStep, stage_ms
from benchmarks.harness.synthetic import Batches
from benchmarks.train_step.variants import VARIANTS, Variant
from tf_fusedrec import tf

RANKS = 2
FEATURES, BATCH_SIZE, IDS_PER_FEATURE, ZIPF_ALPHA = 26, 512, 4, 1.05
PHASES = ("lookup", "forward", "backward")
Batch = Callable[[int], tuple[dict[str, tf.Tensor], tf.Tensor]]


def stages_ms(variant: Variant, batch: Batch, *, warmup: int, repeats: int) -> dict[str, float]:
    """Returns the milliseconds that each stage adds to a step, mean over ranks."""
    marked, runs = MarkedStep(variant.plain_step), []
    for repeat in range(-warmup, repeats):
        fr.collectives.barrier()
        # These batches were not measured before, so that they have as many new ids as any other batch.
        run = marked.run(*batch(10_000 + repeat))
        runs += [run] if repeat >= 0 else []
    by_rank = fr.collectives.all_gather_object(stage_ms(runs))
    return {stage: float(np.mean([ms.get(stage, 0.0) for ms in by_rank])) for stage in by_rank[0]}


def phases_ms(variants: Sequence[Variant], batch: Batch, *, warmup: int, repeats: int) -> dict[str, dict[str, float]]:
    """Returns milliseconds by variant and phase, medians over batches of the slowest rank."""

    def traced(python: Callable) -> Callable:
        return tf.function(tf.autograph.experimental.do_not_convert(python), autograph=False)

    calls: dict[str, Callable] = {}
    for variant in variants:
        pooled = traced(variant.pooled)
        calls[f"{variant.name} lookup"] = lambda ids, labels, pooled=pooled: pooled(ids)
        calls |= {f"{variant.name} forward": traced(variant.loss), f"{variant.name} backward": variant.step}
    ms = ranks.turns(calls, warmup=warmup, repeats=repeats, inputs=lambda n: batch(20_000 + warmup + n)).ms
    until = {variant.name: [ms[f"{variant.name} {phase}"] for phase in PHASES] for variant in variants}
    return {name: dict(zip(PHASES, np.diff(ends, prepend=0.0).tolist())) for name, ends in until.items()}


def on_rank(quick: bool) -> dict[str, Any]:
    """Returns the fields of the JSON file."""
    fr.init()
    tf.get_logger().setLevel("ERROR")  # TFRA warns once per layer about savers, which this run does not use
    names, repeats = [f"f{f:02d}" for f in range(FEATURES)], 200 if quick else 600
    batches = Batches(features=FEATURES, batch_size=BATCH_SIZE, ids_per_feature=IDS_PER_FEATURE, alpha=ZIPF_ALPHA)

    def batch(number: int) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        drawn = batches.batch(number, fr.rank())
        return {name: tf.constant(ids) for name, ids in zip(names, drawn.ids)}, tf.constant(drawn.labels)

    variants: list[Variant] = [variant(names) for variant in VARIANTS]
    fields = ranks.compare_steps({one.name: one.step for one in variants}, batch, warmup=20, repeats=repeats)
    fields["stages_ms"] = stages_ms(variants[-1], batch, warmup=10, repeats=repeats // 4)
    fields["phases_ms"] = phases_ms(variants, batch, warmup=10, repeats=repeats // 4)
    fields["setting"] = {
        "ranks": RANKS, "features": FEATURES, "batch_size": BATCH_SIZE, "ids_per_feature": IDS_PER_FEATURE,
        "zipf_alpha": ZIPF_ALPHA, "repeats": repeats,
    }  # fmt: skip
    return fields


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    fields = processes.ask_ranks(on_rank, RANKS, quick=arguments.quick)
    harness.print_fields(f"train_step: {fields['setting']}", fields)
    harness.print_fields("stages of the native step, ms", fields["stages_ms"])
    harness.print_table("phases, ms", [{"variant": name, **ms} for name, ms in fields["phases_ms"].items()])
    harness.write_json(arguments.json, fields)


if __name__ == "__main__":
    processes.program(main)
