"""Writes the figures of the pages, and the parts of docs/ that come from code, into the repository.

    python -m tools.docs.generate            # writes what has changed
    python -m tools.docs.generate --trim     # also removes the fields of benchmarks/results that no page and plot reads
    python -m tools.docs.generate --check    # writes nothing, names what is not current; tests/docs runs it

A page holds fields: `<!--{train_step.ms_ours:.1f}-->26.1 ms`. The comment is a replacement field of a Python f-string
over the files of benchmarks/results, and this program writes the number behind it. Readers of the repository and of the
site see the number alone, so pages need no second, rendered copy.

    {overlap.speedup_2d:.2f}                          a field of overlap.json
    {train_step.cpu_ms_ours / train_step.cpu_ms_tfra:.0%}
    {table.tfra(rows="1000000", optimizer="adam").ms_ours:.1f}      the one row of a list with these fields
    {ne_gap("weight_sync_g4_c1", 3):+.3f}           a function of `results`

Refused by name: a field that no result has; a field that is no number; and a figure that somebody typed (see `typed`).
The recorded timelines (docs/img/timeline_*.png) are measurements: benchmarks.overlap makes them.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import fnmatch
import functools
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib

from benchmarks.harness import plots
from tools.docs import configuration, places

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
# Kept by `trim` though no page reads them.
PROVENANCE = ("benchmark", "machine", "load_average", "python", "commit", "setting", "note")
NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?%?"
FIELD = re.compile(rf"<!--\{{(.+?)\}}-->((?:{NUMBER})?)")
# Titles in the text files of benchmarks.table, and the names of their rows in a field.
TEXT_TABLES = {
    "against TFRA": "tfra", "ours, row-wise Adagrad, by threads": "threads", "longest pause": "growth",
    "steps that evict": "evicting", "against FBGEMM": "peers", "served rows": "quantized", "dedup": "dedup",
    "dimensions": "dimensions",
}  # fmt: skip


class Result(dict):
    """A JSON object with its fields as attributes. It remembers which were read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({k: Rows(v) if isinstance(v, list) else v for k, v in fields.items()})
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(f"no field {name!r}; the fields are {', '.join(self)}")
        self.read.add(name)
        return super().__getitem__(name)

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        self.read.update(self)
        return super().values()


class Rows(list):
    """A JSON list, whose objects are found by their fields."""

    def all(self, **patterns: str) -> list[Result]:
        rows = [row for row in self if all(fnmatch.fnmatchcase(str(row[k]), str(v)) for k, v in patterns.items())]
        if not rows:
            raise KeyError(f"no row with {patterns}")
        return rows

    def __call__(self, **patterns: str) -> Result:
        rows = self.all(**patterns)
        if len(rows) > 1:
            raise KeyError(f"{len(rows)} rows with {patterns}, want one")
        return rows[0]


@functools.cache
def parse(text: str) -> Any:
    """json.loads with Results. Equal text gives one object, so that plots and pages record their reads together."""
    return json.loads(text, object_hook=Result)


def results() -> dict[str, Any]:
    """The names that a field may use: a result by the stem of its file, and a few functions."""
    paths = [path for path in sorted(RESULTS.rglob("*.json")) if path.parent.name != "curves"]
    names: dict[str, Any] = {path.stem: parse(path.read_text(encoding="utf-8")) for path in paths}
    for path in RESULTS.glob("*.txt"):
        found = plots.tables(path.read_text(encoding="utf-8")).items()
        rows = {name: rows for title, rows in found for start, name in TEXT_TABLES.items() if title.startswith(start)}
        names[path.stem] = Result(
            {name: [Result(dict(map(_cell, row.items()))) for row in rows[name]] for name in rows}
        )
    curves = names["schedule_quality"]["curves"]

    def ne_gap(variant: str, epoch: int) -> float:
        """NE of a variant minus that of sync after an epoch, means over the seeds."""
        mine, sync = (
            [curve.epochs(epoch=epoch).validation.ne for curve in curves.all(variant=name)]
            for name in (variant, "sync")
        )
        return statistics.mean(mine) - statistics.mean(sync)

    functions = {name: getattr(builtins, name) for name in ("abs", "len", "map", "max", "min", "zip")}
    return {**functions, "ne_gap": ne_gap, **names, "__builtins__": {}}


def _cell(cell: tuple[str, str]) -> tuple[str, Any]:
    name, text = cell
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return name, number(text)
    return cell


def filled(page: str, names: Mapping[str, Any], where: str) -> str:
    """Returns the page with the number behind each field. `where` names the page in errors."""

    def number(match: re.Match[str]) -> str:
        try:
            value = eval(f"f'''{{{match[1]}}}'''", dict(names))
        except Exception as error:
            line = page[: match.start()].count("\n") + 1
            raise ValueError(
                f"{where}:{line}: got the field {{{match[1]}}}: {type(error).__name__}: {error}. Remedy: a field "
                "of benchmarks/results, or run the benchmark and keep its result there."
            ) from error
        if not re.fullmatch(NUMBER, value):
            raise ValueError(f"{where}: the field {{{match[1]}}} must be a number, got {value!r}. Remedy: format it.")
        return f"<!--{{{match[1]}}}-->{value}"

    return FIELD.sub(number, page)


