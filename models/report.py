"""The report of a run: one HTML page without any other file, and the same as text.

`facts` reads the run once: run.json, the samples behind its metrics, the users of its training data, the tables of its
checkpoint. `html` and `text` show them. A part whose files are gone is left out.
"""

from __future__ import annotations

import base64
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import yaml

from tf_fusedrec.files import manifest, saves
from tf_fusedrec.files.inspection import open_tables
from tf_fusedrec.metrics import exact
from tf_fusedrec.models import compare, page, screen
from tf_fusedrec.models.data_sets.strings import texts_of
from tf_fusedrec.models.run_folder import read_record

BINS = 10  # of predicted probabilities, of equal numbers of events
_ACTIVITY = (0, 1, 5, 20, 100)  # smallest numbers of training rows of the groups of users
_Z = 1.96  # standard errors of a 95 % interval


class Facts(NamedTuple):
    """What a report shows, JSON-serializable."""

    record: dict[str, Any]
    calibration: dict[str, list[dict[str, float]]]  # by task: `predicted`, `observed` with `low` and `high`, `events`
    activity: dict[str, list[dict[str, Any]]]  # by task: `users` in words, `events`, `auc`, `baseline`
    tables: dict[str, dict[str, Any]] | None  # TableSummary of each table of the checkpoint; None: they are left out
    steps: list[dict[str, float]]  # StepTimes of the recorded steps (train.timeline_steps)
    picture: str  # PNG of a recorded step in base 64, or ""


def facts(folder: pathlib.Path, most_bytes: int | None = None) -> Facts:
    """Reads a run. Tables of a checkpoint of more than `most_bytes` bytes are left out.

    Raises:
      ValueError: run.json or a file of the checkpoint is damaged, or the run has ended before its training began.
    """
    record = read_record(folder)
    if "model" not in record:
        reason = record.get("error", record["state"])
        raise ValueError(f"{folder} ended before its training began ({reason}). Use a run that has trained.")
    calibration, activity = {}, {}
    if record.get("labels") and (folder / compare.SAMPLES).is_file():
        samples = compare.read_samples(folder)
        seen = _rows_of_users(pathlib.Path(record["data"]["folder"]) / "train")
        for task, _ in screen.distinct(record["labels"]):
            label, logit = samples[f"{task}_label"], samples[f"{task}_logit"]
            calibration[task] = [*_calibration(label, logit)]
            if seen is not None:
                activity[task] = [*_by_activity(samples, task, *seen)]
    steps, picture = folder / "timeline/steps.json", folder / "timeline/step.png"
    # Before the first save, the folder may have the checkpoint of an earlier run.
    saved = record["epochs"] or record["resumed"] or record["state"] == "interrupted"
    return Facts(
        record, calibration, activity,
        _tables(folder / "checkpoint", pathlib.Path(record["data"]["folder"]), most_bytes) if saved else {},
        json.loads(steps.read_text(encoding="utf-8")) if steps.is_file() else [],
        base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else "",
    )  # fmt: skip


