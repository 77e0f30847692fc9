"""Prepares data, trains, evaluates and exports.

    fusedrec train clicks.yaml -n 2
    fusedrec train hstu_ml1m_tiny --data path/to/ml-1m --set train.epochs=3 --output runs/mine
    fusedrec train --data path/to/ml-1m
    fusedrec train --resume runs/mine -n 2 --set train.epochs=6
    fusedrec train grm_4g -n 16 -H host1:8,host2:8 --network-interface eth0

CONFIG is a YAML file, or the name of one in tf_fusedrec/configs. Without it, the files of --data choose one, and
synthetic data are the default. Ctrl-C saves and shows the command that goes on. The output folder gets the checkpoint,
saved_model, run.json, tensorboard, and the logs of the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import json
import pathlib
import shlex
import subprocess
import sys
from typing import Any

from tf_fusedrec.cli import launch
from tf_fusedrec.cli.main import DONE, RANK_FAILED, command_line

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
DEFAULT_CONFIG = "grm_tiny"
OPS = pathlib.Path(__file__).parents[1] / "ops" / "_fusedrec_ops.so"
# Prints the refusal of each table in a line, "" for none.
_CHECK = """
import ctypes, sys
framework, ops = sys.argv[1:]
ctypes.CDLL(framework, ctypes.RTLD_GLOBAL)
check = ctypes.CDLL(ops).fusedrec_check_table
check.restype = ctypes.c_char_p
for table in sys.stdin:
    print(check((ctypes.c_char_p * 1)(table.encode()), ctypes.c_int64(1), b"CPU").decode())
"""
# Files that identify a data set, and the experiment for it.
CONFIG_FOR_FILES = {
    ("ratings.dat", "ratings.csv", "ratings.csv.gz", "u.data"): "hstu_ml1m_tiny",
    ("log.csv", "log.csv.gz"): "grm_kuairand",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", description=__doc__)
    add_experiment(parser)
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help="folder to write (default: a new one in runs/NAME)"
    )
    parser.add_argument("--resume", type=pathlib.Path, metavar="RUN", help="go on with a run, in its folder")
    parser.add_argument("--warm-start", type=pathlib.Path, metavar="RUN", help="begin with the rows of a run's tables")
    launch.add_options(parser)


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that describe an experiment."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or the name of a shipped one")
    parser.add_argument("--data", metavar="PATH", help="raw or converted data set; replaces data.input")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="replaces a setting; repeatable"
    )


def run(arguments: argparse.Namespace) -> int:
    from tf_fusedrec.files.saves import read_manifest
    from tf_fusedrec.models.run_folder import new_folder, read_record, run_of

    experiment, overrides = read_experiment(arguments), overrides_of(arguments)
    output = run_of(arguments.resume) if arguments.resume else arguments.output
    if launch.is_rank() and output is None:
        raise ValueError("ranks of another launcher need a folder for all of them. Use --output, or -n N here.")
    if not launch.is_rank():
        _check_tables(experiment)
        ranks = launch.number_of_ranks(arguments)
        try:
            experiment.embedding.topology.sets(ranks)
        except ValueError as error:
            raise ValueError(f"embedding.groups: {error}") from None
    output = output or new_folder(experiment.name)
    go_on = shlex.join(command_line(["fusedrec", "train", "--resume", str(output), *launch.options(arguments)]))
    if launch.is_rank():
        from tf_fusedrec.models import train

        resume = arguments.resume is not None
        rows_of = run_of(arguments.warm_start) / "checkpoint" if arguments.warm_start else None
        return train.main(experiment, output, arguments.config or "", overrides, resume, go_on, rows_of)
    words = arguments.words
    if arguments.output is None and arguments.resume is None:
        words = [words[0], f"--output={output}", *words[1:]]  # a "--" may stand before the configuration
    if not arguments.json:
        print(f"{output}: the ranks start ...", flush=True)
    code, failure = launch.launch(arguments, [sys.executable, "-m", "tf_fusedrec.cli.main", *words], output / "logs")
    if code == RANK_FAILED and (output / "checkpoint").is_dir():
        with contextlib.suppress(ValueError):  # no whole checkpoint
            read_manifest(output / "checkpoint")
            print(f"checkpoint: {output / 'checkpoint'}; continue with: {go_on}", file=sys.stderr)
    if arguments.json:
        document = {"code": code, "run": str(output), "failure": failure and vars(failure)}
        document["results"] = read_record(output)["results"] if code == DONE else {}
        print(json.dumps(document, indent=1))
    return code


def _check_tables(experiment: Any) -> None:
    """Raises ValueError for what the ops refuse of a table, and for a missing checkpoint of another model's rows.

    A process of its own loads the ops, because TensorFlow would not find them in one that has loaded them before it.
    """
    from tf_fusedrec.files.saves import read_manifest

    topology = experiment.embedding.topology
    averaged = topology.groups > 1 and topology.rule == "weight_sync"
    tables = {}
    for table in experiment.tables:
        if table.external is not None:
            try:
                read_manifest(table.external.folder)
            except ValueError as error:
                raise ValueError(f"embedding.tables.{table.name}.external: {error}") from None
        tables[table.name] = json.dumps(table.record(averaged=averaged))
    tensorflow = importlib.util.find_spec("tensorflow")
    if tensorflow is None or tensorflow.origin is None:
        return  # the ranks say so
    framework = pathlib.Path(tensorflow.origin).with_name("libtensorflow_framework.so.2")
    done = subprocess.run(
        [sys.executable, "-S", "-c", _CHECK, str(framework), str(OPS)], input="\n".join(tables.values()),
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    for name, refusal in zip(tables, done.stdout.splitlines()):
        if refusal:
            raise ValueError(f"embedding.tables.{name}: TableConfig.{refusal}")


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the replaced settings, data.input among them."""
    return [*arguments.set, *([f"data.input={json.dumps(arguments.data)}"] if arguments.data else [])]


