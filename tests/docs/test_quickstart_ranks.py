"""Unchanged programs of pages on two ranks: the quick start trains the model of one process; topology makes groups."""

import contextlib
import io
import os
import pathlib
import re

import numpy as np
import pytest

from tests.docs.commands import ROOT, programs
from tests.support.ranks import run_ranks
from tf_fusedrec.exchange.topology import Topology

PAGE = ROOT / "docs/quickstart.md"
TOPOLOGY = ROOT / "docs/topology.md"


def run_page(folder):
    """Body: returns the dense weights after each program of the page, rows of both tables, and the last losses."""
    import tf_fusedrec as fr

    here = pathlib.Path(folder, str(fr.rank()))
    here.mkdir(parents=True)
    os.chdir(here)
    names, weights = {"__name__": "docs"}, []
    for program in programs(PAGE):
        exec(compile(program.code, PAGE.name, "exec"), names)
        if "model" in names:
            weights.append([weight.numpy() for weight in names["model"].weights if weight.shape.rank])
    rows = {table: names["embedding"].export_table(table) for table in ("item", "user")}
    return weights, rows, names["history"], (here / "runs/board").exists()


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    return {size: run_ranks(run_page, size, folder=str(folder / str(size))) for size in (1, 2)}


def test_two_ranks_train_the_model_of_one(by_ranks):
    [(wanted, wanted_rows, wanted_losses, _)] = by_ranks[1]
    (first, rows, losses, _), (second, more_rows, same_losses, _) = by_ranks[2]
    assert len(wanted) == 3, "the page has other programs"
    for number, (ours, theirs, of_one) in enumerate(zip(first, second, wanted)):
        for mine, others, alone in zip(ours, theirs, of_one):
            np.testing.assert_array_equal(mine, others)
            # Up to 104 steps of Adam sum 64 float32 samples in another order.
            np.testing.assert_allclose(mine, alone, rtol=1e-3, atol=1e-4, err_msg=f"program {number}")
    assert losses == same_losses
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-3)
    for table, (ids, values) in wanted_rows.items():
        got = np.concatenate([of[table][0] for of in (rows, more_rows)])
        order = np.argsort(got)
        np.testing.assert_array_equal(got[order], ids)
        values_got = np.concatenate([of[table][1] for of in (rows, more_rows)])[order]
        np.testing.assert_allclose(values_got, values, rtol=1e-3, atol=1e-4, err_msg=table)


def test_rank_0_alone_writes_for_tensorboard(by_ranks):
    assert [board for *_, board in by_ranks[2]] == [True, False]


def print_topology():
    """Body: returns what the first program of the topology page prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(programs(TOPOLOGY)[0].code, TOPOLOGY.name, "exec"), {"__name__": "docs"})
    return printed.getvalue()


def test_two_ranks_are_two_groups_with_a_replica_each():
    shown = re.findall(r"^```text\n(.*?)^```", TOPOLOGY.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert run_ranks(print_topology, 2, topologies=[Topology(groups=2)]) == [shown[1]] * 2
