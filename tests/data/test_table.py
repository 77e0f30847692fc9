"""Tables of events with foreign column names: rows by hand from CSV and Parquet, and every fault by file and row."""

import dataclasses
import datetime
import decimal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.data.shards import lists
from tf_fusedrec import tf
from tf_fusedrec.data.columns import BadInput
from tf_fusedrec.data.fingerprint import hash_strings
from tf_fusedrec.models.data_sets.events import Window
from tf_fusedrec.models.data_sets.layouts import read_info
from tf_fusedrec.models.data_sets.strings import id_of_text, texts_of
from tf_fusedrec.models.data_sets.table import column_map, convert_table, convert_table_sequences
from tf_fusedrec.models.data_sets.table_files import TableFiles

MAP = {
    "user": "customer", "item": "sku", "time": "seen_at", "labels": {"click": "clicked"}, "context": {"city": "town"},
    "context_numbers": ["age"], "features": ["brand"], "lists": {"tag": "tags"}, "numbers": {"price": "eur"},
    "outcomes": ["seconds"], "past": ["brand"],
}  # fmt: skip
HEADER = ["customer", "sku", "seen_at", "clicked", "town", "age", "brand", "tags", "eur", "seconds", "unused"]
ROWS = [
    ["ann", "7", "2024-05-01 10:00:00", "1", "Rome", "31", "b1", "red|old", "2.5", "9", "x"],
    ["ann", "8", "2024-05-01 11:00:00", "0", "Rome", "31", "b1", "", "", "1", "x"],
    ["ann", "9", "2024-05-01 12:00:00", "1", "Rome", "31", "b2", "new", "4", "2", "x"],
    ["bob", "7", "2024-05-01 10:30:00", "0", "Oslo", "20", "b1", "red", "2.5", "3", "x"],
    ["bob", "8", "2024-05-01 12:30:00", "0", "Oslo", "20", "", "old", "3", "4", "x"],
]
SIZES = Window(exposures=4, history=4, validation=0.2, test=0.4)


def csv_file(path, rows=ROWS, header=HEADER):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(",".join(row) + "\n" for row in [header, *rows]), encoding="utf-8")
    return path.parent


def convert(folder, output, columns=MAP, **arguments):
    return convert_table(folder, output, column_map(columns), window=SIZES, **arguments)


def code(text):
    return int(hash_strings(tf.constant(text)))


def test_rows_by_hand(tmp_path):
    info = convert(csv_file(tmp_path / "raw/a.csv"), tmp_path / "d")
    assert (info.users, info.items) == (2, 3) and read_info(tmp_path / "d") == info
    assert info.source.startswith("table, raw, 1 file, 5 of 5 rows, customer strings as fingerprints, seen_at in micro")
    columns = "user_id city age:f history_item* exposed_item* exposed_brand* exposed_tag* exposed_tag_count* "
    columns += "exposed_price*f history_seconds*f exposed_click*f exposed_past_brand_click_rate*f"
    ann, bob = ([code(user), code(town), age] for user, town, age in (("ann", "Rome", 31.0), ("bob", "Oslo", 20.0)))
    # The events end at 10:00, 10:30 and 11:00 in train, the latest two are test.
    train = {row[:3]: row[3:] for row in lists(tmp_path / "d/train", columns)}
    tags, brands = [code(tag) for tag in ("red", "old", "new")], [code(brand) for brand in ("b1", "b2")]
    assert train[tuple(ann)] == (
        (), (7, 8), (brands[0],) * 2, (tags[0], tags[1]), (2, 0), pytest.approx((2.5, np.nan), nan_ok=True), (),
        (1.0, 0.0), pytest.approx((np.nan, 1.0), nan_ok=True),
    )  # fmt: skip
    test = {row[0]: row[3:] for row in lists(tmp_path / "d/test", columns)}
    nan = pytest.approx((np.nan,), nan_ok=True)
    assert test[ann[0]] == ((7, 8), (9,), (brands[1],), (tags[2],), (1,), (4.0,), (9.0, 1.0), (1.0,), nan)
    assert test[bob[0]] == ((7,), (8,), (-1,), (tags[1],), (1,), (3.0,), (3.0,), (0.0,), nan)


