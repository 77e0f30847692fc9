"""An export behind tf_fusedrec.models.serve, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from prometheus_client import parser
from tornado.netutil import bind_sockets

from tf_fusedrec.models.serve.loaded import Export
from tf_fusedrec.models.serve.rest import BoundedServer, Server


class Client:
    """Requests to the server at `url`, "http://host:port"."""

    def __init__(self, url: str, name: str):
        self.url, self.model = url, f"{url}/v1/models/{name}"

    def send(self, url: str, body: bytes | None = None, method: str | None = None) -> tuple[int, Any]:
        """Returns the status and the JSON of an answer."""
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def predict(self, inputs: Any, signature: str = "serving_default") -> Any:
        """Returns the outputs for inputs in columnar form."""
        body = json.dumps({"signature_name": signature, "inputs": inputs}).encode()
        status, answer = self.send(f"{self.model}:predict", body)
        assert status == 200, answer
        return answer["outputs"]

    def metrics(self) -> dict[str, float]:
        """Returns the samples of the page for Prometheus; labels other than `signature` and `status` left out."""
        with urllib.request.urlopen(f"{self.url}/monitoring/prometheus/metrics", timeout=60) as page:
            families = list(parser.text_string_to_metric_families(page.read().decode()))
        return {
            " ".join([one.name, *(one.labels[key] for key in ("signature", "status", "digest") if key in one.labels)]):
            one.value for family in families for one in family.samples if "le" not in one.labels
        }  # fmt: skip


@contextlib.contextmanager
def served(export: Export, name: str = "default", seconds: float = 0.005) -> Iterator[tuple[Client, Server]]:
    """Serves an export while the context lasts. A joined call has at most eight requests."""
    server, begun = Server(export, name, 8, seconds), threading.Event()
    (socket,) = bind_sockets(0, "127.0.0.1")
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        BoundedServer(server.application()).add_socket(socket)
        loop.call_soon(begun.set)
        loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    try:
        yield Client(f"http://127.0.0.1:{socket.getsockname()[1]}", name), server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        server.shut_down()
        socket.close()
