"""Question: how many bytes do micro-batches save when samples that share ids are in the same micro-batch?

    python -m benchmarks.clustering [--quick] [--json FILE]

Token-balanced batches of real sequences are cut into M = 8 micro-batches, as schedules cut them (NestPipe, section
V.C). For each id of a micro-batch a rank sends 8 bytes, receives a row of DIM float32 and sends its gradient. The naive
order is the samples' own. The bound is M = 1, where no id travels twice. No order of samples reaches it. Schedules of
micro-batches send the bound in any order, since they send a row once (exchange/window.py). The bytes of both orders
assume micro-batches that share no rows.

A sample is a user's whole sequence (the last 200 tokens), or a window of 50 tokens that begins every 25. Training cuts
long sequences into such windows. The users or windows of a batch are drawn at random. The headline case has whole
sequences of Amazon's sports articles. The logs are in ../shared/data. Without them the benchmark measures nothing.
"""

from __future__ import annotations

from benchmarks.clustering.bytes_sent import DATA, DIM, HEADLINE, LOGS, MICRO_BATCHES, Case, measure
from benchmarks.harness import harness

CASES = [
    HEADLINE,
    *[Case("amazon_sports", "sequence", tokens) for tokens in (8192, 131072)],
    *[Case(log, sample, t) for log in ("kuairand_explicit", "ml-1m") for sample in ("sequence", "window")
      for t in (8192, 32768)],
]  # fmt: skip


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    cases = [measure(case, 1 if arguments.quick else 4) for case in CASES if (DATA / case.log).is_dir()]
    harness.print_table("all-to-all bytes of a rank and step, 8 micro-batches: clustered against naive", cases)
    if not cases:
        print(f"  {DATA} has none of {sorted(LOGS)}")
    first = cases[0] if cases and cases[0]["log"] == HEADLINE.log else {}
    fields = ("bytes_naive", "bytes_clustered", "bytes_m1", "clustering_ms")
    result = {"bytes_ratio_clustered": first.get("ratio"), **{name: first.get(name) for name in fields}}
    harness.write_json(arguments.json, {**result, "micro_batches": MICRO_BATCHES, "dim": DIM, "cases": cases})


if __name__ == "__main__":
    harness.run(main)
