"""The table of docs/input.md, with columns of its own names, goes through the job of `fusedrec train`."""

import os
import subprocess
import sys

import pytest

from tests.docs.commands import ROOT, programs
from tf_fusedrec.models.run_folder import read_record, run_of

PAGE = ROOT / "docs/input.md"
(SHOP,) = (program for program in programs(PAGE) if "SHOP =" in program.code)
LIMIT_S = 300


@pytest.mark.nightly
def test_the_shop_of_the_docs_trains_with_its_own_column_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(SHOP.code, PAGE.name, "exec"), {})
    command = [sys.executable, "-m", "tf_fusedrec.cli.main", "train", "shop.yaml", "--data", "shop"]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(run_of(tmp_path / "runs/shop"))
    assert "table, shop, 2 files, 1200 of 1200 rows, customer strings as fingerprints" in record["data"]["source"]
    results = record["results"]
    # A customer's own rate for the brand ranks its offers: 0.9 against 0.1.
    assert results["test"]["ctr_auc"] > 0.7 > results["test"]["baseline_ctr_auc"]
    assert results["served_difference"] < 1e-4
