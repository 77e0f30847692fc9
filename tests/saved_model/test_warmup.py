"""Warm-up requests have TensorFlow Serving's form, and the export has answered them."""

import sys
import types

import numpy as np
import pytest

from tests.saved_model.click_model import export_flat
from tests.support.prediction_log import message_class
from tf_fusedrec import tf
from tf_fusedrec.saved_model import warmup, write_warmup_requests


@pytest.fixture(scope="module")
def prediction_log():
    return message_class()


@pytest.fixture
def installed(prediction_log, monkeypatch):
    """Stands in for the package where it is not installed."""
    names = ("tensorflow_serving", "tensorflow_serving.apis", "tensorflow_serving.apis.prediction_log_pb2")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[2]].PredictionLog = prediction_log


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return export_flat(tmp_path_factory.mktemp("warmup") / "export")


@pytest.mark.slow
def test_requests_come_back(export, installed, prediction_log):
    asked = [np.arange(3)[np.newaxis], np.zeros([4, 3])]
    with pytest.raises(ValueError, match="(?s)does not answer request 1, so TensorFlow Serving would not load .*Use"):
        write_warmup_requests(export, [{"x": asked[0]}, {"x": np.zeros([1, 2])}])
    write_warmup_requests(export, [{"x": x} for x in asked])
    records = [prediction_log.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(export / warmup.FILE))]
    assert len(records) == 2
    for record, x in zip(records, asked):
        request = record.predict_log.request
        assert request.model_spec.signature_name == "serving_default"
        tensor = request.inputs["x"]
        assert tensor.dtype == tf.int64.as_datatype_enum
        np.testing.assert_array_equal(tf.make_ndarray(tensor), x)
    with pytest.raises(ValueError, match="tf_serving_warmup_requests' exists. Remove it first"):
        write_warmup_requests(export, [{"x": asked[0]}])
    (export / warmup.FILE).unlink()
    for requests, signature, words in (
        ([{"y": asked[0]}], "serving_default", r"request 0 has the inputs \['y'\], but .* wants \['x'\]"),
        ([{"x": asked[0]}], "other", "no signature 'other'. Use one of"),
        ([], "serving_default", "got 0 requests, want 1 .. 1000"),
    ):
        with pytest.raises(ValueError, match=words):
            write_warmup_requests(export, requests, signature)
    assert [path.name for path in (export / "assets.extra").iterdir()] == ["tables.json"]


def test_without_the_package(export, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving", None)
    monkeypatch.delitem(sys.modules, "tensorflow_serving.apis.prediction_log_pb2", raising=False)
    with pytest.raises(ImportError, match="pip install --no-deps tensorflow-serving-api==2"):
        write_warmup_requests(export, [{"x": np.zeros([1, 3])}])
