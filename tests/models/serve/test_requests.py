"""A server turns JSON into tensors, and joins several requests into one call."""

import asyncio
import concurrent.futures
import json

import numpy as np
import pytest

from tf_fusedrec.models.serve import tensors
from tf_fusedrec.models.serve.batching import Batcher, is_joinable
from tf_fusedrec.models.serve.loaded import RequestError, Signature, Spec

INT, FLOAT, TEXT = np.dtype(np.int64), np.dtype(np.float32), np.dtype(object)
DENSE = Signature({"x": Spec(INT, (None, 2)), "w": Spec(FLOAT, (None,))}, {"y": Spec(FLOAT, (None,))})
SIGNATURES = {
    "serving_default": DENSE,
    "one": Signature({"name": Spec(TEXT, (None,))}, {}),
    "path": Signature({"path": Spec(TEXT, ())}, {}),
    "small": Signature({"k": Spec(np.dtype(np.int32), ())}, {}),
    "version": Signature({}, {}),
}


def parsed(request):
    return tensors.parse(json.dumps(request).encode(), SIGNATURES)


def test_both_forms_give_the_same_tensors():
    in_rows = parsed({"instances": [{"x": [1, 2], "w": 0.5}, {"x": [2**63 - 1, -4], "w": 2}]})
    in_columns = parsed({"inputs": {"x": [[1, 2], [2**63 - 1, -4]], "w": [0.5, 2]}})
    assert in_rows.in_rows and not in_columns.in_rows
    for request in (in_rows, in_columns):
        assert {name: value.dtype for name, value in request.inputs.items()} == {"x": INT, "w": FLOAT}
        np.testing.assert_array_equal(request.inputs["x"], [[1, 2], [2**63 - 1, -4]])
        np.testing.assert_array_equal(request.inputs["w"], [0.5, 2])


def test_a_lone_input_needs_no_name_and_strings_may_be_bytes():
    for given in ({"instances": ["a", {"b64": "/w=="}]}, {"inputs": ["a", {"b64": "/w=="}]}):
        request = parsed({**given, "signature_name": "one"})
        assert request.inputs["name"].tolist() == [b"a", b"\xff"]
    path = parsed({"inputs": {"path": "/deltas/é"}, "signature_name": "path"}).inputs["path"]
    assert path.shape == () and path.item() == "/deltas/é".encode()
    assert parsed({"inputs": [], "signature_name": "one"}).inputs["name"].shape == (0,)
    assert parsed({"inputs": {}, "signature_name": "version"}).inputs == {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON Parse error"),
        (b'{"inputs": [1', "JSON Parse error"),
        (b"\xff", "JSON Parse error"),
        (b"[" * 100_000, "JSON Parse error"),
        (b"[]", "Is not object"),
        (b"{}", "Missing 'inputs' or 'instances' key"),
        (b'{"inputs": {}, "instances": []}', "only one of"),
        (b'{"signature_name": 3, "inputs": {}}', "'signature_name' key must be a string"),
        (b'{"signature_name": "none", "inputs": {}}', '"none" not found in signature def'),
        (b'{"instances": []}', "list with values"),
        (b'{"instances": {"x": 1}}', "list with values"),
        (b'{"instances": [[1, 2]]}', r"object with the keys \['w', 'x'\]"),
        (b'{"instances": [{"x": [1, 2], "w": 1}, {"x": [1, 2]}]}', "process element: 1"),
        (b'{"instances": [{"x": [1, 2], "w": 1}, {"x": [1], "w": 1}]}', r"'x' wants int64 \[\?, 2\], got \[\[1, 2\]"),
        (b'{"inputs": [[1, 2]]}', "object with the keys"),
        (b'{"inputs": {"x": [[1, 2]]}}', r"inputs \['w'\] are missing. The"),
        (b'{"inputs": {"x": [[1, 2]], "w": [1], "z": 1}}', r"inputs \['z'\] are unknown. The"),
        (b'{"inputs": {"x": [[1, 2]], "z": 1}}', r"inputs \['w'\] are missing and \['z'\] are unknown. The"),
        (b'{"inputs": {"x": [[1, 2.5]], "w": [1]}}', r"'x' wants int64 \[\?, 2\], JSON Value: \[\[1, 2.5\]\] is"),
        (b'{"inputs": {"x": [[1, "2"]], "w": [1]}}', "'x' wants int64"),
        (b'{"inputs": {"x": [[1, 9223372036854775808]], "w": [1]}}', "'x' wants int64"),
        (b'{"inputs": {"x": [[1, null]], "w": [1]}}', "'x' wants int64"),
        (b'{"inputs": {"x": [[true, false]], "w": [1]}}', "'x' wants int64"),
        (b'{"inputs": {"x": [[1, 2], [3]], "w": [1]}}', "'x' wants int64"),
        (b'{"inputs": {"x": [1, 2], "w": [1]}}', r"'x' wants int64 \[\?, 2\], got shape \[2\]"),
        (b'{"inputs": {"x": [[1, 2, 3]], "w": [1]}}', r"got shape \[1, 3\]"),
        (b'{"inputs": {"x": [[1, 2]], "w": ["a"]}}', "'w' wants float32"),
        (b'{"inputs": 2147483648, "signature_name": "small"}', r"'k' wants int32 \[\]"),
        (b'{"inputs": [3], "signature_name": "one"}', r"'name' wants string \[\?\]"),
        (b'{"inputs": [{"b64": "?"}], "signature_name": "one"}', "'name' wants string"),
    ],
)
def test_a_bad_request_is_named(body, words):
    with pytest.raises(RequestError, match=words) as refused:
        tensors.parse(body, SIGNATURES)
    assert refused.value.status == 400


