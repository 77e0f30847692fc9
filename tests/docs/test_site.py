"""The site builds without a warning, pages need no network, and every figure of a page is a field of a result."""

import re
import subprocess
import sys

import pytest

from tests.docs.commands import ROOT
from tools.docs import generate


def test_the_site(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, check=True, timeout=300,
    )  # fmt: skip
    assert "all_tables" in (tmp_path / "configuration.html").read_text(encoding="utf-8")
    reference = (tmp_path / "api/embedding.html").read_text(encoding="utf-8")
    assert "accumulate_steps" in reference and "stochastic_rounding" in reference
    assert re.search(r"<td>(<!--.*?-->)[\d.]+ ms</td>", (tmp_path / "benchmarks.html").read_text(encoding="utf-8"))
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf-8"))
        assert not loaded, page.name


def test_pages_and_results_are_current(capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


RESULT = generate.parse(
    '{"a": {"ms": 2.5, "raw": [1, 2], "machine": "m", "cases": [{"dim": 8, "ratio": 3}, {"dim": 16, "ratio": 4}]}}'
)
NAMES = {**RESULT, "max": max, "__builtins__": {}}


def test_a_field_is_filled_and_filled_again():
    page = '<!--{a.ms:.2f}--> ms, <!--{a.cases(dim="16").ratio / a.ms:.0%}-->7% of <!--{a["ms"]}-->1,000'
    made = generate.filled(page, NAMES, "page.md")
    assert re.sub("<!--.*?-->", "", made) == "2.50 ms, 160% of 2.5"
    assert generate.filled(made, NAMES, "page.md") == made


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("a.second", "page.md:2: got the field {a.second}: KeyError: .no field 'second'; the fields are ms, raw"),
        ("b.ms", "NameError: name 'b' is not defined"),
        ('a.cases(dim="32").ratio', "no row with {'dim': '32'}"),
        ("a.cases().ratio", "2 rows with {}, want one"),
        ("a.machine", "must be a number, got 'm'"),
        ("open('x')", "name 'open' is not defined"),
    ],
)
def test_a_field_without_a_number_is_refused_by_name(field, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"KeyError:\ \.", "KeyError: .")):
        generate.filled(f"first\n<!--{{{field}}}-->1", NAMES, "page.md")


@pytest.mark.parametrize(
    ("page", "typed"),
    [
        ("| x | ours |\n|---|---|\n| Figure 1 | 3.07 times |", 1),
        ("| x | figure |\n|---|---|\n| Figure 1 | <!--{a.ms}-->2.5 and 16 ms |", 1),
        ("| x | why |\n|---|---|\n| Figure 1 | two ranks |\n| 2 | <!--{a.ms}-->2.5 |\n| 3 | within -3 % |", 1),
        ("It takes <!--{a.ms}-->2.5 ms on one rank and 3 ms on two.", 1),
        ("<!--{a.ms}-->2.5 ms begins a line.", 1),
        # Settings, names and figures of others.
        ("| x, 3 ms | they | ours |\n|---|---|---|\n| 1 | 7 ms | `M=8` [x](3.md), HR@10 |", 0),
        ("| x | ours |\n|---|---|\n| 1 | MovieLens-1M, see Table 7 |", 0),
        ("It takes <!--{a.ms}-->2.5 ms for 26 features, 95 % interval.\nA line without a field: 3 ms.", 0),
    ],
)
def test_typed_figures_are_found(page, typed):
    assert len(list(generate.typed(page))) == typed
