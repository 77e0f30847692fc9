"""examples/criteo_dlrm.py finds planted signal on 1 and on 2 ranks, and names the wrong line of a log."""

import importlib.util
import pathlib

import numpy as np
import pytest

from tests.support.ranks import ROOT, run_ranks

LINES, HELD_OUT = 2000, 200
FLAGS = ["--epochs", "4", "--batch", "80", "--learning_rate", "0.01", "--dim", "8", "--dims", "C6=4,C9=12"]


def example():
    """Loads the program as a module, because examples/ is no package."""
    spec = importlib.util.spec_from_file_location("criteo_dlrm", ROOT / "examples/criteo_dlrm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_log(path, labels, integers, strings):
    """Writes a log. NaN integers and "" strings are missing fields."""
    with open(path, "w", encoding="utf-8") as log:
        for label, numbers, names in zip(labels, integers, strings):
            fields = ["" if np.isnan(number) else str(int(number)) for number in numbers]
            log.write("\t".join([str(int(label)), *fields, *names]) + "\n")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Writes a log with missing fields whose clicks depend on C1 and I1. Returns the AUC of the true log odds."""
    from tf_fusedrec.metrics import exact

    random = np.random.default_rng(0)
    values = random.integers(0, 20, [LINES, 26])
    integers = random.integers(-2, 50, [LINES, 13]).astype(np.float64)
    missing = random.random([LINES, 39]) < 0.1
    log_odds = np.where(missing[:, 13], 0, random.normal(0, 2, 20)[values[:, 0]])
    log_odds += np.where(missing[:, 0], 0, np.log1p(np.maximum(integers[:, 0], 0)) - 2.8)
    labels = random.random(LINES) < 1 / (1 + np.exp(-log_odds))
    strings = np.where(missing[:, 13:], "", values.astype("U8"))
    path = tmp_path_factory.mktemp("criteo") / "train.txt"
    write_log(path, labels, np.where(missing[:, :13], np.nan, integers), strings)
    return path, exact.auc(labels[-HELD_OUT:], log_odds[-HELD_OUT:])


def train(data, output):
    """Body: returns the history and the SavedModel's output for a line whose fields are all missing."""
    from tf_fusedrec import tf

    history = example().main(["--data", data, "--output", output, *FLAGS])
    served = tf.saved_model.load(str(pathlib.Path(output, "saved_model"))).signatures["serving_default"]
    answer = served(integers=tf.fill([2, 13], float("nan")), strings=tf.fill([2, 26], ""))
    return history, answer["click"].numpy()


def test_two_ranks_find_the_signal_that_one_finds(planted, tmp_path):
    data, possible = planted
    [(history, click)] = run_ranks(train, 1, data=str(data), output=str(tmp_path / "1"))
    (of_two, click_of_two), (same, _) = run_ranks(train, 2, data=str(data), output=str(tmp_path / "2"))
    assert of_two == same, "the ranks disagree"
    assert 0.7 < history["val_auc"][-1] < possible + 0.02
    # 90 steps of Adam sum float32 in another order. One pair of 200 validation lines is 1 / 10,000 of the AUC.
    np.testing.assert_allclose(of_two["val_auc"], history["val_auc"], atol=1e-4)
    np.testing.assert_allclose(of_two["val_loss"], history["val_loss"], rtol=1e-4)
    assert click.shape == (2, 1) and 0 < click[0] < 1
    np.testing.assert_allclose(click_of_two, click, atol=1e-4)
    assert (tmp_path / "2/checkpoint").is_dir()


LINE = "\t".join(["1", *["5"] * 13, *["ab"] * 26])


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (LINE.replace("\t", ","), "got 1 fields (1,5"),
        (LINE + "\tab", "got 41 fields"),
        (LINE.replace("5", "5.5", 1), r"got 40 fields (1\t5.5"),
        ("2" + LINE[1:], r"got 40 fields (2\t5"),
        ("", "got 1 fields ()"),
    ],
)
def test_a_wrong_line_is_named(wrong, got, tmp_path):
    from tf_fusedrec import tf

    program, log = example(), tmp_path / "log.txt"
    log.write_text("\n".join([LINE, LINE, wrong, LINE]) + "\n", encoding="utf-8")
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        list(program.read(str(log), 0, 4, batch=4, shuffle=False))
    for words in (f"{log}, line 3: ", got, f"wanted {program.WANTED}"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "no.txt"], "--data no.txt is no file. Wanted: a log with 40 fields"),
        (["--batch", "0"], "--batch must be a multiple of the 1 ranks, got 0"),
        (["--validation", "1"], "--validation must lie between 0 and 1, got 1.0"),
        (["--dims", "C6:4"], "--dims must look like C6=4,C9=8, got 'C6:4'"),
        (["--dims", "I6=4"], "--dims names ['I6']. Wanted: fields among C1..C26"),
        (["--output", "used"], "--output used has a saved_model. Remedy: another folder, or remove it"),
    ],
)
def test_wrong_flags_are_refused(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("log.txt").write_text(LINE + "\n", encoding="utf-8")
    pathlib.Path("used/saved_model").mkdir(parents=True)
    with pytest.raises(SystemExit):
        example().parse_arguments(["--data", "log.txt", *flags])
    assert words in capsys.readouterr().err


def test_a_log_without_lines_for_both_parts_is_refused(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(LINE + "\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has 1 lines, of which 0 would be the validation part"):
        example().main(["--data", str(log), "--output", str(tmp_path / "out")])


def test_fields_of_any_size_are_read_as_they_stand(tmp_path):
    """A line without fields, the smallest integers, and line ends of Windows."""
    random, log = np.random.default_rng(1), tmp_path / "log.txt"
    integers = np.where(random.random([64, 13]) < 0.4, np.nan, random.lognormal(2, 3, [64, 13]).astype(np.int64) - 2)
    strings = np.vectorize("{:08x}".format)(random.integers(0, 2**32, [64, 26]))
    strings = np.where(random.random(strings.shape) < 0.2, "", strings)
    integers[0], strings[0] = np.nan, ""
    write_log(log, np.arange(64) % 2, integers, strings)
    log.write_bytes(log.read_bytes().replace(b"\n", b"\r\n"))
    [(inputs, labels)] = example().read(str(log), 0, 64, batch=64, shuffle=False)
    np.testing.assert_array_equal(inputs["integers"], integers.astype(np.float32))
    np.testing.assert_array_equal(labels[:, 0], np.arange(64) % 2)
    np.testing.assert_array_equal(inputs["strings"].numpy().astype(str), strings)
