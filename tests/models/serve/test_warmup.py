"""A server replays the warm-up requests of its export, and names the records that it cannot answer."""

import logging

import numpy as np
import pytest

from tests.saved_model.click_model import export_flat
from tests.support.prediction_log import message_class
from tf_fusedrec import tf
from tf_fusedrec.models.serve import warmup
from tf_fusedrec.models.serve.loaded import Export


def record(inputs, signature="serving_default"):
    log = message_class()()
    log.predict_log.request.model_spec.signature_name = signature
    for name, value in inputs.items():
        log.predict_log.request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    return log.SerializeToString()


def write(export, records):
    with tf.io.TFRecordWriter(str(export.path / warmup.FILE)) as writer:
        for one in records:
            writer.write(one)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return Export(export_flat(tmp_path_factory.mktemp("warm") / "export"))


@pytest.fixture
def called(export, monkeypatch):
    """The calls of signatures that a test made: (name, inputs)."""
    calls, call = [], export.call
    monkeypatch.setattr(export, "call", lambda name, inputs: (calls.append((name, inputs)), call(name, inputs))[1])
    return calls


def test_all_requests_are_sent_in_order(export, called, caplog):
    assert warmup.replay(export) == 0 and not called  # An export has no such file at first.
    xs = [np.arange(3)[np.newaxis], np.ones([4, 3], np.int64)]
    write(export, [record({"x": xs[0]}), record({"x": xs[1]}, ""), record({}, "version")])
    with caplog.at_level(logging.INFO):
        assert warmup.replay(export) == 3
    assert [name for name, _ in called] == ["serving_default", "serving_default", "version"]
    for (_, inputs), x in zip(called, xs):
        np.testing.assert_array_equal(inputs["x"], x)
    assert "answered 3 warm-up requests in" in caplog.text


def test_records_that_cannot_be_answered_are_named_and_skipped(export, called, caplog):
    good, other = record({"x": np.zeros([1, 3], np.int64)}), message_class()()
    bad = [record({"y": 1}), record({"x": 1}, "none"), record({"x": np.zeros([1, 2], np.int64)}), b"\xff"]
    write(export, [good, *bad, other.SerializeToString(), good])
    assert warmup.replay(export) == 2
    words = (
        "it has the inputs ['y'], but 'serving_default' wants ['x']", "the export has no signature 'none', only",
        "", "it is no PredictionLog", "it is no predict request",
    )  # fmt: skip
    errors = [one.getMessage() for one in caplog.records]
    assert len(errors) == len(words)
    for number, (error, word) in enumerate(zip(errors, words), 2):
        assert f"record {number} of {export.path / warmup.FILE} is skipped: " in error and word in error
        assert "TensorFlow Serving would not load this export. Remedy" in error


@pytest.mark.parametrize("cut", [True, False])
def test_behind_a_damaged_place_the_rest_is_left_out(export, called, caplog, cut):
    good = record({"x": np.zeros([1, 3], np.int64)})
    write(export, [good] * 3)
    file = export.path / warmup.FILE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content[: -1 - len(content) // 3] if cut else content)
    assert warmup.replay(export) == len(called) == 1
    (error,) = [one.getMessage() for one in caplog.records]
    assert error.startswith(f"file {file} is damaged behind record 1: ")
    assert "This server goes on without the rest of the requests. Remedy: copy the file again" in error
