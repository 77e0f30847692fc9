"""Tables of measured figures, filled from benchmarks/results, so that no figure is typed into a page.

A page holds marked blocks; `filled` replaces their content. Results come from three places:

    <name>.json     a benchmark's own result, by the name of its file
    figures.json    figures of an earlier state whose JSON file was not kept: they get an asterisk
    table.txt       rows of its tables, see `_table_rows`

A file <name>.json replaces the entry <name> of figures.json, as soon as it exists.
"""

from __future__ import annotations

import json
import pathlib
import re
import string
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.plots import figures as plots

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
FOLDERS = ("", "retrieval/", "sizes/")  # of RESULTS
EARLIER = "figures"


class Row(NamedTuple):
    """One line of a table. `what` and `figure` are format strings over the results."""

    what: str
    figure: str
    command: str


class Table(NamedTuple):
    """A theme of docs/benchmarks.md."""

    title: str
    setting: str  # the common setting of all rows
    rows: Sequence[Row]


class Results(NamedTuple):
    """All results by name, and the names that come from an earlier state."""

    values: Mapping[str, Any]
    earlier: frozenset[str]


class _ByName(dict):
    """A JSON object whose keys may be digits: a format string asks for them as integers."""

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, int):
            return self[str(key)]
        raise KeyError(key)


def load(folder: pathlib.Path = RESULTS) -> Results:
    """Reads every result of the folder, and of its FOLDERS."""
    kept = {
        path.stem: json.loads(path.read_text(encoding="utf-8"), object_hook=_ByName)
        for path in sorted(path for place in FOLDERS for path in folder.glob(f"{place}*.json"))
    }
    old = kept.pop(EARLIER)
    missing = {name: values for name, values in old["figures"].items() if name not in kept}
    for values in missing.values():
        values["machine"] = old["machine"]
    table = {"table": _table_rows((folder / "table.txt").read_text(encoding="utf-8"))}
    return Results({**table, **missing, **kept}, frozenset(missing))


def _table_rows(text: str) -> dict[str, Any]:
    """Numbers of table.txt: against TFRA by "<rows>_<rule>", by threads, against peers by "<peer>_<threads>"."""
    page = plots.tables(text)

    def rows_of(title: str, key: str) -> dict[str, dict[str, Any]]:
        rows = next(rows for found, rows in page.items() if found.startswith(title))
        return {key.format(**row): {name: _number(cell) for name, cell in row.items()} for row in rows}

    return {
        "tfra": rows_of("against TFRA", "{rows}_{optimizer}"),
        "threads": rows_of("ours, row-wise Adagrad, by threads", "{rows}_{threads}"),
        "peer": rows_of("against FBGEMM", "{peer}_{threads}"),
        "growth": rows_of("longest pause", "all")["all"],
        "machine": re.search(r"^on:? (.*)$", text, re.MULTILINE)[1],  # type: ignore[index]
    }


def _number(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


def names_in(template: str) -> list[str]:
    """Names of the results that a format string reads."""
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field]
    return [re.split(r"[.\[]", field)[0] for field in fields]


def said(template: str, results: Results) -> str:
    """The format string with its figures; an asterisk where one of them is of an earlier state."""
    text = template.format_map(results.values)
    return text + (r" \*" if results.earlier.intersection(names_in(template)) else "")


def table(rows: Sequence[Row], results: Results) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| what | figure | command |"
    yield "|---|---|---|"
    above = ""
    for row in rows:
        what = row.what.format_map(results.values)
        yield f"| {what} | {said(row.figure, results)} | {'' if row.command == above else f'`{row.command}`'} |"
        above = row.command


def points(text: str, results: Results) -> str:
    """A Markdown list, one point per line of the format string, wrapped."""
    return "\n".join(
        textwrap.fill(said(line, results), width=118, subsequent_indent="  ", break_on_hyphens=False)
        for line in text.splitlines()
    )


def themed(tables: Sequence[Table], results: Results) -> str:
    """All themes, each with the machines and commits of its results."""
    lines = []
    for one in tables:
        lines += [f"### {one.title}", "", one.setting, "", *table(one.rows, results), "", _measured(one, results), ""]
    return "\n".join(lines).rstrip()


def _measured(one: Table, results: Results) -> str:
    names = sorted({name for row in one.rows for name in names_in(row.figure)})
    machines: dict[str, list[str]] = {}
    for name in names:
        result = results.values[name]
        machines.setdefault(result["machine"], []).append(f"`{name}`" + (r" \*" if name in results.earlier else ""))
    return "Measured on " + "; ".join(f"{machine}: {', '.join(found)}" for machine, found in machines.items()) + "."


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with the content of its marked blocks replaced.

    Raises:
      ValueError: the page has no block of that name.
    """
    for name, content in blocks.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
        if begin not in page or end not in page:
            raise ValueError(
                f"got a page without the block {name!r}. Remedy: add its two marks, {begin!r} and {end!r}."
            )
        before, rest = page.split(begin, 1)
        page = f"{before}{begin}\n{content}\n\n{end}{rest.split(end, 1)[1]}"
    return page