def test_every_column_of_strings_keeps_its_texts_the_most_frequent_first(tmp_path):
    folder = csv_file(tmp_path / "raw/a.csv")
    convert(folder, tmp_path / "d")
    for name, texts in {"user_id": ["ann", "bob"], "city": ["Rome"], "brand": ["b1", "b2"], "tag": ["red"]}.items():
        ids = [code(text) for text in texts]
        assert texts_of(tmp_path / "d", name, [*ids, 5]) == dict(zip(ids, texts))
    assert texts_of(tmp_path / "d", "item", [7]) == {} and id_of_text(tmp_path / "d", "tag", "old") == code("old")
    convert(folder, tmp_path / "one", texts=1)
    assert texts_of(tmp_path / "one", "brand", [code("b1"), code("b2")]) == {code("b1"): "b1"}
    convert(folder, tmp_path / "none", texts=0)
    assert not (tmp_path / "none/strings.parquet").exists()


def test_events_of_earlier_days_are_history_only(tmp_path):
    """The second day has the last two events. All of them are test rows, and see the first day."""
    first = csv_file(tmp_path / "first/a.csv", [ROWS[0], ROWS[1], ROWS[3]])
    second = csv_file(tmp_path / "second/b.csv", [ROWS[2], ROWS[4]])
    info = convert(second, tmp_path / "d", earlier=[first], held_out="all")
    columns = "user_id history_item* exposed_item* exposed_past_item_count*f exposed_past_user_click_rate*f"
    rows = {row[0]: row[1:] for row in lists(tmp_path / "d/test", columns)}
    assert rows == {code("ann"): ((7, 8), (9,), (0.0,), (0.5,)), code("bob"): ((7,), (8,), (0.0,), (0.0,))}
    earlier = {row[0]: row[2] for row in lists(tmp_path / "d/train", columns)}
    assert earlier == {code("ann"): (7, 8), code("bob"): (7,)} and "1 earlier source as history" in info.source
    # The split is that of the new events: one of two is test.
    convert(second, tmp_path / "e", earlier=[first])
    assert [row[2] for row in lists(tmp_path / "e/train", columns)] == [(9,)]
    assert [row[1:3] for row in lists(tmp_path / "e/test", columns)] == [((7,), (8,))]
    convert(second, tmp_path / "f", held_out="all")
    assert all(row[1] == () for row in lists(tmp_path / "f/test", columns))


def test_spellings_of_missing_numbers_bools_and_times(tmp_path):
    rows = [[*row[:3], {"1": "True", "0": "false"}[row[3]], *row[4:8], row[8] or "n/a", row[9], "x"] for row in ROWS]
    convert(csv_file(tmp_path / "raw/a.csv"), tmp_path / "d")
    for row in rows:  # as time.time() is written
        row[2] = f"{datetime.datetime.fromisoformat(row[2] + '+00:00').timestamp() + 0.25}"
    info = convert(csv_file(tmp_path / "spelled/a.csv", rows), tmp_path / "e")
    assert "seen_at in microseconds cut to seconds" in info.source
    for part in ("train", "test"):
        np.testing.assert_equal(*(pq.read_table(tmp_path / each / part).to_pydict() for each in "de"))


