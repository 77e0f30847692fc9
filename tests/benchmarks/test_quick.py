"""Every command of `make bench` runs with --quick and writes the fields of the result that the repository keeps."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks.harness import processes
from benchmarks.harness.harness import ROOT

(NAMES,) = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES.split())
def test_a_quick_run_writes_the_fields_of_the_kept_result(name, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(
        command, cwd=tmp_path, env=processes.environment(), capture_output=True, encoding="utf-8", errors="replace"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    kept = ROOT / f"benchmarks/results/{name.rpartition('.')[2]}.json"
    if kept.exists() and not written.get("not_measured"):
        assert set(json.loads(kept.read_text(encoding="utf-8"))) <= set(written)
