"""A step is one tick of a table's clock for any number of micro-batches, so policies decide as under sync."""

import numpy as np

from tests.schedules import clicks
from tests.support.ranks import run_ranks
from tf_fusedrec import Limits, Storage, keras, tf
from tf_fusedrec.schedules import FrozenWindow, Nested

TABLES = {
    "hot, lru": {"limits": Limits(max_rows=13, eviction="lru"), "storage": Storage(dtype="mixed", hot_after=4)},
    "ttl, admission": {"limits": Limits(ttl=2, admission_count=2)},
}


def _trained():
    """Returns the trained state, the counters and the ticks of the table's clock, by policy and schedule."""
    import tf_fusedrec as fr

    rank, found = fr.rank(), {}
    batches = [clicks.batch(8, seed=100 * rank + step) for step in range(10)]
    data = tf.data.Dataset.from_tensor_slices(
        tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
    ).batch(8)
    for policy, table in TABLES.items():
        # test_look_ahead.py has Nested and FrozenWindow on one process, where micro-batches share no rows.
        for schedule in ("sync", Nested(3) if policy == "hot, lru" else FrozenWindow(3)):
            embedding = clicks.make_embedding("SGD", table)
            optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.SGD(0.05))
            model = clicks.make_model(embedding, schedule, optimizer)
            model.fit(data, verbose=0)
            native = embedding.internals.groups[0].table
            found[policy, schedule] = clicks.state(model, embedding), native.statistics, native.clock
    return found


def test_micro_batches_count_evict_admit_and_expire_as_whole_batches():
    results = run_ranks(_trained, 2, timeout_s=280)
    for policy in TABLES:
        counts = [of_table for found in results for of_table in found[policy, "sync"][1].values()]
        assert sum(of_table["evictions"] for of_table in counts) > 2, policy
        assert "admission" not in policy or sum(of_table["refused"] for of_table in counts) > 5
        for found in results:
            wanted, counted, clock = found[policy, "sync"]
            for of, schedule in found:
                if of != policy:
                    continue
                got, *others = found[policy, schedule]
                assert others == [counted, clock], (policy, schedule)
                # float16 rows under "hot": one rounding more or less in ten updates.
                atol = 1e-2 if "hot" in policy else 1e-5
                for what in wanted:
                    if what.startswith("dense") or what.endswith(" row"):
                        np.testing.assert_allclose(got[what], wanted[what], rtol=1e-4, atol=atol, err_msg=what)
                    else:
                        np.testing.assert_array_equal(got[what], wanted[what], err_msg=f"{policy}, {schedule}: {what}")
