"""A TFRA user's program on ratings of real skew and 2 ranks: equal losses with TFRA, swapped, fused, and native."""

import pathlib

import numpy as np
import pytest

import tf_fusedrec.tfra
from tests.support.ranks import run_ranks

SCRIPT = pathlib.Path(__file__).with_name("user_script.py")
BEFORE = "from tensorflow_recommenders_addons import dynamic_embedding as de\n"
AFTER = "from tf_fusedrec.tfra import dynamic_embedding as de\n"
STEPS = 16  # of two ranks, in batches of the program


def ratings():
    """Columns of skewed ids with a rating that depends on them."""
    random = np.random.default_rng(0)
    rows = STEPS * 64 * 2
    user, movie = (random.zipf(1.3, rows) % size for size in (600, 400))
    about = {"user_gender": user % 2, "user_age": user % 7, "user_occupation": user % 21}
    return {"user_id": user, "movie_id": movie, **about, "user_rating": (1 + (user + movie) % 5).astype(np.float32)}


def run_script(folder, swapped, **fused):
    """Body: runs the program and returns the losses by step."""
    source = SCRIPT.read_text(encoding="utf-8")
    assert source.count(BEFORE) == 1
    program = {"__name__": "user_script"}
    exec(compile(source.replace(BEFORE, AFTER) if swapped else source, str(SCRIPT), "exec"), program)
    finish = {"finish": lambda model: tf_fusedrec.tfra.fuse(model, **fused)} if fused else {}
    return program["main"](ratings(), folder, **finish)


@pytest.mark.nightly
def test_losses_and_files_are_those_of_tfra(tmp_path):
    """test_swap_ranks.py compares losses, keys and rows of each kind of layer."""
    runs = {"tfra": {}, "swapped": {}, "fused": {"tables": "tfra"}, "native": {"tables": "native"}}
    losses = {
        name: run_ranks(run_script, 2, timeout_s=600, folder=str(tmp_path / name), swapped=name != "tfra", **fused)
        for name, fused in runs.items()
    }
    for name in ("swapped", "fused", "native"):
        for got, want in zip(losses[name], losses["tfra"]):
            assert len(got) == STEPS
            # float32 sums run in another order. Losses are between 1 and 15.
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.ptp(losses["tfra"][0]) > 0.5, "losses that do not move compare nothing"
    files = {name: sorted(p.name for p in (tmp_path / name).rglob("*_mht_*")) for name in runs}
    assert files["native"] == files["swapped"] == files["tfra"]
    assert len(files["tfra"]) == 2 * 2 * 8 * 2  # savers, ranks, tables, kinds
