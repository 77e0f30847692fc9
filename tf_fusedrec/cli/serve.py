"""Serves an export by the REST interface of TensorFlow Serving, until SIGTERM or SIGINT.

    fusedrec serve runs/grm_tiny
    fusedrec serve runs/grm_tiny/latest/saved_model --deltas runs/grm_tiny/deltas --port 0

EXPORT is a folder of `fusedrec export` or fr.export, or a run. The server answers when it has applied the deltas and
replayed the export's warm-up requests. A signal stops it gracefully: it answers the requests in flight, refuses new
ones with 503, and exits with 0. It exits with 1 if a request still runs after 30 s. A second signal kills it.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
from typing import Any

from tf_fusedrec.cli.main import say


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", description=__doc__)
    parser.add_argument("export", metavar="EXPORT", help="folder of an export, or of a run")
    parser.add_argument("--deltas", metavar="DIR", help="folder whose deltas are applied as they appear")
    parser.add_argument("--model-name", default="default", help="NAME in /v1/models/NAME (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8501, help="0 for a free one (default: %(default)s)")
    parser.add_argument(
        "--batch-requests", type=int, default=16, help="most requests of one call; 1 joins none (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-wait-ms", type=float, default=1.0, help="how long a request waits for others (default: %(default)s)"
    )
    parser.add_argument(
        "--tier-folder", metavar="DIR", help="folder of a file for user states that leave the cache's memory"
    )
    parser.add_argument("--tier-bytes", type=int, default=0, help="limit of that file")


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    for package in ("tornado", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"serving needs {package}, which is not installed. Remedy: pip install -r requirements/serve.txt "
                "(the extra tf_fusedrec[serve])."
            )
    say(arguments, f"loading {arguments.export}")
    from tf_fusedrec.models.serve.program import serve

    for inside in ("saved_model", os.path.join("latest", "saved_model")):
        if os.path.isdir(os.path.join(arguments.export, inside)):
            arguments.export = os.path.join(arguments.export, inside)
    return serve(arguments)


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError: an argument is out of its range."""
    if not os.path.isdir(arguments.export):
        raise ValueError(f"EXPORT: no such folder {arguments.export!r}.")
    if arguments.batch_requests < 1 or not 0 <= arguments.batch_wait_ms < math.inf:
        values = f"{arguments.batch_requests} and {arguments.batch_wait_ms}"
        raise ValueError(f"--batch-requests and --batch-wait-ms are {values}, want at least 1 and 0, both finite.")
    if not 0 <= arguments.port < 1 << 16:
        raise ValueError(f"--port is {arguments.port}, want 0 to 65535.")
    if not arguments.host:
        raise ValueError("--host is empty, want an address: 0.0.0.0 listens at all addresses of this machine.")
    if not re.fullmatch("[^/:]+", arguments.model_name):
        raise ValueError(f"--model-name is {arguments.model_name!r}, want a name without '/' and ':'.")
    if (arguments.tier_folder is None) != (arguments.tier_bytes == 0):
        values = f"{arguments.tier_folder!r} and {arguments.tier_bytes}"
        raise ValueError(f"--tier-folder and --tier-bytes go together, got {values}. Pass both, or neither.")
