"""What setup.py defines, for tests that use its commands and objects."""

from __future__ import annotations

import glob
import runpy
from typing import Any

import pytest
import setuptools

from tests.support.shared import ROOT


def names_of_setup() -> dict[str, Any]:
    """Returns the names of setup.py, run without a command. `described` is what it tells setuptools."""
    described: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **given: described.update(given))
        return {**runpy.run_path(str(ROOT / "setup.py")), "described": described}


def packed_files(pattern: str) -> set[str]:
    """Returns files of tf_fusedrec, through its links to models/ and configs/, as paths from ROOT."""
    return {f"tf_fusedrec/{name}" for name in glob.glob(pattern, root_dir=ROOT / "tf_fusedrec", recursive=True)}
