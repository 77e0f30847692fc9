"""fit_calls on a growing folder: from every checkpoint position on, the remaining rows come exactly once.

With train.cluster_samples, the samples of each batch come in another order.
"""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.models import experiments
from tf_fusedrec import ops, tf
from tf_fusedrec.data.batches import piece_bounds
from tf_fusedrec.models import data_cache
from tf_fusedrec.models.build import ids_by_table
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.fit_calls import fit_calls
from tf_fusedrec.models.prepare import prepare_data

PARTITIONS = 3


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """Returns an experiment and a folder that ends after its partitions."""
    fields = {
        **experiments.RANKING,
        "data": {**experiments.RANKING["data"], "follow": True, "max_partitions": PARTITIONS},
    }
    experiment = from_dict(fields)
    folder = prepare_data(experiment, tmp_path_factory.mktemp("data"))
    return experiment, experiments.in_partitions(folder, PARTITIONS)


def users(followed, saved=None):
    """Returns [(number of the partition, its users step by step)] and the positions after every step."""
    found, positions = [], []
    for one in fit_calls(*followed, json.loads(json.dumps(saved))):
        assert one.end == one.epoch + 1
        batches = [batch["user_id"].numpy().tolist() for batch in one.dataset]
        assert len(batches) == one.steps - one.step
        found.append((one.epoch, batches))
        positions += [one.position(one.epoch, one.step + step) for step in range(len(batches))]
        positions.append(one.position(one.epoch + 1, 0))
    return found, positions


@pytest.mark.slow
def test_every_position_goes_on_with_the_very_same_batches(followed):
    whole, positions = users(followed)
    assert [epoch for epoch, _ in whole] == [0, 1, 2]
    trained = [user for _, batches in whole for users in batches for user in users]
    assert len(trained) == len(set(trained)) == experiments.RANKING["data"]["users"]
    steps = [(epoch, batch) for epoch, batches in whole for batch in batches]
    done = 0
    for position in positions:
        again, _ = users(followed, position)
        assert [(epoch, batch) for epoch, batches in again for batch in batches] == steps[done:]
        done += position["epoch"] == 0  # The position after a partition equals the position before the next one.
    assert done == len(steps)


def test_a_partition_without_rows_has_no_round(followed, tmp_path):
    experiment, folder = followed
    (tmp_path / "train").mkdir()
    for number, name in enumerate(["hour=8", "hour=9", "hour=10"]):
        (tmp_path / "train" / name).mkdir()
        (tmp_path / "train" / name / "_SUCCESS").touch()
        source = folder / "train" / name / "part-0.parquet"
        table = pq.read_table(source)
        pq.write_table(table.slice(0, 0) if number == 1 else table, tmp_path / "train" / name / "a.parquet")
    found, _ = users((experiment, tmp_path))
    assert [epoch for epoch, _ in found] == [0, 2]


def test_an_epoch_of_which_only_empty_batches_are_left_is_over_for_other_ranks(tmp_path):
    """Epochs have as many steps as the longest of them, so others end with empty batches."""
    experiment = from_dict({**experiments.RANKING, "train": {"target_tokens_per_rank": 64, "epochs": 4}})
    folder = prepare_data(experiment, tmp_path)
    first = next(fit_calls(experiment, folder, None))
    for epoch, wanted in ((1, [(2, 4)]), (3, [])):
        position = {**first.position(epoch, first.steps - 1), "left": [[], []], "ranks": 2}
        found = list(fit_calls(experiment, folder, position))
        assert [(one.epoch, one.end) for one in found] == wanted
        assert all(one.step == 0 and one.dataset.cardinality() == one.steps * 2 for one in found)


def test_a_position_of_the_other_kind_of_data_is_refused(followed):
    experiment, folder = followed
    one = next(fit_calls(experiment, folder, None))
    epochs = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, follow=False))
    with pytest.raises(ValueError, match="is False, but the job of the checkpoint followed a growing folder"):
        fit_calls(epochs, folder, one.position(0, 1))
    saved = {name: value for name, value in one.position(0, 1).items() if name != "partition"}
    with pytest.raises(ValueError, match="data.follow is True, but the job of the checkpoint read one data set"):
        fit_calls(experiment, folder, saved)


