"""The picture has its bars where the events were."""

import pytest
from PIL import Image

from tf_fusedrec.timeline import picture
from tf_fusedrec.timeline.intervals import COMPUTE, EXCHANGE, TABLE, WAIT, Event, step_times

EVENTS = [
    Event(WAIT, "w", 10.0, 10.2, ""),
    Event(EXCHANGE, "e", 10.2, 10.6, ""),
    Event(TABLE, "t", 10.1, 10.3, ""),
    Event(COMPUTE, "c", 10.5, 11.5, ""),  # beyond the step
]


@pytest.fixture(scope="module")
def pixel(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "step.png"
    picture.draw(path, step_times(3, EVENTS, 10.0, 11.0), EVENTS, 10.0, 11.0)
    image = Image.open(path)

    def at(lane, share):
        """The color of the bottom of a lane's bars, at a share of the step."""
        row = picture.TOP + picture.LANE * (lane + 1) - 8
        return image.getpixel((picture.LEFT + int(picture.WIDTH * share), row))

    return at


@pytest.mark.parametrize(
    "lane, kind, begin, end", [(0, WAIT, 0, 0.2), (1, EXCHANGE, 0.2, 0.6), (2, TABLE, 0.1, 0.3), (3, COMPUTE, 0.5, 1)]
)
def test_every_kind_has_its_lane(pixel, lane, kind, begin, end):
    for share in (0.05, 0.15, 0.25, 0.45, 0.55, 0.85):  # no line of the grid
        assert (pixel(lane, share) == picture.COLORS[kind]) == (begin < share < end), share


def test_what_is_exposed_is_red(pixel):
    # The exchange of 0.2 to 0.6 without the table's op until 0.3 and the compute from 0.5.
    assert [pixel(4, share) == picture.EXPOSED for share in (0.25, 0.35, 0.45, 0.55)] == [False, True, True, False]
