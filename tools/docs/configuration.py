"""The configuration reference: fields of the records that users fill in, read from their source without running it.

Types and defaults come from the dataclass, words from its docstring ("Attributes:", "Args:") or the comment
behind the field. Names of constants ("one of SCOPES") are replaced by their values.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Title, purpose, source file (or a family of files, bases first), records.
SECTIONS = (
    (
        "Tables and features",
        "The arguments of `FusedEmbedding`.",
        "tf_fusedrec/config.py",
        ("TableConfig", "FeatureConfig"),
    ),
    (
        "Optimizers of rows",
        "`tf_fusedrec.optimizers`, for `TableConfig.optimizer`.",
        "tf_fusedrec/optimizers/{rule,sgd,adagrad,adam,ftrl}.py",
        ("SGD", "Adagrad", "RowWiseAdagrad", "RMSprop", "Adam", "AdamW", "Ftrl"),
    ),
    (
        "Initial rows",
        "For `TableConfig.initializer`.",
        "tf_fusedrec/initializers.py",
        ("Constant", "Zeros", "Uniform", "Normal", "TruncatedNormal"),
    ),
    (
        "Topology",
        "For `fr.init` and `FusedEmbedding(topology=...)`.",
        "tf_fusedrec/exchange/topology.py",
        ("Topology",),
    ),
    (
        "Cluster",
        "For `fr.plan(model, sample, cluster)`.",
        "tf_fusedrec/schedules/planning/cluster.py",
        ("Cluster",),
    ),
    (
        "Columns",
        "`tf_fusedrec.data.Column`, for `ParquetFolder`.",
        "tf_fusedrec/data/columns.py",
        ("Column",),
    ),
    (
        "Cost of a row",
        "`tf_fusedrec.data.Cost`, for `TokenBatches(cost=...)`.",
        "tf_fusedrec/data/batching.py",
        ("Cost",),
    ),
    (
        "Experiments",
        "A YAML file of `configs/`, one record for each of its sections; `--set section.field=value` replaces a field.",
        "models/experiment/records.py",
        ("Experiment", "EmbeddingConfig", "TrainConfig", "EvaluateConfig"),
    ),
    (
        "Data of experiments",
        "The section `data` of an experiment.",
        "models/experiment/data_config.py",
        ("DataConfig",),
    ),
    (
        "Models of experiments",
        "The section `model` of an experiment: `task: ranking` with `kind: grm`, `dlrm`, `din` or `dcn`, or `task: "
        "retrieval`.",
        "models/experiment/{ranking_config,model_config}.py",
        ("GRMConfig", "DLRMConfig", "DINConfig", "DCNConfig", "RetrievalConfig"),
    ),
)

_CONSTANTS = (
    "models/experiment/data_config.py", "models/experiment/records.py", "models/experiment/model_config.py",
    "models/experiment/ranking_config.py", "models/experiment/table_options.py",
    "tf_fusedrec/data/bad_input.py", "tf_fusedrec/data/converters/events.py", "tf_fusedrec/data/converters/kuairand.py",
    "tf_fusedrec/data/plan.py", "tf_fusedrec/layers/bias_weights.py", "tf_fusedrec/losses/negatives.py",
    "tf_fusedrec/exchange/topology.py",
)  # fmt: skip
_CONSTANT = re.compile(r"\b(?:\w+\.)*([A-Z][A-Z_]{3,})\b")


Told = dict[str, tuple[str, str]]  # heading and words by the name of a field


class Field(NamedTuple):
    """One field as the reference shows it."""

    name: str
    type: str
    default: str  # "" where there is none
    words: str
    heading: str  # of the part of the docstring that tells of it; "" for the usual ones


class Record(NamedTuple):
    name: str
    words: str  # the docstring before its sections
    fields: list[Field]


def page() -> str:
    """The whole reference as Markdown."""
    constants = _constants()
    lines = [
        "# Configuration reference",
        "",
        "`python -m tools.docs.generate` makes this page from the dataclasses. A wrong value is refused by name when"
        " the record is made.",
    ]
    for title, purpose, path, names in SECTIONS:
        lines += ["", f"## {title}", "", f"{purpose} Source: `{path}`."]
        records = {record.name: record for record in records_of(files_of(path))}
        for name in names:
            lines += ["", f"### {name}", "", *_table(records[name], constants)]
    return "\n".join(lines) + "\n"


def _table(record: Record, constants: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    yield record.words.replace("\n", " ")
    yield ""
    if not record.fields:
        yield "No fields."
        return
    yield "| field | type | default | what it does |"
    yield "|---|---|---|---|"
    heading = ""
    for field in record.fields:
        if field.heading != heading:
            heading = field.heading
            yield f"| | | | **{heading}** |"
        default = f"`{field.default}`" if field.default else "required"
        yield f"| `{field.name}` | `{field.type}` | {default} | {_spelled(field.words, constants)} |"


def _spelled(words: str, constants: Mapping[str, tuple[str, ...]]) -> str:
    def values(found: re.Match[str]) -> str:
        known = constants.get(found[1])
        return found[0] if known is None else ", ".join(f"`{value}`" for value in known)

    return _CONSTANT.sub(values, words).replace("|", "\\|")


def files_of(path: str) -> list[pathlib.Path]:
    """Returns the files that "folder/{a,b}.py" names."""
    family = re.fullmatch(r"(.*)\{(.*)\}(.*)", path)
    return [ROOT / f"{family[1]}{name}{family[3]}" for name in family[2].split(",")] if family else [ROOT / path]


def records_of(paths: Sequence[pathlib.Path]) -> list[Record]:
    """The dataclasses of files, fields that they inherit from others of these files included."""
    found: dict[str, Record] = {}
    told: dict[str, Told] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                found[node.name], told[node.name] = _record(node, text.splitlines(), found, told)
    return list(found.values())


def _record(
    node: ast.ClassDef, lines: Sequence[str], found: Mapping[str, Record], told: Mapping[str, Told]
) -> tuple[Record, Told]:
    """Returns the record of a class, with descriptions of fields from the docstrings of the class and its bases."""
    docstring = ast.get_docstring(node) or ""
    fields: dict[str, Field] = {}
    mine: Told = {}
    for base in (base.id for base in node.bases if isinstance(base, ast.Name) and base.id in found):
        fields.update({field.name: field for field in found[base].fields})
        mine.update(told[base])
    mine.update(_told(docstring))
    # An annotation of a class in between is no field of the dataclasses below it.
    is_record = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    for item in node.body if is_record else ():
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name) or item.end_lineno is None:
            continue
        annotation = ast.unparse(item.annotation)
        if annotation.startswith("ClassVar"):
            continue
        name = item.target.id
        comment = lines[item.end_lineno - 1][item.end_col_offset :].partition("#")[2].strip()
        heading, words = mine.get(name, ("", comment))
        if not words and name in fields:
            heading, words = fields[name].heading, fields[name].words
        default = "" if item.value is None else ast.unparse(item.value)
        default = default.replace("dataclasses.field(default_factory=dict)", "{}")
        # A field that is declared again keeps its place, as in the dataclass.
        fields[name] = Field(name, annotation.replace("'", ""), default, words, heading)
    return Record(node.name, _before(docstring), list(fields.values())), mine


def _before(docstring: str) -> str:
    """Returns the text of a docstring before its first section."""
    kept = []
    for line in docstring.splitlines():
        if re.fullmatch(r"(Attributes|Args|Raises|Example.*):", line):
            break
        kept.append(line)
    return "\n".join(kept).strip()


def _told(docstring: str) -> Told:
    """(heading, words) by name, of the lines "  name: words" under any heading "Words:" of a docstring."""
    told: Told = {}
    heading, names = "", []  # type: str, list[str]
    for line in docstring.splitlines():
        entry = re.match(r"  ([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line)
        if re.match(r"\S.*:$", line):
            heading, names = ("" if line in ("Attributes:", "Args:") else line[:-1]), []
        elif entry and heading != "Raises":
            names = entry[1].split(", ")
            told.update(dict.fromkeys(names, (heading, entry[2])))
        elif names and line.startswith("    "):
            for name in names:
                told[name] = told[name][0], f"{told[name][1]} {line.strip()}"
        else:
            names = []
    return told


def _constants() -> dict[str, tuple[str, ...]]:
    """Values of the tuples, and keys of the dicts, that have a name in capitals."""
    known: dict[str, tuple[str, ...]] = {}
    for path in _CONSTANTS:
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                keys = node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", None)
                if keys:
                    known.setdefault(node.targets[0].id, tuple(_values(keys, known)))
    return known


def _values(nodes: list, known: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant):
            yield str(node.value)
        elif isinstance(node, ast.Starred) and isinstance(node.value, ast.Name):
            yield from known.get(node.value.id, ())
