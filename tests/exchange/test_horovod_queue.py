"""The queue of Horovod, as tools/horovod.patch changes it: when ranks wake each other."""

import pathlib
import time

import numpy as np

import tf_fusedrec as fr
from tests.support.ranks import choose_exchange, run_ranks
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives

PAUSE_S = 0.01  # of dense compute between two collectives


def _wakes():
    """Returns how often a thread of this process has waited for something and gone on."""
    statuses = (path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/status"))
    return sum(int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for status in statuses)


def _counts():
    """Returns the wakes in a pause, in an all-to-all of another size than the last one, and in one of its size."""

    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def exchange(rows):
        splits = tf.fill([fr.size()], tf.size(rows) // fr.size())
        return collectives.all_to_all(rows, splits, name="rows")[0]

    def exchanged(num_rows):
        fr.collectives.barrier()
        before = _wakes()
        assert exchange(tf.zeros([fr.size() * num_rows])).shape == [fr.size() * num_rows]
        return _wakes() - before

    def paused():
        exchanged(1)
        before = _wakes()
        time.sleep(PAUSE_S)
        return _wakes() - before

    exchanged(1)
    pauses, turns = [paused() for _ in range(30)], [(exchanged(n), exchanged(n)) for n in range(60)]
    # A busy machine adds wakes.
    return [float(np.percentile(counts, 25)) for counts in (pauses, *zip(*turns))]


def test_ranks_leave_each_other_alone_between_collectives_and_agree_on_any_size_at_once(monkeypatch):
    choose_exchange("horovod", monkeypatch)
    for paused, other, equal in run_ranks(_counts, 2):
        assert paused < 100  # With a cycle of .1 ms for all ranks, whether they have collectives or not: 150 to 220.
        assert other < 1.3 * equal  # Where a new size goes through rank 0: 1.5 to 1.9.
