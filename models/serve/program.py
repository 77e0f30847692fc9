"""Serves an export until a signal: `fusedrec serve`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading

import numpy as np
from tornado.netutil import bind_sockets

from tf_fusedrec.models.serve import warmup
from tf_fusedrec.models.serve.deltas import Deltas
from tf_fusedrec.models.serve.loaded import Export, RequestError
from tf_fusedrec.models.serve.rest import BoundedServer, Server

STOP_SECONDS = 30.0


def serve(arguments: argparse.Namespace) -> int:
    """Serves arguments.export until SIGTERM or SIGINT. Returns the exit code. The arguments are those of the command.

    Raises:
      ValueError: it cannot begin.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("absl", "tensorflow"):  # of gradients and names that serving does not use
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        # Before the model, which may take minutes to load. Early requests wait.
        sockets = bind_sockets(arguments.port, arguments.host)
    except OSError as error:
        raise ValueError(
            f"port {arguments.port} of {arguments.host} cannot be used: {error}. Remedy: pass another --port or "
            "--host, or stop the program that has it."
        ) from error
    export = Export(arguments.export)
    if arguments.tier_folder is not None:
        _spill(export, arguments.tier_folder, arguments.tier_bytes)
    server = Server(export, arguments.model_name, arguments.batch_requests, arguments.batch_wait_ms / 1e3)
    deltas = None if arguments.deltas is None else _deltas(server, arguments.deltas)
    warmup.replay(export)
    port = sockets[0].getsockname()[1]
    url = f"http://{arguments.host}:{port}/v1/models/{arguments.model_name}"
    facts = {"export": arguments.export, "ops": export.ops, "version": export.version, "url": url}
    line = f"serving {arguments.export} (ops {export.ops!r}, version {export.version}) at {url}"
    print(json.dumps(facts) if arguments.json else line, flush=True)
    remaining = asyncio.run(_serve(server, sockets, deltas))
    if remaining:
        print(f"error: {remaining} requests still run after {STOP_SECONDS:.0f} s.", file=sys.stderr, flush=True)
        os._exit(1)  # Their threads would hold up a usual exit.
    return 0


def _spill(export: Export, folder: str, most_bytes: int) -> None:
    if "spill_states" not in export.signatures:
        raise ValueError(
            f"--tier-folder is {folder!r}, but export {os.fspath(export.path)!r} keeps no user states. Remedy: export "
            "with --ops ours and --state-bytes, or serve without --tier-folder."
        )
    inputs = {"tier_folder": np.array(folder.encode(), object), "tier_bytes": np.array(most_bytes, np.int64)}
    try:
        export.call("spill_states", inputs)
    except RequestError as error:
        raise ValueError(f"--tier-folder and --tier-bytes are refused: {error}") from error


def _deltas(server: Server, folder: str) -> Deltas:
    if "apply_delta" not in server.export.signatures:
        raise ValueError(
            f"export {os.fspath(server.export.path)!r} has no signature 'apply_delta', an earlier version wrote it. "
            "Remedy: export again, or serve without --deltas."
        )
    if not os.path.isdir(folder):
        raise ValueError(f"deltas {folder!r} is no folder. Remedy: make it, then put the folders of deltas there.")
    deltas = Deltas(server.export, folder, server.metrics.deltas_refused.inc)
    deltas.look()  # A restarted server catches up before its first answer.
    return deltas


async def _serve(server: Server, sockets: list, deltas: Deltas | None) -> int:
    """Serves until a signal. Returns the number of requests that did not end."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    http = BoundedServer(server.application())
    http.add_sockets(sockets)
    stop = threading.Event()
    following = threading.Thread(target=deltas.follow, args=[stop]) if deltas else None
    if following:
        following.start()
    await told.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    server.stopping = True
    stop.set()
    end = loop.time() + STOP_SECONDS
    while server.in_flight and loop.time() < end:
        await asyncio.sleep(0.01)
    http.stop()
    if server.in_flight:
        return server.in_flight
    await http.close_all_connections()
    server.shut_down()
    if following:
        following.join()
    return 0
