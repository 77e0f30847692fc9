"""The identity of a prepared data set: its files and their bytes, neither its name nor a time."""

import os

from benchmarks.harness.content import content_of


def folder_of(path, **files):
    (path / "train").mkdir(parents=True)
    for number, (name, text) in enumerate(files.items()):
        (path / "train" / name).write_text(text, encoding="utf-8")
        os.utime(path / "train" / name, (number, number))
    return path


def test_copies_are_the_same_and_any_other_byte_or_name_is_not(tmp_path):
    one = content_of(folder_of(tmp_path / "one", a="1", b="2"))
    assert content_of(folder_of(tmp_path / "copy", b="2", a="1")) == one and len(one) == 16
    others = {"byte": {"a": "1", "b": "3"}, "name": {"a": "1", "c": "2"}, "border": {"a": "12", "b": ""}}
    for name, files in others.items():
        assert content_of(folder_of(tmp_path / name, **files)) != one, name
