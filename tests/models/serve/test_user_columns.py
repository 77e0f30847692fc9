"""Requests in the columns of a table give the numbers that the converter of training data gives."""

import csv
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.rows import Ragged
from tf_fusedrec.models.data_sets.events import Window
from tf_fusedrec.models.data_sets.layouts import REQUEST, read_info
from tf_fusedrec.models.data_sets.table import column_map, convert_table, convert_table_sequences
from tf_fusedrec.models.serve import tensors
from tf_fusedrec.models.serve.loaded import RequestError, Signature, Spec
from tf_fusedrec.models.serve.user_columns import UserColumns, read_file

COLUMNS = {
    "user": "customer", "item": "sku", "time": "seen_at", "labels": {"click": "clicked", "cart": "bought"},
    "context": {"city": "town"}, "context_numbers": {"age": "age"}, "features": {"brand": "brand"},
    "lists": {"tag": "tags"}, "numbers": {"price": "eur"}, "outcomes": {"seconds": "watched"}, "past": ["brand"],
    "kinds": {"customer": "string"},
}  # fmt: skip
OF_USER = ("customer", "seen_at", "town", "age")
OF_CANDIDATE = ("sku", "brand", "tags", "eur")
OF_HISTORY = (*OF_CANDIDATE, "seen_at", "clicked", "bought", "watched")


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Returns the events of a log with gaps, as text, and its data set, with one row for each event."""
    folder, random = tmp_path_factory.mktemp("shop"), np.random.default_rng(0)
    events = []
    for user in range(12):
        times = np.sort(random.integers(0, 20, 15)) * 3600  # some events have the same time
        age = random.choice(["", str(random.integers(18, 80))])
        for time in times.tolist():
            brand = random.choice(["", "acme", "7", "b rand"])
            events.append({
                "customer": str(user), "sku": random.choice(["A7", "12", "007", "x y"]),
                "seen_at": f"2024-05-{1 + time // 86400:02} {time // 3600 % 24:02}:30:00",
                "clicked": str(random.integers(2)), "bought": str(random.integers(2)),
                "town": ["Rome", "Oslo", ""][user % 3], "age": age, "brand": brand,
                "tags": random.choice(["", "a", "b|c", "5|b|a"]),
                "eur": random.choice(["", str(random.integers(1, 99) / 4)]), "watched": str(random.integers(1, 60)),
            })  # fmt: skip
    with (folder / "log.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, events[0])
        writer.writeheader()
        writer.writerows(events)
    window = Window(exposures=1, history=1000)
    convert_table(folder / "log.csv", folder / "data", column_map(COLUMNS), window=window)
    return events, folder / "data"


def instance_of(events, event):
    """Returns the instance of an event: its user's earlier events, and the event as a candidate. "" is left out."""

    def kept(names, row):
        return {name: row[name] for name in names if row[name] != ""}

    earlier = [kept(OF_HISTORY, row) for row in events
               if row["customer"] == event["customer"] and row["seen_at"] < event["seen_at"]]  # fmt: skip
    return {**kept(OF_USER, event), "history": earlier, "exposed": [kept(OF_CANDIDATE, event)]}