def read_experiment(arguments: argparse.Namespace) -> Any:
    """Returns the experiment that the arguments describe.

    Raises:
      ValueError: A path does not exist, the data are of an unknown kind and no configuration is named, a setting is
        wrong, or the checkpoint of a run does not fit or is damaged. Rows are verified by the ranks' load alone.
    """
    from tf_fusedrec.models.experiment import load
    from tf_fusedrec.models.run_folder import run_of
    from tf_fusedrec.models.saved_run import check_gives_rows, check_goes_on, experiment_of

    if arguments.data and not pathlib.Path(arguments.data).exists():
        raise ValueError(f"--data: no such file or folder {arguments.data!r}.")
    overrides = overrides_of(arguments)
    if arguments.warm_start and arguments.resume:
        raise ValueError("--warm-start is given beside --resume, which takes all of a run. Use one of them.")
    if arguments.resume is None:
        experiment = load(config_file(arguments.config, arguments.data), overrides)
        if arguments.warm_start:
            check_gives_rows(experiment, run_of(arguments.warm_start) / "checkpoint")
        return experiment
    if arguments.output:
        raise ValueError("--output is given beside --resume, which goes on in the folder of the run. Use one of them.")
    checkpoint = run_of(arguments.resume) / "checkpoint"
    if arguments.config:
        experiment = load(config_file(arguments.config, arguments.data), overrides)
    else:
        experiment = experiment_of(checkpoint, overrides)
    check_goes_on(experiment, checkpoint)
    return experiment


def config_file(name: str | None, data: str | None) -> pathlib.Path:
    """Returns the file of a configuration, the data set's if `name` is None, and a synthetic one without data."""
    if name is None and data:
        chosen = [
            config
            for files, config in CONFIG_FOR_FILES.items()
            if any((pathlib.Path(data) / f).is_file() for f in files)
        ]
        if not chosen:
            known = "; ".join(" or ".join(files) for files in CONFIG_FOR_FILES)
            raise ValueError(f"--data {data} has none of the files that identify a data set ({known}). Name CONFIG.")
        name = chosen[0]
    name = name or DEFAULT_CONFIG
    if pathlib.Path(name).is_file():
        return pathlib.Path(name)
    shipped = {str(path.relative_to(CONFIGS).with_suffix("")): path for path in CONFIGS.rglob("*.yaml")}
    if name in shipped:
        return shipped[name]
    close = difflib.get_close_matches(name.removesuffix(".yaml"), shipped, 1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"CONFIG: no such file {name!r}.{meant} Shipped configurations: {', '.join(sorted(shipped))}.")
