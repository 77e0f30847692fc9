"""benchmarks.tier measures four variants, removes the file's pages from memory, and stops when tables differ."""

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.tier import __main__ as tier

CASE = tier.Case(rows=4096, ids=512, blocks=1)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_rates_are_of_four_variants(tmp_path):
    results = tier.measure(CASE)
    for name in ("memory", "tier", "tier_lookahead", "tier_cached"):
        assert results[f"ids_per_s_{name}"] > 0
    assert results["ratio"] == results["ids_per_s_tier_lookahead"] / results["ids_per_s_memory"]
    assert results["table_bytes"] == 4 * results["budget_bytes"]
    assert results["share_of_pages_that_stayed"] < 0.5, "the file was not read from the disk"
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_differs_is_not_measured(monkeypatch):
    honest = tier.Variant.train

    def careless(self, batches):
        rows = honest(self, batches)
        return [r + 1e-3 for r in rows] if self.emb.name == "tier_lookahead" else rows

    monkeypatch.setattr(tier.Variant, "train", careless)
    with pytest.raises(harness.CheckFailed, match="rows of tier_lookahead"):
        tier.measure(CASE)


def test_batches_are_skewed_and_ask_for_rows_all_over_the_table():
    ids = np.concatenate([batch.numpy() for block in tier._blocks(CASE, 4, seed=1) for batch in block])
    values, counts = np.unique(ids, return_counts=True)
    assert len(values) > 0.5 * CASE.rows and counts.max() > 0.05 * len(ids)
    assert values.min() >= 0 and values.max() < CASE.rows
