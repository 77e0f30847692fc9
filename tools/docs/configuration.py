"""docs/configuration.md: the fields of the records that users fill in, from the dataclasses and their docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator

# Title, purpose, module, records.
SECTIONS = (
    ("Tables and features", "The arguments of `FusedEmbedding`.", "tf_fusedrec.config",
     "TableConfig Storage Limits Tier External FeatureConfig"),
    (
        "Experiments",
        "A YAML file of `configs/`, one record for each of its sections; `--set section.field=value` replaces a field.",
        "models.experiment.records", "Experiment EmbeddingConfig TrainConfig EvaluateConfig",
    ),
    ("Data of experiments", "The section `data` of an experiment.", "models.experiment.data_config", "DataConfig"),
    (
        "Models of experiments",
        "The section `model` of an experiment: `task: ranking` with `kind: grm`, `dlrm`, `din` or `dcn`, or `task: "
        "retrieval`.",
        "models.experiment.model_config", "RankingConfig GRMConfig DLRMConfig DINConfig DCNConfig RetrievalConfig",
    ),
)  # fmt: skip


def page() -> str:
    """Returns the whole reference as Markdown."""
    lines = [
        "# Configuration reference",
        "",
        "`python -m tools.docs.generate` makes this page from the dataclasses. A wrong value raises an error when "
        "the record is made. A type stands for the default None or (). The [API reference](api/embedding.md) has "
        "optimizers, initial rows, topologies and columns.",
    ]
    for title, purpose, module, names in SECTIONS:
        lines += ["", f"## {title}", "", f"{purpose} Module: `{module}`."]
        for name in names.split():
            lines += ["", f"### {name}", "", *_record(getattr(importlib.import_module(module), name))]
    return "\n".join(lines) + "\n"


def _record(cls: type) -> Iterator[str]:
    words = re.split(r"^(?:Attributes|Args|Raises|Example.*):$", inspect.getdoc(cls) or "", flags=re.MULTILINE)[0]
    yield " ".join(words.split())
    yield ""
    bases = [f"`{base.__name__}`" for base in cls.__mro__[1:-1] if _on_page(base)]
    if bases:
        yield f"It has the fields of {', '.join(bases)}, and these:"
        yield ""
    if not dataclasses.fields(cls):
        yield "No fields."
        return
    yield "| field | default | what it does |"
    yield "|---|---|---|"
    described = _described(cls)
    above = ""
    for field in dataclasses.fields(cls):
        heading, words = described.get(field.name, ("", ""))
        if any(_is_inherited(field, words, base) for base in cls.__mro__[1:-1]):
            continue
        if heading != above:
            yield f"| | | **{heading or 'With any backend'}** |"
        above = heading
        words = re.sub(r"\b(?:\w+\.)*([A-Z][A-Z_]{3,})\b", lambda found: _values(cls, found), words)
        yield f"| `{field.name}` | {_default(field)} | {words.replace('|', chr(92) + '|')} |"


def _described(cls: type) -> dict[str, tuple[str, str]]:
    """Returns (heading, words) by field, those of bases included."""
    return {name: entry for base in reversed(cls.__mro__) for name, entry in _descriptions(base).items()}


def _on_page(cls: type) -> bool:
    return any(cls.__name__ in names.split() for *_, names in SECTIONS)


def _is_inherited(field: dataclasses.Field, words: str, base: type) -> bool:
    """Returns whether a base record on this page has the same field."""
    fields = {each.name: each for each in dataclasses.fields(base)} if _on_page(base) else {}
    return (
        field.name in fields
        and _default(fields[field.name]) == _default(field)
        and _described(base).get(field.name, ("", ""))[1] == words
    )


def _default(field: dataclasses.Field) -> str:
    """Returns the default, or the type where the default does not show it."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default not in (None, (), dataclasses.MISSING):
        return f"`{field.default!r}`"
    name = field.type.__name__ if isinstance(field.type, type) else field.type
    name = re.sub(r"Literal\[([^]]*)\]", r"\1", name)
    name = name.replace(" | ", " or ")
    return f"`{name}`, required" if field.default is dataclasses.MISSING else f"`{name}`"


def _descriptions(cls: type) -> dict[str, tuple[str, str]]:
    """Returns (heading, words) by field, from the comments behind fields and the lines "  name: words" of a docstring.

    The headings "Attributes:" and "Args:" are "".
    """
    if cls.__module__ == "builtins":
        return {}
    comments = re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE)
    described = {name: ("", words) for name, words in comments}
    heading, names = "", []  # type: str, list[str]
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        entry = re.match(r"  ([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line)
        if re.match(r"\S.*:$", line):
            heading, names = ("" if line in ("Attributes:", "Args:") else line[:-1]), []
        elif entry and heading != "Raises":
            names = entry[1].split(", ")
            described.update(dict.fromkeys(names, (heading, entry[2])))
        elif names and line.startswith("    "):
            described.update({name: (heading, f"{described[name][1]} {line.strip()}") for name in names})
        else:
            names = []
    return described


def _values(cls: type, found: re.Match[str]) -> str:
    """Returns the values of the constant that a description names, or its words if no module has a list of it."""
    bases = [sys.modules[base.__module__] for base in cls.__mro__]
    others = [module for name, module in sys.modules.items() if name.split(".")[0] in ("models", "tf_fusedrec")]
    for module in (*bases, *others):
        values = getattr(module, "__dict__", {}).get(found[1])
        if isinstance(values, (tuple, dict)):
            return ", ".join(f"`{value}`" for value in values)
    return found[0]
