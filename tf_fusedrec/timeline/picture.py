"""One step as a picture: lanes of bars over time."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from tf_fusedrec.timeline.intervals import COMPUTE, EXCHANGE, TABLE, WAIT, Event, StepTimes, exposed, inside

COLORS = {EXCHANGE: (31, 119, 180), WAIT: (190, 210, 230), TABLE: (44, 160, 44), COMPUTE: (255, 152, 60)}
EXPOSED = (214, 39, 40)
LEFT, WIDTH, LANE, TOP = 110, 1500, 46, 50  # pixels; time begins at LEFT and takes WIDTH
_INK, _GRID = (40, 40, 40), (225, 225, 225)


def draw(path: pathlib.Path, times: StepTimes, events: Sequence[Event], begin: float, end: float) -> None:
    """Writes the step between two moments (seconds) as a PNG."""
    mine = inside(events, begin, end)
    lanes = [WAIT, EXCHANGE, TABLE, COMPUTE]
    image = Image.new("RGB", (LEFT + WIDTH + 20, TOP + LANE * (len(lanes) + 1) + 40), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)

    def x(moment: float) -> float:
        return LEFT + WIDTH * (moment - begin) / (end - begin)

    def bars(row: int, spans: Sequence[tuple[float, float, str]], color: tuple[int, int, int]) -> None:
        top = TOP + LANE * row
        for start, stop, label in spans:
            pen.rectangle([x(start), top + 6, max(x(stop), x(start) + 1), top + LANE - 6], fill=color)
            if pen.textlength(label, font) < x(stop) - x(start) - 6:
                pen.text((x(start) + 4, top + 14), label, _INK if color == COLORS[WAIT] else "white", font)

    title = (
        f"step {times.number}: {times.step_ms:.1f} ms = {times.compute_ms:.1f} compute + {times.exposed_ms:.1f} exposed"
        f" communication + {times.free_ms:.1f} free; {times.exchange_ms:.1f} ms of exchanges"
    )
    pen.text((LEFT, 12), title, _INK, font)
    bottom = TOP + LANE * (len(lanes) + 1)
    for tenth in range(11):
        at = LEFT + WIDTH * tenth / 10
        pen.line([at, TOP, at, bottom], _GRID)
        pen.text((at - 14, bottom + 8), f"{times.step_ms * tenth / 10:.1f}", _INK, font)
    pen.text((12, bottom + 8), "ms", _INK, font)
    for row, kind in enumerate(lanes):
        pen.text((12, TOP + LANE * row + 14), kind, _INK, font)
        bars(row, [(e.begin, e.end, _short(e.name)) for e in mine if e.kind == kind], COLORS[kind])
    pen.text((12, TOP + LANE * len(lanes) + 14), "exposed", _INK, font)
    bars(len(lanes), [(start, stop, "") for start, stop in exposed(mine)], EXPOSED)
    image.save(path)


def _short(name: str) -> str:
    """The end of a name tells what it is: "0.rows", "MatMul"."""
    return ".".join(name.rsplit(":", 1)[-1].rsplit(".", 2)[-2:])
