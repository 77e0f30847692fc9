"""Resuming after any step gives equal batches on as many ranks, and every row once on any other number."""

import json

import numpy as np
import pytest

from tests.data.shards import COLUMNS, write_folder
from tf_fusedrec.data import ParquetFolder, TokenBatches

ROWS, EPOCHS = 70, 3
OPTIONS = {"length_columns": ["item_id"], "extra_tokens": 1, "target_tokens_per_rank": 20, "epochs": EPOCHS}


@pytest.fixture
def path(tmp_path):
    return write_folder(tmp_path / "d", [40, 30], 9)


def _job(path, ranks, scope, start=None, **folder):
    """Returns TokenBatches of every rank. `start` passes through JSON, as in a checkpoint."""
    folder = {"shuffle_seed": 5, "shuffle_rows": 24, **folder}
    return [
        TokenBatches(
            ParquetFolder(path, COLUMNS, rank=rank, ranks=ranks, **folder),
            scope=scope, start=json.loads(json.dumps(start)), **OPTIONS,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def _contents(batch):
    return [batch["user_id"].numpy().tolist(), batch["item_id"].to_list(), batch["rating"].to_list()]


def _epochs(job, first_epoch=None, epochs=1):
    """Returns [rank][step] contents of batches."""
    return [[_contents(batch) for batch in rank.dataset(first_epoch, epochs)] for rank in job]


def _users(steps):
    return [user for rank in steps for users, *_ in rank for user in users]


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["rank", "global"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_as_many_ranks_repeat_the_very_same_batches(path, scope, ranks):
    job = _job(path, ranks, scope)
    steps = job[0].steps_per_epoch
    whole = _epochs(job, 0, EPOCHS)
    assert steps >= 3 and all(len(of_rank) == EPOCHS * steps for of_rank in whole)
    for epoch, step in [(0, 1), (1, 0), (1, steps - 1), (2, 2)]:
        starts = [rank.position(epoch, step) for rank in job]
        assert starts == starts[:1] * ranks
        again = _job(path, ranks, scope, starts[0])
        assert {(rank.first_epoch, rank.first_step, rank.steps_per_epoch) for rank in again} == {(epoch, step, steps)}
        done = epoch * steps + step
        assert _epochs(again) == [of_rank[done : (epoch + 1) * steps] for of_rank in whole]
        if epoch < 2:
            assert _epochs(again, epoch + 1) == [
                of_rank[(epoch + 1) * steps : (epoch + 2) * steps] for of_rank in whole
            ]


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["rank", "global"])
def test_other_numbers_of_ranks_lose_and_repeat_no_row(path, scope):
    trained, start = [], None
    for ranks, steps in [(2, 1), (5, 1), (1, 3), (3, 1), (2, None)]:
        job = _job(path, ranks, scope, start)
        left = _epochs(job)
        assert len({len(of_rank) for of_rank in left}) == 1  # all ranks make the same number of steps
        trained += _users([of_rank[:steps] for of_rank in left])
        steps = len(left[0]) if steps is None else steps
        start = job[0].position(0, job[0].first_step + steps)
    assert sorted(trained) == list(range(ROWS))
    assert start["left"] == [[]] * len(start["left"]) and start["steps_left"] == 0
    assert sorted(_users(_epochs(_job(path, 4, scope, start), 1))) == list(range(ROWS))


def test_a_position_within_a_resumed_epoch_is_of_the_steps_that_were_trained(path):
    """The position ignores batches that the input has read ahead, although its iterator is further."""
    job = _job(path, 2, "rank")
    again = _job(path, 2, "rank", job[0].position(1, 1))
    iterators = [iter(rank.dataset()) for rank in again]
    for iterator in iterators:
        next(iterator)
    assert again[0].position(1, 2) == job[0].position(1, 2)
    assert again[0].position(1, 1)["left"] == job[0].position(1, 1)["left"]


def test_skipped_rows_and_costs_do_not_move_the_batches(path):
    """The remaining rows have their weights of the whole epoch."""
    (job,) = _job(path, 1, "rank", bad_rows="skip")
    first = _epochs([job])[0]
    (again,) = _job(path, 1, "rank", job.position(0, 2), bad_rows="skip")
    assert _epochs([again])[0] == first[2:]


def test_a_position_in_other_data_or_another_order_is_refused(path):
    start = _job(path, 2, "rank")[0].position(1, 1)
    with pytest.raises(ValueError, match="start lies inside epoch 1 of data with shuffle_seed 5, but .* has 6"):
        _job(path, 2, "rank", start, shuffle_seed=6)
    with pytest.raises(ValueError, match="with shuffle_rows 24, but"):
        _job(path, 2, "rank", start, shuffle_rows=25)
    between = _job(path, 2, "rank")[0].position(2, 0)
    (path / "part-1.parquet").rename(path / "part-2.parquet")
    with pytest.raises(ValueError, match="with contents '.*valid for one order of rows only: restore the files"):
        _job(path, 2, "rank", start)
    job = _job(path, 2, "rank", between)  # between epochs data may change
    assert sorted(_users(_epochs(job))) == list(range(ROWS))
    assert np.all([rank.first_epoch == 2 for rank in job])
