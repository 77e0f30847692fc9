"""The drawings of the site, as SVG: the way of an id, a table, the schedules, the topology. No TensorFlow.

The ops give the numbers in the drawing of the message; tests/docs/test_site.py runs them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

BLUE, GREEN, ORANGE, RED, GREY = "#dbe9f6", "#ddf0dd", "#fde5cf", "#f6d5d5", "#eeeeee"
INK, LINE = "#222222", "#666666"

# One rank of two; table "item" is segment 0, table "user" segment 1. Hash ranges give the owners.
EXAMPLE: Mapping[str, Sequence[int]] = {
    "ids": [7, 5, 7, 3, 3, 9, 3],
    "segment_splits": [0, 4, 7],
    "unique_ids": [7, 5, 3, 3, 9],
    "unique_splits": [0, 3, 5],
    "inverse": [0, 1, 0, 2, 3, 4, 3],
    "message": [2, 1, 7, 3, 3, 1, 1, 5, 9],
    "send_splits": [5, 4],
    "restore": [0, 3, 1, 2, 4],
}
SEGMENTS = 2


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure whose units are characters, y downwards, without axes."""
    figure, axes = pyplot.subplots(figsize=(width / 10, height / 10))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def _svg(figure: Any) -> str:
    # Text stays text; the same drawing is the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tf_fusedrec"}):
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return stream.getvalue()


