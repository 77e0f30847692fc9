"""Files of earlier versions give the rows, slots and answers that their version recorded."""

import json
import shutil

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.golden.make import FOLDER, OPS, answers, make_model, state, train, weights
from tf_fusedrec import checkpoint
from tf_fusedrec.checkpoint import loading

VERSIONS = sorted(path.parent for path in FOLDER.glob("*/expected.json"))
# Another processor may order the sums of matrix products otherwise.
SAME = {"rtol": 1e-5, "atol": 1e-6}


def expected(version):
    return json.loads((version / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.legacy  # the optimizer of the recorded numbers
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_checkpoints_of_earlier_versions(version):
    want = expected(version)
    model, embedding = make_model()
    train(model, 3)  # makes all weights, and rows that the load must remove
    assert checkpoint.load(version / "checkpoint", model, model.optimizer) == {"step": 16}
    assert state(embedding) == want["tables"]
    assert weights(model) == want["weights"]
    rows = loading.read_tables(version / "checkpoint")
    assert rows["item"][0].tolist() == sorted(map(int, want["tables"]["item.rows"]))


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_exports_and_deltas_of_earlier_versions(version, ops, tmp_path):
    want = expected(version)
    base = shutil.copytree(version / f"export-{ops}", tmp_path / "base")
    delta = shutil.copytree(version / f"delta-{ops}", tmp_path / "delta")
    shutil.copy(version / "apply_delta.py", delta)
    np.testing.assert_allclose(answers(base), want[f"export-{ops}"], **SAME)
    fr.apply_delta(base, delta, tmp_path / "applied")
    np.testing.assert_allclose(answers(tmp_path / "applied"), want[f"delta-{ops}"], **SAME)