def _calibration(label: np.ndarray, logit: np.ndarray) -> Iterator[dict[str, float]]:
    """Yields the bins from the lowest to the highest prediction, with the Wilson interval of the observed rate."""
    order = np.argsort(logit, kind="stable")
    for part in np.array_split(order, min(BINS, len(order))) if len(order) else ():
        count, rate = len(part), float(label[part].mean())
        middle = (rate + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
        half = _Z * math.sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
        predicted = float(np.mean(1 / (1 + np.exp(-logit[part]))))
        yield {"predicted": predicted, "observed": rate, "low": middle - half, "high": middle + half, "events": count}


def _rows_of_users(train: pathlib.Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the users of a training split, ascending, and the number of events of each; None if the data are gone."""
    users, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    if not train.is_dir():
        return None
    for path in sorted(train.rglob("*.parquet")):
        table = pq.read_table(path, columns=["user_id", "exposed_item"])
        lengths = np.diff(table["exposed_item"].combine_chunks().offsets.to_numpy())
        users, place = np.unique(np.concatenate([users, table["user_id"].to_numpy()]), return_inverse=True)
        counts = np.bincount(place, weights=np.concatenate([counts, lengths])).astype(np.int64)
    return users, counts


def _by_activity(
    samples: Mapping[str, np.ndarray], task: str, users: np.ndarray, counts: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Yields AUC of model and baseline for groups of users by their number of training events."""
    at = np.minimum(np.searchsorted(users, samples["user"]), max(len(users) - 1, 0))
    seen = np.where(users[at] == samples["user"], counts[at], 0) if len(users) else np.zeros(len(samples["user"]))
    group = np.searchsorted(_ACTIVITY, seen, side="right") - 1
    for number, low in enumerate(_ACTIVITY):
        members = group == number
        if not members.any():
            continue
        high = _ACTIVITY[number + 1] - 1 if number + 1 < len(_ACTIVITY) else None
        label = samples[f"{task}_label"][members]
        baseline = samples.get(f"baseline_{task}")
        yield {
            "users": f"{low}" if low == high else f"{low} or more" if high is None else f"{low} to {high}",
            "events": int(members.sum()),
            "auc": _or_none(exact.auc(label, samples[f"{task}_logit"][members])),
            "baseline": None if baseline is None else _or_none(exact.auc(label, baseline[members])),
        }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _tables(checkpoint: pathlib.Path, data: pathlib.Path, most_bytes: int | None) -> dict[str, dict[str, Any]] | None:
    """Returns the summary of each table. Its hot and cold rows have the text of their ids, as far as `data` has it."""
    if not manifest.exists(checkpoint):
        return {}
    described = saves.read_manifest(checkpoint)
    if most_bytes is not None and saves.size_of(checkpoint, described) > most_bytes:
        return None
    tables = {}
    for name, table in open_tables(checkpoint, described).items():
        summary = table.summary(5)
        texts = texts_of(data, name, [row.id for row in (*summary.hottest, *summary.coldest)])
        rows = {word: [[*row, texts.get(row.id)] for row in getattr(summary, word)] for word in ("hottest", "coldest")}
        tables[name] = {**summary._asdict(), **rows}
    return tables


def text(shown: Facts, width: int) -> str:
    """Returns the report as lines of at most `width` columns; commands may be longer."""
    record = shown.record
    lines = [f"{record['state']}, {screen.duration(record['seconds'])}", screen.header(record, width)]
    if record["epochs"]:
        lines += ["", screen.epochs_heading(record, width)]
        lines += [screen.epoch_line(record, entry, width) for entry in record["epochs"]]
    lines += ["", screen.ending(record, width)]
    for title, rows in _as_tables(shown):
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines += ["", title]
        for row in rows:
            cells = (f"{cell:<{w}}" if at == 0 else f"{cell:>{w}}" for at, (cell, w) in enumerate(zip(row, widths)))
            lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _as_tables(shown: Facts) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yields title and rows, the heading first, of what text and page show alike."""
    rows: list[tuple[str, ...]]
    labels = shown.record["labels"]
    for task, groups in shown.activity.items():
        rows = [("training events of the user", "test events", "AUC", "baseline")]
        rows += [(one["users"], f"{one['events']:,}", _four(one["auc"]), _four(one["baseline"])) for one in groups]
        yield f"{labels[task]} AUC by activity of the user", rows
    for task, bins in shown.calibration.items():
        rows = [("predicted", "observed", "95 % interval", "events")]
        for one in bins:
            interval = f"{one['low']:.4f} to {one['high']:.4f}"
            rows.append((f"{one['predicted']:.4f}", f"{one['observed']:.4f}", interval, f"{one['events']:,}"))
        yield f"{labels[task]}: predicted and observed rates", rows
    if shown.tables is None:
        yield "tables of the checkpoint", [("left out because they are large; `fusedrec report` reads them",)]
    elif shown.tables:
        rows = [
            (
                "table",
                "rows",
                "dim",
                "rule",
                "MB",
                "median lookups",
                "largest",
                "unseen in half the steps",
                "mean |row|",
            )
        ]
        for name, table in shown.tables.items():
            unseen = table["unseen_share"]
            rows.append(
                (name, f"{table['rows']:,}", f"{table['dim']}", table["rule"], f"{table['bytes'] / 1e6:.2f}",
                 _count(table["lookups_median"]), _count(table["lookups_max"]),
                 "-" if unseen is None else f"{unseen:.0%}", f"{table['norm_mean']:.3f}")
            )  # fmt: skip
        yield "tables of the checkpoint", rows
        rows = [("table", "row", "id", "lookups", "steps since", "|row|")]
        for name, table in shown.tables.items():
            for word in ("hottest", "coldest"):
                for row_id, lookups, age, norm, known_text in table[word]:
                    rows.append((name, word, known_text or f"{row_id}", _count(lookups), _count(age), f"{norm:.3f}"))
        yield "hot and cold rows", rows
    if shown.steps:
        rows = [tuple(name.replace("_ms", "").replace("number", "milliseconds of step") for name in shown.steps[0])]
        rows += [
            tuple(f"{value:g}" if name == "number" else f"{value:.2f}" for name, value in step.items())
            for step in shown.steps
        ]
        yield "recorded steps", rows


def _four(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def html(shown: Facts) -> str:
    """Returns the report as one HTML page."""
    record = shown.record
    said = f"{record['state']} · {screen.duration(record['seconds'])} · started {record['started']}"
    parts = [
        f"<h1>{page.safe(record['folder'])}</h1><p class=dim>{page.safe(said)}</p>",
        f"<pre>{page.safe(screen.header(record, 100))}</pre>",
        *(f"<p class=hint>{page.safe(hint)}</p>" for hint in screen.hints(record)),
    ]
    if record["epochs"]:
        parts += ["<h2>Training</h2><div class=row>", *_curves(record), "</div>"]
    if "metrics" in record:
        parts += ["<h2>Test</h2>", _test(record)]
    if shown.calibration:
        plots = [_calibration_plot(record["labels"][task], bins) for task, bins in shown.calibration.items()]
        parts += ["<h2>Calibration</h2><div class=row>", *plots, "</div>"]
    for title, rows in _as_tables(shown):
        parts += [f"<h2>{page.safe(title[:1].upper() + title[1:])}</h2>", page.table(rows[0], rows[1:])]
    if shown.picture:
        parts.append(f'<img alt="a recorded step" src="data:image/png;base64,{shown.picture}">')
    parts += ["<h2>Data</h2>", _data(record["data"])]
    code = {name: record[name] for name in ("command", "code", "versions", "ranks", "hosts")}
    parts += ["<h2>Settings</h2>", f"<pre>{page.safe(_yaml(record['experiment']))}</pre>"]
    parts += ["<h2>Command, code and versions</h2>", f"<pre>{page.safe(_yaml(code))}</pre>"]
    return page.document(record["folder"], parts)


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(json.loads(json.dumps(values)), sort_keys=False, default_flow_style=None, width=100)


def _test(record: Mapping[str, Any]) -> str:
    lines = []
    for name, row in screen.shown_metrics(record["metrics"], record["labels"]).items():
        cells = [screen.title_of(name, record["labels"]), f"{row['value']:.4f}", "", "", ""]
        sure = ""
        if "baseline" in row:
            sure = screen.verdict(row)
            interval = f"{row['low']:+.4f} to {row['high']:+.4f}"
            cells[2:] = [f"{row['baseline']:.4f}", f"{row['difference']:+.4f}", interval]
        marked = f"<td class={sure or 'dim'}>{sure}</td>"
        lines.append(f"<tr>{''.join(f'<td>{page.safe(cell)}</td>' for cell in cells)}{marked}</tr>")
    heads = ("metric", "value", "baseline", "difference", "95 % interval", "surely better?")
    return page.table(heads, []).replace("</table>", "".join(lines) + "</table>")


def _data(data: Mapping[str, Any]) -> str:
    heads = ("split", "events", "users", "rows", "label rates", "missing")
    rows = []
    for name, split in data["splits"].items():
        labels, missing = (
            ", ".join(f"{column} {100 * share:.3g} %" for column, share in split[part].items())
            for part in ("labels", "missing")
        )
        rows.append((name, *(f"{split[part]:,}" for part in ("events", "users", "rows")), labels, missing or "none"))
    said = f"{data['source']}. {data['rule']} Fingerprint {data['fingerprint']}, in {data['folder']}."
    return f"<p>{page.safe(said)}</p>" + page.table(heads, rows)


def _curves(record: Mapping[str, Any]) -> Iterator[str]:
    steps, epochs = record["steps"], record["epochs"]
    if len(steps["step"]) > 1:
        yield page.plot("loss by step", {"train": [*zip(steps["step"], steps["loss"])]})
    pairs: list[tuple[str, str | None, str]] = [("loss", "loss", "val_loss")]
    pairs += [(one.title, one.train, one.held_out) for one in screen.epoch_metrics(record)]
    for title, train, held_out in pairs:
        series = {}
        for word, name in (("train", train), (record["validates"], held_out)):
            points = [(one["epoch"], one[name]) for one in epochs if name and one.get(name) is not None]
            if points:
                series[word] = points
        if series:
            yield page.plot(f"{title} by epoch", series)


def _calibration_plot(label: str, bins: Sequence[Mapping[str, float]]) -> str:
    observed = [(one["predicted"], one["observed"]) for one in bins]
    ends = (edge(value for point in observed for value in point) for edge in (min, max))
    right = [(end, end) for end in ends]
    return page.plot(f"{label}: observed by predicted", {"model": observed, "right": right}, square=True)
