"""The HTTP side: TensorFlow Serving's REST paths and errors.

POST /v1/models/NAME[/versions/N]:predict      GET /v1/models/NAME[/versions/N]           (status)
GET /monitoring/prometheus/metrics             GET /v1/models/NAME[/versions/N]/metadata
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import re
import time
import urllib.parse
from http import HTTPStatus
from typing import Any

from tornado.web import Application, RequestHandler

from models.serve import tensors
from models.serve.batching import Batcher
from models.serve.loaded import Export, RequestError
from models.serve.metrics import PATH, Metrics

MOST_IN_FLIGHT = 1000  # A request beyond them gets 503 at once, because it would wait for all others.
_PREDICT = re.compile(r"/v1/models/([^/:]+)(?:/versions/(\d+))?:predict")
_MODEL = re.compile(r"/v1/models/([^/:]+)(?:/versions/(\d+))?(/metadata)?")


class Server:
    """A served export.

    Args:
      export: The model.
      name: Name of the model in paths.
      batch_requests: Most requests that one call answers.
      batch_seconds: How long a request waits for others.
    """

    def __init__(self, export: Export, name: str, batch_requests: int, batch_seconds: float):
        self.export, self.name = export, name
        self.metrics = Metrics(export, name)
        self.stopping = False
        self.in_flight = 0  # requests whose answers have not left
        self.threads = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._batchers = {
            signature: Batcher(
                functools.partial(export.call, signature), described, self.threads, batch_requests, batch_seconds,
                self.metrics.batch.observe,
            )
            for signature, described in export.signatures.items()
        }  # fmt: skip

    def application(self) -> Application:
        """Returns the handlers of all paths."""
        given = {"server": self}
        paths = [("/v1/.*", _Models, given), (re.escape(PATH), _Prometheus, given)]
        return Application(
            paths, default_handler_class=_NotFound, default_handler_args=given, log_function=lambda handler: None
        )

    async def predict(self, body: bytes) -> bytes:
        """Answers the body of a predict request.

        Raises:
          RequestError: The request or the model refuses, or the server is stopping or overloaded.
        """
        started, signature, status = time.perf_counter(), "", 200
        try:
            if self.stopping:
                raise RequestError(503, "The server is stopping. Send the request to another one.")
            if self.in_flight > MOST_IN_FLIGHT:
                raise RequestError(503, f"{MOST_IN_FLIGHT} requests are in flight. Send the request again later.")
            request = tensors.parse(body, self.export.signatures)
            signature = request.signature
            answer = tensors.response(await self._batchers[signature].answer(request.inputs), request.in_rows)
            self.metrics.latency.observe((time.perf_counter() - started) * 1e6)
            return answer
        except BaseException as error:
            status = error.status if isinstance(error, RequestError) else 500
            raise
        finally:
            self.metrics.requests.labels(signature, status).inc()

    def status(self) -> dict[str, Any]:
        state = "UNLOADING" if self.stopping else "AVAILABLE"
        no_error = {"error_code": "OK", "error_message": ""}
        return {"model_version_status": [{"version": str(self.export.version), "state": state, "status": no_error}]}

    def metadata(self) -> dict[str, Any]:
        spec = {"name": self.name, "signature_name": "", "version": str(self.export.version)}
        return {"model_spec": spec, "metadata": {"signature_def": {"signature_def": self.export.metadata()}}}


class _Json(RequestHandler):
    """Answers with JSON, errors too."""

    def initialize(self, server: Server) -> None:
        self.server = server

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        self.finish({"error": str(kwargs["exc_info"][1]) or HTTPStatus(status_code).phrase})


class _NotFound(_Json):
    def prepare(self) -> None:
        self.set_status(404)
        self.finish({"error": f"Not found: {self.request.method} {self.request.path}"})


class _Models(_Json):
    async def prepare(self) -> None:
        """Answers all methods here, because a wrong method is a malformed request."""
        self.server.in_flight += 1
        try:
            try:
                answer = await self._answer()
            except RequestError as error:
                self.set_status(error.status)
                answer = {"error": str(error)}
            self.set_header("Content-Type", "application/json")
            await self.finish(answer)
        finally:
            self.server.in_flight -= 1

    async def _answer(self) -> bytes | dict[str, Any]:
        method, path = self.request.method, self.request.path
        form = {"GET": _MODEL, "POST": _PREDICT}.get(method or "")
        found = form.fullmatch(path) if form else None
        if found is None:
            raise RequestError(400, f"Malformed request: {method} {path}")
        name, version = urllib.parse.unquote(found[1]), found[2]
        if method == "POST":
            self._check_model(name, version)
            return await self.server.predict(self.request.body)
        self._check_model(name, version, of_status=not found[3])
        return self.server.metadata() if found[3] else self.server.status()

    def _check_model(self, name: str, version: str | None, of_status: bool = False) -> None:
        right_name = name == self.server.name
        if right_name and version in (None, str(self.server.export.version)):
            return
        if not of_status:
            asked = f"Latest({name})" if version is None else f"Specific({name}, {version})"
            raise RequestError(404, f"Servable not found for request: {asked}")
        versions = "any versions" if version is None else f"version {version}"
        raise RequestError(404, f"Could not find {versions} of model {name}")


class _Prometheus(_Json):
    async def get(self) -> None:
        page = await asyncio.get_running_loop().run_in_executor(None, self.server.metrics.page)
        self.set_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.finish(page)
