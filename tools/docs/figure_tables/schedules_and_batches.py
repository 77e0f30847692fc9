"""Schedules, the plan, and balanced batches."""

from __future__ import annotations

from tools.docs.figures import Row, Table

OVERLAP = "python -m benchmarks.overlap --json F"
PLANNER = "python -m benchmarks.planner --json F"
QUALITY = "python -m benchmarks.schedule_quality --json F"
BALANCE = "python -m benchmarks.balance --json F"
LADDER = "python -m benchmarks.papers.ladder --json F"
SCALE = "python -m benchmarks.scale --json F"

THEME = Table(
    "Schedules and batches",
    "Schedules: four ranks on two hosts with a cable of 1 Gbit/s between them, against `sync`. Compute is a stream "
    "that takes time and no core, as on an accelerator, 1.4 times as long as the exchange. Exposed: exchange that "
    "nothing hides, as a part of all exchange. Contended: two ranks compute on the two cores that move the bytes. "
    "Batches: 8 ranks, 128 rows of mean length 600 each.",
    (
        Row(
            "`FrozenWindow(4)`: speed, exposed",
            "{overlap[speedup_frozen_M4]:.2f} times, {overlap[exposed_ratio_frozen_M4]:.0%}", OVERLAP,
        ),
        Row(
            "`Nested(8)`: speed, exposed",
            "{overlap[speedup_nested_M8]:.2f} times, {overlap[exposed_ratio_nested_M8]:.0%}", OVERLAP,
        ),
        Row(
            "the same at 250 Mbit/s, compute as much slower: speed of `Nested(8)`, exposed of both",
            "{overlap[speedup_nested_M8_250mbit]:.2f} times, {overlap[exposed_ratio_frozen_M4_250mbit]:.0%}, "
            "{overlap[exposed_ratio_nested_M8_250mbit]:.0%}", OVERLAP,
        ),
        Row("`Nested(16)`: speed", "{overlap[speedup_nested_M16]:.2f} times", OVERLAP),
        Row("`Nested(8)`, clustered samples: speed", "{overlap[speedup_nested_clustered]:.2f} times", OVERLAP),
        Row(
            "`DualBuffer()`, lookups take 45 % of the step: speed", "{overlap[speedup_dual_lookup45]:.2f} times",
            OVERLAP,
        ),
        Row(
            "`SemiAsync()` / `Pipelined(6)`, rows lack one update: speed",
            "{overlap[speedup_semi_async]:.2f} / {overlap[speedup_pipelined6]:.2f} times", OVERLAP,
        ),
        Row(
            'two groups, `"sync"` / `Nested(8)`: speed',
            "{overlap[speedup_2d]:.2f} / {overlap[speedup_nested_2d]:.2f} times", OVERLAP,
        ),
        Row(
            "the worst step over its own floor; of four variants at 250 Mbit/s",
            "{overlap[floor_ratio_worst]:.2f}; {overlap[floor_ratio_worst_250mbit]:.2f}", OVERLAP,
        ),
        Row(
            "contended: `FrozenWindow(4)` / `Nested(4)` / `DualBuffer()`: speed",
            "{overlap[contended_speedup_frozen_M4]:.2f} / {overlap[contended_speedup_nested_M4]:.2f} / "
            "{overlap[contended_speedup_dual]:.2f} times", OVERLAP,
        ),
        Row(
            "`fr.plan`: choices within 5 % of the best of 16; the worst one",
            "{planner[within_5_percent]} of {planner[workloads]} workloads; {planner[worst_regret]:.1%} slower",
            PLANNER,
        ),
        Row(
            "`fr.plan`: median error of its step times, worst error of its bytes",
            "{planner[median_error]:.0%}, {planner[worst_bytes_error]:.1%}", PLANNER,
        ),
        Row(
            "HR@10 of MovieLens-1M at convergence, at most 60 epochs, two seeds: `sync` / `SemiAsync()` / 4 groups "
            "with `weight_sync`, moments scaled by 4",
            "{schedule_quality[variants][sync][hr_at_10]:.3f} / "
            "{schedule_quality[variants][semi_async][hr_at_10]:.3f} / "
            "{schedule_quality[variants][weight_sync_g4_c4][hr_at_10]:.3f}", QUALITY,
        ),
        Row(
            "the same after 3 epochs, by an earlier form of the benchmark: `sync` / `Nested(4)` / `SemiAsync()`",
            "{schedule_quality_3_epochs[variants][0][hr_at_10]:.3f} / "
            "{schedule_quality_3_epochs[variants][1][hr_at_10]:.3f} / "
            "{schedule_quality_3_epochs[variants][2][hr_at_10]:.3f}", QUALITY,
        ),
        Row(
            "cost model, {scale[cells_predicted]} published cells: median / 90th percentile of the error",
            "{scale[median_error_predicted_percent]:.1f} / {scale[p90_error_predicted_percent]:.0f} %",
            SCALE,
        ),
        Row(
            "(max - min) / mean of tokens: fixed rows / `scope=\"rank\"` / `scope=\"global\"`",
            "{balance[max_token_gap_fixed]:.0%} / {balance[max_token_gap_dynamic]:.1%} / "
            "{balance[max_token_gap_global]:.2%}", BALANCE,
        ),
        Row("step on 2 ranks: global / fixed", "{balance[step_time_ratio]:.2f}", BALANCE),
        Row("input pipeline / pyarrow alone, one core", "{balance[reader_ratio]:.2f}", BALANCE),
        Row(
            "GRM on 2 ranks, samples per second: tables merged / and ids deduplicated / and batches balanced",
            "{ladder[ratio_merged]:.2f} / {ladder[ratio_deduplicated]:.2f} / {ladder[ratio_balanced]:.2f} times",
            LADDER,
        ),
    ),
)  # fmt: skip