def test_other_files_and_orders_are_the_same_data(tmp_path):
    convert(csv_file(tmp_path / "raw/a.csv"), tmp_path / "d")
    table = pa.csv.read_csv(tmp_path / "raw/a.csv")
    tags = pa.array([row.split("|") if row else [] for row in table["tags"].to_pylist()])
    table = table.set_column(table.column_names.index("tags"), "tags", tags)
    (tmp_path / "parquet").mkdir()
    for number, part in enumerate((table.slice(0, 3), table.slice(3))):
        pq.write_table(part, tmp_path / f"parquet/{number}.parquet")
    csv_file(tmp_path / "mixed/a.csv", [ROWS[4], ROWS[2]])
    csv_file(tmp_path / "mixed/b.csv", [ROWS[0], ROWS[3], ROWS[1]])
    for name, order in (("parquet", "file"), ("mixed", "any")):
        convert(tmp_path / name, tmp_path / "out" / name, {**MAP, "order": order})
        for part in ("train", "test"):
            tables = (pq.read_table(folder / part).to_pydict() for folder in (tmp_path / "out" / name, tmp_path / "d"))
            np.testing.assert_equal(*tables)


def with_value(row, column, value):
    changed = [list(one) for one in ROWS]
    changed[row][HEADER.index(column)] = value
    return changed


def everywhere(column, value):
    return [[value if name == column else old for name, old in zip(HEADER, row)] for row in ROWS]


FAULTS = {
    "a label outside": (with_value(3, "clicked", "2"), "a.csv, row 4: column 'clicked' is a label and has 2, want 0"),
    "a label that is text": (with_value(1, "clicked", "no"), r"a.csv, row 2: column 'clicked' has 'no', want 0 or 1"),
    "no label": (with_value(2, "clicked", ""), "a.csv, row 3: column 'clicked' is empty, want a value"),
    "no user": (with_value(4, "customer", ""), "a.csv, row 5: column 'customer' is empty"),
    "a number that is text": (with_value(2, "eur", "cheap"), "a.csv, row 3: column 'eur' has 'cheap', want a number"),
    "an infinite number": (with_value(2, "eur", "inf"), "a.csv, row 3: column 'eur' has 'inf', want a finite float32"),
    "a number beyond float32": (with_value(2, "eur", "-1e39"), "a.csv, row 3: column 'eur' has '-1e39', want a finite"),
    "a time that is none": (with_value(1, "seen_at", "noon"), "a.csv, row 2: column 'seen_at' has 'noon', want a time"),
    "all null": (everywhere("brand", ""), "a.csv, row 1, to .*a.csv, row 5: column 'brand' has no value"),
    "no list": (everywhere("tags", ""), "a.csv, row 1, to .*a.csv, row 5: column 'tags' has no value"),
    "constant number": (
        everywhere("seconds", "3"),
        "a.csv, row 1, to .*: column 'seconds' has the same value .* 3, and so",
    ),
    "constant label": (everywhere("clicked", "1"), "a.csv, row 1, to .*: column 'clicked' has the same value every"),
    "constant id": (everywhere("brand", "A5"), "a.csv, row 1, to .*: column 'brand' has the same value everywhere, A5"),
    "a time that is a date": (
        [[*row[:2], f"2024050110000{at}", *row[3:]] for at, row in enumerate(ROWS)],
        r"a.csv, row 1: column 'seen_at' has 20240501100000, a date written as a number, want seconds",
    ),
    "one time that is a date": (
        with_value(3, "seen_at", "20240501103000"),
        r"a.csv, row 4: column 'seen_at' has '20240501103000', want a time: seconds since 1970, or text",
    ),
    "an id beyond int64": (with_value(2, "sku", str(2**63)), f"a.csv, row 3: column 'sku' has the id '{2**63}', want"),
    "an id that lost digits": (with_value(2, "sku", "1e+16"), r"a.csv, row 3: column 'sku' has the id '1e\+16', want"),
    "an id above 2^53 as a float": (with_value(2, "sku", f"{2**53 + 2}.0"), "row 3: column 'sku' has the id '9"),
    "a tag beyond int64": (with_value(3, "tags", f"7|{2**64}"), "a.csv, row 4: column 'tags' has the id '184"),
    "decreasing times": ([ROWS[1], ROWS[0], *ROWS[2:]], "a.csv, row 2: its column 'seen_at' has an earlier time than "),
    "two values of context": (
        with_value(1, "town", "Bari"),
        "a.csv, row 2: column 'town' is context and differs from ",
    ),
}


