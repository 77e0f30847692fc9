"""Every test run includes short fuzzing, and the fuzzers find planted faults."""

import json

import pytest

from tests.fuzz.files import Target, Violation, damage_files, plain_json, write_plain_json
from tests.fuzz.op_calls import call_ops, record, scenario
from tests.fuzz.targets import TARGETS
from tf_fusedrec.ops._library import library

DAMAGES = 40


@pytest.mark.parametrize("kind", TARGETS)
def test_damaged_files_are_refused_by_name(kind):
    counts = damage_files(TARGETS[kind], 1, DAMAGES)
    print(dict(counts))
    assert counts["refused"] > DAMAGES // 4


def read_number(folder):
    path = folder / "number.json"
    try:
        number = json.loads(path.read_bytes())["number"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return number


def crashing(folder):
    return json.loads((folder / "number.json").read_bytes())["number"]


def nameless(folder):
    try:
        return crashing(folder)
    except (KeyError, TypeError) as error:
        raise ValueError("damaged") from error


@pytest.mark.parametrize(
    ("read", "checked", "words"),
    [
        (read_number, False, ""),
        (read_number, True, "a wrong answer, seed 0"),
        (crashing, False, "neither an answer nor a ValueError|names no file"),
        (nameless, False, "a refusal that names no file, seed 0"),
    ],
)
def test_readers_that_take_too_much_are_found(read, checked, words):
    def make(folder):
        folder.mkdir()
        (folder / "number.json").write_text('{"number": 1234567}', encoding="utf-8")

    ways = {"*.json": (plain_json, write_plain_json)}
    target = Target(make, read, ("*.json",), checked, ways)
    if words:
        with pytest.raises(Violation, match=words):
            damage_files(target, 0)
    else:
        assert damage_files(target, 0)["refused"]


def test_wrong_op_calls_end_in_errors():
    apart = ("mark_collective",)  # The op forwards any tensor.
    every = {name for name in dir(library) if name.startswith("fusedrec_") and "eager" not in name}
    missing = every - {call.name for call in record(scenario)}
    assert [name for name in missing if not any(word in name for word in apart)] == []
    assert call_ops(1, 500)["refusals"] > 100
