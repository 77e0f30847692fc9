"""A served export answers as the model does, follows a folder of deltas, and stops without losing a request."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from tornado.netutil import bind_sockets

import tf_fusedrec as fr
from tests.support.only_tensorflow import make_environment
from tests.support.prediction_log import message_class
from tests.support.served import Client, served
from tf_fusedrec import keras, tf
from tf_fusedrec.cli.main import main
from tf_fusedrec.models.serve import program, rest, warmup
from tf_fusedrec.models.serve.deltas import Deltas
from tf_fusedrec.models.serve.loaded import Export, RequestError
from tf_fusedrec.models.serve.rest import Server
from tf_fusedrec.saved_model import applying

ROOT = pathlib.Path(__file__).resolve().parents[3]
# The same rows and weights, in sums of other lengths.
TOLERANCE = 1e-6


def request(seed, users=2):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, users)
    return {
        "history": random.integers(0, 30, lengths.sum()).tolist(),
        "history_row_splits": [0, *np.cumsum(lengths).tolist()],
        "shown": random.integers(0, 30, [users, 2]).tolist(),
    }


class Trained:
    """A model, its first version as an export, the delta to its second, and the answers of both to request(0)."""

    def __init__(self, folder):
        table = fr.TableConfig("item", 4, fr.optimizers.SGD(1.0), fr.Normal(0.0, 1.0))
        features = [fr.FeatureConfig("history", "item", "mean"), fr.FeatureConfig("shown", "item")]
        embedding = fr.FusedEmbedding(features, [table])
        inputs = {
            "history": keras.Input([None], ragged=True, dtype=tf.int64, name="history"),
            "shown": keras.Input([2], dtype=tf.int64, name="shown"),
        }
        rows = embedding(inputs)
        hidden = keras.layers.Concatenate()([rows["history"], keras.layers.Flatten()(rows["shown"])])
        self.model = keras.Model(inputs, keras.layers.Dense(1, name="score")(hidden))
        self.folder, self.answers = folder, []
        self.change(np.arange(20))
        fr.export(self.model, folder / "1")
        self.change(np.arange(10, 25))
        fr.export(self.model, folder / "ready" / "1-to-2", base=folder / "1")
        (folder / "deltas").mkdir()

    def change(self, ids):
        random = np.random.default_rng(len(self.answers))
        fr.checkpoint.warm_start(self.model, "item", ids, random.normal(0, 1, [len(ids), 4]).astype(np.float32))
        dense = self.model.layers[-1]
        dense.set_weights([random.normal(0, 1, weight.shape) for weight in dense.get_weights()])
        self.answers.append(self.answer(request(0)))

    def batch(self, given):
        history = tf.RaggedTensor.from_row_splits(
            tf.constant(given["history"], tf.int64), tf.constant(given["history_row_splits"], tf.int64)
        )
        return {"history": history, "shown": tf.constant(given["shown"], tf.int64)}

    def answer(self, given):
        return self.model(self.batch(given), training=False).numpy()


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "ready").mkdir()
    return Trained(folder)


@pytest.fixture(scope="module")
def exported(stock):
    return Export(stock.folder / "1")


@pytest.fixture(scope="module")
def running(exported):
    with served(exported, "clicks") as (client, server):
        yield client, server


def test_answers_are_those_of_the_model_also_of_joined_requests(stock, running):
    client, _ = running
    np.testing.assert_allclose(client.predict(request(0)), stock.answers[0], rtol=0, atol=TOLERANCE)
    requests = [request(seed, users=1 + seed % 3) for seed in range(30)]
    signature = tf.saved_model.load(str(stock.folder / "1")).signatures["serving_default"]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        for given, answer in zip(requests, pool.map(client.predict, requests)):
            wanted = signature(**{name: tf.constant(value, tf.int64) for name, value in given.items()})["score"]
            np.testing.assert_allclose(answer, wanted, rtol=0, atol=TOLERANCE)
    found = client.metrics()
    assert found["fusedrec_requests_total serving_default 200"] == 31
    assert found[":tensorflow:serving:request_latency_count"] == 31
    assert 0 < found[":tensorflow:serving:request_latency_sum"] < 31 * 60e6
    assert found["fusedrec_batch_requests_sum"] >= 31 > found["fusedrec_batch_requests_count"]


def test_status_and_metadata(running):
    client, _ = running
    status = {
        "version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""},
    }  # fmt: skip
    for path in (client.model, f"{client.model}/versions/1"):
        assert client.send(path) == (200, {"model_version_status": [status]})
    for path in (f"{client.model}/metadata", f"{client.model}/versions/1/metadata"):
        code, told = client.send(path)
        assert code == 200 and told["model_spec"] == {"name": "clicks", "signature_name": "", "version": "1"}
        signatures = told["metadata"]["signature_def"]["signature_def"]
        assert {"serving_default", "apply_delta", "apply_deltas", "version"} <= set(signatures)
        shown = signatures["serving_default"]["inputs"]["shown"]
        assert shown["dtype"] == "DT_INT64" and shown["name"] == "serving_default_shown:0"
        sizes = [{"size": "-1", "name": ""}, {"size": "2", "name": ""}]
        assert shown["tensor_shape"] == {"dim": sizes, "unknown_rank": False}
        assert signatures["serving_default"]["method_name"] == "tensorflow/serving/predict"
    body = json.dumps({"inputs": request(0)}).encode()
    assert client.send(f"{client.model}/versions/1:predict", body)[0] == 200
    assert set(client.predict({}, "version")) == {"version", "deltas", "changed_rows"}


def test_bad_requests_get_the_codes_of_tensorflow_serving(running):
    client, _ = running
    good = json.dumps({"inputs": request(0)}).encode()
    wrong = json.dumps({"inputs": {**request(0), "history_row_splits": [0, 9, 9]}}).encode()
    other = client.model.replace("clicks", "others")
    missing = b'{"signature_name": "apply_delta", "inputs": {"path": "/nowhere"}}'
    for path, body, method, code, words in (
        (f"{other}:predict", good, None, 404, "Servable not found for request: Latest(others)"),
        (f"{client.model}/versions/7:predict", good, None, 404, "Servable not found for request: Specific(clicks, 7)"),
        (other, None, None, 404, "Could not find any versions of model others"),
        (f"{client.model}/versions/7", None, None, 404, "Could not find version 7 of model clicks"),
        (f"{client.model}:predict", None, None, 400, "Malformed request: GET /v1/models/clicks:predict"),
        (f"{client.model}:classify", good, None, 400, "Malformed request: POST"),
        (client.model, good, "PUT", 400, "Malformed request: PUT"),
        (f"{client.url}/v2", None, None, 404, "Not found"),
        (f"{client.model}:predict", b"{", None, 400, "JSON Parse error"),
        (f"{client.model}:predict", wrong, None, 400, "do not form a valid RaggedTensor"),
        (f"{client.model}:predict", missing, None, 404, "/nowhere/server/header; No such file"),
    ):
        status, answer = client.send(path, body, method)
        assert status == code and words in answer["error"] and "node" not in answer["error"], answer
    assert client.send(f"{client.model}:predict", good)[0] == 200


def test_a_delta_is_applied_as_it_appears_and_a_damaged_one_is_named(stock, running, caplog):
    client, server = running
    deltas = Deltas(server.export, stock.folder / "deltas", server.metrics.deltas_refused.inc)
    assert deltas.look() == 0
    shutil.copytree(stock.folder / "ready" / "1-to-2", stock.folder / "deltas" / "1-to-2")
    path = stock.folder / "deltas" / "1-to-2" / "server" / "changes.data-00000-of-00001"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    for _ in range(3):
        assert deltas.look() == 0
    np.testing.assert_allclose(client.predict(request(0)), stock.answers[0], rtol=0, atol=TOLERANCE)
    refusals = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(refusals) == 1 and f"{path} is damaged" in refusals[0]
    before = client.metrics()
    assert before["fusedrec_deltas_refused_total"] == 1 and before["fusedrec_deltas"] == 0
    path.write_bytes(sound)
    assert deltas.look() == 1
    np.testing.assert_allclose(client.predict(request(0)), stock.answers[1], rtol=0, atol=TOLERANCE)
    assert np.abs(stock.answers[1] - stock.answers[0]).max() > 1e-3
    after = client.metrics()
    digest = client.predict({}, "version")["version"]
    assert after["fusedrec_deltas"] == 1 and after[f"fusedrec_version {digest}"] == 1 and after["fusedrec_changed_rows"]
    assert f"fusedrec_version {digest}" not in before


def test_large_bodies_are_parsed_beside_the_loop_and_larger_ones_refused(stock, running, monkeypatch):
    client, _ = running
    monkeypatch.setattr(rest, "LARGE_BODY_BYTES", 10)
    signature = tf.saved_model.load(str(stock.folder / "1")).signatures["version"]
    assert client.predict({}, "version")["version"] != signature()["version"]  # a delta was applied
    np.testing.assert_allclose(client.predict(request(0)), stock.answers[1], rtol=0, atol=TOLERANCE)
    status, answer = client.send(f"{client.model}:predict", b"[" * 100)
    assert status == 400 and "JSON Parse error" in answer["error"]
    monkeypatch.setattr(rest, "MOST_BODY_BYTES", 1000)
    for body in (b" " * 1001, b" " * 5_000_000):
        status, answer = client.send(f"{client.model}:predict", body)
        assert status == 413 and f"The body has {len(body)} bytes, want at most 1000" in answer["error"]
    np.testing.assert_allclose(client.predict(request(0)), stock.answers[1], rtol=0, atol=TOLERANCE)


def test_idle_connections_and_clients_that_go_away_cost_nothing(stock, exported, monkeypatch, caplog):
    # Less than the idle connections, and more than those that leave and the files that the server itself opens.
    files = len(os.listdir("/proc/self/fd")) + rest.SPARE_FILES + 16
    monkeypatch.setattr(rest.resource, "getrlimit", lambda kind: (files, files))
    monkeypatch.setattr(rest.resource, "setrlimit", lambda kind, limits: None)
    head = "POST /v1/models/clicks:predict HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{}"
    body = json.dumps({"inputs": request(0)})
    with served(exported, "clicks") as (client, server), contextlib.ExitStack() as connections:
        address = ("127.0.0.1", int(client.url.rpartition(":")[2]))
        idle = [connections.enter_context(socket.create_connection(address)) for _ in range(30)]
        assert client.send(client.model)[0] == 200
        idle[0].settimeout(10)
        assert idle[0].recv(1) == b""  # The longest idle one was closed for a later one.
        idle[-1].sendall(head.format(len(body), body).encode())
        assert idle[-1].recv(12) == b"HTTP/1.1 200"
        for _ in range(5):
            with socket.create_connection(address) as leaving:
                leaving.sendall(head.format(len(body), body).encode())
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset
        assert client.send(client.model)[0] == 200
        end = time.monotonic() + 30
        while server.in_flight:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_inputs_become_tensors_without_a_leak(exported):
    """tf.constant of TensorFlow 2.16 leaks 0.33 KB a call."""
    random = np.random.default_rng(0)
    arrays = [
        random.integers(-100, 100, [3, 4]).astype(kind) for kind in ("f4", "f8", "i1", "i4", "i8", "u1", "?", "f2")
    ]
    arrays += [np.array(7), np.zeros([0, 3], np.float32), np.arange(9)[::2]]
    arrays += [np.array(of, object) for of in (b"path", [[b"a", b""], [b"\xff\0", b"bc"]], [b"x" * (1 << 17)])]
    arrays.append(np.zeros([0, 2], object))
    for array in arrays:
        tensor = exported._tensor(array)
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)

    def pages():
        return int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])

    given = [arrays[0], arrays[4], arrays[-3]]
    grown = []
    for _ in range(5):  # A leak grows in every block; the heap, and threads of other tests, in some.
        before = pages()
        for at in range(5_000):
            exported._tensor(given[at % 3])
        grown.append((pages() - before) * os.sysconf("SC_PAGESIZE"))
    assert min(grown) < 0.05 * 1024 * 5_000


class Versions:
    """An export whose version is a letter, and whose deltas are files that name the next letter."""

    def __init__(self):
        self.version, self.signatures = "a", {"apply_delta"}

    def described_version(self):
        return self.version, 0, 0

    def call(self, name, inputs):
        assert name == "apply_delta"
        told = (pathlib.Path(os.fsdecode(inputs["path"].item())) / "server/changes").read_text(encoding="utf-8")
        if told == "damaged":
            raise RequestError(400, "it is damaged")
        self.version = told
        return {"version": np.array(told.encode(), object)}


def test_deltas_follow_by_the_version_that_they_start_from(tmp_path):
    def arrive(name, base, result):
        (tmp_path / name / "server").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "server/changes").write_text(result, encoding="utf-8")
        description = json.dumps({"identity": {"version": base}})
        (tmp_path / name / "delta.json").write_text(description, encoding="utf-8")

    export, refusals = Versions(), []
    deltas = Deltas(export, tmp_path, lambda: refusals.append(1))

    def look(applied, version, refused):
        for wanted in (applied, 0):
            assert (deltas.look(), export.version, len(refusals)) == (wanted, version, refused)

    arrive("1", "c", "d")
    arrive("2", "b", "damaged")
    look(0, "a", 0)
    arrive("3", "a", "b")
    look(1, "b", 1)
    arrive("2", "b", "the letter c")  # The copy is complete now.
    arrive("0", "b", "c")  # Another trainer's delta from the same version comes first by its name.
    look(2, "d", 1)
    (tmp_path / "4").mkdir()
    for text in ("{", "[]", '{"identity": {}}'):
        (tmp_path / "4/delta.json").write_text(text, encoding="utf-8")
        deltas.look()
    look(0, "d", 4)
    arrive("4", "d", "a")  # Back to the first version. Delta 3, which starts there, was applied already.
    look(1, "a", 4)
    shutil.rmtree(tmp_path / "3")
    look(0, "a", 4)
    arrive("3", "a", "e")
    look(1, "e", 4)


def test_a_bad_entry_keeps_no_good_delta_from_the_server(tmp_path, caplog):
    def entry(name, text="{}"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.makedirs(os.path.join(folder, b"server"))
        with open(os.path.join(folder, b"delta.json"), "w", encoding="utf-8") as file:
            file.write(text)
        return pathlib.Path(os.fsdecode(folder))

    sound = json.dumps({"identity": {"version": "a"}})
    entry(b"deep", "[" * 100_000)
    entry(b"\xff", sound.replace("a", "b"))
    entry(b"line\n2026 ERROR forged")
    for name, special in (("pipe", os.mkfifo), ("device", lambda path: os.symlink("/dev/zero", path))):
        folder = entry(name.encode())
        (folder / "delta.json").unlink()
        special(folder / "delta.json")
        special(entry(f"0 {name} as header".encode(), sound) / "server/header")
    (entry(b"0 huge header", sound) / "server/header").write_bytes(bytes(1 << 13))
    huge = entry(b"huge")
    os.truncate(huge / "delta.json", 1 << 40)
    (entry(b"good", sound) / "server/changes").write_text("b", encoding="utf-8")
    export, refusals = Versions(), []
    deltas = Deltas(export, tmp_path, lambda: refusals.append(1))
    (tmp_path / os.fsdecode(b"\xff") / "server/changes").write_text("c", encoding="utf-8")
    with caplog.at_level("INFO"):
        assert (deltas.look(), export.version, len(refusals)) == (2, "c", 8)
        assert (deltas.look(), len(refusals)) == (0, 8)
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_while_it_stops_new_requests_get_503(running):
    client, server = running
    server.stopping = True
    try:
        status, answer = client.send(f"{client.model}:predict", json.dumps({"inputs": request(0)}).encode())
        assert status == 503 and "stopping" in answer["error"]
        assert client.send(client.model)[1]["model_version_status"][0]["state"] == "UNLOADING"
    finally:
        server.stopping = False


def test_a_request_that_does_not_end_is_an_error(exported, monkeypatch):
    monkeypatch.setattr(program, "STOP_SECONDS", 0.05)
    server = Server(exported, "clicks", 1, 0.0)
    server.in_flight = 1

    async def run():
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        return await program._serve(server, bind_sockets(0, "127.0.0.1"), None)

    assert asyncio.run(run()) == 1
    server.threads.shutdown()


@pytest.mark.parametrize("ops", ["ours", "stock"])
def test_exports_of_earlier_versions_are_loaded(ops):
    assert Export(ROOT / f"tests/golden/0.1.0/export-{ops}").ops == ops


def test_what_cannot_be_served_is_refused_before_it_begins(stock, tmp_path, monkeypatch, capsys):
    def refused(words, *arguments, port=0):
        assert main(["serve", "--port", str(port), *map(str, arguments)]) == 1
        assert re.search(words, capsys.readouterr().err, re.DOTALL)

    sound, damaged = stock.folder / "1", tmp_path / "damaged"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        refused(f"port {port} of 127.0.0.1 cannot be used.*Remedy", sound, port=port)
    refused("has no saved_model.pb", tmp_path)
    for flag, value in (
        ("--batch-requests", 0), ("--batch-wait-ms", "nan"), ("--batch-wait-ms", "inf"), ("--model-name", "a/b"),
        ("--port", 70000), ("--host", ""),
    ):  # fmt: skip
        refused(flag, sound, flag, value)
    refused("is a delta", stock.folder / "ready/1-to-2")
    refused("none' is no folder", sound, "--deltas", tmp_path / "none")
    refused("--tier-folder and --tier-bytes go together", sound, "--tier-folder", tmp_path)
    tier = ("--tier-folder", tmp_path, "--tier-bytes", 10**6)
    refused("1' keeps no user states. Remedy: export with --ops ours", sound, *tier)
    shutil.copytree(sound, damaged)
    (damaged / "saved_model.pb").write_bytes(b"\xff")
    refused("cannot be loaded", damaged)
    for at, key in enumerate(("dense_weights/1", "served_tables/_tables/0/2")):
        shutil.copytree(sound, tmp_path / f"nan{at}")
        tensors = applying.read_bundle(tmp_path / f"nan{at}")
        tensors[f"{key}/.ATTRIBUTES/VARIABLE_VALUE"].flat[0] = np.nan
        applying.write_bundle(tmp_path / f"nan{at}", tensors)
        refused(f"nan{at}' has numbers in.*not finite. Remedy", tmp_path / f"nan{at}")
    description = damaged / "assets.extra/tables.json"
    described = json.loads(description.read_text(encoding="utf-8"))
    description.write_text(json.dumps({**described, "ops": "ours"}), encoding="utf-8")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tf_fusedrec", None)
        refused("has ops 'ours', which need tf_fusedrec", damaged)
    description.write_text("{", encoding="utf-8")
    refused("tables.json' is damaged", damaged)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(r"the extra tf_fusedrec\[serve\]", sound)


def test_the_program_where_only_tensorflow_is_installed(stock, tmp_path):
    """It applies deltas, then replays the warm-up requests. On SIGTERM it answers all in flight and exits with 0."""
    python = make_environment(tmp_path / "venv", ["tensorflow", "tornado", "prometheus-client"])
    inherited = ("TF_USE_LEGACY_KERAS", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    for room in ("models", "cli"):
        shutil.copytree(
            ROOT / "tf_fusedrec" / room, tmp_path / "tf_fusedrec" / room, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(stock.folder / "1", tmp_path / "1")
    warm = message_class()()
    for name, value in request(0).items():
        warm.predict_log.request.inputs[name].CopyFrom(tf.make_tensor_proto(np.array(value, np.int64)))
    with tf.io.TFRecordWriter(str(tmp_path / "1" / warmup.FILE)) as writer:
        writer.write(warm.SerializeToString())
    command = [python, "-m", "tf_fusedrec.cli.main", "serve", tmp_path / "1", "--deltas", stock.folder / "ready"]
    command += ["--port", "0", "--model-name", "clicks", "--batch-wait-ms", "1500"]
    errors = (tmp_path / "stderr").open("w", encoding="utf-8")
    running = subprocess.Popen(
        list(map(str, command)), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
    )
    try:
        line = running.stdout.readline()
        said = (tmp_path / "stderr").read_text(encoding="utf-8")
        assert "serving" in line, said[-3000:]
        assert 0 < said.index("applied delta") < said.index("answered 1 warm-up requests")
        client = Client(line.split(" at ")[1].split("/v1/")[0], "clicks")
        # The first requests have no others to wait for.
        for seed in range(6):
            client.predict(request(seed, users=3))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.predict, request(0))
            time.sleep(0.5)
            running.send_signal(signal.SIGTERM)
            end = time.monotonic() + 60
            while client.send(client.model)[1]["model_version_status"][0]["state"] == "AVAILABLE":
                assert time.monotonic() < end
            refused, _ = client.send(f"{client.model}:predict", json.dumps({"inputs": request(1)}).encode())
            np.testing.assert_allclose(waiting.result(60), stock.answers[1], rtol=0, atol=TOLERANCE)
        assert running.wait(60) == 0
        assert refused == 503
    finally:
        running.kill()
        running.wait(60)
        running.stdout.close()
        errors.close()