@pytest.mark.parametrize("fields", [experiments.RANKING, experiments.RETRIEVAL], ids=["ranking", "retrieval"])
def test_clustered_batches_hold_the_same_samples_in_the_order_of_all_their_ids(fields, tmp_path):
    experiment = from_dict({**fields, "train": {**fields["train"], "schedule": "frozen_window(3)"}})
    clustered = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, cluster_samples=True))
    folder = prepare_data(experiment, tmp_path)
    (plain,), (ordered,) = (list(fit_calls(one, folder, None)) for one in (experiment, clustered))
    assert ordered.dataset.cardinality() == plain.dataset.cardinality() > 0
    moved = 0
    for batch, got in zip(plain.dataset, ordered.dataset):
        features = [
            (number, *_ids_and_splits(one))
            for number, (_, given) in enumerate(sorted(ids_by_table(experiment.model, batch).items()))
            for one in given
        ]
        numbers, ids, splits = zip(*features)
        samples = len(splits[0]) - 1
        order = ops.cluster_samples(ids, splits, np.diff(piece_bounds(samples, 3)), tables=numbers).numpy()
        moved += (order != np.arange(samples)).any()
        for name, column in batch.items():
            assert _list(got[name]) == _list(tf.gather(column, order)), name
    assert moved


def _ids_and_splits(column):
    if not isinstance(column, tf.RaggedTensor):
        column = tf.RaggedTensor.from_tensor(column[:, tf.newaxis])
    return column.values.numpy(), column.row_splits.numpy()


def _list(column):
    return column.to_list() if isinstance(column, tf.RaggedTensor) else column.numpy().tolist()


@pytest.mark.parametrize("marker", ["_SUCCESS", ""])
def test_partitions_of_a_table_are_converted_as_they_come(tmp_path, marker):
    """The first one, of CSV, is divided into parts. The second one, of Parquet, follows the history of the first."""
    raw, random = tmp_path / "raw", np.random.default_rng(0)
    names = ["user", "item", "time", "clicked"]
    days = []
    for day in range(2):
        users, clicked = random.integers(0, 4, 40), random.integers(0, 2, 40)
        days.append([users, random.integers(0, 9, 40), np.arange(40) + 1000 * (day + 1), clicked])
        (raw / f"day={day}").mkdir(parents=True)
        if marker:
            (raw / f"day={day}" / marker).touch()
    lines = ["user,item,time,clicked", *(",".join(map(str, row)) for row in zip(*days[0]))]
    (raw / "day=0/log.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pq.write_table(pa.table(dict(zip(names, days[1]))), raw / "day=1/log.parquet")
    columns = {"user": "user", "item": "item", "time": "time", "labels": {"click": "clicked"}, "order": "any"}
    data = {"source": "table", "columns": columns, "input": str(raw), "cache": str(tmp_path / "cache")}
    model = {"kind": "dlrm", "conversion_label": "exposed_click", "dim": 4, "max_history": 200}
    fields = {
        "name": "days", "task": "ranking", "model": model, "train": {"epochs": 1, "target_tokens_per_rank": 512},
        "data": {**data, "follow": True, "marker": marker, "poll_s": 0.05, "max_partitions": 2, "held_out": "test"},
    }  # fmt: skip
    experiment = from_dict(fields)
    folder = prepare_data(experiment, tmp_path / "cache")
    calls = list(fit_calls(experiment, folder, None))
    rows = [list(call.dataset) for call in calls]
    exposed = [sum(int(batch["exposed_item"].values.shape[0]) for batch in batches) for batches in rows]
    assert exposed == [36, 40]
    # The first event of a user on the second day follows all of the first day's.
    history = np.concatenate([batch["history_item"].row_lengths() for batch in rows[1]])
    users = np.concatenate([batch["user_id"] for batch in rows[1]])
    for user in range(4):
        assert history[users == user].min() == (days[0][0] == user).sum()
    again = list(fit_calls(experiment, folder, json.loads(json.dumps(calls[1].position(1, 0)))))
    assert [(call.epoch, call.steps, call.step) for call in again] == [(1, calls[1].steps, 0)]
    # A long job keeps no file open for each trained partition. The first one has the test split.
    assert {path == folder: data_cache.clear(path) for path in data_cache.cached(folder.parent)} == {
        True: False,
        False: True,
    }
