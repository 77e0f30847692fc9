"""Damaged and forged files of a checkpoint are refused by file and field, and leave nothing in tables or weights."""

import copy
import json
import re

import numpy as np
import pytest
import xxhash

from tests.checkpoint import simulated
from tests.checkpoint.forger import IDS, forge_manifest, forge_shard, model, refused, save_two, sign
from tests.checkpoint.tables import DictTable
from tf_fusedrec import tf
from tf_fusedrec.checkpoint.loading import read_tables
from tf_fusedrec.files.hash_order import OWNERS
from tf_fusedrec.files.saves import read_manifest
from tf_fusedrec.files.shard_file import Label, ShardFile

FULL, DELTA = ("save-1-*/", "save-2-*/")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged") / "c"
    save_two(folder)
    return folder


@pytest.fixture
def whole(directory, monkeypatch):
    """Returns a checkpoint, and restores its files. Loads read it in many chunks, so damage at the end shows late."""
    monkeypatch.setattr("tf_fusedrec.files.shard_file._CHUNK_BYTES", 1)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    yield directory
    for path, data in before.items():
        path.write_bytes(data)


def file_of(directory, pattern):
    (path,) = directory.glob(pattern)
    return path


# The damages and forgeries below take the folder of a checkpoint.


def gone(pattern):
    return lambda directory: file_of(directory, pattern).unlink()


def bytes_of(pattern, change):
    def changed(directory):
        path = file_of(directory, pattern)
        path.write_bytes(change(path.read_bytes()))

    return changed


def in_manifest(old, new):
    return bytes_of("manifest.json", lambda data: data.replace(old, new, 1))


def cut(pattern):
    return bytes_of(pattern, lambda data: data[:-1000])


def flipped(pattern, at):
    return bytes_of(pattern, lambda data: data[:at] + bytes([data[at] ^ 16]) + data[at:][1:])


def swapped(*patterns):
    def changed(directory):
        one, other = (file_of(directory, pattern) for pattern in patterns)
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)

    return changed


def manifest(change):
    return lambda directory: forge_manifest(directory / "manifest.json", change)


def each(change):
    """Forges both tables, so that they agree with each other."""
    return manifest(lambda whole: [change(table) for table in whole["tables"].values()])


def put(*path):
    *path, value = path
    return manifest(lambda whole: _put(whole, path, value))


def shard(change=lambda *_: None, **options):
    return lambda directory: forge_shard(file_of(directory, FULL + "user.rows*"), change, **options)


def exchanged(header, ids, records):
    ids[[3, 4]] = ids[[4, 3]]


def repeated(header, ids, records):
    ids[3] = ids[4]


