"""Sentences with figures: why, and six headlines, for the README; where we lose, for docs/benchmarks.md."""

from __future__ import annotations

from tools.docs.figure_tables.embedding_tables import TABLE
from tools.docs.figure_tables.models import LARGE, RANKING, scores
from tools.docs.figure_tables.schedules_and_batches import OVERLAP
from tools.docs.figure_tables.training_step import AS_LAUNCHED, AT_BEST, STEP, SWAP
from tools.docs.figures import Row

# The README: three reasons, then six figures.
WHY = """\
- **One exchange for all features.** A step with {train_step[setting][features]} features makes \
{train_step[alltoalls_per_step][ours]} all-to-alls, TFRA's layers make {train_step[alltoalls_per_step][tfra]}. \
The step is {train_step[ratio_vs_tfra_as_launched]:.1f} times as fast as TFRA as its users launch it, and \
{train_step[ratio_vs_tfra]:.1f} times as fast as TFRA at its best settings.
- **A hash table that trains in place.** Lookup and update of 81,920 ids take \
{table[tfra][1000000_adagrad][ms_ours]:.1f} ms, TFRA's table takes {table[tfra][1000000_adagrad][ms_tfra]:.1f} ms \
(Adagrad, a million rows). Rows can expire, be evicted, shrink to 16 bits or move to disk.
- **Attention without padding.** On rows of mean length 600, it runs {attention[ratio_fwd_bwd]:.0f} times as fast as \
padded TensorFlow and {attention[ratio_vs_bucketed]:.1f} times as fast as bucketed TensorFlow, in \
{attention[memory_ratio]:.1%} of the padded memory."""

HEADLINES = (
    Row(
        f"training step of 26 features, 2 processes: {AS_LAUNCHED} / {AT_BEST} / ours",
        "{train_step[ms_tfra_as_launched]:.0f} / {train_step[ms_tfra]:.0f} / {train_step[ms_ours]:.0f} ms", STEP,
    ),
    Row(
        "a TFRA program of 26 layers: as launched / at best / one import changed and `fuse`",
        "{tfra_swap[ms_tfra_as_launched]:.0f} / {tfra_swap[ms_tfra]:.0f} / {tfra_swap[ms_ours]:.0f} ms", SWAP,
    ),
    Row(
        "one table of ten million rows, 81,920 ids, Adagrad: TFRA / ours",
        "{table[tfra][10000000_adagrad][ms_tfra]:.0f} / {table[tfra][10000000_adagrad][ms_ours]:.0f} ms", TABLE,
    ),
    Row(
        "step of 2 x 2 ranks, 1 Gbit/s between hosts, as on an accelerator: `Nested(8)` against `sync`",
        "{overlap[speedup_nested_M8]:.2f} times as fast", OVERLAP,
    ),
    Row(
        "MovieLens-1M, HSTU-large, HR@10: published / by others with a stable sort / ours",
        "{retrieval_ml1m_hstu_large[published][paper][hr_at_10]:.3f} / "
        "{retrieval_ml1m_hstu_large[published][others_with_stable_sort][hr_at_10]:.3f} / "
        "{retrieval_ml1m_hstu_large[hr_at_10]:.3f}", LARGE,
    ),
    Row(
        "MovieLens-1M as ranking; KuaiRand: AUC of click, rates / DLRM / DIN / DCN-V2 / GRM",
        f"{scores('ranking_ml1m', 'auc')}; {scores('ranking_kuairand', 'auc')}", RANKING,
    ),
)  # fmt: skip

LOSSES = """\
- A table step takes {table[threads][1000000_1][ms]:.1f} ms on one thread and {table[threads][1000000_2][ms]:.1f} \
ms on two. Copying as many bytes takes {table[threads][1000000_1][ms_floor]:.1f} and \
{table[threads][1000000_2][ms_floor]:.1f} ms, because rows lie at random places.
- One changed import and `fuse` make a TFRA program {tfra_swap[ratio_as_launched]:.2f} times as fast as launched, and \
{tfra_swap[ratio]:.2f} times as fast as at its best settings: its rows stay in TFRA's table.
- A load of a checkpoint has {checkpoint[load_ratio_vs_disk]:.2f} of the rate of a plain read.
- `SemiAsync` trains on rows that lack one update, and HR@10 fell from \
{schedule_quality_3_epochs[variants][0][hr_at_10]:.3f} to \
{schedule_quality_3_epochs[variants][2][hr_at_10]:.3f} after three epochs. After up to \
60 epochs it was {schedule_quality[variants][sync][hr_at_10]:.3f} with `sync` and \
{schedule_quality[variants][semi_async][hr_at_10]:.3f} with `SemiAsync`, with two seeds. \
[Schedules](schedules.md#what-it-costs-in-quality) has all runs to convergence.
- Where ranks compute on the cores that move the bytes, `DualBuffer` has a speed of \
{overlap[contended_speedup_dual]:.2f}, because its look-ahead wants these cores. Two groups have \
{overlap[speedup_2d]:.2f}, because the gradients of all rows still go to both.
- On KuaiRand, GRM is above DLRM, but level with DCN-V2, and does not win as it does on MovieLens-1M. In click, its \
difference from the best baseline has the 95 % interval {ranking_kuairand[auc_difference_low]:+.3f} to \
{ranking_kuairand[auc_difference_high]:+.3f} of AUC, and {ranking_kuairand[gauc_difference_low]:+.3f} to \
{ranking_kuairand[gauc_difference_high]:+.3f} of GAUC. In long view, it is \
{ranking_kuairand[second_auc_difference_low]:+.3f} to {ranking_kuairand[second_auc_difference_high]:+.3f} of AUC, and \
{ranking_kuairand[second_gauc_difference_low]:+.3f} to {ranking_kuairand[second_gauc_difference_high]:+.3f} of GAUC.
- Gate and norm in the attention's op make an HSTU block {attention[block_fused_ratio]:.2f} times as fast on a \
CPU. A block without gate and norm is at most 1.03 times as fast.
- A row of 64 tokens costs the attention {attention[cost_spread]:.1f} times as much per useful FLOP as one of 8,192.
- `segment_unique` takes up to {small_ops[segment_unique_worst]} times the time of `tf.unique` per segment on groups \
of 50,000 ids. On a million ids it is level or up to {small_ops[segment_unique_best]} times as fast.
- `recover_grad` takes {small_ops[recover_grad_worst]} times the time of `unsorted_segment_sum` on 500,000 rows of 64 \
bytes. Elsewhere it is faster.
- Drawing 20,000 new rows takes {small_ops[initial_rows_low]} to {small_ops[initial_rows_high]} times the time of \
`tf.random.stateless_normal`, which cannot give an id the same row twice.
- Padding the send buffers saves nothing at 1,000 rows. At 22,000 rows it saves {small_ops[padding_saved_low]:.0%} to \
{small_ops[padding_saved_high]:.0%} of an all-to-all on a quiet machine."""
