"""The picture has a bar for every event, round ticks, and a legend of the colours."""

import numpy as np
import pytest
from PIL import Image

from tf_fusedrec.callbacks import timeline
from tf_fusedrec.callbacks.timeline_events import COMPUTE, EXCHANGE, TABLE, WAIT, Event, step_times

EVENTS = [
    Event(WAIT, "w", 10.0, 10.2, ""),
    Event(EXCHANGE, "e", 10.2, 10.6, ""),
    Event(TABLE, "t", 10.1, 10.3, ""),
    Event(COMPUTE, "c", 10.5, 11.5, ""),  # beyond the step
]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "step.png"
    timeline.draw(path, step_times(3, EVENTS, 10.0, 11.0), EVENTS, 10.0, 11.0)
    return Image.open(path)


@pytest.fixture(scope="module")
def pixel(image):
    def at(lane, share):
        """Returns the color of a lane's bars at their bottom, at a share of the step."""
        row = timeline.TOP + timeline.LANE * (lane + 1) - 8
        return image.getpixel((timeline.LEFT + int(timeline.WIDTH * share), row))

    return at


@pytest.mark.parametrize(
    "lane, kind, begin, end", [(0, WAIT, 0, 0.2), (1, EXCHANGE, 0.2, 0.6), (2, TABLE, 0.1, 0.3), (3, COMPUTE, 0.5, 1)]
)
def test_every_kind_has_its_lane(pixel, lane, kind, begin, end):
    for share in (0.05, 0.15, 0.25, 0.45, 0.55, 0.85):  # no line of the grid
        assert (pixel(lane, share) == timeline.LANES[kind][0]) == (begin < share < end), share


def test_exposed_exchanges_are_red(pixel):
    # The exchange of 0.2 to 0.6 without the table's op until 0.3 and the compute from 0.5.
    assert [pixel(4, share) == timeline.LANES[timeline.EXPOSED][0] for share in (0.25, 0.35, 0.45, 0.55)] == [
        False,
        True,
        True,
        False,
    ]


def test_the_legend_names_every_colour_and_stays_inside(image):
    for row, (kind, (color, meaning)) in enumerate(timeline.LANES.items()):
        middle = timeline.LEGEND + timeline.LINE * row + 7
        assert image.getpixel((timeline.LEFT + 7, middle)) == color, kind
        text = [image.getpixel((x, middle)) for x in range(timeline.LEFT + 24, image.width)]
        words = [n for n, color in enumerate(text) if color != (255, 255, 255)]
        assert words and max(words) > 5 * len(meaning) and max(words) < len(text) - 10, kind


def test_ticks_are_round():
    assert timeline.ticks(595.7) == [50.0 * n for n in range(12)]
    assert timeline.ticks(29.0) == [0, 5, 10, 15, 20, 25]
    for step_ms in np.geomspace(0.01, 1e5, 500):
        found = timeline.ticks(step_ms)
        assert 6 <= len(found) <= 13 and found[0] == 0 and found[-1] <= step_ms < found[-1] + found[1]
        assert f"{found[1]:e}"[:8] in ("1.000000", "2.000000", "5.000000")


def test_neighbouring_exchanges_are_told_apart(tmp_path):
    events = [Event(EXCHANGE, "e", 10.0, 10.5, ""), Event(EXCHANGE, "e", 10.5, 11.0, "")]
    timeline.draw(tmp_path / "step.png", step_times(3, events, 10.0, 11.0), events, 10.0, 11.0)
    image = Image.open(tmp_path / "step.png")
    row = timeline.TOP + timeline.LANE * 2 - 10
    middle = [image.getpixel((timeline.LEFT + timeline.WIDTH // 2 + n, row)) for n in range(-3, 4)]
    assert (255, 255, 255) in middle and middle[0] == middle[-1] == timeline.LANES[EXCHANGE][0]
