"""Manifests and dense files with right checksums and wrong contents are refused with file and field."""

import copy
import json
import re

import pytest
import xxhash

from tests.checkpoint.forger import forge_manifest, model, refused, save_two
from tf_fusedrec import checkpoint, tf


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a checkpoint. Each test restores its forged files."""
    return save_two(tmp_path_factory.mktemp("forged") / "c")


def both(change):
    """Returns the same change of both tables, so that they agree with each other."""

    def changed(manifest):
        for table in manifest["tables"].values():
            change(table)

    return changed


def put(*path):
    """Returns a change that sets the last of `path` at the place of the others; "*" first: in both tables."""
    *path, key, value = path

    def change(manifest):
        for start in manifest["tables"].values() if path[:1] == ["*"] else [manifest]:
            for step in path[1:] if path[:1] == ["*"] else path:
                start = start[step]
            start[key] = value

    return change


def drop(*path):
    *path, key = path

    def change(manifest):
        for step in path:
            manifest = manifest[step]
        del manifest[key]

    return change


ITEM = ("tables", "item")
FULL, DELTA = (*ITEM, "parts", 0), (*ITEM, "parts", 1)
FORGERIES = {
    "no save": (drop("save"), "the manifest is"),
    "a field more": (put("more", 1), "the manifest is .*, want a dict of"),
    "extra dropped": (drop("extra"), "the manifest is"),
    "save no text": (put("save", 7), "save is 7, want the name of a save"),
    "save elsewhere": (put("save", "../c/save-1-00000000"), "save is '../c"),
    "save of nobody": (put("save", "save-9-00000000"), r"tables\['item'\].parts\[1\] is"),
    "ranks 0": (put("ranks", 0), r"ranks is 0, want an int in \[1, "),
    "ranks not those of the part": (put("ranks", 2), r"parts\[1\] is .*want save and ranks of the manifest"),
    "dense a list": (put("dense", []), "dense is"),
    "dense empty": (put("dense", {}), "dense is .* want dense.index and all of dense.data"),
    "dense without data": (drop("dense", "dense.data-00000-of-00001"), "dense is"),
    "dense of another name": (put("dense", "../../x", [1, "0" * 16]), "dense is"),
    "dense size negative": (put("dense", "dense.index", 0, -1), r"dense\['dense.index'\]\[0\] is -1"),
    "dense checksum a number": (put("dense", "dense.index", 1, 3), r"dense\['dense.index'\]\[1\] is 3"),
    "dense entry short": (put("dense", "dense.index", [3]), r"dense\['dense.index'\] is"),
    "tables a list": (put("tables", []), r"tables is \[\]"),
    "table of another folder": (put("tables", "../x", {}), "tables is '../x', want names without"),
    "clock negative": (put(*ITEM, "clock", -1), r"tables\['item'\].clock is -1"),
    "clock beyond": (put(*ITEM, "clock", 2**64), "clock is 18446744073709551616"),
    "iterations negative": (put(*ITEM, "iterations", -3), "iterations is -3"),
    "iterations beyond": (put(*ITEM, "iterations", 2**63), "iterations is"),
    "owner unknown": (put(*ITEM, "owner", "mine"), "owner is 'mine', want 'hash_range' or 'tfra'"),
    "spec without dim": (drop(*ITEM, "spec", "dim"), "spec is"),
    "dim 0": (put(*ITEM, "spec", "dim", 0), "spec.dim is 0"),
    "slots a text": (put(*ITEM, "spec", "slots", "scale"), "spec.slots is 'scale'"),
    "optimizer a list": (put(*ITEM, "spec", "optimizer", []), "spec.optimizer is"),
    "parts empty": (put(*ITEM, "parts", []), r"parts is \[\], want a list of one or two"),
    "full save dropped": (both(lambda table: table["parts"].pop(0)), r"parts\[0\].sections is"),
    "delta dropped": (
        both(lambda table: table["parts"].pop(1)),
        r"parts\[0\] is .*want save and ranks of the manifest",
    ),
    "delta of one table dropped": (drop("tables", "item", "parts", 1), r"parts\[0\] is"),
    "parts changed places": (both(lambda table: table["parts"].reverse()), r"parts\[0\].sections is"),
    "a part thrice": (both(lambda table: table["parts"].append(table["parts"][1])), "parts is"),
    "the delta twice": (
        both(lambda table: table["parts"].__setitem__(0, table["parts"][1])),
        r"parts\[0\].sections is",
    ),
    "part of nobody": (put("*", "parts", 0, "save", "save-1-00000000"), r"parts\[0\].save is .* a save that .* holds"),
    "part's save a path": (put(*FULL, "save", "/etc"), r"parts\[0\].save is '/etc'"),
    "part's ranks 0": (put(*FULL, "ranks", 0), r"parts\[0\].ranks is 0"),
    "part's ranks 2": (put(*FULL, "ranks", 2), "item.rows-0.shard is foreign: it has ranks 1"),
    "part without sections": (drop(*FULL, "sections"), r"parts\[0\] is"),
    "sections empty": (put(*FULL, "sections", {}), r"parts\[0\].sections is \{\}"),
    "rows of the full save are changes": (put(*FULL, "sections", "rows", False), r"parts\[0\].sections is"),
    "rows 1": (put(*DELTA, "sections", "rows", 1), r"parts\[1\].sections is"),
    "tombstones dropped": (drop(*DELTA, "sections", "tombstones"), r"parts\[1\].sections is"),
    "tombstones whole": (put(*DELTA, "sections", "tombstones", True), r"parts\[1\].sections is"),
    "candidates dropped": (drop(*DELTA, "sections", "candidates"), r"parts\[1\].sections is"),
    "candidates dropped everywhere": (
        both(lambda table: [part["sections"].pop("candidates") for part in table["parts"]]),
        "holds item.candidates-0.shard, which it does not name",
    ),
    "rows dropped": (drop(*FULL, "sections", "rows"), r"parts\[0\].sections is"),
    "a section of nobody": (put(*FULL, "sections", "../rows", True), r"parts\[0\].sections is"),
    "delta's rows are whole": (put(*DELTA, "sections", "rows", True), r"parts\[1\].sections is"),
    "delta's candidates are changes": (put(*DELTA, "sections", "candidates", False), r"parts\[1\].sections is"),
    "tables dropped": (put("tables", {}), "holds item.candidates-0.shard, which it does not name"),
    "a table dropped": (drop("tables", "user"), "holds user.candidates-0.shard, which it does not name"),
}


@pytest.mark.parametrize("kind", list(FORGERIES))
def test_a_forged_manifest_is_refused_with_file_and_field(kind, whole):
    path = whole / "manifest.json"
    before = path.read_bytes()
    change, words = FORGERIES[kind]
    forge_manifest(path, change)
    try:
        refused(whole, f"({re.escape(str(path))} is forged or damaged: )?.*{words}")
        with pytest.raises(ValueError):
            checkpoint.read_tables(whole)
    finally:
        path.write_bytes(before)


def places(value, path=()):
    """Yields the path of every leaf of a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


