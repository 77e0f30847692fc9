"""Timeline inside `fit` on two processes and on one, and its picture: bars of all events, round ticks, and a legend."""

import json
import pathlib
import time
import types

import numpy as np
import pytest
from PIL import Image

import tf_fusedrec as fr
from tests.schedules import clicks
from tests.support.ranks import error_of, run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks import timeline, timeline_events
from tf_fusedrec.callbacks.timeline import Timeline
from tf_fusedrec.callbacks.timeline_events import COMPUTE, EXCHANGE, TABLE, WAIT, Event, step_times
from tf_fusedrec.exchange import collectives, horovod
from tf_fusedrec.schedules import FrozenWindow

FIRST, STEPS = 2, 2


def _fit(folder, count, **timeline):
    """Trains with FrozenWindow(2), so that there are several exchanges of a kind."""
    model = clicks.make_model(
        clicks.make_embedding(),
        FrozenWindow(2),
        fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01)),
    )
    data = tf.data.Dataset.from_generator(
        lambda: iter([clicks.batch(9, step) for step in range(count)]), output_signature=clicks.SIGNATURE
    )
    callback = Timeline(folder, **timeline)
    model.fit(data, steps_per_epoch=count, callbacks=[callback], verbose=0)
    return [times._asdict() for times in callback.steps]


def _fit_twice(folder):
    # A second time: both logs begin and end again.
    return [_fit(f"{folder}/{turn}", 5, first_step=FIRST, steps=STEPS) for turn in ("first", "second")]


def _events(folder, kind):
    entries = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    pid = next(e["pid"] for e in entries if e["ph"] == "M" and e["args"]["name"] == kind)
    return sorted((e for e in entries if e["ph"] == "X" and e["pid"] == pid), key=lambda e: e["ts"])


def _check_times(folder, recorded):
    assert [times["number"] for times in recorded] == [FIRST, FIRST + 1]
    assert json.loads((folder / "steps.json").read_text(encoding="utf-8")) == recorded
    for times in recorded:
        parts = times["compute_ms"] + times["exposed_ms"] + times["free_ms"]
        assert parts == pytest.approx(times["step_ms"])
        assert times["compute_ms"] > 0 and times["exposed_ms"] <= times["exchange_ms"] <= times["step_ms"]
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")


def test_exchanges_and_ops_of_two_ranks(tmp_path):
    results = run_ranks(_fit_twice, 2, timeline=True, folder=str(tmp_path))
    assert results[1] == [[], []]  # rank 0 records
    for turn, recorded in zip(("first", "second"), results[0]):
        folder = tmp_path / turn
        _check_times(folder, recorded)
        steps = _events(folder, "step")
        for step, times in zip(steps, recorded):
            assert step["dur"] == pytest.approx(1e3 * times["step_ms"], rel=1e-3)
            begin, end = step["ts"], step["ts"] + step["dur"]
            mine = [e for e in _events(folder, "exchange") if begin <= e["ts"] and e["ts"] + e["dur"] <= end]
            all_to_alls = [e["name"].split(".", 2)[-1] for e in mine if e["name"].startswith("alltoall ")]
            kinds = [name.rsplit(".", 1)[-1] for name in all_to_alls]
            assert sorted(kinds) == ["gradients"] * 2 + ["ids"] * kinds.count("ids") + ["rows"] * 2
            assert "ids" in kinds
            assert any(e["name"].startswith("allreduce ") for e in mine)
            # The clocks of both logs agree: ids leave before a table is asked, rows after.
            lookups = [e for e in _events(folder, "table") if begin <= e["ts"] <= end and "TableLookup" in e["name"]]
            first = {kind: next(e for e in mine if e["name"].endswith(f".{kind}")) for kind in ("ids", "rows")}
            assert first["ids"]["ts"] < lookups[0]["ts"] < first["rows"]["ts"] + first["rows"]["dur"]