@pytest.mark.parametrize(("rows", "message"), FAULTS.values(), ids=FAULTS)
def test_faults_are_named_by_file_and_row(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        convert(csv_file(tmp_path / "raw/a.csv", rows), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def id_texts():
    """Returns the ids by their texts. Fingerprints are those of fr.hash_strings, which has an oracle of its own."""
    others = ("A7", "007", "-0", "+5", " 5", "1.5", "12.00", "12.0.0", "5 ", "\u0665")
    numbers = {"12": 12, "12.0": 12, "0": 0, "-5": -5, str(2**63 - 1): 2**63 - 1, str(-(2**63)): -(2**63)}
    return numbers | {text: code(text) for text in others}


def table_of(path, *files, column="c", kinds=None):
    """The files are lists of texts, which become CSV files with a second column, or Arrow arrays."""
    path.mkdir()
    for number, values in enumerate(files):
        table = pa.table({column: values, "other": pa.array(range(len(values)))})
        if isinstance(values, list):
            pa.csv.write_csv(table, path / f"{number}.csv")
        else:
            pq.write_table(table, path / f"{number}.parquet")
    return TableFiles([path], [column, "other"], BadInput("error"), kinds)


def test_the_id_of_a_value_depends_on_no_other_row(tmp_path):
    texts = id_texts()
    found, strings = table_of(tmp_path / "all", [*texts]).ids("c")
    assert found.tolist() == [*texts.values()] == hash_strings([*texts], integers=True).tolist()
    assert strings[code("007")] == "007" and 12 not in strings
    for number, (text, wanted) in enumerate(texts.items()):
        assert table_of(tmp_path / str(number), ["99", text]).ids("c")[0].tolist() == [99, wanted]
    ids, _ = table_of(tmp_path / "lists", ["12.0|007", "", "A7"]).lists("c")
    assert ids.values.tolist() == [12, code("007"), code("A7")] and ids.lengths().tolist() == [2, 0, 1]
    as_string = table_of(tmp_path / "string", [*texts], kinds={"c": "string"}).ids("c")[0]
    assert as_string.tolist() == hash_strings([*texts]).tolist()
    assert table_of(tmp_path / "integer", ["12", "13.0"], kinds={"c": "integer"}).ids("c")[0].tolist() == [12, 13]
    with pytest.raises(ValueError, match=r"1.csv, row 2: column 'c' has the id 'A7', want an integer. Correct the row"):
        table_of(tmp_path / "no integer", ["12"], ["13", "A7"], kinds={"c": "integer"}).ids("c")


PLAIN = ["12", "", "A7", None]
ENCODINGS = {
    **{str(kind): pa.array(PLAIN, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    "dictionary": pa.array(PLAIN).dictionary_encode(),
    **{
        str(kind): pa.array([text and text.encode() for text in PLAIN], kind)
        for kind in (pa.binary(), pa.large_binary(), pa.binary_view())
    },
}


@pytest.mark.parametrize("values", ENCODINGS.values(), ids=ENCODINGS)
def test_every_encoding_of_text_has_the_same_ids(tmp_path, values):
    table = table_of(tmp_path / "t", values)
    assert table.ids("c")[0].tolist() == [12, -1, code("A7"), -1]
    with pytest.raises(ValueError, match="0.parquet, row 2: column 'c' is empty, want a value"):
        table.ids("c", required=True)
    lists = (
        pa.LargeListArray.from_arrays([0, 2, 4], values) if "view" not in str(values.type) else pa.array([PLAIN] * 2)
    )
    assert table_of(tmp_path / "l", lists).lists("c")[0].values.tolist()[:2] == [12, code("A7")]


def test_files_of_other_types_have_the_same_ids(tmp_path):
    files = [pa.array([12, 13]), pa.array([12.0, None, 1e15, 1.5]), pa.array(["A7", "12"]), pa.array([12], pa.uint64())]
    wanted = [12, 13, 12, -1, 10**15, code("1.5"), code("A7"), 12, 12]
    assert table_of(tmp_path / "t", *files).ids("c")[0].tolist() == wanted
    decimals = pa.array([decimal.Decimal("12.00"), decimal.Decimal("1.50")])
    assert table_of(tmp_path / "d", decimals).ids("c")[0].tolist() == [12, code("1.50")]


NESTED = {
    "list": (pa.array([[1], [2]]), "ids", "row 1: column 'c' has a list, want one id. Name it under columns.lists"),
    "list of lists": (pa.array([[], [[1]]]), "lists", "row 2: column 'c' has a list of list<.*, want a list of ids"),
    "list of structs": (pa.array([[], [{"a": 1}]]), "lists", "row 2: column 'c' has a struct<a: int64>, want one va"),
    "struct": (pa.array([None, {"a": 1}]), "ids", "row 2: column 'c' has a struct<a: int64>, want one value"),
    "map": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "ids", "row 1: column 'c' has a map<.*, want"),
    "uint64": (pa.array([1, 2**63], pa.uint64()), "ids", f"row 2: column 'c' has the id '{2**63}', want an int64"),
    "no UTF-8": (pa.array([b"a", b"\xff"]), "ids", r"row 2: column 'c' has b'\\xff', want text in UTF-8"),
    "infinite": (pa.array([1.0, np.inf]), "ids", "row 2: column 'c' has the id 'inf', want an int64 without rounding"),
}


@pytest.mark.parametrize(("values", "method", "message"), NESTED.values(), ids=NESTED)
def test_values_that_are_no_ids_are_named_by_file_and_row(tmp_path, values, method, message):
    with pytest.raises(ValueError, match=f"0.parquet, {message}"):
        getattr(table_of(tmp_path / "t", values), method)("c")


def test_a_large_file_may_have_newlines_in_quotes(tmp_path):
    rows = [[f"{at}", f"a{at}\n{'z' * 80}"] for at in range(20_000)]  # more than a block of 1 MiB
    (tmp_path / "a.csv").write_text("c,other\n" + "".join(f'{a},"{b}"\n' for a, b in rows), encoding="utf-8")
    table = TableFiles([tmp_path], ["c", "other"], BadInput("error"))
    assert table.ids("c")[0].tolist() == [*range(20_000)] and len(table.ids("other")[1]) == 20_000


def test_faults_of_files(tmp_path):
    raw = csv_file(tmp_path / "raw/a.csv", ROWS[:2])
    csv_file(tmp_path / "raw/b.csv", ROWS[2:])
    with pytest.raises(ValueError, match="b.csv, row 1: its column 'customer' has a user of .*a.csv, row 2, 1 such r"):
        convert(raw, tmp_path / "d")
    csv_file(tmp_path / "raw/b.csv", [row[:-2] for row in ROWS], HEADER[:-2])
    with pytest.raises(ValueError, match=r"b.csv: got the columns .*, want also \['seconds'\]. Correct the column map"):
        convert(raw, tmp_path / "d")
    (tmp_path / "raw/b.csv").write_text(";".join(HEADER) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"b.csv: its fields are parted by ';', want commas."):
        convert(raw, tmp_path / "d")
    csv_file(tmp_path / "raw/b.csv", [[*row, "1"] for row in ROWS], [*HEADER, "sku"])
    with pytest.raises(ValueError, match="b.csv: 2 columns have the name 'sku', want one. Rename the others."):
        convert(raw, tmp_path / "d")
    (tmp_path / "raw/b.csv").write_bytes(b'"customer"\n"x')
    with pytest.raises(ValueError, match=r"b.csv"):
        convert(raw, tmp_path / "d")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "raw/c.parquet")
    with pytest.raises(ValueError, match=r"has \['a.csv', 'b.csv', 'c.parquet'\], want files of one kind"):
        convert(raw, tmp_path / "d")
    with pytest.raises(ValueError, match="does not exist, want a folder"):
        convert(tmp_path / "nothing", tmp_path / "d")


def test_skipped_rows_are_logged_and_the_others_stay(tmp_path, caplog):
    rows = with_value(1, "clicked", "7")
    info = convert(csv_file(tmp_path / "raw/a.csv", rows), tmp_path / "d", bad_rows="skip")
    assert "4 of 5 rows" in info.source and "a.csv, row 2: column 'clicked' is a label and has 7" in caplog.text
    seen = [row for part in ("train", "test") for row in lists(tmp_path / "d" / part, "history_item* exposed_item*")]
    assert sorted(item for row in seen for item in row[1]) == [7, 7, 8, 9]


def test_users_items_and_times_alone_are_sequences_for_retrieval(tmp_path):
    columns = column_map({name: MAP[name] for name in ("user", "item", "time")} | {"kinds": {"sku": "string"}})
    folder = csv_file(tmp_path / "raw/a.csv", [*ROWS[::-1], ["eve", "", "2024-05-01 12:30:00", *ROWS[0][3:]]])
    with pytest.raises(ValueError, match="a.csv, row 4: its column 'seen_at' has an earlier time than"):
        convert_table_sequences(folder, tmp_path / "d", columns, bad_rows="skip")
    columns = dataclasses.replace(columns, order="any")
    info = convert_table_sequences(folder, tmp_path / "d", columns, bad_rows="skip", texts=2)
    assert (info.task, info.users, info.items, info.id_kinds) == ("retrieval", 2, 3, {"item": "string"})
    assert "5 of 6 rows, customer strings as fingerprints, sku strings as" in info.source
    rows = pq.read_table(tmp_path / "d/test").sort_by("target_timestamp").to_pydict()
    assert rows["user_id"] == [code("ann"), code("bob")]
    assert rows["item_id"] == [[code("7"), code("8")], [code("7")]] and rows["target_item"] == [code("9"), code("8")]
    assert rows["target_timestamp"][0] - rows["timestamp"][0][0] == 7200
    assert sorted(texts_of(tmp_path / "d", "item", [code(text) for text in "789"]).values()) == ["7", "8"]
    for refused, table in ((convert_table, columns), (convert_table_sequences, column_map(MAP))):
        with pytest.raises(ValueError, match="columns.labels (names no label|is for the task 'ranking')"):
            refused(folder, tmp_path / "e", table)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": "clicked"}, r"data.columns.labels must be a list of names, or {name: column}, got 'clicked'"),
        ({"usr": "x"}, r"data.columns names \['usr'\], and a column map takes \['user', 'item'"),
        ({"past": ["colour"]}, r"columns.past names 'colour', want one of the features \['brand', 'tag'\]"),
        ({"numbers": ["brand"]}, "the name 'brand' twice"),
        ({"features": {"item": "brand"}}, "the name 'item' twice in .* or it is one of"),
        ({"kinds": {"clicked": "string"}}, r"kinds has clicked: string, want a column of ids, one of \['brand'"),
        ({"kinds": {"sku": "text"}}, r"columns.kinds has sku: text, want .* one of \['integer', 'string'\]"),
        ({"order": "time"}, r"columns.order must be one of \['file', 'any'\], got 'time'"),
    ],
)
def test_refused_maps(changed, message):
    with pytest.raises(ValueError, match=message):
        column_map({**MAP, **changed})
    with pytest.raises(ValueError, match=r"data.columns lacks \['time'\]"):
        column_map({"user": "a", "item": "b"})