def test_answers_have_the_form_of_the_request():
    two = {"p": np.array([0.2, np.nan], np.float32), "ids": np.array([[1, 2], [3, 2**62]])}
    told = json.loads(tensors.response(two, in_rows=False))
    assert told["outputs"]["p"][0] == 0.2 and np.isnan(told["outputs"]["p"][1])  # 0.2, not 0.20000000298
    assert told["outputs"]["ids"] == [[1, 2], [3, 2**62]]
    rows = json.loads(tensors.response(two, in_rows=True))["predictions"]
    assert rows[0] == {"ids": [1, 2], "p": 0.2} and rows[1]["ids"] == [3, 2**62]
    alone = {"p": two["p"][:1]}
    assert tensors.response(alone, True) == b'{"predictions": [0.2]}'
    assert tensors.response(alone, False) == b'{"outputs": [0.2]}'
    texts = {"a": np.array([b"x"], object), "a_bytes": np.array([b"\xff"], object)}
    assert json.loads(tensors.response(texts, False))["outputs"] == {"a": ["x"], "a_bytes": [{"b64": "/w=="}]}
    with pytest.raises(RequestError, match="inconsistent batch sizes"):
        tensors.response({"a": np.zeros(2), "b": np.zeros(3)}, True)
    with pytest.raises(RequestError, match="inconsistent batch sizes"):
        tensors.response({"a": np.zeros(())}, True)


RANKING = Signature(
    {
        **{name: Spec(INT, (None,)) for name in ("history", "history_row_splits", "tags", "tags_count")},
        **{name: Spec(INT, (None,)) for name in ("shown", "shown_row_splits", "user")},
        "k": Spec(INT, ()),
    },
    {"score": Spec(INT, (None,)), "found": Spec(INT, (None,)), "wide": Spec(INT, (None, 2))},
)


def rank(inputs):
    """The answer of a row takes all of its user and nothing else. Refuses what a graph refuses."""
    if min(len(inputs["history_row_splits"]), len(inputs["shown_row_splits"])) == 0:
        raise RequestError(400, "no splits")
    history, shown = (np.diff(inputs[f"{name}_row_splits"]) for name in ("history", "shown"))
    sizes = len(history), len(shown), len(inputs["user"])
    ends = inputs["history_row_splits"][-1], inputs["shown_row_splits"][-1]
    right = len(inputs["history"]), len(inputs["shown"])
    counted = len(inputs["tags_count"]) == right[0] and inputs["tags_count"].sum() == len(inputs["tags"])
    if len(set(sizes)) > 1 or ends != right or not counted or (inputs["user"] < 0).any():
        raise RequestError(400, "refused")
    of_events = np.split(inputs["tags"], np.cumsum(inputs["tags_count"])[:-1]) if right[0] else []
    events = inputs["history"] * 3 + np.array([int(tags.sum()) for tags in of_events], np.int64)
    of_users = [part.sum() for part in np.split(events, inputs["history_row_splits"][1:-1])]
    of_users = np.array(of_users, np.int64)[: sizes[0]] * 1000 + inputs["user"] + inputs["k"]
    score = np.repeat(of_users, shown) + inputs["shown"]
    return {"score": score, "found": of_users, "wide": np.stack([score, score], 1)}


def request(random, users, k=0):
    history, shown = random.integers(0, 4, users), random.integers(0, 4, users)
    counts = random.integers(0, 3, history.sum())
    return {
        "history": random.integers(0, 50, history.sum()),
        "history_row_splits": np.concatenate([[0], np.cumsum(history)]),
        "tags": random.integers(0, 50, counts.sum()), "tags_count": counts,
        "shown": random.integers(0, 50, shown.sum()),
        "shown_row_splits": np.concatenate([[0], np.cumsum(shown)]),
        "user": random.integers(0, 50, users), "k": np.array(k),
    }  # fmt: skip


