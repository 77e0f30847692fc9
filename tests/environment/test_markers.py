"""Tests that start processes or take long are marked, so that `make quick` leaves them out."""

import importlib

import pytest

from tests import conftest
from tests.conftest import markers_of


@pytest.mark.parametrize(
    ("module", "markers"),
    [
        ("exchange.test_ranks", {"ranks"}),
        ("exchange.test_two_hosts", {"ranks"}),
        ("checkpoint.test_killed", {"processes"}),
        ("models.test_train", {"processes"}),
        ("environment.test_sanitizers", {"processes"}),
        ("cuda.test_emulation", {"emulation", "processes"}),
        ("soak.test_soak", {"processes", "slow"}),
        ("models.test_evaluate", set()),
        ("embedding.test_embedding", set()),
    ],
)
def test_markers_of_modules(module, markers):
    assert markers_of(importlib.import_module(f"tests.{module}")) == markers


def test_a_long_test_without_a_marker_fails(request, monkeypatch):
    monkeypatch.setattr(conftest, "QUICK_S", 0.0)
    said = "in a test of `make quick`, wanted at most 0 s. Remedy: "
    with pytest.raises(pytest.fail.Exception, match=said), conftest.within_quick_limit(request.node):
        sum(range(100_000))
    request.node.add_marker("slow")
    with conftest.within_quick_limit(request.node):
        sum(range(100_000))
