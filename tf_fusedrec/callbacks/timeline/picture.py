"""Picture of one step: lanes of bars over time, with a legend below."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from tf_fusedrec.callbacks.timeline.intervals import COMPUTE, EXCHANGE, TABLE, WAIT, Event, StepTimes, exposed, inside

EXPOSED = "exposed"
# Lanes from the top: colour and meaning.
LANES = {
    WAIT: ((190, 210, 230), "an exchange waits for a rank that has not requested it yet; ops may run meanwhile"),
    EXCHANGE: ((31, 119, 180), "an exchange runs: all ranks have requested it, and data travel"),
    TABLE: ((44, 160, 44), "an op of an embedding table runs: lookup or update"),
    COMPUTE: ((255, 152, 60), "any other op runs"),
    EXPOSED: ((214, 39, 40), "an exchange runs and no op: communication that no computation hides"),
}
LEFT, WIDTH, LANE, TOP = 110, 1500, 46, 50  # pixels: left end and width of the time axis, height of a lane, first lane
BOTTOM = TOP + LANE * len(LANES)  # end of the lanes; the labels of the time axis and the legend follow
LINE, LEGEND = 22, BOTTOM + 44  # height of a line of the legend, and its top
_INK, _GRID, _GAP = (40, 40, 40), (225, 225, 225), "white"


def draw(path: pathlib.Path, times: StepTimes, events: Sequence[Event], begin: float, end: float) -> None:
    """Writes a PNG of the step that ran from `begin` to `end`, in seconds."""
    mine = inside(events, begin, end)
    image = Image.new("RGB", (LEFT + WIDTH + 40, LEGEND + LINE * len(LANES) + 8), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)

    def x(moment: float) -> float:
        return LEFT + WIDTH * (moment - begin) / (end - begin)

    title = (
        f"step {times.number}: {times.step_ms:.1f} ms = {times.compute_ms:.1f} compute + {times.exposed_ms:.1f} exposed"
        f" communication + {times.free_ms:.1f} free; {times.exchange_ms:.1f} ms of exchanges"
    )
    pen.text((LEFT, 12), title, _INK, font)
    for tick in ticks(times.step_ms):
        at = x(begin + 1e-3 * tick)
        pen.line([at, TOP, at, BOTTOM], _GRID)
        pen.text((at, BOTTOM + 8), f"{tick:g}", _INK, font, anchor="ma")
    pen.text((12, BOTTOM + 8), "ms", _INK, font)
    for row, (kind, (color, meaning)) in enumerate(LANES.items()):
        top = TOP + LANE * row
        pen.text((12, top + 14), kind, _INK, font)
        if kind == EXPOSED:
            spans = [(x(start), x(stop), "") for start, stop in exposed(mine)]
        else:
            spans = [(x(e.begin), x(e.end), _short(e.name)) for e in mine if e.kind == kind]
        for start, stop, _ in spans:
            # White edges separate neighbours. Narrow bars have none, because the edge would hide them.
            edge = _GAP if kind in (WAIT, EXCHANGE) and stop - start > 4 else None
            pen.rectangle([start, top + 6, max(stop, start + 1), top + LANE - 6], fill=color, outline=edge)
        free = 0.0  # end of the last label; bars of one lane may overlap
        for start, stop, label in sorted(spans):
            width = pen.textlength(label, font)
            if label and start + 4 >= free and width < stop - start - 6:
                pen.text((start + 4, top + 14), label, _INK if kind == WAIT else "white", font)
                free = start + 4 + width
        line = LEGEND + LINE * row
        pen.rectangle([LEFT, line, LEFT + 14, line + 14], fill=color)
        pen.text((LEFT + 24, line), f"{kind}: {meaning}", _INK, font)
    image.save(path)


def ticks(step_ms: float) -> list[float]:
    """Round tick marks of a step in ms, from 0, with 6 to 13 ticks at 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step_ms / 6))
    every = next(power * factor for factor in (5, 2, 1) if 5 * power * factor <= step_ms)
    return [every * n for n in range(math.floor(step_ms / every) + 1)]


def _short(name: str) -> str:
    """The end of an event's name, such as "0.rows" or "MatMul"."""
    return ".".join(name.rsplit(":", 1)[-1].rsplit(".", 2)[-2:])