def answer_all(requests, call=rank, signature=RANKING, most=8, at_once=12):
    """Answers requests by a batcher, `at_once` at a time. Returns answers or errors, and the sizes of the calls."""
    sizes = []

    async def all_of_them():
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            batcher = Batcher(call, signature, threads, most, 0.01, sizes.append)
            answers = []
            for first in range(0, len(requests), at_once):
                some = [batcher.answer(one) for one in requests[first : first + at_once]]
                answers += await asyncio.wait_for(asyncio.gather(*some, return_exceptions=True), 60)
            return answers

    return asyncio.run(all_of_them()), sizes


def alone(inputs):
    try:
        return rank(inputs)
    except RequestError as error:
        return error


def check(answers, requests):
    for answer, one in zip(answers, requests):
        wanted = alone(one)
        if isinstance(wanted, RequestError):
            assert isinstance(answer, RequestError) and str(answer) == str(wanted)
        else:
            assert set(answer) == set(wanted)
            for name, value in wanted.items():
                np.testing.assert_array_equal(answer[name], value)


@pytest.mark.parametrize("seed", range(5))
def test_joined_requests_get_the_answers_of_each_alone(seed):
    """One request in six is bad: a refused user, splits or counts that end short or long, also such that sums agree."""
    random = np.random.default_rng(seed)
    requests = [request(random, int(random.integers(0, 4)), int(random.integers(0, 2))) for _ in range(120)]
    for one in requests[::6]:
        name = random.choice(["user", "history", "shown", "tags", "history_row_splits"])
        if name == "user":
            one["user"] = one["user"] - 1000
        elif random.integers(2):
            one[name] = one[name][:-1]
        else:
            one[name] = np.append(one[name], 1)
    answers, sizes = answer_all(requests)
    check(answers, requests)
    assert max(sizes) > 4, sizes


def test_sound_requests_take_one_call_for_eight():
    random = np.random.default_rng(2)
    requests = [request(random, int(random.integers(1, 4))) for _ in range(48)]
    answers, sizes = answer_all(requests, at_once=8)
    check(answers, requests)
    assert sizes == [1] * 8 + [8] * 5


@pytest.mark.parametrize("name", ["shown", "tags"])
def test_errors_that_cancel_out_in_the_sum_reach_no_other_request(name):
    random = np.random.default_rng(7)
    taught = [request(random, 2) for _ in range(8)]
    short, right, long = (request(random, 3) for _ in range(3))
    short[name], long[name] = short[name][:-1], np.append(long[name], 9)
    requests = [*taught, short, right, long]
    answers, _ = answer_all(requests, at_once=len(taught))
    check(answers, requests)
    assert isinstance(answers[-1], RequestError) and isinstance(answers[-3], RequestError)


def test_outputs_that_follow_no_input_are_never_cut():
    dense = Signature({"x": Spec(INT, (None,))}, {"total": Spec(INT, ()), "table": Spec(INT, (None,))})

    def call(inputs):
        return {"total": inputs["x"].sum(), "table": np.arange(3) + inputs["x"].sum()}

    requests = [{"x": np.arange(size)} for size in (3, 3, 3, 3, 2, 3, 3)]
    answers, sizes = answer_all(requests, call, dense)
    for answer, one in zip(answers, requests):
        assert (
            answer["total"] == one["x"].sum() and answer["table"].tolist() == (np.arange(3) + one["x"].sum()).tolist()
        )
    assert max(sizes) == 1


def test_signatures_that_cannot_be_joined():
    free, fixed, scalar = Spec(INT, (None, 2)), Spec(INT, (2,)), Spec(INT, ())
    assert is_joinable(Signature({"x": free, "k": scalar}, {}))
    assert not is_joinable(Signature({"x_indices": free, "x_dense_shape": fixed}, {}))  # a sparse input
    assert not is_joinable(Signature({"path": scalar}, {}))
    assert not is_joinable(Signature({}, {}))
    assert not is_joinable(Signature({"x": free}, {"y_row_splits": Spec(INT, (None,))}))
    assert not is_joinable(Signature({"x": Spec(INT, None)}, {}))


def test_a_failure_of_the_program_reaches_its_request_only():
    def call(inputs):
        if (inputs["user"] > 1000).any():
            raise ZeroDivisionError("a defect")
        return rank(inputs)

    random = np.random.default_rng(3)
    requests = [request(random, 3) for _ in range(12)]
    requests[9]["user"] = requests[9]["user"] + 2000
    answers, sizes = answer_all(requests, call, at_once=6)
    failed = answers.pop(9)
    assert isinstance(failed, ZeroDivisionError) and max(sizes) > 1
    check(answers, requests[:9] + requests[10:])