STRANGE = [None, True, -1, 0, 2**70, 1.5, "", "x", "../x", [], [[]], {}, {"x": 1}]


def test_any_value_of_any_field_is_accepted_or_refused(whole):
    """Replaces every field by strange values: a ValueError names the file, or the load works."""
    path = whole / "manifest.json"
    before = path.read_bytes()
    manifest = json.loads(before)
    taken, count = set(), 0
    try:
        for place in places({key: value for key, value in manifest.items() if key not in ("checksum", "extra")}):
            if not place or place[1:2] == ("user",):  # as "item"
                continue
            for value in STRANGE:
                forged = copy.deepcopy(manifest)
                forge = put(*place, value)
                path.write_text(json.dumps(forged), encoding="utf-8")
                forge_manifest(path, forge)
                count += 1
                try:
                    checkpoint.read_manifest(whole)
                except ValueError as refusal:
                    assert str(path) in str(refusal)
                else:
                    taken.add(place)
    finally:
        path.write_bytes(before)
    assert count > 400
    # These fields may hold other values of the same type. The load compares them with the tables.
    told = [("storage",), ("optimizer",), ("slots",), ("slots", 0), ("slots", 1), ("optimizer", "rule")]
    fields = {("spec", *field) for field in told} | {("clock",), ("iterations",), ("learning_rate",)}
    fields |= {
        ("parts", p, "sections", s) for p, s in ((0, "rows"), (0, "candidates"), (1, "candidates"))
    }  # true as is
    sizes = {("dense", name, 0) for name in manifest["dense"]}
    assert taken == {("tables", "item", *field) for field in fields} | sizes


def test_unreadable_and_foreign_dense_files_are_refused(whole, tmp_path):
    """The files have right checksums. Weights and tables stay unchanged."""
    path = whole / "manifest.json"
    save = whole / json.loads(path.read_text(encoding="utf-8"))["save"]
    files = [path, *save.glob("dense.*")]
    before = {file: file.read_bytes() for file in files}

    def signed(manifest):
        for file in files[1:]:
            data = file.read_bytes()
            manifest["dense"][file.name] = [len(data), xxhash.xxh3_64_hexdigest(data)]

    try:
        for file in files[1:]:
            file.write_bytes(bytes(len(before[file])))
            forge_manifest(path, signed)
            refused(whole, r"dense \(.index, .data-\*\) holds unreadable weights")
            file.write_bytes(before[file])
        tf.train.Checkpoint(model=model(2.0, units=3)).write(str(tmp_path / "dense"))
        for file in files[1:]:
            file.write_bytes((tmp_path / file.name).read_bytes())
        forge_manifest(path, signed)
        refused(whole, "Dense weights of .* do not fit the model")
    finally:
        for file, data in before.items():
            file.write_bytes(data)
