"""Compares integers exactly."""

import numpy as np


def assert_same_integers(got, wanted, what=""):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype.kind in "iub", f"{what}: {got.dtype} is not an integer type"
    np.testing.assert_array_equal(got, wanted, err_msg=what)
