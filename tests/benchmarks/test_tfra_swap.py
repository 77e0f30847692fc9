"""benchmarks.tfra_swap, tiny and on one process: both models train alike, and a difference stops the run."""

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.harness.synthetic import Batches
from benchmarks.tfra_swap import __main__ as tfra_swap


def test_both_models_train_alike_and_take_turns():
    import horovod.tensorflow as hvd  # after tf_fusedrec, which chooses the version of Keras

    hvd.init()  # TFRA's layers need it in a single process too
    batches = Batches(features=2, batch_size=8, ids_per_feature=2, alpha=1.05)
    steps = tfra_swap.variants(["a", "b"])
    assert tfra_swap.largest_difference(steps, batches) <= tfra_swap.LOSS_TOLERANCE
    seconds = tfra_swap.measure(steps, batches, warmup=1, repeats=2)
    assert list(seconds) == [tfra_swap.AS_LAUNCHED, "tfra", "ours"] and all(
        len(s) == 2 and min(s) > 0 for s in seconds.values()
    )

    def careless(*batch):
        return np.float32(1.01) * steps["tfra"](*batch)

    with pytest.raises(harness.CheckFailed, match="losses of ours by step against TFRA's"):
        tfra_swap.largest_difference({"tfra": steps["tfra"], "ours": careless}, batches)
