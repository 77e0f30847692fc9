"""Compares results: integers exactly, floats no worse than a plain TensorFlow baseline."""

import numpy as np


def assert_same_integers(got, wanted, what=""):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype.kind in "iub", f"{what}: {got.dtype} is not an integer type"
    np.testing.assert_array_equal(got, wanted, err_msg=what)


def assert_no_worse_than(candidate, baseline, exact, factor=2.0, floor=1e-6):
    """Allows `candidate` a maximal error of `factor` times `baseline`'s, both against `exact` in float64.

    The factor covers another order of summation. `floor` covers a baseline that happens to be exact.
    """
    exact = np.asarray(exact, np.float64)
    ours = np.max(np.abs(np.asarray(candidate, np.float64) - exact), initial=0.0)
    theirs = np.max(np.abs(np.asarray(baseline, np.float64) - exact), initial=0.0)
    limit = factor * theirs + floor * np.max(np.abs(exact), initial=0.0)
    assert ours <= limit, f"max error {ours:.3g} exceeds {limit:.3g} (baseline error {theirs:.3g}, factor {factor})"
