"""On 2 ranks, FusedTfraEmbedding gives HvdAllToAllEmbedding's losses, keys and rows after the same steps."""

import traceback

import numpy as np
import pytest

from benchmarks.harness.harness import count_nodes
from tests.support.ranks import run_ranks
from tests.tfra import models
from tests.tfra.models import legacy
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.tfra import fuse
from tf_fusedrec.tfra.tfra_library import de
from tf_fusedrec.tfra.uneven_data import stop_at_shortest

STEPS = 5


def check_all():
    """Body: runs every case in one pair of processes. A case's result is its traceback, empty on success."""
    results = {}
    for name, case in CASES.items():
        try:
            case(name)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    return results


def compare(name, optimizer, *layers, fused=False, native=False, low=-9, nothing_on=None, **arguments):
    """Trains upstream's layers and ours on the same batches and compares losses by step, keys and rows.

    layers: arguments of each layer; without any, two layers have the `arguments` alone.
    """
    each = [{**arguments, **of_layer} for of_layer in layers or ({}, {})]

    def run(kind, tag):
        model = models.SumOfRows([models.layer_of(kind, f"{name}_{tag}{n}", **own) for n, own in enumerate(each)])
        chosen = optimizer_of(optimizer)
        if tag in ("fused", "native"):
            where = {"tables": "native", "optimizer": chosen} if tag == "native" else {}
            assert len(fuse(model, **where)) == 1
        step, random, losses = models.training_step(model, chosen), np.random.default_rng(collectives.rank()), []
        for _ in range(STEPS):
            samples = 0 if collectives.rank() == nothing_on else 6
            dtypes = [own.get("key_dtype", "int64") for own in each]
            ids = [tf.constant(random.integers(low, 12, [samples, 3]).astype(dtype)) for dtype in dtypes]
            losses.append(float(step(ids, tf.constant(random.random(samples).astype(np.float32)))))
        return np.array(losses), [models.exported(layer) for layer in model.embeddings]

    def of_all_ranks(tables):
        gathered = [tuple(map(collectives.all_gather, table)) for table in tables]
        return [(keys[order], rows[order]) for keys, rows in gathered for order in [np.argsort(keys)]]

    want_losses, want_tables = run(models.UPSTREAM, "theirs")
    for tag in ("ours", *["fused"] * fused, *["native"] * native):
        losses, tables = run(models.OURS, tag)
        if tag == "native":  # the last, because native tables have other owners
            tables, want_tables = of_all_ranks(tables), of_all_ranks(want_tables)
        # Sums of a few float32 run in another order. The mean of an empty batch is NaN on both sides.
        # The new Adam computes 1 - beta_2^t in float32, which moves a step by 2e-5 of its length.
        rounds = tag == "native" and optimizer == "new adam"
        np.testing.assert_allclose(losses, want_losses, rtol=1e-5, atol=1e-4 if rounds else 1e-6)
        for (keys, rows), (want_keys, want_rows) in zip(tables, want_tables):
            np.testing.assert_array_equal(keys, want_keys)
            tolerance = 2e-3 if rows.dtype == np.float16 else 1e-5
            np.testing.assert_allclose(rows, want_rows, rtol=tolerance, atol=tolerance)
    assert sum(len(keys) for keys, _ in want_tables) > 0


def optimizer_of(kind):
    return {
        "adagrad": lambda: legacy.Adagrad(0.1),
        "sgd": lambda: legacy.SGD(0.05),
        "scheduled momentum": lambda: legacy.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.7), momentum=0.9, nesterov=True
        ),
        "ftrl": lambda: legacy.Ftrl(0.05, l1_regularization_strength=0.01),
        "adam": lambda: legacy.Adam(0.05),
        "slow sgd": lambda: legacy.SGD(0.002),  # for losses of four layers, which grow at a larger rate
        "clipped adam": lambda: legacy.Adam(0.05, clipnorm=0.5),
        "new adam": lambda: keras.optimizers.Adam(0.05),
    }[kind]()


def restricted(name):
    """Frequencies equal upstream's, and the rarest rows are evicted."""
    left = []
    for kind, tag in ((models.UPSTREAM, "theirs"), (models.OURS, "ours")):
        layer = models.layer_of(kind, f"{name}_{tag}", restrict_policy=de.FrequencyRestrictPolicy)
        step = models.training_step(models.SumOfRows([layer]), optimizer_of("sgd"))
        random = np.random.default_rng(collectives.rank())
        for _ in range(STEPS):
            ids = tf.constant(np.minimum(random.geometric(0.2, [6, 3]), 30))
            step([ids], tf.constant(random.random(6).astype(np.float32)))
        status = [tensor.numpy() for tensor in layer.params.restrict_policy.status.export()]
        order = np.argsort(status[0])
        layer.params.restrict(2, trigger=3)
        left.append((status[0][order], status[1][order], len(layer.params.export()[0])))
    for theirs, ours in zip(*left):
        np.testing.assert_array_equal(ours, theirs)