def typed(page: str) -> Iterator[str]:
    """Yields the figures that are no fields, each with its line, where a page shows measured ones.

    In a table, a column that is called "ours" or "figure", or holds a field and is not the first one, has no digit
    beside fields, code, links, and names such as HR@10 or Table 7. In a line with a field, no typed number has a unit.
    """
    lines = page.splitlines()
    table: list[int] = []
    for n, line in enumerate([*lines, ""]):
        if line.startswith("|"):
            table.append(n)
            continue
        if table:
            yield from _typed_in_table(table[0], [_cells(lines[row]) for row in table])
        table = []
        if FIELD.search(line):
            unit = r"(?<![\w.])\d[\d.,]* ?(?:%(?! interval)|times|ms|s\b|[KMG]B|MFLOPs)"
            # Markdown takes a line that begins with a comment as HTML.
            found = re.search(unit, FIELD.sub("", line)) or re.match(r"\s*(?:[-*] )?<!--.*", line)
            if found:
                yield f"line {n + 1}: {found[0]}"


def _typed_in_table(first: int, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for column, head in enumerate(rows[0]):
        cells = [row[column] for row in rows[2:] if column < len(row)]
        if head not in ("ours", "figure") and not (column and any(FIELD.search(cell) for cell in cells)):
            continue
        for n, cell in enumerate(cells):
            words = re.sub(
                r"`[^`]*`|\]\([^)]*\)|(?:Table|Figure|section)s? [\d.]+(?: and [\d.]+)?|2D-SP", "", FIELD.sub("", cell)
            )
            if re.search(r"(?<![\w@.,])(?<![A-Za-z]-)\d", words):
                yield f"line {first + n + 3}, column {head!r}: {cell}"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def generated() -> dict[str, str]:
    """Returns the text of every page with fields, and of every generated file, by its path in the repository."""
    names = results()
    made = {"docs/configuration.md": configuration.page()}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        where, page = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        found = list(typed(page))
        if found:
            raise ValueError(f"{where}: typed figures, {'; '.join(found)}. Remedy: a field, {{result.field:.1f}}.")
        if FIELD.search(page):
            made[where] = filled(page, names, where)
    gpu = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    made["docs/gpu.md"] = re.sub(
        r"(<!-- generated: places -->\n).*(<!-- end: places -->)",
        lambda marks: f"{marks[1]}\n{places.block()}\n\n{marks[2]}", gpu, flags=re.DOTALL,
    )  # fmt: skip
    return {**made, **{f"docs/img/{name}.svg": plot for name, plot in plots.kept_plots(parse).items()}}


def trimmed(value: Any) -> Any:
    """Returns a result with the fields that were read, and its machine."""
    if isinstance(value, list):
        return [one for one in map(trimmed, value) if one != {}]
    if not isinstance(value, Result):
        return value
    return {k: trimmed(dict.get(value, k)) for k in value if k in value.read or k in PROVENANCE}


def compact(value: Any, indent: str = "", of_list: bool = False) -> str:
    """Returns JSON in lines of about 118 characters: a short value, and a list's object of scalars, is one line."""
    line = json.dumps(value)
    inner = indent + "  "
    if not isinstance(value, (dict, list)) or len(indent + line) <= 118:
        return line
    if isinstance(value, dict):
        if of_list and not any(isinstance(one, (dict, list)) for one in value.values()):
            return line
        items = (f"{json.dumps(k)}: {compact(v, inner)}" for k, v in value.items())
        return "{\n" + ",\n".join(inner + item for item in items) + f"\n{indent}}}"
    lines: list[str] = []
    for item in (compact(one, inner, of_list=True) for one in value):
        if lines and "\n" not in lines[-1] + item and len(inner + lines[-1] + item) < 116:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return "[\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}]"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not current")
    parser.add_argument("--trim", action="store_true", help="also remove the unread fields of benchmarks/results")
    arguments = parser.parse_args(argv)
    made = generated()
    if arguments.trim or arguments.check:
        for path in RESULTS.rglob("*.json"):
            made[str(path.relative_to(ROOT))] = compact(trimmed(parse(path.read_text(encoding="utf-8")))) + "\n"
    changed = [name for name, text in made.items() if not _is_current(ROOT / name, text)]
    for name in changed:
        print(f"{name} is not current" if arguments.check else name)
        if not arguments.check:
            (ROOT / name).write_text(made[name], encoding="utf-8")
    if arguments.check and changed:
        print("Remedy: python -m tools.docs.generate, with --trim for results; commit what it writes.")
    return int(arguments.check and bool(changed))


def _is_current(path: pathlib.Path, made: str) -> bool:
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if path.suffix == ".svg" and f"Matplotlib v{matplotlib.__version__}," not in kept:
        # Another release moves items by a hair; the words are equal.
        made, kept = (str(re.findall(r"<text.*?>(.*?)</text>", svg)) for svg in (made, kept))
    return made == kept


if __name__ == "__main__":
    sys.exit(main())
