"""The Makefile sets up first, and runs no command that a value given to it holds."""

import subprocess

import pytest

from tests.support.shared import ROOT


@pytest.mark.parametrize(
    "value", ['x"; touch broken; "', "$(touch broken)", "$$(touch broken)", "$(shell touch broken)"]
)
@pytest.mark.parametrize("target", ["train", "bench"])
def test_a_value_given_to_make_is_never_run_as_a_command(tmp_path, target, value):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text(encoding="utf-8"), encoding="utf-8")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\n', encoding="utf-8")
    python.chmod(0o755)
    taken = ("NP", "DATA", "CONFIG") if target == "train" else ("BENCHMARKS",)
    no_set_up = ["--old-file=setup", "--old-file=runtime"]
    done = subprocess.run(
        ["make", *no_set_up, target, f"PYTHON={value}", f"BIN={value}", *(f"{name}={value}" for name in taken)],
        cwd=tmp_path, capture_output=True, encoding="utf-8", errors="replace", check=True,
    )  # fmt: skip
    assert not (tmp_path / "broken").exists()
    if target == "train":
        words = [f"<--ranks={value}>", f"<--data={value}>", "<-->", f"<{value}>"]
        assert done.stdout.splitlines()[2:] == ["<train>", *words]
    else:
        assert f"<benchmarks.{value.split()[0]}>" in done.stdout
