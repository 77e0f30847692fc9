"""The HTTP side: TensorFlow Serving's REST paths and errors.

POST /v1/models/NAME[/versions/N]:predict      GET /v1/models/NAME[/versions/N]           (status)
GET /monitoring/prometheus/metrics             GET /v1/models/NAME[/versions/N]/metadata
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import functools
import importlib
import multiprocessing
import os
import pathlib
import re
import resource
import signal
import time
import urllib.parse
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPConnection, HTTPMessageDelegate
from tornado.iostream import IOStream, StreamClosedError
from tornado.web import Application, RequestHandler, stream_request_body

from tf_fusedrec.models.serve import tensors
from tf_fusedrec.models.serve.batching import Batcher
from tf_fusedrec.models.serve.loaded import Export, RequestError
from tf_fusedrec.models.serve.metrics import PATH, Metrics

if TYPE_CHECKING:
    from tf_fusedrec.models.serve.user_columns import UserColumns

COLUMNS_FILE = pathlib.PurePath("assets.extra/columns.json")  # of an export that takes user columns
MOST_IN_FLIGHT = 1000  # A request beyond them gets 503 at once, because it would wait for all others.
MOST_BODY_BYTES = 100 << 20  # A larger body gets 413.
LARGE_BODY_BYTES = 1 << 20  # A larger body is parsed in another process: Python's parser would hold up all requests.
SPARE_FILES = 32  # that the process may open besides those at its start and connections
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
        self.columns = _columns_of(export)
        self.metrics = Metrics(export, name)
        self.stopping = False
        self.in_flight = 0  # requests whose answers have not left
        self.threads = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._parser: concurrent.futures.Executor | None = None  # made for the first large body
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

    def shut_down(self) -> None:
        """Ends the threads and the process of this server."""
        self.threads.shutdown()
        if self._parser is not None:
            self._parser.shutdown()

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
            request = await self._parse(body)
            signature = request.signature
            outputs = await self._batchers[signature].answer(request.inputs)
            if request.splits is None or self.columns is None:
                answer = tensors.response(outputs, request.in_rows)
            else:
                named = {self.columns.tasks[name]: outputs[name] for name in self.columns.tasks}
                answer = tensors.response_by_row(named, request.splits)
            self.metrics.latency.observe((time.perf_counter() - started) * 1e6)
            return answer
        except BaseException as error:
            status = error.status if isinstance(error, RequestError) else 500
            raise
        finally:
            self.metrics.requests.labels(signature, status).inc()

    async def _parse(self, body: bytes) -> tensors.Predict:
        if len(body) <= LARGE_BODY_BYTES:
            return tensors.parse(body, self.export.signatures, self.columns)
        if self._parser is None:
            context = multiprocessing.get_context("spawn")
            self._parser = concurrent.futures.ProcessPoolExecutor(1, context, _end_with_server)
        loop = asyncio.get_running_loop()
        try:
            parsing = loop.run_in_executor(self._parser, tensors.parse, body, self.export.signatures, self.columns)
            return await parsing
        except concurrent.futures.BrokenExecutor as error:
            self._parser = None
            raise RequestError(
                503, "The process that parses large bodies has ended. Send the request again."
            ) from error

    def status(self) -> dict[str, Any]:
        state = "UNLOADING" if self.stopping else "AVAILABLE"
        no_error = {"error_code": "OK", "error_message": ""}
        return {"model_version_status": [{"version": str(self.export.version), "state": state, "status": no_error}]}

    def metadata(self) -> dict[str, Any]:
        spec = {"name": self.name, "signature_name": "", "version": str(self.export.version)}
        return {"model_spec": spec, "metadata": {"signature_def": {"signature_def": self.export.metadata()}}}


def _columns_of(export: Export) -> UserColumns | None:
    """The user columns that an export takes, or None. Only such an export needs pyarrow and tf_fusedrec.data."""
    if not (export.path / COLUMNS_FILE).is_file():
        return None
    user_columns = importlib.import_module("tf_fusedrec.models.serve.user_columns")
    return user_columns.read_file(export.path / COLUMNS_FILE)


def _end_with_server() -> None:
    """In the parser's process: SIGINT, which a terminal sends to all, is the server's, and the process dies with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; queues of a pool do not notice a killed server


class BoundedServer(HTTPServer):
    """An HTTPServer that keeps some of the process's files free, and closes its longest idle connection for a new one.

    Tornado accepts until no file is left. Then it logs a traceback for every connection that waits, and answers nobody.
    """

    def initialize(self, application: Application) -> None:
        # Handlers drop what is too large, so that the client reads their answer.
        super().initialize(application, max_body_size=1 << 62)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._most = max(most - len(os.listdir("/proc/self/fd")) - SPARE_FILES, 1)
        self._idle: dict[IOStream, None] = {}  # in the order in which they became idle

    def handle_stream(self, stream: IOStream, address: tuple) -> None:
        if len(self._connections) >= self._most:
            longest = next(iter(self._idle), stream)
            self._idle.pop(longest, None)
            longest.close()
        if not stream.closed():
            self._idle[stream] = None
            super().handle_stream(stream, address)

    def start_request(self, server_conn: Any, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        """Called when a connection begins to wait for a request."""
        stream: IOStream = server_conn.stream
        self._idle.pop(stream, None)
        self._idle[stream] = None
        delegate = super().start_request(server_conn, request_conn)
        received = delegate.headers_received

        def headers_received(*args: Any) -> Any:
            self._idle.pop(stream, None)
            return received(*args)

        delegate.headers_received = headers_received
        return delegate

    def on_close(self, server_conn: Any) -> None:
        self._idle.pop(server_conn.stream, None)
        super().on_close(server_conn)


@stream_request_body
class _Json(RequestHandler):
    """Answers with JSON, errors too. Keeps the body, unless it is too large."""

    def initialize(self, server: Server) -> None:
        self.server, self.body, self.body_bytes = server, bytearray(), 0

    def data_received(self, chunk: bytes) -> None:
        self.body_bytes += len(chunk)
        if self.body_bytes > MOST_BODY_BYTES:
            self.body.clear()
        else:
            self.body += chunk

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        self.finish({"error": str(kwargs["exc_info"][1]) or HTTPStatus(status_code).phrase})

    def log_exception(self, kind: Any, error: Any, trace: Any) -> None:
        if not isinstance(error, StreamClosedError):  # Clients may go away.
            super().log_exception(kind, error, trace)


class _NotFound(_Json):
    def prepare(self) -> None:
        self.set_status(404)
        self.finish({"error": f"Not found: {self.request.method} {self.request.path}"})


class _Models(_Json):
    async def respond(self) -> None:
        """Answers all methods, because a wrong method is a malformed request."""
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

    get = post = put = delete = head = patch = options = respond

    async def _answer(self) -> bytes | dict[str, Any]:
        method, path = self.request.method, self.request.path
        form = {"GET": _MODEL, "POST": _PREDICT}.get(method or "")
        found = form.fullmatch(path) if form else None
        if found is None:
            raise RequestError(400, f"Malformed request: {method} {path}")
        name, version = urllib.parse.unquote(found[1]), found[2]
        if method == "POST":
            self._check_model(name, version)
            if self.body_bytes > MOST_BODY_BYTES:
                raise RequestError(
                    413, f"The body has {self.body_bytes} bytes, want at most {MOST_BODY_BYTES}. Send smaller batches."
                )
            return await self.server.predict(bytes(self.body))
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
