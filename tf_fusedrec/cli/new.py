"""Looks at the columns of a table of events, and writes a commented YAML that proposes their roles.

    fusedrec new clicks.csv
    fusedrec new day=1.parquet day=2.parquet --output shop.yaml

The proposal reads the first 100,000 rows of the first file. Check the roles, then pass the YAML to `fusedrec train`.
"""

from __future__ import annotations

import argparse
import json
import keyword
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from tf_fusedrec.cli.main import write
from tf_fusedrec.models.data_sets.table import UNKNOWN, is_reserved
from tf_fusedrec.models.data_sets.table_files import ENDINGS, check_columns, plain
from tf_fusedrec.models.experiment.data_config import DataConfig

ROWS = 100_000
# Names of columns, by role. A longer name has the word between non-letters or at its end.
NAMES = {
    "user": "user|customer|member|visitor|client|uid|session",
    "item": "item|sku|product|movie|article|video|doc|content|goods|asin",
    "time": "time|timestamp|date|ts|at|datetime",
    "outcome": "watched|dwell|duration|seconds|spent|revenue",
}
FEW = 1000  # distinct integers up to which a column is an id, not a number
CROSSED = 100  # most values of a column that is crossed with the user


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("new", description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE", help="CSV or Parquet files, or a folder")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="YAML to write (default: NAME.yaml)")


def run(arguments: argparse.Namespace) -> int:
    for path in arguments.files:
        if not path.exists():
            raise ValueError(f"FILE: no such file or folder {str(path)!r}.")
    source = arguments.files[0] if len(arguments.files) == 1 else pathlib.Path(os.path.commonpath(arguments.files))
    name = re.sub(r"\W+", "_", source.name.split(".")[0]) or "events"
    output = arguments.output or pathlib.Path(f"{name}.yaml")
    if output.exists():
        raise ValueError(f"--output {str(output)!r} exists. Remove it, or pass another --output.")
    listed = [path for file in arguments.files for path in ([file] if file.is_file() else file.iterdir())]
    first = min((path for path in listed if path.name.endswith(ENDINGS)), default=None)
    if first is None:
        raise ValueError(f"FILE: no file ends in {', '.join(ENDINGS)}. Name CSV or Parquet files, or their folder.")
    if len(arguments.files) > 1:
        in_folder = {path for path in source.iterdir() if path.name.endswith(ENDINGS)}
        if stray := in_folder ^ {*arguments.files}:
            raise ValueError(
                f"FILE: the files are not all of {source}/, {min(stray).name!r} for one, and data.input is one folder. "
                "Move them to a folder of their own."
            )
    table = read(first)
    columns = profile(table)
    roles = propose(columns)
    write("--output", output, text_of(name, source, columns, roles, window_of(table, roles)))
    if arguments.json:
        print(json.dumps({"config": str(output), "roles": roles}, indent=1))
    else:
        scope = f" All files of {source}/ will be read." if len(arguments.files) > 1 else ""
        print(f"{output}: {len(columns)} columns of {first}.{scope} Check the roles, then: fusedrec train {output}")
    return 0


def read(path: pathlib.Path) -> Any:
    """Returns the first rows of a file as an Arrow table. Raises ValueError: it is neither CSV nor Parquet."""
    try:
        if path.suffix == ".parquet":
            table = pa.Table.from_batches([next(pq.ParquetFile(path).iter_batches(ROWS))])
        else:
            block, lines = pa.csv.ReadOptions(block_size=1 << 24), pa.csv.ParseOptions(newlines_in_values=True)
            with pa.csv.open_csv(path, read_options=block, parse_options=lines) as reader:
                table = pa.Table.from_batches([reader.read_next_batch()]).slice(0, ROWS)
    except (pa.ArrowException, OSError, StopIteration) as error:
        reason = str(error) or "it has no row"
        raise ValueError(f"{path}: not readable ({reason}). Pass CSV or Parquet files with a row.") from error
    check_columns(path, table.column_names, table.column_names)
    names = [
        field.name for field in table.schema if not (pa.types.is_struct(field.type) or pa.types.is_map(field.type))
    ]
    return pa.table({name: plain(name, table[name], lambda row: f"{path}, row {row + 1}") for name in names})


def profile(table: Any) -> dict[str, dict[str, Any]]:
    """Returns what decides the role of each column: type, distinct values, share of missing values, an example."""
    columns = {}
    for name in table.column_names:
        values = table[name]
        dtype = values.type
        is_number = pa.types.is_decimal(dtype) or (
            pa.types.is_floating(dtype)  # pandas writes integers as 12.0 if one is missing
            and not pc.all(pc.equal(values, pc.floor(values))).as_py()
        )
        is_list = pa.types.is_nested(dtype)
        texts = pa.types.is_string(dtype) or pa.types.is_large_string(dtype)
        distinct = [] if is_list else pc.unique(values.drop_null()).to_pylist()
        columns[name] = {
            "type": "list" if is_list else "text" if texts else "time" if pa.types.is_temporal(dtype)
            else "number" if is_number else "integer",
            "distinct": len(distinct),
            "missing": values.null_count / max(1, len(values)),
            "binary": {*map(float, distinct)} == {0.0, 1.0} if not texts and not is_list and len(distinct) == 2
            and not pa.types.is_temporal(dtype) else False,
            "parted": texts and any("|" in value for value in distinct[:1000]),
            "example": next((value for value in values.to_pylist()[:1000] if value is not None), None),
        }  # fmt: skip
    user = _named("user", columns)
    for name, column in columns.items():
        column["of_user"] = user not in (None, name) and column["type"] != "list" and _is_constant(table, user, name)
    return columns


def propose(columns: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns the role of each column: user, item, time, label, list, context, feature, number, outcome, or ""."""
    roles = {}
    for role in ("user", "item", "time"):
        name = _named(role, {name: column for name, column in columns.items() if name not in roles})
        if name is not None:
            roles[name] = role
    for name, column in columns.items():
        if name in roles:
            continue
        if column["distinct"] == 1 or column["missing"] == 1:
            roles[name] = ""  # It distinguishes no events.
        elif column["binary"]:
            roles[name] = "label"
        elif column["type"] == "list" or column["parted"]:
            roles[name] = "list"
        elif column["type"] == "time":
            roles[name] = ""
        elif column["type"] == "number" or (column["type"] == "integer" and column["distinct"] > FEW):
            outcome = re.search(rf"(^|[^a-z])({NAMES['outcome']})", name.lower())
            roles[name] = "outcome" if outcome else "context_number" if column["of_user"] else "number"
        else:
            roles[name] = "context" if column["of_user"] else "feature"
    return {name: roles[name] for name in columns}


def window_of(table: pa.Table, roles: dict[str, str]) -> int:
    """Returns data.window: a quarter of the events of a median user, so that most of them have a history in train."""
    user = next((name for name, role in roles.items() if role == "user"), None)
    if user is None:
        return DataConfig.window
    events = np.median(table.select([user]).group_by(user).aggregate([(user, "count")])[f"{user}_count"])
    return int(min(max(events // 4, 1), DataConfig.window))


def text_of(
    name: str, source: pathlib.Path, columns: dict[str, dict[str, Any]], roles: dict[str, str], window: int
) -> str:
    """Returns the YAML. A role that no column has is marked, and the YAML is refused until it is filled in."""
    name_of = model_names(roles)

    def having(*some: str) -> list[str]:
        return [column for column, role in roles.items() if role in some]

    def column_with(role: str) -> str:
        return (having(role) or [UNKNOWN])[0]

    def block(key: str, role: str) -> list[str]:
        lines = [f"      {json.dumps(name_of[each])}: {json.dumps(each)}{comment(each)}" for each in having(role)]
        return [f"    {key}:", *lines] if lines else []

    def comment(column: str) -> str:
        facts = columns[column]
        missing = f", {100 * facts['missing']:.0f} % missing" if facts["missing"] else ""
        return f"  # {facts['distinct']:,} values{missing}, such as {str(facts['example'])[:30]!r}"

    def names(*some: str) -> str:
        return f"[{', '.join(json.dumps(name_of[column]) for column in having(*some))}]"

    labels = [name_of[column] for column in having("label")]
    crossed = [name_of[column] for column in having("feature") if columns[column]["distinct"] <= CROSSED]
    tasks = labels[:2] or ["click"]
    lines = [
        f"# Written by `fusedrec new`, which looked at the first {ROWS:,} rows. Check the roles of the columns.",
        f"name: {json.dumps(name)}",
        "task: ranking",
        "data:",
        "  source: table",
        f"  input: {json.dumps(str(source))}",
        f"  window: {window}  # events of a row; a user's earlier events are its history",
        "  columns:",
        *(f"    {role}: {json.dumps(column_with(role))}{comment(column_with(role)) if having(role) else ''}"
          for role in ("user", "item", "time")),
        "    order: any  # file: a user's rows are in one file, by time",
        *(block("labels", "label") or [f'    labels: {{click: "{UNKNOWN}"}}  # no column has only 0 and 1']),
        *block("context", "context"),
        *block("context_numbers", "context_number"),
        *block("features", "feature"),
        *block("lists", "list"),
        *block("numbers", "number"),
        *block("outcomes", "outcome"),
        *(f"# left out: {column}{comment(column)}" for column in having("")),
        "model:",
        "  kind: dlrm  # or din, dcn, grm",
        f"  click_label: {json.dumps(f'exposed_{tasks[0]}')}",
        f"  conversion_label: {json.dumps(f'exposed_{tasks[-1]}')}",
        *([f"  other_labels: [{', '.join(map(json.dumps, labels[2:]))}]"] if labels[2:] else []),
        f"  contextual: [{', '.join(['user_id', *(json.dumps(name_of[column]) for column in having('context'))])}]",
        f"  contextual_dense: {names('context_number')}",
        f"  item_features: {names('feature')}",
        f"  item_lists: {names('list')}",
        f"  history_dense: {names('number', 'outcome')}",
        f"  exposed_dense: {names('number')}",
        "  # tastes of each user, where a column has few values",
        f"  crosses: [{', '.join(json.dumps(f'user_id*{name}') for name in crossed)}]",
        "  dim: 16",
        "embedding: {optimizer: adam, learning_rate: 0.005}",
        "train: {epochs: 10, patience: 2, learning_rate: 0.002, target_tokens_per_rank: 1024}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def model_names(columns: Iterable[str]) -> dict[str, str]:
    """Returns a name that the model can have for each column: letters, digits and "_", as in inputs of a server."""
    names: dict[str, str] = {}
    for column in columns:
        name = re.sub(r"\W+", "_", column, flags=re.ASCII).strip("_")
        numbered = [f"column_{name}_{number}" for number in range(2, len(names) + 3)]
        names[column] = next(
            form
            for form in (name, f"column_{name}", *numbered)
            if form[:1].isalpha() and not keyword.iskeyword(form) and form not in (*names.values(), "self")
            and not is_reserved(form)
        )  # fmt: skip
    return names


def _named(role: str, columns: dict[str, dict[str, Any]]) -> str | None:
    pattern = re.compile(rf"(^|[^a-z])({NAMES[role]})([^a-z]|$)")
    kinds = ("time", "integer", "text", "number") if role == "time" else ("integer", "text")
    fitting = [name for name, column in columns.items() if column["type"] in kinds and pattern.search(name.lower())]
    return max(fitting, key=lambda name: columns[name]["distinct"], default=None)


def _is_constant(table: Any, user: str, name: str) -> bool:
    """Whether each user has one value of a column."""
    pairs = table.select([user, name]).group_by([user, name]).aggregate([])
    return pairs.num_rows == table.select([user]).group_by([user]).aggregate([]).num_rows