def other_inputs(name):
    """Ragged ids, int32 ids of an int64 layer, upstream's safe_embedding_lookup_sparse, inference mode."""
    layers = [models.layer_of(models.OURS, f"{name}{n}") for n in range(2)]
    for n, layer in enumerate(layers):
        mine = np.arange(collectives.rank(), 20, collectives.size())
        layer.params.upsert(tf.constant(mine), tf.constant((mine[:, None] + 100.0 * n) * np.ones([1, 4]), tf.float32))
    fuse(models.SumOfRows(layers))
    for n, layer in enumerate(layers):
        ragged = tf.RaggedTensor.from_nested_row_splits([3, 1, 4, 15], [[0, 2, 2], [0, 1, 4]])
        want = ragged.with_flat_values(tf.constant([3.0, 1.0, 4.0, 15.0]) + 100.0 * n)
        answer = layer(tf.cast(ragged, tf.int64))
        np.testing.assert_array_equal(answer.flat_values[:, 0], want.flat_values)
        assert answer.ragged_rank == 2
        np.testing.assert_array_equal(layer(tf.constant([[5, 6]], tf.int32))[..., 0], [[5 + 100.0 * n, 6 + 100.0 * n]])
        sparse = tf.sparse.from_dense(tf.constant([[2, 4], [7, 0]], tf.int64))
        pooled = de.safe_embedding_lookup_sparse(layer.hvd_variable, sparse, combiner="mean", name=f"{name}_safe{n}")
        np.testing.assert_allclose(pooled[:, 0], [3.0 + 100 * n, 7.0 + 100 * n])
        de.enable_inference_mode()
        try:
            np.testing.assert_array_equal(
                layer(tf.constant([[8, 99]], tf.int64))[0, :, 0], np.float32([8 + 100 * n, 0.1])
            )
            assert 99 not in layer.export()[0]
        finally:
            de.enable_train_mode()
        layer(tf.zeros([0, 2], tf.int64)) if collectives.rank() else layer(tf.zeros([3, 2], tf.int64))


def unique_flags(name):
    """B9: an id with three occurrences on rank 0 and one on rank 1 gets the sum of its gradients under all flags."""
    for first in (True, False):
        for second in (True, False):
            layer = models.layer_of(
                models.OURS, f"{name}_{first}_{second}", with_unique=first, with_secondary_unique=second
            )  # fmt: skip
            optimizer = models.de.DynamicEmbeddingOptimizer(models.legacy.SGD(1.0), synchronous=True)
            ids = tf.constant([7, 7, 7, 8] if collectives.rank() == 0 else [7, 9, 9, 10], tf.int64)

            @tf.function
            def step(layer=layer, optimizer=optimizer, ids=ids):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.reduce_sum(layer(ids), axis=1))
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
                )

            step()
            keys, rows = layer.export()
            want = {7: -0.9, 8: -0.15, 9: -0.4, 10: -0.15}  # 0.1 - (number of times) / 4
            for key, row in zip(keys, rows):
                np.testing.assert_allclose(row, want[key], rtol=1e-6)
            assert layer.with_unique is first


def several_calls(name):
    """B3: a layer that is called twice in a step trains the keys of both calls, with the summed gradients."""

    class Once(models.SumOfRows):
        def call(self, ids):
            total = 0.0
            for n, (layer, part) in enumerate(zip(self.embeddings, ids)):
                rows = layer(part)
                rows = tf.reduce_mean(rows, 1) + 2.0 * rows[:, 0]
                total += tf.reduce_sum(rows * tf.range(1.0, 5.0) * (n + 1), -1)
            return total

    class Twice(models.SumOfRows):
        def call(self, ids):
            return super().call(ids) + 2.0 * super().call([part[:, :1] for part in ids])

    tables = []
    for kind, fused in ((Once, False), (Twice, False), (Twice, True)):
        model = kind([models.layer_of(models.OURS, f"{name}{kind.__name__}{fused}{n}") for n in range(2)])
        if fused:
            fuse(model)
        step = models.training_step(model, optimizer_of("sgd"))
        random = np.random.default_rng(collectives.rank())
        for _ in range(STEPS):
            ids = [tf.constant(random.integers(0, 12, [6, 3])) for _ in range(2)]
            step(ids, tf.constant(random.random(6).astype(np.float32)))
        tables.append([layer.export() for layer in model.embeddings])
    for table in tables[1:]:
        for (keys, rows), (want_keys, want_rows) in zip(table, tables[0]):
            np.testing.assert_array_equal(keys, want_keys)
            np.testing.assert_allclose(rows, want_rows, rtol=1e-4, atol=1e-4)


