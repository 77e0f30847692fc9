"""The options of a table: Python's records and custom_ops/hash_table/options.h have the same."""

import ctypes
import dataclasses
import typing

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import config, ops
from tf_fusedrec.ops._library import _functions

# Options that are no fields of the three records.
OWN = {
    "name", "dim", "seed", "initializer", "initializer.a", "initializer.b", "unknown", "record_tombstones",
    "averaged", "rule", "storage.initial_dtype",
}  # fmt: skip
RECORDS = {name: record for name, record in config.RECORDS.items() if name != "external"}


def test_records_and_schema_have_the_same_options_and_defaults():
    schema = ops.table_schema()
    fields = {f"{name}.{f.name}": f for name, record in RECORDS.items() for f in dataclasses.fields(record)}
    assert {*schema} == {*fields, *OWN}
    record = fr.TableConfig("t", 1, fr.optimizers.SGD(0.1)).record(seed=0)
    assert {*record} == {*schema} - {"averaged", "rule", "storage.initial_dtype"}
    assert {path: schema[path]["default"] for path in fields} == {path: record[path] for path in fields}


def test_records_and_schema_have_the_same_choices_and_scopes():
    schema = ops.table_schema()
    for name, record in (*RECORDS.items(), ("", fr.TableConfig)):
        for field, hint in typing.get_type_hints(record).items():
            path = f"{name}.{field}".removeprefix(".")
            literals = [choice for kind in (hint, *typing.get_args(hint)) for choice in typing.get_args(kind)]
            texts = {choice for choice in literals if isinstance(choice, str)}
            if texts and path in schema:
                assert texts == {*schema[path]["choices"]} - {"none", "int8"}, path  # int8: of a server's tables
    scopes = {path: option["scope"] for path, option in schema.items()}
    assert all((scope == "table") == path.startswith("limits.") for path, scope in scopes.items() if path not in OWN)
    assert {path for path, scope in scopes.items() if scope == "sum"} == {
        "tier.memory_budget_per_rank",
        "tier.hot_rows_per_rank",
    }


def test_numbers_of_numpy_are_taken():
    uniform = fr.Uniform(np.float32(-0.1), np.float32(0.1))
    table = fr.TableConfig("t", np.int64(2).item(), fr.optimizers.SGD(0.1, momentum=np.float32(0.9)), uniform)
    layer = fr.FusedEmbedding([fr.FeatureConfig("t", "t")], [table])
    assert np.abs(layer({"t": np.array([1])})["t"]).max() <= 0.1


def test_a_text_is_read_whatever_its_names_have():
    for name in ('a "quote"', "back\\slash", "ünïcode", "tab\t", "\x01", ""):
        (refusal,) = {ops.check_tables([{"name": name, "dim": 0}])}
        assert refusal == f"dim of table '{name}' must be an int in [1, 1048576], got 0."
    for wrong in ([1], {"x": 1}, None):
        assert "must be a flat JSON object" in ops.check_tables([{"name": "t", "dim": wrong}])
    assert ops.check_tables([]) == "tables must be 1 to 1048576, got 0."
    texts = (ctypes.c_char_p * (2**20 + 1))(*[b'{"dim": 1}'] * (2**20 + 1))
    assert _functions.fusedrec_check_table(texts, len(texts), b"CPU") == b"tables must be 1 to 1048576, got 1048577."
