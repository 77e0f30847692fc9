"""Parts of a page that needs no other file: the document with its style in light and dark, tables, and plots as SVG."""

from __future__ import annotations

import html as markup
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667080; --line: #d8dde5; --page: #fff; --card: #f6f8fa;
  --a: #2364aa; --b: #d1651b; --c: #6a4fb3; --d: #0b8a83; --good: #1a7f37; --bad: #c0332b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --dim: #9aa5b4; --line: #38414d; --page: #14181e;
  --card: #1c222b; --a: #6cb0f5; --b: #f0a05a; --c: #b39df0; --d: #58cfc6; --good: #5ac878; --bad: #f27d74; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1060px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; overflow-x: auto; font-size: 13px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: .25rem .8rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 500; }
.scroll { overflow-x: auto; } .row { display: flex; flex-wrap: wrap; gap: 1rem; } .dim { color: var(--dim); }
.yes { color: var(--good); } .worse { color: var(--bad); }
img { max-width: 100%; } .hint { border-left: 3px solid var(--b); padding-left: .8rem; }
svg { background: var(--card); border-radius: 6px; } svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
svg .title { fill: var(--ink); font-size: 13px; } .grid { stroke: var(--line); }
.a { stroke: var(--a); fill: var(--a); } .b { stroke: var(--b); fill: var(--b); }
.c { stroke: var(--c); fill: var(--c); } .d { stroke: var(--d); fill: var(--d); }
svg path[class] { fill: none; stroke-width: 2; } svg text[class] { stroke: none; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """Returns a page of HTML."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{safe(title)}</title><style>{_STYLE}</style>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def safe(value: Any) -> str:
    """Returns words without markup."""
    return markup.escape(str(value))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table, which scrolls on a narrow screen."""
    lines = [f"<tr>{''.join(f'<th>{safe(head)}</th>' for head in heads)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 340, 220, 52, 30, 28


def plot(title: str, series: Mapping[str, Sequence[tuple[float, float]]], square: bool = False) -> str:
    """Returns an SVG of a line for each series of points. `square` gives both axes the same range."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    if square:
        low_x = low_y = min(low_x, low_y)
        high_x = high_y = max(high_x, high_y)
    pad = 0.0 if square else (high_y - low_y or abs(high_y) or 1.0) * 0.08
    low_y, high_y = low_y - pad, high_y + pad
    top = _TOP + 14 * max(0, len(series) - 2)  # below the names of the lines

    def place(x: float, y: float) -> str:
        across = (x - low_x) / (high_x - low_x or 1.0) * (_WIDTH - _LEFT - 14)
        up = (y - low_y) / (high_y - low_y or 1.0) * (_HEIGHT - top - _BOTTOM)
        return f"{_LEFT + across:.1f},{_HEIGHT - _BOTTOM - up:.1f}"

    parts = [f"<text class=title x={_LEFT} y=18>{safe(title)}</text>"]
    for share in (0.0, 0.5, 1.0):
        value = low_y + share * (high_y - low_y)
        x, y = place(low_x, value).split(",")
        parts.append(f"<line class=grid x1={x} x2={_WIDTH - 14} y1={y} y2={y} />")
        parts.append(f"<text x={_LEFT - 6} y={y} text-anchor=end dominant-baseline=middle>{value:.4g}</text>")
    for value, anchor in ((low_x, "start"), (high_x, "end")):
        x = place(value, low_y).split(",")[0]
        parts.append(f"<text x={x} y={_HEIGHT - 10} text-anchor={anchor}>{value:.4g}</text>")
    for at, ((name, points), color) in enumerate(zip(series.items(), itertools.cycle("abcd"))):
        parts.append(f'<path class={color} d="M{" L".join(place(*point) for point in points)}" />')
        if len(points) < 30:
            dots = (place(*point).split(",") for point in points)
            parts += [f"<circle class={color} cx={across} cy={down} r=2.5 />" for across, down in dots]
        corner = f"x={_WIDTH - 14} y={18 + 14 * at}"
        parts.append(f"<text class={color} {corner} text-anchor=end>{safe(name)}</text>")
    label = f'role=img aria-label="{safe(title)}"'
    return f'<svg width={_WIDTH} height={_HEIGHT} viewBox="0 0 {_WIDTH} {_HEIGHT}" {label}>{"".join(parts)}</svg>'
