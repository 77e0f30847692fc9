"""The text of ids in a data set: strings.parquet for fingerprints, codes.json for codes. Needs no TensorFlow."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

STRINGS, CODES = "strings.parquet", "codes.json"


def write_strings(path: pathlib.Path, strings: Mapping[str, Mapping[int, str]]) -> None:
    """Writes columns name, id <int64> and string, if there is any string."""
    parts = [
        pa.table({
            "name": pa.array([name] * len(texts), pa.string()).dictionary_encode(),
            "id": pa.array(list(texts), pa.int64()),
            "string": pa.array(list(texts.values()), pa.string()),
        })
        for name, texts in strings.items() if texts
    ]  # fmt: skip
    if parts:
        pq.write_table(pa.concat_tables(parts).unify_dictionaries(), path, write_page_checksum=True)


def texts_of(root: str | pathlib.Path, name: str, ids: Iterable[int]) -> dict[int, str]:
    """The text of ids of a name, as far as the data set knows it: by strings.parquet, or by codes.json."""
    root, distinct = pathlib.Path(root), list(ids)
    texts: dict[int, str] = {}
    if (root / CODES).is_file():
        values = json.loads((root / CODES).read_text(encoding="utf-8")).get(name, [])
        texts = {code: str(values[code - 1]) for code in distinct if 0 < code <= len(values)}
    if (root / STRINGS).is_file():
        same = (pc.field("name") == name) & pc.field("id").isin(pa.array(distinct, pa.int64()))
        matching = pq.read_table(root / STRINGS, columns=["id", "string"], filters=same)
        texts |= dict(zip(matching["id"].to_pylist(), matching["string"].to_pylist()))
    return texts


def id_of_text(root: str | pathlib.Path, name: str, text: str) -> int | None:
    """The id of a text of a name by strings.parquet; None if it is not there."""
    path = pathlib.Path(root) / STRINGS
    if not path.is_file():
        return None
    same = (pc.field("name") == name) & (pc.field("string") == text)
    matching = pq.read_table(path, columns=["id"], filters=same)["id"].to_pylist()
    return matching[0] if matching else None
