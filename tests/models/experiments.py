"""Small experiments of both tasks, and their data as partitions."""

import pathlib

import pyarrow.parquet as pq

RANKING = {
    "name": "test_ranking",
    "task": "ranking",
    "data": {
        "source": "synthetic-ranking", "users": 40, "items": 20, "clusters": 4, "mean_history": 6, "exposures": 4,
    },
    "model": {
        "contextual": ["user_budget"], "max_history": 20, "max_exposures": 4, "dim": 8, "num_blocks": 1,
        "num_heads": 1, "qk_dim": 4, "value_dim": 4, "expert_units": 4, "head_units": 4,
    },
    "train": {"target_tokens_per_rank": 64},
}  # fmt: skip
RETRIEVAL = {
    "name": "test_retrieval",
    "task": "retrieval",
    "data": {"source": "synthetic-retrieval", "users": 40, "items": 20, "clusters": 4, "mean_history": 6},
    "model": {
        "max_history": 20, "dim": 8, "num_blocks": 1, "qk_dim": 4, "value_dim": 4, "num_negatives": 4,
    },
    "train": {"target_tokens_per_rank": 64},
}  # fmt: skip


# Fields of the model section that all kinds of ranking models know.
_SHARED = ("contextual", "max_history", "max_exposures", "dim")


def ranking(kind: str) -> dict:
    """Returns RANKING with a model of a kind. Models other than GRM have their default sizes."""
    model = RANKING["model"] if kind == "grm" else {name: RANKING["model"][name] for name in _SHARED}
    return {**RANKING, "model": {**model, "kind": kind}}


def in_partitions(folder: pathlib.Path, count: int) -> pathlib.Path:
    """Splits the training rows of a prepared data set into complete partitions hour=8, hour=9, ..."""
    table = pq.read_table(folder / "train")
    for file in (folder / "train").glob("*.parquet"):
        file.unlink()
    for number in range(count):
        part = folder / "train" / f"hour={8 + number}"
        part.mkdir()
        begin, end = (len(table) * bound // count for bound in (number, number + 1))
        pq.write_table(table.slice(begin, end - begin), part / "part-0.parquet", row_group_size=4)
        (part / "_SUCCESS").touch()
    return folder