ITEM = ("tables", "item")
ROWS, CHANGES = FULL + "item.rows*", DELTA + "item.rows*"
CASES = {
    "missing rows": (gone(ROWS), "item.rows-0.shard is missing"),
    "missing tombstones": (gone(DELTA + "user.tomb*"), "user.tombstones-0.shard is missing"),
    "missing weights": (gone(DELTA + "dense.index"), "dense.index is missing"),
    "missing manifest": (gone("manifest.json"), "must hold a checkpoint, but .* is missing"),
    "truncated delta": (cut(CHANGES), "item.rows-0.shard is truncated"),
    "truncated weights": (cut(DELTA + "dense.data*"), "dense.data-00000-of-00001 is truncated"),
    "a bit of the last row": (flipped(ROWS, -500), "item.rows-0.shard is damaged: block .* differs"),
    "a bit of the index": (flipped(ROWS, -20), "is damaged: its index differs"),
    "a bit of the weights": (flipped(DELTA + "dense.data*", 10), "dense.data-00000-of-00001 is damaged"),
    "tables swapped": (
        swapped(FULL + "user.rows*", ROWS),
        "it has table 'user', but the manifest wants table 'item' h",
    ),
    "saves swapped": (swapped(ROWS, CHANGES), "item.rows-0.shard is foreign: it has save 'save-2-.* wants save 'sav"),
    "a digit of the manifest": (in_manifest(b'"clock": ', b'"clock": 1'), "manifest.json is damaged: its check"),
    "half a manifest": (bytes_of("manifest.json", lambda data: data[:200]), "manifest.json is damaged"),
    "another format": (in_manifest(b'"format": 2', b'"format": 3'), "has format 3, but this version reads 2"),
    # Right checksums, and fields that contradict each other.
    "save of nobody": (put("save", "save-9-00000000"), r"tables\['item'\].parts\[1\] is"),
    "ranks not those of the part": (put("ranks", 2), r"parts\[1\] is .*want save and ranks of the manifest"),
    "dense of another name": (put("dense", "../../x", [1, "0" * 16]), "dense is .* want dense.index and all"),
    "table of another folder": (
        manifest(lambda whole: whole["tables"].update({"../x": whole["tables"]["item"]})),
        "tables is '../x', want names without",
    ),
    "clock beyond": (put(*ITEM, "clock", 2**64), "clock is 18446744073709551616"),
    "iterations beyond": (put(*ITEM, "iterations", 2**63), "iterations is"),
    "full save dropped": (each(lambda table: table["parts"].pop(0)), r"parts\[0\].sections is"),
    "delta dropped": (each(lambda table: table["parts"].pop(1)), r"parts\[0\] is .*want save and ranks of the manif"),
    "delta of one table dropped": (manifest(lambda whole: whole["tables"]["item"]["parts"].pop(1)), r"parts\[0\] is"),
    "parts changed places": (each(lambda table: table["parts"].reverse()), r"parts\[0\].sections is"),
    "a part thrice": (each(lambda table: table["parts"].append(table["parts"][1])), "parts is"),
    "part of nobody": (
        each(lambda table: table["parts"][0].update(save="save-1-00000000")),
        r"parts\[0\].save is .* hol",
    ),
    "part's ranks 2": (put(*ITEM, "parts", 0, "ranks", 2), "item.rows-0.shard is foreign: it has ranks 1"),
    "candidates dropped everywhere": (
        each(lambda table: [part["sections"].pop("candidates") for part in table["parts"]]),
        "holds item.candidates-0.shard, which it does not name",
    ),
    "header of no JSON": (shard(lambda *_: b"{"), "user.rows-0.shard .*its header is not JSON"),
    "record of two dimensions": (shard(lambda of, *_: of["record"][4].__setitem__(2, [2, 2])), r"record is \['row'"),
    "record twice": (
        shard(lambda header, *_: header["record"].append(header["record"][0])),
        "rows-0.shard .*record is",
    ),
    "ids not in order": (shard(exchanged), "user.rows-0.shard .*are not in hash order"),
    "an id twice": (shard(repeated), "user.rows-0.shard .*are not in hash order"),
    "an index that lies": (
        shard(index=lambda of: of["first_hash"].__setitem__(0, 5)),
        "rows-0.shard .*not in hash ord",
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_bad_file_is_refused_by_file_and_field(kind, whole):
    change, words = CASES[kind]
    change(whole)
    refused(whole, words)
    if "weights" not in kind:
        with pytest.raises(ValueError, match=f"{re.escape(str(whole))}.*{words}|{words}.*"):
            read_tables(whole)


def test_the_forger_writes_what_a_save_writes(whole):
    path = file_of(whole, FULL + "user.rows*")
    before = path.read_bytes()
    forge_shard(path)
    assert path.read_bytes() == before


# Values of a wrong type, out of range, or of a type that needs more checks.
STRANGE = [None, True, False, -1, 0, 1, 2**70, 1.5, "", "x", "../x", [], [[]], {}, {"x": 1}]


def places(value, path=()):
    """Yields place and contents of all parts of a JSON value."""
    yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def _put(whole, place, value):
    for step in place[:-1]:
        whole = whole[step]
    whole[place[-1]] = value


def strange_forms(whole):
    """Yields (place, strange value) and the whole JSON with it; also with a field too many and with each field gone."""
    for place, inner in places(whole):
        for value in STRANGE if place else ():
            if json.dumps(value) != json.dumps(inner):
                _put(forged := copy.deepcopy(whole), place, value)
                yield (*place, value), forged
        for key in ("more", *inner) if isinstance(inner, dict) else ():
            _put(forged := copy.deepcopy(whole), (*place, key), True)
            if key != "more":
                at = forged
                for step in place:
                    at = at[step]
                del at[key]
            yield (*place, key, "MORE" if key == "more" else "GONE"), forged


def accepted(path, whole, write, read):
    """Returns the strange forms that `read` accepts. All others must raise a ValueError that names the file."""
    taken, count = [], 0
    for form, forged in strange_forms(whole):
        write(forged)
        count += 1
        try:
            read()
        except ValueError as refusal:
            assert str(path) in str(refusal), form
        else:
            taken.append(form)
    assert count > 400
    return taken


def test_any_value_of_any_field_of_a_manifest_is_accepted_or_refused(whole):
    """Accepts other values of the same type where the load compares them with the tables."""
    path = whole / "manifest.json"
    fields = json.loads(path.read_bytes())
    kept = {"checksum": fields.pop("checksum"), "extra": fields.pop("extra"), "user": fields["tables"].pop("user")}

    def write(forged):
        whole = {**forged, "extra": kept["extra"]}
        if isinstance(tables := whole.get("tables"), dict) and "item" in tables:
            whole["tables"] = {**tables, "user": kept["user"]}
        sign(path, whole)

    taken = accepted(path, fields, write, lambda: read_manifest(whole))
    texts, spec = ["", "x", "../x"], ("tables", "item", "spec")
    want = [(*spec, "storage", text) for text in texts] + [(*spec, "slots", n, text) for n in (0, 1) for text in texts]
    want += [(*spec, "optimizer", "rule", value) for value in (*STRANGE, "GONE")]
    want += [(*spec, "optimizer", value) for value in ({}, {"x": 1})]
    want += [(*spec, "optimizer", "more", "MORE"), (*spec, "dim", 1), (*spec, "slots", []), (*ITEM, "clock", 0)]
    want += [(*ITEM, "clock", 1), (*ITEM, "iterations", None), (*ITEM, "iterations", 1)]
    want += [(*ITEM, "learning_rate", "GONE")]
    want += [("dense", name, 0, size) for name in fields["dense"] for size in (0, 1)]
    assert sorted(map(str, taken)) == sorted(map(str, want))


def test_any_value_of_any_field_of_a_shard_is_accepted_or_refused(whole):
    """Accepts other names of fields, which the reader compares with the table."""
    path = file_of(whole, FULL + "user.rows*")
    data = path.read_bytes()
    header = json.loads(data[24 : 24 + int.from_bytes(data[8:16], "little")])
    label = Label(*(header[field] for field in Label._fields))

    def write(forged):
        path.write_bytes(data)
        forge_shard(path, lambda *_: forged)

    taken = accepted(path, header, write, lambda: ShardFile(path, label))
    assert taken == [("record", n, 0, name) for n in range(len(header["record"])) for name in ("x", "../x")]


def test_unreadable_and_foreign_dense_files_are_refused(whole, tmp_path):
    """The files have right checksums. Weights and tables stay unchanged."""
    path = whole / "manifest.json"
    files = sorted((whole / json.loads(path.read_text(encoding="utf-8"))["save"]).glob("dense.*"))

    def sign_files(manifest):
        for file in files:
            data = file.read_bytes()
            manifest["dense"][file.name] = [len(data), xxhash.xxh3_64_hexdigest(data)]

    for file in files:
        data = file.read_bytes()
        file.write_bytes(bytes(len(data)))
        forge_manifest(path, sign_files)
        refused(whole, r"dense \(.index, .data-\*\) holds unreadable weights")
        file.write_bytes(data)
    tf.train.Checkpoint(model=model(2.0, units=3)).write(str(tmp_path / "dense"))
    for file in files:
        file.write_bytes((tmp_path / file.name).read_bytes())
    forge_manifest(path, sign_files)
    refused(whole, "Dense weights of .* do not fit the model")


@pytest.mark.parametrize("owner", ["hash_range", "tfra"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_id_of_another_rank_is_refused_at_either_end(rank, owner, tmp_path):
    """A shard is in hash order: a foreign id is the last one of rank 0 and the first one of rank 1."""
    tables = [DictTable("item", owner=owner), DictTable("item", owner=owner)]
    owners = OWNERS[owner](np.array(IDS[:20]), 2)
    for number, table in enumerate(tables):
        ids = [id_ for id_, of in zip(IDS, owners) if of == number]
        foreign = [id_ for id_, of in zip(IDS, owners) if of != number][: number == rank]
        table.train("item", ids + foreign, np.random.default_rng(0))
    simulated.save(tmp_path / "c", tables)
    with pytest.raises(ValueError, match=rf"id -?\d+ does not belong to rank {rank} of 2"):
        read_tables(tmp_path / "c")
