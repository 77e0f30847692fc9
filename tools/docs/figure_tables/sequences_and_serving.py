"""Attention, negatives and serving."""

from __future__ import annotations

from tools.docs.figures import Row, Table

NEGATIVES = "python -m benchmarks.negatives --json F"
END_TO_END = "python -m benchmarks.end_to_end --peer PYTHON --json F"
ATTENTION = "python -m benchmarks.attention --json F"
BATCHING = "python -m benchmarks.papers.sequence_batching --json F"
SERVING = "python -m benchmarks.serving --quick --json F"

THEME = Table(
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
)  # fmt: skip
