"""The first program of the topology page makes the groups that the page shows, on two ranks."""

import contextlib
import io
import re

from tests.docs.commands import ROOT, programs
from tests.support.ranks import run_ranks
from tf_fusedrec.exchange.topology import Topology

PAGE = ROOT / "docs/topology.md"


def run_program():
    """Body: returns the output of the program."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(programs(PAGE)[0].code, PAGE.name, "exec"), {"__name__": "docs"})
    return printed.getvalue()


def test_two_ranks_are_two_groups_with_a_replica_each():
    shown = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert run_ranks(run_program, 2, topologies=[Topology(groups=2)]) == [shown[1]] * 2
