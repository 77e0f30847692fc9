"""`fusedrec plan` plans the model of a configuration for a cluster, without Horovod and without other machines."""

import json

import pytest
import yaml

from tests.models import experiments
from tf_fusedrec.cli.main import main


@pytest.mark.slow
@pytest.mark.both
def test_a_configuration_is_planned(tmp_path, capsys):
    config = tmp_path / "a.yaml"
    config.write_text(yaml.safe_dump(experiments.RANKING), encoding="utf-8")
    words = ["plan", str(config), "--set", f"data.cache={tmp_path}", "--ranks", "4", "--memory-bytes-per-rank", "1e9"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cluster"]["ranks"] == 4 and plan["forecasts"][0]["step_s"] > 0
    assert main([*words, "--ranks-per-host", "3"]) == 1
    assert "Cluster.ranks_per_host must divide Cluster.ranks, which is 4, got 3" in capsys.readouterr().err
