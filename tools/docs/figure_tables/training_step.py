"""A training step and a TFRA program, against TFRA."""

from __future__ import annotations

from tools.docs.figures import Row, Table

STEP = "python -m benchmarks.train_step --json F"
SWAP = "python -m benchmarks.tfra_swap --json F"
AS_LAUNCHED = "TFRA as its users launch it"
AT_BEST = "TFRA at its best settings"

THEME = Table(
    "A training step, against TFRA",
    "26 features, batches of 512 with 4 ids per feature, 2 processes, Adagrad, the same rows and losses. TFRA as its "
    "users launch it has called `hvd.init` alone; a loop of Gloo then spins. At its best settings, Horovod's threads "
    "run as `fr.init` sets them.",
    (
        Row(f"step: {AS_LAUNCHED}", "{train_step[ms_tfra_as_launched]:.1f} ms", STEP),
        Row(f"step: {AT_BEST}", "{train_step[ms_tfra]:.1f} ms", STEP),
        Row("step: TFRA's parts, fused (FusedRec, section 4)", "{train_step[ms_tfra_fused]:.1f} ms", STEP),
        Row("step: ours over TFRA's table", "{train_step[ms_ours_tfra]:.1f} ms", STEP),
        Row("step: ours", "{train_step[ms_ours]:.1f} ms", STEP),
        Row(f"{AS_LAUNCHED} / ours", "{train_step[ratio_vs_tfra_as_launched]:.1f} times", STEP),
        Row(f"{AT_BEST} / ours", "{train_step[ratio_vs_tfra]:.1f} times", STEP),
        Row(
            "processor time per step and process: as launched / best / ours",
            "{train_step[cpu_ms_tfra_as_launched]:.0f} / {train_step[cpu_ms_tfra]:.0f} / "
            "{train_step[cpu_ms_ours]:.0f} ms", STEP,
        ),
        Row(
            "all-to-alls per step: TFRA / TFRA's parts, fused / ours",
            "{train_step[alltoalls_per_step][tfra]} / {train_step[alltoalls_per_step][tfra_fused]} / "
            "{train_step[alltoalls_per_step][ours]}", STEP,
        ),
        Row(
            "a TFRA program: as launched / at best / changed import and `fuse`",
            "{tfra_swap[ms_tfra_as_launched]:.1f} / {tfra_swap[ms_tfra]:.1f} / {tfra_swap[ms_ours]:.1f} ms", SWAP,
        ),
        Row(
            "the same: as launched / fused, at best / fused",
            "{tfra_swap[ratio_as_launched]:.2f}, {tfra_swap[ratio]:.2f} times", SWAP,
        ),
        Row(
            "the same: all-to-alls per step, largest difference of a loss",
            "{tfra_swap[alltoalls_tfra]} / {tfra_swap[alltoalls_ours]}, {tfra_swap[max_loss_difference]:.0e}",
            SWAP,
        ),
    ),
)  # fmt: skip