def test_one_process_has_ops_only_and_training_that_ends_first_writes_what_there_is(tmp_path):
    recorded = _fit(tmp_path / "one", 4, first_step=FIRST, steps=10)
    _check_times(tmp_path / "one", recorded)
    assert all(times["exchange_ms"] == 0 for times in recorded)
    assert any("MatMul" in event["name"] for event in _events(tmp_path / "one", "compute"))
    assert _fit(tmp_path / "none", 2, first_step=FIRST, steps=10) == []
    assert not (tmp_path / "none").exists()


def test_a_reading_of_the_clock_that_took_long_does_not_count(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    clock = [timeline._clock_reading() for _ in range(4)]
    tf.function(lambda x: tf.matmul(x, x))(tf.ones([100, 100])).numpy()
    tf.profiler.experimental.stop()
    events = timeline_events.profiler_events(tmp_path, clock)
    assert events and all(clock[0][0] <= event.begin <= time.time() for event in events)
    shortest = min(range(4), key=lambda i: clock[i][1] - clock[i][0])
    stopped = [(before, after + (i != shortest)) for i, (before, after) in enumerate(clock)]
    assert timeline_events.profiler_events(tmp_path, stopped) == events


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="first_step and steps must be >= 1, got 0 and 3"):
        Timeline("folder", first_step=0)


def test_a_timeline_of_horovodruns_own_is_not_overwritten(monkeypatch):
    monkeypatch.setattr(collectives, "_engine", types.SimpleNamespace(rank=0, size=2))
    monkeypatch.setattr(horovod, "_hvd", object())
    monkeypatch.setenv("HOROVOD_TIMELINE", "mine.json")
    with pytest.raises(RuntimeError, match=r"timeline to 'mine.json' already.*--timeline-filename"):
        horovod.start_timeline("other.json")
    with pytest.raises(RuntimeError, match=r"timeline to 'mine.json' already"):
        fr.init(timeline=True)


def _without_timeline():
    """Body: returns the spinning threads of an idle rank, and the refusal of a timeline."""
    fr.collectives.barrier()
    spinning = _spinning_threads()
    refusals = [error_of(Timeline, "folder"), error_of(fr.init, timeline=True)]
    fr.collectives.barrier()
    return spinning, refusals


def _spinning_threads():
    """Returns the threads that use a core for a second without waiting. Horovod's thread sleeps a millisecond at a time
    on any machine.
    """

    def used():
        for task in pathlib.Path("/proc/self/task").iterdir():
            fields = (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            status = (task / "status").read_text(encoding="utf-8")
            waits = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
            yield int(task.name), (int(fields[11]) + int(fields[12]), waits)

    before = dict(used())
    time.sleep(1)
    after = {thread: np.subtract(now, before[thread]) for thread, now in used() if thread in before}
    return [thread for thread, (ticks, waits) in after.items() if ticks >= 5 and waits < 10]


def test_a_joined_rank_is_idle_and_says_that_it_has_no_timeline():
    for spinning, refusals in run_ranks(_without_timeline, 2):
        assert spinning == []
        for text in refusals:
            assert text.startswith("RuntimeError") and "joined without a timeline" in text and "timeline=True" in text


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


@pytest.mark.parametrize(
    "lane, kind, begin, end",
    [
        (0, WAIT, 0, 0.2), (1, EXCHANGE, 0.2, 0.6), (2, TABLE, 0.1, 0.3), (3, COMPUTE, 0.5, 1),
        # The exchange without the table's op until 0.3 and the compute from 0.5.
        (4, timeline.EXPOSED, 0.3, 0.5),
    ],
)  # fmt: skip
def test_every_kind_has_its_lane_and_exposed_exchanges_are_red(image, lane, kind, begin, end):
    row = timeline.TOP + timeline.LANE * (lane + 1) - 8  # bottom of the bars
    for share in (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.85):  # no line of the grid
        pixel = image.getpixel((timeline.LEFT + int(timeline.WIDTH * share), row))
        assert (pixel == timeline.LANES[kind][0]) == (begin < share < end), share


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
