"""Exports a checkpoint as a SavedModel, or as a delta that a running server applies.

    fusedrec export runs/grm_tiny runs/grm_tiny/served/1
    fusedrec export runs/grm_tiny runs/grm_tiny/deltas/1-to-2 --base runs/grm_tiny/served/1
    fusedrec export runs/retrieval runs/retrieval/served --index-share 0.1

RUN is a run of `fusedrec train`, or its checkpoint. OUTPUT must not exist. The signatures are listed in the head of
tf_fusedrec/models/export.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from tf_fusedrec.cli.main import say


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("export", description=__doc__)
    parser.add_argument("run_folder", metavar="RUN", type=pathlib.Path, help="run, or checkpoint of a run")
    parser.add_argument("output", metavar="OUTPUT", type=pathlib.Path, help="folder to write")
    parser.add_argument("--base", metavar="EXPORT", help="export that a delta starts from; OUTPUT becomes the delta")
    parser.add_argument("--ops", choices=["stock", "ours"], default="stock", help="operations that the server supports")
    parser.add_argument("--rows", choices=["bfloat16", "int8"], help="dtype of rows on the server (default: their own)")
    parser.add_argument(
        "--index-share", type=float, default=0.0, help="share of all products of a search by the index; 0: no index"
    )
    parser.add_argument(
        "--state-bytes", type=int, default=0, help="memory of the server's cache of user states; 0: no cache"
    )
    parser.add_argument(
        "--state-ttl", type=int, default=0, help="seconds without use after which a user state leaves; 0: never"
    )


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.run_folder
    if not folder.is_dir():
        raise ValueError(f"RUN: no such folder {str(folder)!r}.")
    if arguments.output.exists():
        raise ValueError(f"OUTPUT must not exist, got {str(arguments.output)!r}. Use another folder, or remove it.")
    from tf_fusedrec.files.saves import read_manifest
    from tf_fusedrec.models.run_folder import checkpoint_of
    from tf_fusedrec.models.saved_run import check_whole, saved_experiment

    folder = checkpoint_of(folder) or folder
    check_whole(folder)
    say(arguments, f"exporting {folder}")
    from tf_fusedrec.models.export import export, summary, trained_model
    from tf_fusedrec.models.item_index import IndexOptions
    from tf_fusedrec.models.kept_states import StateOptions

    states = StateOptions(arguments.state_bytes, arguments.state_ttl) if arguments.state_bytes else None
    index = IndexOptions(share=arguments.index_share) if arguments.index_share else None
    export(
        trained_model(folder), arguments.output, arguments.ops, states,
        index=index, rows=arguments.rows, base=arguments.base, experiment=saved_experiment(folder),
        data=read_manifest(folder)["extra"].get("data"),
    )  # fmt: skip
    form = "delta" if arguments.base else "saved model"
    facts = {form: str(arguments.output), "summary": summary(arguments.output)}
    print(json.dumps(facts) if arguments.json else f"{form}: {arguments.output}: {facts['summary']}")
    return 0
