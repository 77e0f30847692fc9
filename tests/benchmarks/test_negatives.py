"""benchmarks.negatives: a form whose gradient differs is not measured."""

import pytest

from benchmarks.harness import harness
from benchmarks.negatives import __main__ as negatives
from tf_fusedrec import tf


def test_forms_agree_and_a_wrong_gradient_is_not_measured(monkeypatch):
    negatives.check_gradients()
    honest = negatives.losses.sampled_softmax
    monkeypatch.setattr(negatives.losses, "sampled_softmax", lambda *a, **k: honest(*a, **k) + 1e-3 * tf.norm(a[0]))
    with pytest.raises(harness.CheckFailed, match="gradients"):
        negatives.check_gradients()