def test_a_request_has_the_ids_and_numbers_of_training(shop):
    events, folder = shop
    types = read_info(folder).columns["test"]
    names = [name for name in types if not name.endswith(("exposed_click", "exposed_cart"))]
    columns = []
    for name in names:
        element = types[name].removeprefix("list<").removesuffix(">")
        columns.append(Column(name, element, ragged=element != types[name]))
    rows = list(ParquetFolder(folder / "test", columns).read())
    expected = {name: np.concatenate([_flat(part.columns[name]) for part in rows]) for name in names}
    # The rows of the data set are in the order of user and time. Its events are found again by both.
    held_out = sorted(events, key=lambda event: event["seen_at"])[len(events) * 9 // 10]["seen_at"]
    late = [event for event in events if event["seen_at"] >= held_out]
    asked = UserColumns(COLUMNS, {"ctr": "click"})
    by_user = {
        str(asked.read([instance_of(events, event)], ["user_id"]).inputs["user_id"][0]): event["customer"]
        for event in late
    }
    order = []
    for user in dict.fromkeys(expected["user_id"].tolist()):
        order += [event for event in late if event["customer"] == by_user[str(user)]]
    read = asked.read([instance_of(events, event) for event in order], [*names, "history_row_splits"])
    assert read.inputs["history_row_splits"][-1] > 100 and read.exposed_splits.tolist() == list(range(len(order) + 1))
    for name in names:
        np.testing.assert_array_equal(read.inputs[name], expected[name], err_msg=name)


def _flat(values):
    return values.values if isinstance(values, Ragged) else values


def test_json_values_have_the_ids_of_their_text(shop):
    events, _ = shop
    asked = UserColumns(COLUMNS, {"ctr": "click"})
    instance = instance_of(events, events[-1])
    typed = json.loads(json.dumps(instance))
    for event in (*typed["history"], *typed["exposed"]):
        event["tags"] = event["tags"].split("|") if "tags" in event else None
        event["eur"] = float(event["eur"]) if "eur" in event else None
        event["sku"] = int(event["sku"]) if event["sku"] == "12" else event["sku"]
    for event in typed["history"]:
        event["clicked"] = event["clicked"] == "1"
    names = ["exposed_item", "history_item", "history_tag", "history_tag_count", "history_price", "history_action"]
    for name, values in asked.read([typed], names).inputs.items():
        np.testing.assert_array_equal(values, asked.read([instance], names).inputs[name], err_msg=name)


def test_the_example_request_of_a_data_set_can_be_sent(shop):
    _, folder = shop
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    inputs = {"exposed_item": Spec(np.dtype(np.int64), (None,)), "history_price": Spec(np.dtype(np.float32), (None,))}
    signatures = {"serving_default": Signature(inputs, {})}
    asked = UserColumns(COLUMNS, {"ctr": "click"})
    predict = tensors.parse(json.dumps(request).encode(), signatures, asked)
    assert predict.signature == "serving_default" and predict.splits.tolist() == [0, 2]
    assert len(predict.inputs["exposed_item"]) == 2 and len(predict.inputs["history_price"]) == 3
    body = tensors.response_by_row({"click": np.array([0.25, 0.5], np.float32)}, predict.splits)
    assert json.loads(body) == {"predictions": [{"click": [0.25, 0.5]}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["exposed"][0].update(eur="cheap"), r"exposed\[0\]: column 'eur' has 'cheap', want a number"),
        (lambda i: i["history"][2].update(clicked=2), r"history\[2\]: column 'clicked' is a label and has 2"),
        (lambda i: i["history"][1].pop("sku"), r"instances\[0\].history\[1\]: column 'sku' is empty, want a value"),
        (lambda i: i.update(seen_at="soon"), r"instances\[0\]: column 'seen_at' has 'soon', want a time"),
        (lambda i: i["history"][0].update(seen_at=i["seen_at"]), r"history\[0\]: column 'seen_at' has .* not before"),
        (lambda i: i.update(twon="Rome"), r"instances\[0\] has the key 'twon', want only keys of \['customer'"),
        (lambda i: i.update(exposed=[]), r"instances\[0\].exposed is \[\], want a list of at least one event"),
        (lambda i: i["exposed"][0].update(sku={"a": 1}), r"exposed\[0\]: column 'sku' has {\"a\": 1}, want text"),
        (lambda i: i["exposed"][0].update(sku=["A7"]), r"exposed\[0\]: column 'sku' has a list, want one id"),
    ],
)  # fmt: skip
def test_an_unusable_value_is_named_with_its_event(shop, change, message):
    events, _ = shop
    instance = instance_of(events, events[14])
    change(instance)
    with pytest.raises(RequestError, match=message) as error:
        UserColumns(COLUMNS, {"ctr": "click"}).read([instance], ["exposed_item"])
    assert error.value.status == 400


def test_a_request_of_a_search_has_the_sequence_of_training(shop, tmp_path):
    events, folder = shop
    columns = {name: COLUMNS[name] for name in ("user", "item", "time")} | {"order": "any"}
    convert_table_sequences(folder.parent / "log.csv", tmp_path / "data", column_map(columns))
    inputs = {"item_id": Spec(np.dtype(np.int64), (None,))}
    body = (tmp_path / "data" / REQUEST).read_bytes()
    predict = tensors.parse(body, {"top_k": Signature(inputs, {})}, UserColumns(columns, {}))
    assert (predict.signature, predict.splits, predict.inputs["k"]) == ("top_k", None, 3)
    rows = pq.read_table(tmp_path / "data/test").to_pylist()
    asked = {name: values.tolist() for name, values in predict.inputs.items()}
    row = next(row for row in rows if row["item_id"][-3:] == asked["item_id"])
    assert [*row["timestamp"][-3:], row["target_timestamp"]] == [*asked["timestamp"], *asked["query_time"]]
    # A user without events, and one whose events are not in order, in one request.
    ann = [{"sku": event["sku"], "seen_at": event["seen_at"]} for event in events[2::-1]]
    read = UserColumns(columns, {}).read([{"seen_at": "2025-01-01"}, {"seen_at": "2025-01-01", "history": ann}], inputs)
    assert read.inputs["row_splits"].tolist() == [0, 0, 3] and read.inputs["k"] == 10
    assert (np.diff(read.inputs["timestamp"]) >= 0).all()


@pytest.mark.parametrize(
    ("instances", "message"),
    [
        ([{"time": 9, "k": 0}], r"instances have the k \[0\], want one integer >= 1. Use the same in all."),
        ([{"time": 9, "k": 2}, {"time": 9}], r"instances have the k \[2, 10\], want one integer >= 1"),
        ([{"time": 9, "k": True}], r"instances have the k \[true\], want one integer"),
        ([{"time": 9, "exposed": []}], r"instances\[0\] has the key 'exposed', want only keys of \['user', 'time'\]"),
        ([{"time": 9, "history": [{"item": "A"}]}], r"history\[0\]: column 'time' is empty, want a value"),
        (
            [{"time": 9, "history": [{"time": 9, "item": "A"}]}],
            r"history\[0\]: column 'time' has 9, which is not",
        ),
        ([{"time": 9, "history": [{"time": 8}]}], r"history\[0\]: column 'item' is empty, want a value"),
        (["ann"], r"instances\[0\] is \"ann\", want an object with \['user', 'time'\]"),
        ([], "'instances' must be a list of at least one object"),
    ],
)
def test_an_unusable_search_is_named(instances, message):
    with pytest.raises(RequestError, match=message):
        UserColumns({"user": "user", "item": "item", "time": "time"}, {}).read(instances, [])


def test_a_damaged_file_of_columns_is_named(tmp_path):
    (tmp_path / "columns.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"columns.json' is damaged: .*missing 2 required.* Remedy: copy it again"):
        read_file(tmp_path / "columns.json")
