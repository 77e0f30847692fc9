"""`make sanitize` finds planted errors in a clone of one algorithm and one program."""

import pathlib

import pytest

from tools import sanitizers

SOUND = "int Read(const int* x, int i) { return x[i]; }\n"
CALL = "int Read(const int* x, int i);\n"
PROGRAMS = {
    "sound": "int main() { int x[2] = {0, 7}; return Read(x, 1) - 7; }\n",
    "beyond_the_end": "int main() { int* x = new int[2](); const int y = Read(x, 2); delete[] x; return y; }\n",
    "leak": "int* kept; int main() { kept = new int[99](); kept = nullptr; }\n",
    "overflow": "int main(int n, char**) { int x = 0x7fffffff; return x + n > 0; }\n",
    "race": """#include <thread>
int shared;
int main() { std::thread other([] { ++shared; }); ++shared; other.join(); }
// #include "threads.h" is what tells that a program has threads
""",
    "wrong": "int main() { return 3; }\n",
}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Fills a clone with the algorithm and one of the programs, and returns it."""
    monkeypatch.setattr(sanitizers, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sanitizers, "describe_tensorflow", lambda: sanitizers.TensorFlow("2", [], ["-pthread"]))
    (tmp_path / "custom_ops/a").mkdir(parents=True)
    (tmp_path / "tests/cpp").mkdir(parents=True)
    (tmp_path / sanitizers.HEADERS).write_text("#include <cstddef>\n", encoding="utf-8")
    (tmp_path / "custom_ops/a/a.cc").write_text(SOUND, encoding="utf-8")
    (tmp_path / "custom_ops/a/a_op.cc").write_text("#error a registration is no algorithm\n", encoding="utf-8")

    def write(name: str) -> pathlib.Path:
        (tmp_path / "tests/cpp/a_test.cc").write_text(CALL + PROGRAMS[name], encoding="utf-8")
        return tmp_path

    return write


def test_a_sound_program_passes(clone, capsys):
    clone("sound")
    assert sanitizers.main(["address"]) == 0
    assert "address: a ... " in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("beyond_the_end", "address", "heap-buffer-overflow"),
        ("leak", "address", "detected memory leaks"),
        ("overflow", "address", "signed integer overflow"),
        ("race", "thread", "data race"),
        ("wrong", "address", "a ended with 3"),
    ],
)
def test_faults_are_found(clone, capsys, program, kind, words):
    clone(program)
    assert sanitizers.main([kind]) == 1
    assert words in capsys.readouterr().err


def test_the_threads_of_the_table_are_watched():
    tests = {path.name for path in sanitizers.tests(sanitizers.KINDS["thread"])}
    assert {"threads_test.cc", "look_ahead_test.cc", "pipeline_test.cc"} <= tests
    assert {path.stem for path in sanitizers.algorithms()} >= {"hash_table", "key_index", "lookup", "segment_unique"}
