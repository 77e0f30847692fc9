"""`fusedrec new` proposes a role for each column, and the YAML is one that `fusedrec train` reads."""

import json
import random

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tf_fusedrec.cli.main import main
from tf_fusedrec.models.experiment import load

ROLES = {
    "customer_id": "user", "sku": "item", "seen_at": "time", "bought": "label", "town": "context", "brand": "feature",
    "tags": "list", "eur": "number", "watched_s": "outcome", "age": "context_number", "always": "",
}  # fmt: skip


def write_table(path):
    draw = random.Random(0)
    rows = []
    for customer in range(30):
        town, age = draw.choice("ab"), draw.uniform(20, 60)
        for day in range(1, 21):
            rows.append({
                "customer_id": f"c{customer}", "sku": draw.randint(1, 40), "seen_at": f"2024-01-{day:02d} 10:00:00",
                "bought": draw.randint(0, 1), "town": town, "brand": draw.choice(["x", "y"]),
                "tags": "|".join(draw.sample(["new", "sale"], draw.randint(1, 2))),
                "eur": draw.choice([None, draw.uniform(1, 50)]), "watched_s": draw.uniform(0, 90), "age": age,
                "always": 1,
            })  # fmt: skip
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, path) if path.suffix == ".parquet" else pa.csv.write_csv(table, path)


@pytest.mark.parametrize("name", ["shop.csv", "shop.parquet"])
def test_each_column_has_a_role_and_the_yaml_is_read(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / name)
    assert main(["new", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"config": "shop.yaml", "roles": ROLES}
    columns = load("shop.yaml").data.column_map
    assert (columns.user, columns.item, columns.time) == ("customer_id", "sku", "seen_at")
    assert columns.labels == {"bought": "bought"} and columns.outcomes == {"watched_s": "watched_s"}
    text = (tmp_path / "shop.yaml").read_text(encoding="utf-8")
    assert '"brand": "brand"  # 2 values, such as ' in text and " % missing" in text and "# left out: always" in text


REFUSED = {
    "no file": (None, "FILE: no such file or folder 'a.csv'."),
    "empty": (b"", "a.csv: not readable (Empty CSV file)."),
    "header only": (b"user,item,time\n", "a.csv: not readable (it has no row)."),
    "a name twice": (
        b"user,price,price\nu,1,2\n",
        "a.csv: 2 columns have the name 'price', want one. Rename the other",
    ),
    "semicolons": (b"user;item;time\nu;i;1\n", "a.csv: its fields are parted by ';', want commas."),
    "Latin-1": (b"user,item\nZo\xeb,1\n", "a.csv, row 1: column 'user' has b'Zo\\xeb', want text in UTF-8."),
}


@pytest.mark.parametrize(("content", "error"), REFUSED.values(), ids=REFUSED)
def test_files_that_cannot_be_read_are_refused(tmp_path, monkeypatch, capsys, content, error):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "a.csv").write_bytes(content)
    assert main(["new", "a.csv"]) == 1 and capsys.readouterr().err.startswith(f"error: {error}")
    assert not (tmp_path / "a.yaml").exists()


def test_output_that_exists_or_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "a.csv")
    (tmp_path / "b.yaml").touch()
    for output, error in (("b.yaml", "'b.yaml' exists. Remove it,"), ("no/c.yaml", "cannot be written: [Errno 2]")):
        assert main(["new", "a.csv", "--output", output]) == 1
        assert capsys.readouterr().err.startswith(f"error: --output {error}")


def test_names_that_a_model_cannot_have_are_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {
        "brand name": "brand_name", "brand-name": "column_brand_name", "item": "column_item", "2nd": "column_2nd",
        "class": "column_class", "": "column_", "past_x": "column_past_x", "Pre\u00e7o": "Pre_o", "ok?": "ok",
    }  # fmt: skip
    lines = [["uid", "sku", "ts", *names]]  # pandas writes 12.0 for the user 12 where one is missing
    lines += [
        [f"{12 + at % 2}.0", f"s{at}", f"{at}", *[f"{at % 3}"] * (len(names) - 1), f"{at % 2}"] for at in range(8)
    ]
    (tmp_path / "a.csv").write_text("\n".join(",".join(line) for line in lines), encoding="utf-8")
    assert main(["new", "a.csv"]) == 0
    experiment = load("a.yaml")
    columns = experiment.data.column_map
    assert {column: name for name, column in {**columns.features, **columns.labels}.items()} == names
    assert experiment.data.window == 1 and columns.user == "uid"  # four events of a user


def test_a_role_without_a_column_is_refused_until_it_is_filled_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("uid,sku,ts,liked,nothing\na,b,1,-1,\nb,c,2,1,\n", encoding="utf-8")
    assert main(["new", "a.csv"]) == 0 and "# left out: nothing" in (tmp_path / "a.yaml").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"data.columns: columns has \?\?\? for the labels 'click'. Name a column"):
        load("a.yaml")


def test_files_of_a_folder_that_are_no_data_are_skipped_and_names_stay_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "2026-11-25.csv")
    assert main(["new", "2026-11-25.csv"]) == 0
    assert load("2026_11_25.yaml").name == "2026_11_25"  # YAML reads it as a number without quotes
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    assert main(["new", "days"]) == 1 and "FILE: no file ends in .csv" in capsys.readouterr().err
    write_table(folder / "day.parquet")
    assert main(["new", "days"]) == 0 and "columns of days/day.parquet" in capsys.readouterr().out
    write_table(folder / "night.parquet")
    days = ["days/day.parquet", "days/night.parquet"]
    assert main(["new", *days, "--output", "b.yaml"]) == 0 and load("b.yaml").data.input == "days"
    write_table(folder / "other.parquet")
    assert main(["new", *days, "--output", "c.yaml"]) == 1
    assert "FILE: the files are not all of days/, 'other.parquet' for one" in capsys.readouterr().err
