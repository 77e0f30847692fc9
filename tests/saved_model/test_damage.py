"""Damaged, foreign and hostile files are refused by name, before any write, and nothing is left."""

import errno
import json
import os
import pathlib
import shutil

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.saved_model import click_model
from tests.saved_model.server import by_saved_model, by_v1
from tf_fusedrec import tf
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.native_tables import NativeTables
from tf_fusedrec.saved_model.served_rows import Group, GroupIds

IDS = np.array([-5, 0, 7, 2**40])


def changed(path, data):
    """Replaces the bytes of `path`, without touching files that share its contents."""
    path.unlink()
    path.write_bytes(data)


def flipped(data, bit):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.mark.slow
def test_a_server_finds_flipped_bits_of_every_byte_and_cuts_of_its_rows(tmp_path):
    """The initializer of a loaded graph finds them."""
    config = fr.TableConfig("t", 2, fr.optimizers.SGD(1.0))
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    tables = NativeTables({"t": (IDS[:3], rows)}, {"t": None}, {"t": config}, tmp_path)
    (table,), path = tables._tables.values(), tmp_path / "t.rows"
    data = path.read_bytes()
    assert len(data) == applying.HEADER_BYTES + 3 * 16
    table._initialize()
    initialize = tf.function(table._initialize)
    initialize()
    bits = 8 * np.arange(len(data)) + np.random.default_rng(0).integers(0, 8, len(data))
    damaged = [flipped(data, bit) for bit in bits] + [data[:size] for size in range(0, len(data), 3)]
    damaged += [data[: applying.HEADER_BYTES], data[:-16], data[:-1], data + data[-16:]]
    for case in damaged:
        path.write_bytes(case)
        with pytest.raises(tf.errors.OpError, match=r"t\.rows"):
            initialize()
    path.write_bytes(data)
    initialize()
    np.testing.assert_array_equal(found(tables, tf.constant(IDS)), [*rows, [0, 0]])


def found(tables, ids):
    return tables.find(0, GroupIds.of(Group(("t",), 2, tf.float32), [("t", ids)]))[0]


def test_an_empty_table_and_files_of_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(applying, "BLOCK_ROWS", 3)
    config = fr.TableConfig("t", 2, fr.optimizers.SGD(1.0))
    for count in (0, 3, 7):
        rows = np.random.default_rng(count).normal(size=(count, 2)).astype(np.float32)
        tables = NativeTables({"t": (np.arange(count), rows)}, {"t": None}, {"t": config}, tmp_path)
        tables._tables["t"]._initialize()
        ids = tf.range(count, dtype=tf.int64)
        np.testing.assert_array_equal(found(tables, ids), rows)


@pytest.mark.slow
@pytest.mark.parametrize("load", [by_saved_model, by_v1])
def test_loaders_name_the_file_of_damaged_rows(load, click, tmp_path):
    shutil.copytree(click.folder / "ours", tmp_path / "served")
    path = tmp_path / "served/assets/user.rows"
    words = r"rows file .*/user\.rows of table user is damaged: .*Copy the export again"
    for case in (flipped(path.read_bytes(), 8 * 40 + 3), path.read_bytes()[:-16]):
        changed(path, case)
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            load(str(tmp_path / "served"), click_model.served(click_model.batch(0)))


def files_of(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def refused(base, delta, words, output=None):
    output = output or delta.parent / "out"
    before = sorted(path.name for path in output.parent.iterdir())
    with pytest.raises((ValueError, OSError), match=words):
        fr.apply_delta(base, delta, output)
    assert sorted(path.name for path in output.parent.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_apply_delta_finds_flipped_bits_cuts_and_missing_files(ops, click, tmp_path):
    base, delta, random = tmp_path / "base", tmp_path / "delta", np.random.default_rng(1)
    shutil.copytree(click.folder / f"{ops}-delta", delta)
    shutil.copytree(click.folder / ops, base)
    # A delta needs its base's description and rows. The rest comes from the delta.
    rows = list((base / "assets").glob("*.rows")) if ops == "ours" else files_of(base / "variables")
    for path in [*files_of(delta), base / applying.DESCRIPTION, *rows]:
        data, names = path.read_bytes(), f"{path.name}|variables/variables|does not start from base"
        cases = [None, b""]
        if ops == "ours" or path not in rows:  # the delta replaces a bundle except its rows
            cases += [data[: len(data) // 2], *(flipped(data, bit) for bit in random.choice(8 * len(data), 4))]
        for case in cases:
            path.unlink()
            if case is not None:
                path.write_bytes(case)
            refused(base, delta, names)
            path.write_bytes(data)
    (delta / "model/extra").write_text("x", encoding="utf-8")
    refused(base, delta, "model/extra' is not named by delta.json. Remove it")
    (delta / "model/extra").unlink()
    fr.apply_delta(base, delta, tmp_path / "out")
    by_saved_model(str(tmp_path / "out"), click_model.served(click_model.batch(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../evil", "/evil", "a\\b", "..", "", "evil\0"])
def test_hostile_names_of_tables_are_refused(name, click, tmp_path):
    base, delta = tmp_path / "base", tmp_path / "delta"
    shutil.copytree(click.folder / "ours", base)
    shutil.copytree(click.folder / "ours-delta", delta)
    for path in (base / applying.DESCRIPTION, delta / "delta.json"):
        told = json.loads(path.read_text(encoding="utf-8"))
        for part in ("tables", "base", "result"):
            if part in told:
                told[part] = {name: told[part]["user"]}
        changed(path, json.dumps(told).encode())
    refused(base, click.folder / "ours-delta", "tables.json.*table name .* cannot name a file", tmp_path / "out")
    refused(click.folder / "ours", delta, "delta.json.*table name .* cannot name a file")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "model/../../secret", "model//x", "model/link"])
def test_files_outside_of_a_delta_are_refused(name, click, tmp_path):
    delta, secret = tmp_path / "in/delta", tmp_path / "in/secret"
    shutil.copytree(click.folder / "ours-delta", delta)
    secret.write_bytes(b"x")
    (delta / "model/link").symlink_to(secret)
    told = json.loads((delta / "delta.json").read_text(encoding="utf-8"))
    told["files"][name] = [1, applying.checksum_of(secret)]
    told["files"].setdefault("model/link", told["files"][name])
    changed(delta / "delta.json", json.dumps(told).encode())
    refused(click.folder / "ours", delta, "lies outside '.*delta'. Use files")


@pytest.mark.slow
def test_links_out_of_a_base_are_refused(click, tmp_path):
    for ops, file in (("ours", "assets/user.rows"), ("stock", "variables/variables.index")):
        base = tmp_path / ops
        shutil.copytree(click.folder / ops, base)
        (base / file).rename(tmp_path / "elsewhere")
        (base / file).symlink_to(tmp_path / "elsewhere")
        refused(base, click.folder / f"{ops}-delta", f"{pathlib.Path(file).name}' lies outside", tmp_path / "out")


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_and_names_the_folder(click, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(applying, "write_records", full)
    refused(
        click.folder / "ours",
        click.folder / "ours-delta",
        r"output '.*out' cannot be written.*No space left",
        tmp_path / "out",
    )
