"""Small Parquet folders for the tests of this room, and reading a ParquetFolder back as Python lists."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.rows import Ragged

COLUMNS = (Column("user_id"), Column("item_id", ragged=True), Column("rating", "float32", ragged=True))


def user_table(num_rows, first_user=0):
    """Row u has u % 4 items u*10, u*10+1, ... (so every fourth row has none), each rated with its place."""
    users = range(first_user, first_user + num_rows)
    return pa.table(
        {
            "user_id": pa.array(list(users), pa.int64()),
            "item_id": pa.array([[u * 10 + i for i in range(u % 4)] for u in users], pa.list_(pa.int64())),
            "rating": pa.array([[float(i) for i in range(u % 4)] for u in users], pa.list_(pa.float32())),
            "unread": pa.array(["text"] * num_rows),
        }
    )


def write_folder(folder, rows_per_file, row_group_size):
    """Writes user_table rows, numbered through, into one file per entry of rows_per_file."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, num_rows in enumerate(rows_per_file):
        table = user_table(num_rows, first)
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=row_group_size)
        first += num_rows
    return folder


def read_lists(folder: ParquetFolder, epoch=0):
    """Returns all rows of this rank and epoch, each as a tuple of Python values in the order of the columns."""
    rows = []
    for chunk in folder.read(epoch):
        columns = [to_lists(chunk.columns[column.name]) for column in folder.columns]
        rows += list(zip(*columns))
    return rows


def columns(names):
    """Returns the Columns of names such as "user_id item_id* age:f price*f": * marks lists and f float32."""
    marked = (re.fullmatch(r"(\w+)(\*?):?(f?)", name).groups() for name in names.split())
    return [Column(name, "float32" if kind else "int64", ragged=bool(star)) for name, star, kind in marked]


def lists(path, names):
    """Returns all rows of a folder's columns, which are named as for `columns`."""
    return read_lists(ParquetFolder(path, columns(names)))


def to_lists(column):
    """Returns a column as a list with one Python value (or tuple of values) per row."""
    if isinstance(column, Ragged):
        return [tuple(piece.tolist()) for piece in np.split(column.values, column.row_splits[1:-1])]
    return column.tolist()


def expected_rows(num_rows):
    """Returns the result of read_lists for user_table(num_rows) without shuffling."""
    return [
        (u, tuple(u * 10 + i for i in range(u % 4)), tuple(float(i) for i in range(u % 4))) for u in range(num_rows)
    ]
