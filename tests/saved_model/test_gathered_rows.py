"""Rows of all ranks are gathered once each, also where ranks hold replicas of each other's rows."""

import types

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.saved_model.export import read_all_rows, write_rank_rows

IDS = np.array([7, -3, 2**62, 0, 5, np.iinfo(np.int64).min])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_once(dtype, replicas, tmp_path, monkeypatch):
    numbers = np.arange(12).reshape(6, 2).astype(tf.as_dtype(dtype).as_numpy_dtype)
    monkeypatch.setattr(collectives, "size", lambda: 2)
    for rank in range(2):
        held = slice(None) if replicas == 2 else slice(rank, None, 2)
        layout = types.SimpleNamespace(replicas=types.SimpleNamespace(size=replicas), piece=rank)
        embedding = types.SimpleNamespace(export_table=lambda _, held=held: (IDS[held], numbers[held]), layout=layout)
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        write_rank_rows(tmp_path, embedding, "item")
    ids, got = read_all_rows(tmp_path, "item", dtype)
    order = np.argsort(IDS)
    np.testing.assert_array_equal(ids, IDS[order])
    assert got.dtype == numbers.dtype
    np.testing.assert_array_equal(got, numbers[order])
