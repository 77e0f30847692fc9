"""The command line of the converters writes data sets, and refuses unknown arguments."""

import pytest

from models.data_sets import convert
from models.data_sets.layouts import read_info


def _run(*arguments):
    convert.convert(["convert", *map(str, arguments)])


def test_makes_a_data_set_and_says_so(tmp_path, capsys):
    _run("synthetic-ranking", "--output", tmp_path / "r", "--users=12", "--items=9", "--clusters=3", "--exposures=2")
    assert "ranking, 12 users, 9 items, from synthetic ranking" in capsys.readouterr().out
    _run("synthetic-retrieval", "--output", tmp_path / "s", "--users=5", "--items=50", "--seed=4")
    assert read_info(tmp_path / "s").source.endswith("seed=4")
    (tmp_path / "ratings.dat").write_text("1::2::3::4\n1::5::3::6\n", encoding="utf-8")
    _run("movielens", "--input", tmp_path, "--output", tmp_path / "m")
    assert read_info(tmp_path / "m").users == 1
    (tmp_path / "seq.txt").write_text("1 2 3\n", encoding="utf-8")
    _run("sequences", "--input", tmp_path / "seq.txt", "--output", tmp_path / "q")
    assert "1 users, 2 items, from sequences, seq.txt, 2 interactions, timestamps are" in capsys.readouterr().out
    (tmp_path / "log.csv").write_text("user_id,video_id,time_ms,is_click\n1,2,3,1\n1,3,9,0\n", encoding="utf-8")
    _run("kuairand", f"--input={tmp_path}", "--output", tmp_path / "k", "--test_fraction=0.5")
    assert read_info(tmp_path / "k").items == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            [],
            r"name one converter of movielens, sequences, kuairand, movielens_ranking, synthetic-.* got \[\]",
        ),
        (["criteo"], r"name one converter of .* got \['criteo'\]"),
        (["movielens", "--output=x"], "movielens needs --input"),
        (["synthetic-ranking"], "synthetic-ranking needs --output"),
        (["movielens", "--input=a", "--output=b", "--users=3"], "--users is not a flag of movielens; it takes input"),
        (["movielens", "--inputt=a"], "Unknown command line flag 'inputt'.*Run with --help"),
        (["synthetic-ranking", "--output=x", "--users=many"], "flag --users=many"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        _run(*arguments)


def test_an_error_is_one_line_and_exit_code_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["convert", "kuairand", "--input", str(tmp_path), "--output", str(tmp_path / "o")])
    with pytest.raises(SystemExit, match="error: input .* must be a KuaiRand log"):
        convert.main()


def test_help_lists_the_converters(capsys):
    _run("--help")
    assert "synthetic-retrieval" in capsys.readouterr().out
