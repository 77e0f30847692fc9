"""The unchanged program of "Your data" gives one AUC and one export on one rank and on two."""

import os
import pathlib

import numpy as np

from tests.docs.commands import ROOT, programs
from tests.support.ranks import run_ranks

PAGE = ROOT / "docs/your_data.md"
MAKES_CLICKS, WHOLE = programs(PAGE)[-2:]


def run_whole_program(folder):
    """Body: returns the history, steps, ids of both tables on this rank, and the SavedModel's answer to raw fields."""
    os.chdir(folder)
    names = {"__name__": "docs"}
    exec(compile(WHOLE.code, PAGE.name, "exec"), names)
    served = names["tf"].saved_model.load("runs/mine/saved_model").signatures["serving_default"]
    answer = served(
        user=names["tf"].constant(["user 3", "nobody"]),
        items=names["tf"].constant(["7", "9"]),
        items_row_splits=names["tf"].constant([0, 2, 2], names["tf"].int64),
        age=names["tf"].constant([[31.0], [float("nan")]]),
    )
    ids = {table: names["embedding"].export_table(table)[0] for table in ("user", "item")}
    return names["history"], int(names["model"].optimizer.iterations), ids, answer["logit"].numpy()


def run(size, folder):
    folder = pathlib.Path(folder, str(size))
    folder.mkdir()
    os.chdir(folder)
    exec(compile(MAKES_CLICKS.code, PAGE.name, "exec"), {"np": np})
    return run_ranks(run_whole_program, size, folder=str(folder))


def test_two_ranks_find_the_auc_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [(wanted, wanted_steps, wanted_ids, wanted_answer)] = run(1, tmp_path)
    (history, steps, ids, answer), (same, _, more_ids, _) = run(2, tmp_path)
    assert history == same
    assert steps == wanted_steps == 80
    for name, values in wanted.items():
        # 80 steps of Adam sum float32 in another order.
        np.testing.assert_allclose(history[name], values, atol=1e-4, err_msg=name)
    for table, known in wanted_ids.items():
        assert len(ids[table]) and len(more_ids[table]), "a rank has no rows"
        np.testing.assert_array_equal(np.sort(np.concatenate([ids[table], more_ids[table]])), known)
    np.testing.assert_allclose(answer, wanted_answer, atol=1e-3)
