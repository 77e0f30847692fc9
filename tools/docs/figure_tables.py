"""The themed tables of docs/benchmarks.md, as format strings over benchmarks/results (figures.py)."""

from __future__ import annotations

from tools.docs.figures import Row, Table

STEP = "python -m benchmarks.train_step --json F"
SWAP = "python -m benchmarks.tfra_swap --json F"
TABLE = "python -m benchmarks.table --json F"
PEERS = "python -m benchmarks.table --peer PYTHON --json F"
OVERLAP = "python -m benchmarks.overlap --json F"
PLANNER = "python -m benchmarks.planner --json F"
QUALITY = "python -m benchmarks.schedule_quality --json F"
BALANCE = "python -m benchmarks.balance --json F"
NEGATIVES = "python -m benchmarks.negatives --json F"
ML1M = "python -m benchmarks.retrieval_ml1m --json F"
LADDER = "python -m benchmarks.ladder --json F"
COLLISIONS = "python -m benchmarks.table.collisions --peer PYTHON --json F"
END_TO_END = "python -m benchmarks.end_to_end --peer PYTHON --json F"
SPORTS = "python -m benchmarks.retrieval_sports --json F"
KUAIRAND = "python -m benchmarks.ranking --data path/to/kuairand --json F"
RANKING_ML1M = "python -m benchmarks.ranking --data path/to/ml-1m --settings 4 --json F"
RANKING = "python -m benchmarks.ranking --data DIR --json F"
KUAIRAND_SIZES = "python -m benchmarks.ranking --data path/to/kuairand --sizes --json F"

CHECKPOINT = "python -m benchmarks.checkpoint --json F"
SCALE = "python -m benchmarks.scale --json F"
ATTENTION = "python -m benchmarks.attention --json F"
BATCHING = "python -m benchmarks.sequence_batching --json F"
SERVING = "python -m benchmarks.serving --quick --json F"
SHARED = "python -m benchmarks.retrieval_ml1m --negatives 64 --expansion 2 --json F"

AS_LAUNCHED = "TFRA as its users launch it"
AT_BEST = "TFRA at its best settings"

# Rows of benchmarks.ranking: the meaning of a field by its name, by result.
RANKED = {
    "ranking_ml1m": {
        "auc": "MovieLens-1M as ranking, AUC of a rating of at least 4",
        "second_auc": "MovieLens-1M as ranking, AUC of a rating of 5",
        "gauc": "MovieLens-1M as ranking, GAUC of a rating of at least 4",
        "second_gauc": "MovieLens-1M as ranking, GAUC of a rating of 5",
    },
    "ranking_kuairand": {
        "auc": "KuaiRand, AUC of click",
        "second_auc": "KuaiRand, AUC of long view",
        "gauc": "KuaiRand, GAUC of click",
        "second_gauc": "KuaiRand, GAUC of long view",
    },
}


def scores(result: str, field: str) -> str:
    """Returns the format string of a metric of rates, DLRM, DIN, DCN-V2 and GRM."""
    return " / ".join(f"{{{result}[{field}_{model}]:.3f}}" for model in ("rates", "dlrm", "din", "dcn", "grm"))


