"""Serves an export by the REST interface of TensorFlow Serving, until SIGTERM or SIGINT.

    python -m tf_fusedrec.models.serve --export runs/grm_tiny/saved_model --deltas runs/grm_tiny/deltas

It answers when it has applied the deltas and replayed the export's warm-up requests. A signal stops it gracefully: it
answers the requests in flight, refuses new ones with 503, and exits with 0. It exits with 1 and an error if it cannot
begin, or if a request still runs after STOP_SECONDS. A second signal kills it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import re
import signal
import sys
import threading

import numpy as np

try:
    import prometheus_client  # noqa: F401
    from tornado.netutil import bind_sockets
except ImportError as missing:
    sys.exit(
        f"error: tf_fusedrec.models.serve needs tornado and prometheus_client: {missing}. Remedy: pip install -r "
        "requirements/serve.txt (the extra tf_fusedrec[serve])"
    )

from tf_fusedrec.models.serve import warmup
from tf_fusedrec.models.serve.deltas import Deltas
from tf_fusedrec.models.serve.loaded import Export, RequestError
from tf_fusedrec.models.serve.rest import BoundedServer, Server

STOP_SECONDS = 30.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tf_fusedrec.models.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--export", required=True, help="folder that fr.export or tf_fusedrec.models.export wrote")
    parser.add_argument("--deltas", help="folder whose deltas are applied as they appear")
    parser.add_argument("--model_name", default="default", help="NAME in /v1/models/NAME (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8501, help="0 for a free one (default: %(default)s)")
    parser.add_argument(
        "--batch_requests", type=int, default=16, help="most requests of one call; 1 joins none (default: %(default)s)"
    )
    parser.add_argument(
        "--batch_wait_ms", type=float, default=1.0, help="how long a request waits for others (default: %(default)s)"
    )
    parser.add_argument("--tier_folder", help="folder of a file for user states that leave the cache's memory")
    parser.add_argument("--tier_bytes", type=int, default=0, help="limit of that file")
    arguments = parser.parse_args()
    if arguments.batch_requests < 1 or not 0 <= arguments.batch_wait_ms < math.inf:
        given = f"{arguments.batch_requests} and {arguments.batch_wait_ms}"
        parser.error(f"--batch_requests and --batch_wait_ms are {given}, want at least 1 and 0, both finite.")
    if not 0 <= arguments.port < 1 << 16:
        parser.error(f"--port is {arguments.port}, want 0 to 65535.")
    if not arguments.host:
        parser.error("--host is empty, want an address: 0.0.0.0 listens at all addresses of this machine.")
    if not re.fullmatch("[^/:]+", arguments.model_name):
        parser.error(f"--model_name is {arguments.model_name!r}, want a name without '/' and ':'.")
    if (arguments.tier_folder is None) != (arguments.tier_bytes == 0):
        given = f"{arguments.tier_folder!r} and {arguments.tier_bytes}"
        parser.error(f"--tier_folder and --tier_bytes go together, got {given}. Pass both, or neither.")
    return arguments


def main() -> None:
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("absl", "tensorflow"):  # of gradients and names that serving does not use
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        # Before the model, which may take minutes to load. Early requests wait.
        sockets = bind_sockets(arguments.port, arguments.host)
    except OSError as error:
        sys.exit(
            f"error: port {arguments.port} of {arguments.host} cannot be used: {error}. Remedy: pass another --port or "
            "--host, or stop the program that has it."
        )
    try:
        export = Export(arguments.export)
        if arguments.tier_folder is not None:
            _spill(export, arguments.tier_folder, arguments.tier_bytes)
        server = Server(export, arguments.model_name, arguments.batch_requests, arguments.batch_wait_ms / 1e3)
        deltas = None if arguments.deltas is None else _deltas(server, arguments.deltas)
        warmup.replay(export)
    except ValueError as error:
        sys.exit(f"error: {error}")
    port = sockets[0].getsockname()[1]
    url = f"http://{arguments.host}:{port}/v1/models/{arguments.model_name}"
    print(f"serving {arguments.export} (ops {export.ops!r}, version {export.version}) at {url}", flush=True)
    left = asyncio.run(_serve(server, sockets, deltas))
    if left:
        print(f"error: {left} requests still run after {STOP_SECONDS:.0f} s.", file=sys.stderr, flush=True)
        os._exit(1)  # Their threads would hold up a usual exit.


def _spill(export: Export, folder: str, most_bytes: int) -> None:
    if "spill_states" not in export.signatures:
        raise ValueError(
            f"--tier_folder is {folder!r}, but export {os.fspath(export.path)!r} keeps no user states. Remedy: export "
            "with --ops ours and --state_bytes, or serve without --tier_folder."
        )
    inputs = {"tier_folder": np.array(folder.encode(), object), "tier_bytes": np.array(most_bytes, np.int64)}
    try:
        export.call("spill_states", inputs)
    except RequestError as error:
        raise ValueError(f"--tier_folder and --tier_bytes are refused: {error}") from error


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


if __name__ == "__main__":
    main()
