"""What a person reads of a run: header, one line for each epoch, a live bar, the end. All of it is a view of run.json.

The functions return text of at most `width` columns, and know no terminal. run_callbacks.py prints it as the run goes;
`fusedrec report` prints it again from the record.
"""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Record = Mapping[str, Any]
NAMES = {
    "auc": "AUC",
    "gauc": "GAUC",
    "ne": "NE",
    "calibration": "calibration",
    "hr": "HR",
    "ndcg": "NDCG",
    "mrr": "MRR",
}
_PREDICT = "http://localhost:8501/v1/models/default:predict"
_LABEL = 8  # columns of the first word of a line
_NOTES = {"ne": "(below 1 is good)", "calibration": "(1 is right)"}
_RATES = ("events_per_s", "samples_per_s", "tokens_per_s", "gflops_per_s", "mfu")


class Metric(NamedTuple):
    """A metric of an epoch."""

    title: str  # in the user's words
    train: str | None  # name in the logs, None: not measured in training
    held_out: str


class _Column(NamedTuple):
    title: str
    name: str  # in an entry of `epochs`
    form: str


def epoch_metrics(record: Record) -> list[Metric]:
    """Returns the metrics of an epoch's line, the most important first."""
    if record["labels"]:
        return [Metric(f"{label} AUC", f"{task}_auc", f"val_{task}_auc") for task, label in distinct(record["labels"])]
    cutoff = record["experiment"]["evaluate"]["cutoffs"][0]
    return [Metric(f"{NAMES[name]}@{cutoff}", None, f"val_{name}@{cutoff}") for name in ("hr", "ndcg")]