def table_operations(name):
    """B15: a new-style optimizer makes 1 + k finds and inserts per layer; fused layers share them and 3 all-to-alls."""
    for fused, want in ((False, [9, 9, 9]), (True, [3, 3, 3])):
        model = models.SumOfRows([models.layer_of(models.OURS, f"{name}{fused}{n}") for n in range(3)])
        if fused:
            fuse(model)
        step = models.training_step(model, optimizer_of("new adam"))
        graph = step.get_concrete_function([tf.zeros([2, 3], tf.int64)] * 3, tf.zeros([2])).graph.as_graph_def()
        operations = (["TFRA>CuckooHashTableFind"], ["TFRA>CuckooHashTableInsert"], collectives.ALL_TO_ALLS)
        assert [count_nodes(graph, *ops) for ops in operations] == want


def uneven_steps(name):
    """B12: rank 1 has fewer batches; fit, evaluate and predict end on both ranks after rank 1's number."""
    model = models.SumOfRows([models.layer_of(models.OURS, f"{name}{n}") for n in range(2)])
    fuse(model)
    model.compile(models.de.DynamicEmbeddingOptimizer(optimizer_of("sgd"), synchronous=True), "mse", run_eagerly=False)

    for batches_of_rank_1 in (3, 0):
        seen, batches = [], [5, batches_of_rank_1][collectives.rank()]
        ids = tuple(np.arange(4 * batches * 3).reshape(-1, 3) % 11 for _ in range(2))
        dataset = tf.data.Dataset.from_tensor_slices((ids, np.ones(4 * batches, np.float32))).batch(4)
        if batches_of_rank_1:
            count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, seen=seen: seen.append(batch))
            model.fit(dataset, verbose=0, callbacks=[count], epochs=2)
            assert len(seen) == 2 * batches_of_rank_1
            # A data set of known length ends without a step that fails and counts.
            assert int(model.optimizer.iterations) == 2 * batches_of_rank_1
            model.evaluate(dataset.filter(lambda *_: True), verbose=0)  # of unknown length
            assert len(model.predict(dataset, verbose=0)) == 4 * batches_of_rank_1
        else:
            assert not list(stop_at_shortest(dataset))
    with pytest.raises(ValueError, match=r"arrays of \[5, 1\] batches"):
        model.fit(ids, np.ones(len(ids[0])), batch_size=4) if collectives.rank() == 0 else model.fit(
            tuple(part for part in np.ones([2, 4, 3], np.int64)), np.ones(4), batch_size=4
        )


def two_graphs(name):
    """A layer looked up in two graphs before a gradient is refused, where upstream trains rows of other keys."""
    layer = models.layer_of(models.OURS, name)
    with tf.GradientTape() as tape:
        first = layer(tf.constant([1, 2], tf.int64))
        layer(tf.constant([3], tf.int64))
        loss = tf.reduce_sum(first)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Layer '{name}' was looked up again"):
        tape.gradient(loss, layer.trainable_variables)


def partition_by_high_digit(keys, ranks):
    return tf.cast(tf.math.floormod(keys // 4, tf.cast(ranks, keys.dtype)), tf.int32)


CASES = {
    "adagrad": lambda name: compare(name, "adagrad", fused=True, native=True, low=0),
    "sgd_negative_ids": lambda name: compare(name, "sgd", native=True),
    "adam": lambda name: compare(name, "adam", native=True),
    "ftrl": lambda name: compare(name, "ftrl", native=True),
    "scheduled_momentum": lambda name: compare(name, "scheduled momentum", native=True),
    "clipped_adam": lambda name: compare(name, "clipped adam"),
    "adagrad_bp_v2": lambda name: compare(name, "adagrad", bp_v2=True, fused=True, low=0),
    "new_adam": lambda name: compare(name, "new adam", fused=True, native=True, low=0),
    "int32, float64, partitioner, max_norm": lambda name: compare(
        "arguments",
        "slow sgd",
        {"key_dtype": "int32"},
        {"value_dtype": "float64"},
        {"partitioner": partition_by_high_digit},
        {"max_norm": 0.15},
    ),
    "float16": lambda name: compare(name, "sgd", {"value_dtype": "float16"}),
    "no_data_on_rank_1": lambda name: compare(name, "sgd", fused=True, native=True, low=0, nothing_on=1),
    "restricted": restricted,
    "other_inputs": other_inputs,
    "unique_flags": unique_flags,
    "several_calls": several_calls,
    "table_operations": table_operations,
    "uneven_steps": uneven_steps,
    "two_graphs": two_graphs,
}


@pytest.fixture(scope="module")
def results():
    return run_ranks(check_all, 2, timeout_s=600)


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(results, case):
    failures = [f"rank {rank}:\n{found[case]}" for rank, found in enumerate(results) if found[case]]
    assert not failures, "\n".join(failures)