TABLES = (
    Table(
        "A training step, against TFRA",
        "26 features, batches of 512 with 4 ids per feature, 2 processes, Adagrad, the same rows and losses. "
        "TFRA as its "
        "users launch it has called `hvd.init` alone; a loop of Gloo then spins. At its best settings, "
        "Horovod's threads "
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
    ),
    Table(
        "Tables and checkpoints",
        "81,920 ids by zipf(1.05), 64 columns, forward to update, one process. FBGEMM and torch run on the "
        "CPU and keep "
        "a static array; ours is a hash table.",
        (
            Row(
                "a million rows, Adagrad: TFRA / ours",
                "{table[tfra][1000000_adagrad][ms_tfra]:.1f} / {table[tfra][1000000_adagrad][ms_ours]:.1f} ms, "
                "{table[tfra][1000000_adagrad][ratio]:.1f} times", TABLE,
            ),
            Row(
                "a million rows, Adam: TFRA / ours",
                "{table[tfra][1000000_adam][ms_tfra]:.1f} / {table[tfra][1000000_adam][ms_ours]:.1f} ms, "
                "{table[tfra][1000000_adam][ratio]:.1f} times", TABLE,
            ),
            Row(
                "ten million rows, Adagrad: TFRA / ours",
                "{table[tfra][10000000_adagrad][ms_tfra]:.1f} / {table[tfra][10000000_adagrad][ms_ours]:.1f} ms, "
                "{table[tfra][10000000_adagrad][ratio]:.1f} times", TABLE,
            ),
            Row(
                "ours, row-wise Adagrad, 1 / 2 threads",
                "{table[threads][1000000_1][ids_per_s]:.3g} / {table[threads][1000000_2][ids_per_s]:.3g} ids per "
                "second",
                TABLE,
            ),
            Row(
                "longest pause while growing to 10 M rows / copying the rows",
                "{table[growth][max_growth_pause_ms]:.1f} / {table[growth][copy_rows_ms]:.0f} ms", TABLE,
            ),
            Row(
                "FBGEMM, a row per id / ours, 1 / 2 threads",
                "{table[peer][fbgemm_sequence_1][ratio]:.1f} / {table[peer][fbgemm_sequence_2][ratio]:.1f} times",
                PEERS,
            ),
            Row(
                "FBGEMM, sums of 10 rows / ours, 1 / 2 threads",
                "{table[peer][fbgemm_pooled_1][ratio]:.1f} / {table[peer][fbgemm_pooled_2][ratio]:.1f} times", PEERS,
            ),
            Row(
                "torch's array, plain SGD / ours, 1 / 2 threads",
                "{table[peer][torch_sgd_1][ratio]:.2f} / {table[peer][torch_sgd_2][ratio]:.2f} times", PEERS,
            ),
            Row(
                "TorchRec's managed collisions and FBGEMM's table / ours, 200,000 rows of 32, 256, 2,048 columns",
                "{collisions[cases][0][ratio]:.1f} / {collisions[cases][1][ratio]:.1f} / "
                "{collisions[cases][2][ratio]:.1f} times", COLLISIONS,
            ),
            Row(
                "a save in the background: training waits / copying as many bytes",
                "{checkpoint[snapshot_pause_ms]:.0f} / {checkpoint[copy_rows_ms]:.0f} ms "
                "({checkpoint[rows]:,} rows)", CHECKPOINT,
            ),
            Row(
                "a delta of 1 % of the rows: training waits", "{checkpoint[delta_pause_ms]:.0f} ms",
                CHECKPOINT,
            ),
        ),
    ),
    Table(
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
    ),
    Table(
        "Sequences and serving",
        "Attention: lengths of mean 600 up to 3,000, 4 heads of 64, forward and backward. Negatives: 128 for each of "
        "2,048 positions. Serving: a GRM with 200,000 items and 32 exposures per user, medians.",
        (
            Row(
                "attention: padded TensorFlow (XLA) / ours",
                "{attention[ms_padded_xla_fwd_bwd]:.0f} / {attention[ms_ours_fwd_bwd]:.0f} ms, "
                "{attention[ratio_fwd_bwd]:.0f} times", ATTENTION,
            ),
            Row(
                "with position and time bias",
                "{attention[ms_padded_xla_fwd_bwd_bias]:.0f} / {attention[ms_ours_fwd_bwd_bias]:.0f} ms, "
                "{attention[ratio_fwd_bwd_bias]:.0f} times", ATTENTION,
            ),
            Row(
                "without bias, padded to buckets of length (XLA) / ours",
                "{attention[ms_bucketed_xla_fwd_bwd]:.0f} / {attention[ms_ours_fwd_bwd]:.0f} ms, "
                "{attention[ratio_vs_bucketed]:.1f} times", ATTENTION,
            ),
            Row("peak memory: ours / padded", "{attention[memory_ratio]:.3f}", ATTENTION),
            Row(
                "useful FLOPs / rate of a matrix product, without / with bias",
                "{attention[gemm_fraction]:.2f} / {attention[gemm_fraction_bias]:.2f}", ATTENTION,
            ),
            Row(
                "an HSTU block with gate and norm outside the op / inside",
                "{attention[ms_block_outside]:.0f} / {attention[ms_block_fused]:.0f} ms, "
                "{attention[block_fused_ratio]:.2f} times", ATTENTION,
            ),
            Row(
                "HSTU on MovieLens-1M, a training step: PyTorch with padded rows / with FBGEMM's jagged rows / ours",
                "{end_to_end[ratio_vs_padded]:.1f}, {end_to_end[ratio_vs_jagged]:.1f} times", END_TO_END,
            ),
            Row(
                "negatives, logits in segments / gathered rows: peak memory, time",
                "{negatives[peak_memory_ratio]:.2f}, {negatives[step_time_ratio]:.2f}", NEGATIVES,
            ),
            Row(
                "forward FLOPs: one row per exposure / per user",
                "{sequence_batching[saving]:.1f} times", BATCHING,
            ),
            Row(
                "64 users served: `stock` / `ours`",
                "{serving[p50_ms][stock][64]:.0f} / {serving[p50_ms][ours][64]:.0f} ms", SERVING,
            ),
            Row(
                "1 user served: `stock` / `ours`",
                "{serving[p50_ms][stock][1]:.1f} / {serving[p50_ms][ours][1]:.1f} ms", SERVING,
            ),
            Row(
                "4,096 events, 128 new, 256 candidates: whole request / one with a kept state: small GRM, GRM 4G",
                "{serving[speedup_state]:.1f}, {serving[speedup_state_4g]:.1f} times", SERVING,
            ),
            Row(
                "the same, processor time",
                "{serving[speedup_state_processor]:.1f}, {serving[speedup_state_processor_4g]:.1f} times", SERVING,
            ),
        ),
    ),
    Table(
        "Quality of models",
        "MovieLens-1M: the whole catalogue is ranked for 6,040 users; a sixth of the timestamps of our copy are "
        "estimates. MovieLens-1M as ranking and KuaiRand: means of 3 seeds, settings chosen on a validation split, "
        "at most five epochs. On MovieLens-1M all models were best at the fifth. Amazon Sports: items in the order of "
        "the file, a user's last item is test, the one before validation, and the models have not trained on the "
        "validation items; all unseen ones of 18,357 items are ranked for 35,598 users. All have the first setting "
        "of the grid, which is not tuned yet, and at most 12 epochs. At the limit, HSTU and FuXi-alpha still improve. "
        "FuXi-alpha's dense weights have a third of the others' learning rate; at theirs it does not learn.",
        (
            Row(
                "HSTU, {retrieval_ml1m[epochs]} epochs: HR@10, NDCG@10",
                "{retrieval_ml1m[hr_at_10]:.3f}, {retrieval_ml1m[ndcg_at_10]:.3f}", ML1M,
            ),
            Row(
                "the same as published / by others with a stable sort",
                "{retrieval_ml1m[published][paper][hr_at_10]:.3f}, "
                "{retrieval_ml1m[published][paper][ndcg_at_10]:.3f} / "
                "{retrieval_ml1m[published][others_with_stable_sort][hr_at_10]:.3f}, "
                "{retrieval_ml1m[published][others_with_stable_sort][ndcg_at_10]:.3f}", ML1M,
            ),
            Row(
                "the same: HR@50, HR@200; seconds of one core per epoch",
                "{retrieval_ml1m[hr_at_50]:.3f}, {retrieval_ml1m[hr_at_200]:.3f}; "
                "{retrieval_ml1m[processor_seconds_per_epoch]:.1f}", ML1M,
            ),
            Row(
                "128 own negatives / 64 and 64 of another position: HR@10",
                "{retrieval_ml1m_negatives128[hr_at_10]:.3f} / {retrieval_ml1m_negatives64_k2[hr_at_10]:.3f}",
                SHARED,
            ),
            Row(
                "the same: difference and its 95 % interval",
                "{shared_negatives[difference]:.4f}, {shared_negatives[low]:.3f} to {shared_negatives[high]:.3f}",
                SHARED,
            ),
            Row(
                "SASRec: HR@10, NDCG@10: ours / as published",
                "{retrieval_ml1m_sasrec[hr_at_10]:.3f}, {retrieval_ml1m_sasrec[ndcg_at_10]:.3f} / "
                "{retrieval_ml1m_sasrec[published][paper][hr_at_10]:.3f}, "
                "{retrieval_ml1m_sasrec[published][paper][ndcg_at_10]:.3f}",
                "python -m benchmarks.retrieval_ml1m --model sasrec --json F",
            ),
            Row(
                "Amazon Sports, HR@10, NDCG@10: popularity / SASRec after {retrieval_sports[models][sasrec][epochs]} "
                "epochs / HSTU after {retrieval_sports[models][hstu][epochs]} / FuXi-alpha after "
                "{retrieval_sports[models][fuxi][epochs]}",
                "{retrieval_sports[hr_at_10_popularity]:.4f}, {retrieval_sports[ndcg_at_10_popularity]:.4f} / "
                "{retrieval_sports[hr_at_10_sasrec]:.4f}, {retrieval_sports[ndcg_at_10_sasrec]:.4f} / "
                "{retrieval_sports[hr_at_10_hstu]:.4f}, {retrieval_sports[ndcg_at_10_hstu]:.4f} / "
                "{retrieval_sports[hr_at_10_fuxi]:.4f}, {retrieval_sports[ndcg_at_10_fuxi]:.4f}",
                SPORTS,
            ),
            Row(
                "the same by others, tuned: SASRec / HSTU / FuXi-alpha",
                " / ".join(
                    f"{{retrieval_sports[published][{model}][hr_at_10]:.4f}}, "
                    f"{{retrieval_sports[published][{model}][ndcg_at_10]:.4f}}"
                    for model in ("sasrec", "hstu", "fuxi")
                ),
                SPORTS,
            ),
            *(
                Row(f"{of}: rates / DLRM / DIN / DCN-V2 / GRM", scores(result, field), command)
                for result, command in (("ranking_ml1m", RANKING_ML1M), ("ranking_kuairand", KUAIRAND))
                for field, of in RANKED[result].items()
            ),
            Row(
                "MovieLens-1M as ranking, rating of at least 4: GRM minus the best baseline, AUC; GAUC, 95 % intervals",
                "{ranking_ml1m[auc_difference_low]:+.4f} to {ranking_ml1m[auc_difference_high]:+.4f}; "
                "{ranking_ml1m[gauc_difference_low]:+.4f} to {ranking_ml1m[gauc_difference_high]:+.4f}",
                RANKING_ML1M,
            ),
            Row(
                "the same, rating of 5",
                "{ranking_ml1m[second_auc_difference_low]:+.4f} to {ranking_ml1m[second_auc_difference_high]:+.4f}; "
                "{ranking_ml1m[second_gauc_difference_low]:+.4f} to {ranking_ml1m[second_gauc_difference_high]:+.4f}",
                RANKING_ML1M,
            ),
            Row(
                "KuaiRand, GAUC of click, four sizes: GRM / DLRM",
                "{ranking_kuairand_sizes[sizes][0][gauc]:.3f}, {ranking_kuairand_sizes[sizes][1][gauc]:.3f}, "
                "{ranking_kuairand_sizes[sizes][2][gauc]:.3f}, {ranking_kuairand_sizes[sizes][3][gauc]:.3f} / "
                "{ranking_kuairand_sizes[sizes][4][gauc]:.3f}, {ranking_kuairand_sizes[sizes][5][gauc]:.3f}, "
                "{ranking_kuairand_sizes[sizes][6][gauc]:.3f}, {ranking_kuairand_sizes[sizes][7][gauc]:.3f}",
                KUAIRAND_SIZES,
            ),
            Row(
                "KuaiRand, GAUC of click after {convergence[steps]} steps: rows in our table / in TFRA's",
                "{convergence[gauc][native]:.3f} / {convergence[gauc][tfra]:.3f}",
                "python -m benchmarks.convergence --data path/to/kuairand --json F",
            ),
            Row(
                "MovieLens-1M, one epoch, HR@10: popularity / ours",
                "{main_job[popularity_hr_at_10]:.3f} / {main_job[hr_at_10]:.3f}", "make train DATA=path/to/ml-1m",
            ),
            Row(
                "synthetic ranking, AUC of click: rates / ours",
                "{main_job[rates_ctr_auc]:.3f} / {main_job[ctr_auc]:.3f}", "make train",
            ),
        ),
    ),
)  # fmt: skip
