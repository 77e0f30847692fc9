"""benchmarks.attention has the documented lengths and peers, and stops on a wrong result."""

import numpy as np
import pytest

from benchmarks.attention import __main__ as attention
from benchmarks.harness import harness
from tf_fusedrec import tf


@pytest.fixture
def small(monkeypatch):
    """Rows of up to 60 tokens, a matrix product of 8."""
    monkeypatch.setattr(attention, "LONGEST", 60)
    monkeypatch.setattr(attention, "MEAN", 20)
    monkeypatch.setattr(attention, "EDGES", (16, 60))
    monkeypatch.setattr(attention, "MOST_PAIRS", 2 * 60**2)
    monkeypatch.setattr(attention, "GEMM", 8)


@pytest.mark.parametrize("rows", [8, 16])
def test_lengths_are_long_tailed(rows):
    lengths = attention.long_tailed(rows)
    assert lengths.max() == 3000 and abs(lengths.mean() - 600) < 1 and lengths.min() >= 1
    assert np.median(lengths) < 0.8 * lengths.mean()


def test_useful_flops_are_of_visible_pairs():
    lengths = attention.long_tailed(5)
    pairs = sum(int(np.tri(n).sum()) for n in lengths)
    batch = attention.Batch(lengths, bias=False)
    assert batch.flops("fwd") == pairs * 4 * (2 * 64 + 2 * 64) and batch.flops("fwd_bwd") == pairs * 4 * 7 * 2 * 64


def test_a_wrong_gradient_is_not_measured(small, monkeypatch):
    assert attention.versus_padded(rows=5, repeats=1)["ratio_vs_bucketed"] > 0
    assert attention.block(rows=5, repeats=1)["block_fused_ratio"] > 0
    honest = attention.Batch.ours

    def wrong(self):
        calls = honest(self)

        def both():
            out, (d_query, d_key, *rest) = calls["fwd_bwd"]()
            return out, [d_query, tf.roll(d_key, 1, axis=0), *rest]

        return {**calls, "fwd_bwd": both}

    monkeypatch.setattr(attention.Batch, "ours", wrong)
    with pytest.raises(harness.CheckFailed, match="d_key against padded_tf"):
        attention.versus_padded(rows=5, repeats=1)


def test_groups_hold_every_row_once_and_only_so_many():
    lengths = np.array([5, 900, 70, 64, 65, 1, 30])
    groups = attention.groups_of(lengths, (64, 128, 1000), most=2 * 64**2)
    assert sorted(row for group in groups for row in group) == list(range(7))
    for group in groups:
        assert len(group) == 1 or len(group) * lengths[group].max() ** 2 <= 2 * 64**2
        assert len({int(np.searchsorted((64, 128, 1000), lengths[row])) for row in group}) == 1
