"""Tests that start processes are marked, so that `make quick` leaves them out."""

import importlib

import pytest

from tests.conftest import markers_of


@pytest.mark.parametrize(
    ("module", "markers"),
    [
        ("exchange.test_ranks", {"ranks"}),
        ("exchange.test_two_hosts", {"ranks"}),
        ("checkpoint.test_killed", {"slow"}),
        ("models.test_train", {"slow"}),
        ("environment.test_sanitizers", {"slow"}),
        ("cuda.test_emulation", {"emulation", "slow"}),
        ("models.test_evaluate", set()),
        ("embedding.test_embedding", set()),
    ],
)
def test_markers_of_modules(module, markers):
    assert markers_of(importlib.import_module(f"tests.{module}")) == markers