def _box(
    axes: Any, x: float, y: float, width: float, text: str, color: str, height: float = 3.0, size: int = 9
) -> None:
    axes.add_patch(pyplot.Rectangle((x, y), width, height, facecolor=color, edgecolor=LINE, linewidth=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def _say(axes: Any, x: float, y: float, text: str, size: int = 9, **more: Any) -> None:
    axes.text(x, y, text, fontsize=size, color=INK, va="center", **more)


def _arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": LINE, "linewidth": 1.0})


def _cells(axes: Any, x: float, y: float, numbers: Sequence[int], colors: Sequence[str], width: float = 4.0) -> None:
    for n, (number, color) in enumerate(zip(numbers, colors)):
        _box(axes, x + width * n, y, width, str(number), color)


def message() -> str:
    """From the ids of a rank to the message, and from the rows that come back to the rows per id."""
    example = EXAMPLE
    blocks, begin = [], 0
    for size in example["send_splits"]:
        block = example["message"][begin : begin + size]
        blocks.append((block[:SEGMENTS], block[SEGMENTS:]))
        begin += size
    figure, axes = _figure(104, 46)
    split, unique_split = example["segment_splits"][1], example["unique_splits"][1]
    of_ids = [BLUE] * split + [GREEN] * (len(example["ids"]) - split)
    of_unique = [BLUE] * unique_split + [GREEN] * (len(example["unique_ids"]) - unique_split)

    _say(axes, 2, 3.5, "ids [N]")
    _cells(axes, 26, 2, example["ids"], of_ids)
    _say(axes, 58, 3.5, "blue: segment 0, table item; green: segment 1, table user")
    _arrow(axes, (40, 5.2), (40, 8.6))
    _say(axes, 42, 7, "segment_unique: once per segment")
    _say(axes, 2, 10.5, "unique ids [U]")
    _cells(axes, 26, 9, example["unique_ids"], of_unique)
    _say(axes, 58, 10.5, f"inverse [N]  {' '.join(map(str, example['inverse']))}")
    _arrow(axes, (36, 12.2), (36, 15.6))
    _say(axes, 42, 14, "rank_partition: sorted by owner, a header of counts [S] before each block")
    _say(axes, 2, 17.5, "message")
    x = 26.0
    for owner, (counts, ids) in enumerate(blocks):
        _cells(axes, x, 16, counts, [GREY] * len(counts))
        _cells(axes, x + 4 * len(counts), 16, ids, [BLUE] * counts[0] + [GREEN] * counts[1])
        width = 4 * (len(counts) + len(ids))
        _say(axes, x + width / 2, 20.3, f"to rank {owner}", 8, ha="center")
        x += width + 2
    _say(axes, x + 4, 17.5, f"restore [U]  {' '.join(map(str, example['restore']))}")
    _arrow(axes, (36, 21.4), (36, 24.6))
    _say(axes, 42, 23, "all-to-all of ids. Rank 0 gets its blocks from ranks 0 and 1")
    _box(axes, 26, 25, 44, "owner: (segment, id) is the key; dedup over ranks, find or insert", ORANGE, 3.4)
    _say(axes, 2, 26.7, "table")
    _arrow(axes, (36, 28.6), (36, 31.8))
    _say(axes, 42, 30.2, "all-to-all of rows, in the order of the sent ids")
    _say(axes, 2, 33.6, "rows that came [U, D]")
    colored = [(ids, [BLUE] * counts[0] + [GREEN] * counts[1]) for counts, ids in blocks]
    sent = [pair for ids, colors in colored for pair in zip(ids, colors)]
    for n, (number, color) in enumerate(sent):
        _box(axes, 26 + 6 * n, 32, 6, f"row {number}", color, size=8)
    _arrow(axes, (36, 35.2), (36, 38.6))
    _say(axes, 42, 37, "recover: one gather with restore[inverse], pooled where a feature has a combiner")
    _say(axes, 2, 40.5, "rows per id [N, D]")
    for n, (number, color) in enumerate(zip(example["ids"], of_ids)):
        _box(axes, 26 + 6 * n, 39, 6, f"row {number}", color, size=8)
    _say(
        axes,
        2,
        44.3,
        "Backward: gradients are summed to [U, D] at their source, then an all-to-all takes them to the owner.",
    )
    return _svg(figure)


def table() -> str:
    """Keys in lines, rows in chunks."""
    figure, axes = _figure(112, 40)
    _say(axes, 2, 2, "keys: one index per segment in each of 64 shards", 10)
    _say(axes, 58, 2, "rows: chunks that never move", 10)
    for line, (y, which) in enumerate(
        ((6, "low bits of the hash"), (14, "that was full: an odd step further"), (22, ""))
    ):
        _say(axes, 2, y - 1.2, f"line of 64 bytes: {which}" if which else "other lines", 8)
        for key in range(5):
            _box(axes, 2 + 4 * key, y, 4, "key", BLUE if (line, key) < (2, 2) else "white", size=7)
        for payload in range(5):
            _box(axes, 22 + 3.4 * payload, y, 3.4, "row" if (line, payload) < (2, 2) else "", GREY, size=7)
        _box(axes, 39, y, 5, ("5+", "5", "2")[line], "white", size=8)
    for y, color in ((5, GREEN), (9, GREEN), (13, "white"), (20, GREEN), (24, "white"), (28, "white")):
        for x, width, name in ((58, 9, "header"), (67, 16, "embedding, D"), (83, 16, "slots, k D")):
            _box(axes, x, y, width, name if color == GREEN else "", color if x > 58 else GREY, 4, 8)
    _say(axes, 101, 11, "chunk 0", 8)
    _say(axes, 101, 26, "chunk 1", 8)
    _arrow(axes, (24, 9), (58, 21.8))
    _arrow(axes, (27, 6), (58, 6))
    _arrow(axes, (24, 14), (58, 11))
    for place, words in (
        (29.0, "key: id, any int64.  row: its number, 32 bits."),
        (31.5, "Last word: keys in the line, + when it has overflown."),
        (34.0, "Growing builds new lines and swaps a pointer; rows and handles stay."),
        (36.5, "Header: clock of the last lookup (LRU, ttl), count (LFU), version of the last update (deltas)."),
    ):
        _say(axes, 2, place, words, 8)
    return _svg(figure)


Bar = tuple[float, float, str]


def _of_sync() -> tuple[list[Bar], list[Bar]]:
    net: list[Bar] = []
    dense: list[Bar] = []
    for t in range(3):
        at = 9.0 * t
        net += [(at, 1, f"ids {t}"), (at + 1, 2, f"rows {t}"), (at + 7, 2, f"grads {t}")]
        dense += [(at + 3, 4, f"compute {t}")]
    return net, dense


def _of_windows(step: float, ids_hidden: bool) -> tuple[list[Bar], list[Bar]]:
    """Micro-batches of a quarter each: row exchanges one behind the other, gradients when their compute is done."""
    net: list[Bar] = [(0, 1, "ids 0")]
    dense: list[Bar] = []
    for t in range(4):
        if t and not ids_hidden:
            net += [(step * t, 1, f"ids {t}")]
        first = step * t + 1.0
        net += [(first + 0.5 * m, 0.5, "rows") for m in range(4)]
        dense += [(first + 0.5 + m, 1, f"{t}.{m}") for m in range(4)]
        net += [(first + begin, 0.5, "grads") for begin in (2.0, 2.5, 3.5, 4.5)]
        if ids_hidden:
            net += [(first + begin, 0.5, "ids") for begin in (3.0, 4.0)]
    return net, dense


def _of_dual_buffer() -> tuple[list[Bar], list[Bar]]:
    net: list[Bar] = [(0, 1, "ids 0")]
    dense: list[Bar] = []
    for t in range(3):
        at = 1 + 8.0 * t
        net += [(at, 2, f"rows {t}"), (at + 2, 1, f"ids {t + 1}"), (at + 6, 2, f"grads {t}")]
        dense += [(at + 2, 4, f"compute {t}")]
    return net, dense


def _of_in_flight(ids_ahead: int) -> tuple[list[Bar], list[Bar]]:
    """While batch t computes: gradients of t - 1, ids of t + ids_ahead, rows of t + 1."""
    net: list[Bar] = [(1.0 * n, 1.0, f"ids {n}") for n in range(ids_ahead)] + [(1.0 * ids_ahead, 2.0, "rows 0")]
    dense: list[Bar] = []
    at = ids_ahead + 2.0
    for t in range(5):
        exchanges = [("grads", 2.0, t - 1), ("ids", 1.0, t + ids_ahead), ("rows", 2.0, t + 1)]
        begin = at
        for what, length, batch in exchanges if t else exchanges[1:]:
            net.append((begin, length, f"{what} {batch}"))
            begin += length
        dense.append((at, 4.0, f"compute {t}"))
        at = max(at + 4.0, begin)
    return net, dense


SCHEDULES: Sequence[tuple[str, Callable[[], tuple[list[Bar], list[Bar]]]]] = (
    ("sync", _of_sync),
    ("FrozenWindow(4)", lambda: _of_windows(6.0, ids_hidden=False)),
    ("DualBuffer()", _of_dual_buffer),
    ("Nested(4)", lambda: _of_windows(5.0, ids_hidden=True)),
    ("SemiAsync()", lambda: _of_in_flight(1)),
    ("Pipelined(6)", lambda: _of_in_flight(3)),
)


def schedules() -> str:
    """Draws the network and the dense compute under each schedule, for exchanges as long as the compute."""
    figure, axes = _figure(124, 64)
    left, scale, limit = 22.0, 3.7, 27.5
    colors = {"ids": BLUE, "rows": GREEN, "grads": RED}
    for n, (name, bars) in enumerate(SCHEDULES):
        y = 3 + 10 * n
        _say(axes, 1, y + 3, name, 10)
        for lane, (what, spans) in enumerate(zip(("network", "compute"), bars())):
            _say(axes, left - 1, y + 1.5 + 3.4 * lane, what, 7, ha="right")
            for begin, length, text in spans:
                if begin + length <= limit:
                    color = ORANGE if lane else colors.get(text.split(" ")[0], GREY)
                    fits = length >= 1
                    _box(
                        axes, left + scale * begin, y + 3.4 * lane, scale * length, text if fits else "", color, size=7
                    )
    return _svg(figure)


def topology() -> str:
    """Four ranks as two groups."""
    figure, axes = _figure(92, 30)
    for shard in range(2):
        _say(axes, 30 + 26 * shard, 2.5, f"shard {shard}", ha="center")
    for group in range(2):
        y = 6 + 13 * group
        _say(axes, 2, y + 3, f"group {group}")
        for shard in range(2):
            _box(axes, 20 + 26 * shard, y, 20, f"rank {2 * group + shard}", (BLUE, GREEN)[shard], 6)
        axes.annotate("", (46, y + 3), (40, y + 3), arrowprops={"arrowstyle": "<->", "color": LINE})
    for shard in range(2):
        axes.annotate(
            "", (30 + 26 * shard, 19), (30 + 26 * shard, 12), arrowprops={"arrowstyle": "<->", "color": "#c03030"}
        )
    _say(axes, 68, 9, "along a row: all-to-all", 8)
    _say(axes, 68, 12, "of ids, rows, gradients", 8)
    _say(axes, 68, 19, "along a column: the rule that", 8)
    _say(axes, 68, 22, "keeps the replicas of a shard equal", 8)
    return _svg(figure)


def all_drawings() -> dict[str, str]:
    """SVG text by file name."""
    return {f"{draw.__name__}.svg": draw() for draw in (message, table, schedules, topology)}
