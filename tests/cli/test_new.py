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


def test_files_that_cannot_be_read_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.yaml").touch()
    for words, error in (
        (["nothing.csv"], "FILE: no such file or folder 'nothing.csv'."),
        (["a.csv"], "a.csv: not readable ("),
        (["a.csv", "--output", "b.yaml"], "--output 'b.yaml' exists. Remove it, or pass another --output."),
    ):
        assert main(["new", *words]) == 1
        assert capsys.readouterr().err.startswith(f"error: {error}")


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
