"""Tables of embeddings against their peers, and what checkpoints cost."""

from __future__ import annotations

from tools.docs.figures import Row, Table

TABLE = "python -m benchmarks.table --json F"
PEERS = "python -m benchmarks.table --peer PYTHON --json F"
COLLISIONS = "python -m benchmarks.table.collisions --peer PYTHON --json F"
CHECKPOINT = "python -m benchmarks.checkpoint --json F"

THEME = Table(
    "Tables and checkpoints",
    "81,920 ids by zipf(1.05), 64 columns, forward to update, one process. FBGEMM and torch run on the CPU and keep "
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
)  # fmt: skip
