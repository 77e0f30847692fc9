"""Exports that several modules read. A test that damages one copies it first."""

import types

import pytest

import tf_fusedrec as fr
from tests.saved_model import click_model


@pytest.fixture(scope="session")
def click(tmp_path_factory):
    """The click model in two versions.

    folder: Exports of version 1, "stock" and "ours", and their deltas to version 2, "stock-delta" and "ours-delta".
    model: The model at version 2.
    answers: Its answers by version and seed of the batch; by "exported", those of version 1 after its exports.
    """
    folder, model = tmp_path_factory.mktemp("click"), click_model.make_model()

    def answers():
        return {seed: model(click_model.batch(seed), training=False) for seed in (0, 1, 2)}

    click_model.train(model)
    told = {1: answers()}
    for ops in ("stock", "ours"):
        fr.export(model, folder / ops, ops)
    told["exported"] = answers()
    click_model.train(model, [4, 5])
    told[2] = answers()
    for ops in ("stock", "ours"):
        fr.export(model, folder / f"{ops}-delta", ops, base=folder / ops)
    return types.SimpleNamespace(folder=folder, model=model, answers=told)