def distinct(labels: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns tasks with their labels, without a conversion that is the click itself."""
    first: dict[str, str] = {}
    for task, label in labels.items():
        first.setdefault(label, task)
    return [(task, label) for label, task in first.items()]


def shown_metrics(metrics: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Returns metrics by name, without those of a conversion that is the click itself."""
    hidden = labels.keys() - {task for task, _ in distinct(labels)}
    return {name: row for name, row in metrics.items() if name.rpartition("_")[0] not in hidden}


def title_of(metric: str, labels: Mapping[str, str]) -> str:
    """Returns the words for a result, such as "click AUC" for ctr_auc where the label is `click`."""
    task, _, name = metric.rpartition("_")
    if task in labels and name in NAMES:
        return f"{labels[task]} {NAMES[name]}"
    name, at, cutoff = metric.partition("@")
    return f"{NAMES.get(name, name)}{at}{cutoff}"


def header(record: Record, width: int) -> str:
    """Returns what runs, on which data, with which model, on how many ranks."""
    lines = [*_about_run(record, width), *_about_data(record["data"], width), *_about_model(record, width)]
    return "\n".join(lines)


def _about_run(record: Record, width: int) -> Iterator[str]:
    code, experiment = record["code"], record["experiment"]
    parts = [f"{record['folder']} ({'resumed' if record['resumed'] else 'new'})"]
    settings = " + ".join(filter(None, [record["config"], *record["overrides"]]))
    parts += [settings] if settings else []
    parts.append(f"seed {experiment['seed']}")
    if code:
        changed = f" + {code['changed_files']} changed files" if code["changed_files"] else ""
        parts.append(f"git {code['commit'][:7]}{changed}")
    return _wrapped("run", parts, width)


def _about_data(data: Mapping[str, Any], width: int) -> Iterator[str]:
    splits = data["splits"]
    first = min((split["first"] for split in splits.values() if split["first"] is not None), default=None)
    last = max((split["last"] for split in splits.values() if split["last"] is not None), default=None)
    parts = [*data["source"].split(", "), f"{data['users']:,} users", f"{data['items']:,} items"]
    if first is not None and last is not None:
        parts.append(f"{_day(first)} to {_day(last)}")
    yield from _wrapped("data", parts, width)
    since = {name: f" from {_day(split['first'])}" for name, split in splits.items() if split["first"] is not None}
    parts = [
        f"{name} {split['events']:,} events" + (since.get(name, "") if name == "test" else "")
        for name, split in splits.items()
    ]
    yield from _wrapped("", parts, width)
    of = splits.get("train") or splits.get("test") or {"labels": {}, "missing": {}}
    parts = [f"{name} {_percent(rate)}" for name, rate in of["labels"].items()]
    if of["missing"]:
        parts.append("missing: " + ", ".join(f"{name} {_percent(share)}" for name, share in of["missing"].items()))
    yield from _wrapped("", parts, width)


def _about_model(record: Record, width: int) -> Iterator[str]:
    model, experiment = record["model"], record["experiment"]
    rules = sorted({table["rule"] for table in model["tables"].values()})
    count, rows = len(model["tables"]), sum(table["rows"] for table in model["tables"].values())
    parts = [
        model["kind"].upper(),
        f"{count} table{'s' * (count > 1)}{f', {rows:,} rows so far' * bool(rows)} ({', '.join(rules)})",
        f"{model['dense_weights']:,} dense weights (Adam {experiment['train']['learning_rate']:g})",
    ]
    yield from _wrapped("model", parts, width)
    ranks, hosts = record["ranks"], len(set(record["hosts"]))
    parts = [f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}", f"schedule {model['schedule']}"]
    if ranks > 1:
        parts.append(f"{model['all_to_alls']} all-to-alls a step")
    yield from _wrapped("ranks", parts, width)


def _columns(record: Record, width: int) -> list[_Column]:
    """The columns of an epoch's line that fit beside the word at its end; later metrics go first."""
    validates = record["validates"]
    word = "val" if validates == "validation" else "test"
    total = f"{record['epochs_wanted']}/{record['epochs_wanted']}"
    first = [_Column(f"{'epoch':>{len(total)}}", "epoch", "{}"), _Column("loss", "loss", "{:.4f}")]
    first += [_Column(f"{word} loss", "val_loss", "{:.4f}")] if validates and record["labels"] else []
    of_metrics = []
    for metric in epoch_metrics(record):
        group = [] if metric.train is None else [_Column(metric.title, metric.train, "{:.4f}")]
        if validates:
            group.append(_Column(word if group else f"{word} {metric.title}", metric.held_out, "{:.4f}"))
        of_metrics.append(group)
    last = [_Column("events/s", "events_per_s", "{:,.0f}"), _Column("time", "seconds", ""), _Column("left", "left", "")]

    def chosen() -> list[_Column]:
        return [*first, *(column for group in of_metrics for column in group), *last]

    while len(of_metrics) > 1 and sum(map(_width, chosen())) > width - len("  saved *"):
        of_metrics.pop()
    return chosen()


def _width(column: _Column) -> int:
    return max(len(column.title), 6) + 2


def epochs_heading(record: Record, width: int) -> str:
    return "".join(f"{column.title:>{_width(column)}}" for column in _columns(record, width))


def epoch_line(record: Record, entry: Mapping[str, Any], width: int) -> str:
    """Returns the line of an entry of `epochs`. A star marks the best epoch so far."""
    cells = []
    for column in _columns(record, width):
        value = entry.get(column.name)
        if column.name == "epoch":
            shown = f"{value}/{record['epochs_wanted']}" if record["epochs_wanted"] else str(value)
        elif value is None or (column.name == "left" and not value) or (isinstance(value, float) and math.isnan(value)):
            shown = ""
        else:
            shown = column.form.format(value) if column.form else duration(value)
        cells.append(f"{shown:>{_width(column)}}")
    return "".join(cells) + ("  saved" + " *" * bool(entry["is_best"]) if entry["saved"] else "")


def bar_line(record: Record, progress: Mapping[str, Any], width: int) -> str:
    """Returns the line of an epoch that runs, of less than `width` columns.

    Args:
      record: Record of the run.
      progress: `epoch`, `loss`, `step` of `steps`, `events_per_s`, `left` in seconds.
      width: Columns of the terminal.
    """
    total = f"/{record['epochs_wanted']}" if record["epochs_wanted"] else ""
    begin = f"{progress['epoch']}{total}".rjust(max(2 * len(total) + 1, 8)) + f"{progress['loss']:>8.4f}  "
    end = (
        f" {progress['step']}/{progress['steps']}  {progress['events_per_s']:,.0f}/s  {duration(progress['left'])} left"
    )
    room = min(30, width - 1 - len(begin) - len(end) - 2)
    done = max(0, round(room * progress["step"] / max(progress["steps"], 1)))
    bar = f"[{'=' * done}{' ' * (room - done)}]" if room >= 5 else ""
    return (begin + bar + end)[: width - 1]


def warning(text: str, width: int) -> str:
    return "\n".join(_wrapped("", text.split(" "), width, mark="!  ", joint=" "))


def watched(record: Record) -> str:
    """Returns the name in the logs by which a model overfits and train.patience ends training."""
    if record["validates"] != "validation":
        return "loss"
    return "val_loss" if record["labels"] else epoch_metrics(record)[0].held_out


def rising(record: Record) -> str | None:
    """Returns a hint if the validation's loss or metric was better in an earlier epoch than in the last two."""
    name = watched(record)
    if name == "loss":
        return None
    values = [entry.get(name, math.nan) for entry in record["epochs"]]
    if len(values) < 2 or any(value is None or math.isnan(value) for value in values):
        return None
    sign = 1 if name == "val_loss" else -1
    best = min(range(len(values)), key=lambda at: sign * values[at])
    if best >= len(values) - 1:
        return None
    trend = "loss rises" if name == "val_loss" else f"{title_of(name[4:], {})} falls"
    stops = f" --set train.patience=1 stops there; the best epoch so far is {best + 1}."
    stops = "" if record["experiment"]["train"]["patience"] else stops
    return f"validation {trend} since epoch {best + 1}: the model begins to overfit.{stops}"


def ending(record: Record, width: int) -> str:
    """Returns the table of the test, hints, and what to do next. Without a test, what to do next."""
    lines = []
    if "metrics" in record:
        lines += [*test_table(record, width), ""]
    lines += [warning(hint, width) for hint in hints(record)]
    folder, is_done = shlex.quote(record["folder"]), record["state"] == "done"
    longer = f" --set train.epochs={2 * record['epochs_wanted']}" if is_done and record["epochs_wanted"] else ""
    if is_done or record.get("report"):
        lines.append(report_line(record))
    lines.append(f"resume  fusedrec train --resume {folder}{longer}")
    if is_done:
        lines.append(f"serve   fusedrec serve {folder}")
        if "request" in record:
            lines.append(f"request curl -d @{shlex.quote(record['request'])} {_PREDICT}")
    return "\n".join(lines)


def report_line(record: Record) -> str:
    """Returns where the report is; without one, the command that writes it."""
    return f"report  {record.get('report') or 'fusedrec report ' + shlex.quote(record['folder'])}"


def test_table(record: Record, width: int) -> Iterator[str]:
    """Yields the lines of the test's metrics beside the baseline and the interval of their difference."""
    labels = record["labels"]
    room = max(24, width - 62)
    split = record["data"]["splits"].get("test", {})
    size = f"{split.get('events', 0):,} events, {split.get('users', 0):,} users"
    begin = f"{'test':<{_LABEL}}{size}"
    if len(begin) >= room:
        yield begin
        begin = ""
    yield f"{begin:<{room}}{'value':>9}{'baseline':>10}{'difference':>20}  surely better?"
    for name, row in shown_metrics(record["metrics"], labels).items():
        task, _, measure = name.rpartition("_")
        title, note = title_of(name, labels), "" if "baseline" in row else _NOTES.get(measure or name, "")
        if task == "ctcvr" and measure == "auc":
            note = f"(= {labels['ctr']} and {labels['ctcvr']})"
        title = _cut(title, room - 3)
        title += f" {note}" if len(title) + len(note) < room - 3 else ""
        line = f"  {title:<{room - 2}}{_number(row['value'])}"
        if "baseline" in row:
            half = (row["high"] - row["low"]) / 2
            line += f"{row['baseline']:>10.4f}{row['difference']:>+11.4f} ± {half:<6.4f}  {verdict(row)}"
        yield line.rstrip()
    rates = record["results"]
    parts = [f"{rates[name]:,.0f} {name.replace('_per_s', '/s')}" for name in _RATES[:3]]
    parts.append(f"{rates['gflops_per_s']:.1f} gflops/s, mfu {rates['mfu']:.4f}")
    yield from _wrapped("speed", parts, width)


def verdict(row: Mapping[str, float]) -> str:
    """Returns "yes", "no" or "worse" by the interval of the difference from the baseline."""
    return "yes" if row["low"] > 0 else "worse" if row["high"] < 0 else "no"


def hints(record: Record) -> list[str]:
    """Returns what a user may want to change."""
    ideas = []
    compared = [row for row in shown_metrics(record.get("metrics", {}), record["labels"]).values() if "baseline" in row]
    if compared and not any(verdict(row) == "yes" for row in compared):
        ideas.append(
            "no metric is surely above the baseline. Ideas: more epochs (train.epochs), a larger train.learning_rate, "
            "more columns, crosses of ids (model.crosses), train.keep_best."
        )
    if (hint := rising(record)) is not None:
        ideas.append(hint)
    still = [name for name, table in record["model"]["tables"].items() if table.get("moved", 1.0) < 0.05]
    if still:
        ideas.append(
            f"rows of {', '.join(still)} hardly move from their first values. Raise embedding.learning_rate, or train "
            "longer."
        )
    return ideas


def duration(seconds: float) -> str:
    """Returns "8 s", "1:12" (minutes) or "2:03 h"."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"


def _wrapped(word: str, parts: Sequence[str], width: int, *, mark: str = "", joint: str = " · ") -> Iterator[str]:
    """Yields lines that begin with `word` or blanks and hold whole parts as far as they fit."""
    line, begin = "", f"{word:<{_LABEL}}{mark}"
    for part in parts:
        if line and len(begin) + len(line) + len(joint) + len(part) > width:
            yield begin + line
            line, begin = "", " " * len(begin)
        line += (joint if line else "") + part
    if line:
        yield begin + line


def _day(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _number(value: float) -> str:
    return f"{value:>9.0f}" if value > 1 and float(value).is_integer() else f"{value:>9.4f}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"
