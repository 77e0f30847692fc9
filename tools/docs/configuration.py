"""docs/configuration.md: the fields of the records of an experiment, from the dataclasses and their docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator

# Title, purpose, module, records.
SECTIONS = (
    ("Experiments", "One record for each section of the file.", "tf_fusedrec.models.experiment.records",
     "Experiment EmbeddingConfig TrainConfig EvaluateConfig"),
    ("Data", "The section `data`.", "tf_fusedrec.models.experiment.data_config", "DataConfig"),
    (
        "Models", "The section `model`, by `task: ranking` with `kind: grm`, `dlrm`, `din` or `dcn`, or `retrieval`.",
        "tf_fusedrec.models.experiment.model_config",
        "RankingConfig GRMConfig DLRMConfig DINConfig DCNConfig RetrievalConfig",
    ),
)  # fmt: skip


def page() -> str:
    """Returns the whole reference as Markdown."""
    lines = [
        "# Configuration reference",
        "",
        "The fields of a YAML file of `configs/`; `--set section.field=value` replaces one. A wrong value raises an "
        "error with the field's name. A field with a type in the place of a default is required. The [API reference]"
        "(api/embedding.md) and `help(fr.TableConfig)` describe tables and features. `python -m tools.docs.generate` "
        "makes this page.",
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
    described = _described(cls)
    fields = [
        (_field(field), described.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if not any(_is_inherited(field, described.get(field.name, ""), base) for base in cls.__mro__[1:-1])
    ]
    rows = [(field, words) for field, words in fields if words]
    for field, words in rows:
        words = re.sub(r"\b(?:\w+\.)*([A-Z][A-Z_]{3,})\b", lambda found: _values(cls, found), words)
        yield f"- {field}: {words.replace('<', '&lt;')}"
    plain = [field for field, words in fields if not words]
    if rows and plain:
        yield ""
    if plain:
        yield f"{'Also ' if rows else ''}{', '.join(plain)}."


def _described(cls: type) -> dict[str, str]:
    """Returns the words by field, those of bases included."""
    return {name: entry for base in reversed(cls.__mro__) for name, entry in _descriptions(base).items()}


def _on_page(cls: type) -> bool:
    return any(cls.__name__ in names.split() for *_, names in SECTIONS)


def _is_inherited(field: dataclasses.Field, words: str, base: type) -> bool:
    """Returns whether a base record on this page has the same field."""
    fields = {each.name: each for each in dataclasses.fields(base)} if _on_page(base) else {}
    return (
        field.name in fields
        and _field(fields[field.name]) == _field(field)
        and _described(base).get(field.name, "") == words
    )


def _field(field: dataclasses.Field) -> str:
    """Returns the name with its default, or with the type where there is none."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.name}={field.default_factory()!r}`"
    if field.default is not dataclasses.MISSING:
        return f"`{field.name}={field.default!r}`"
    return f"`{field.name}: {field.type.__name__ if isinstance(field.type, type) else field.type}`"


def _descriptions(cls: type) -> dict[str, str]:
    """Returns the words by field, from the comments behind fields and the lines "  name: words" of a docstring."""
    if cls.__module__ == "builtins":
        return {}
    described = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE))
    names: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        entry = re.match(r"  ([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            described.update(dict.fromkeys(names, entry[2]))
        elif line.startswith("    "):
            described.update({name: f"{described[name]} {line.strip()}" for name in names})
        else:
            names = []
    return described


def _values(cls: type, found: re.Match[str]) -> str:
    """Returns the values of the constant that a description names, or its words if no module has a list of it."""
    bases = [sys.modules[base.__module__] for base in cls.__mro__]
    others = [module for name, module in sys.modules.items() if name.split(".")[0] == "tf_fusedrec"]
    for module in (*bases, *others):
        values = getattr(module, "__dict__", {}).get(found[1])
        if isinstance(values, (tuple, dict)):
            return ", ".join(f"`{value}`" for value in values)
    return found[0]
