"""Micro-batches that share rows, on 1 and 3 ranks: as one batch in results and in ids sent, with each row sent once.

Gradients are small multiples of 1/8 and are added without rounding, so every float must be equal bit for bit.
"""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.exchange import linear
from tests.oracles.rank_partition import owner_oracle
from tests.support.ids import INT64_MAX, INT64_MIN
from tests.support.logs import logged
from tests.support.ranks import error_of, run_ranks
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives

STEPS, M = 3, 8
FEATURES = ("item", "wide", "user")  # "wide" reads items in another dtype
SEGMENTS = 2
EXTREME = [INT64_MIN, INT64_MAX, 0, -1]


def _pieces(rank, step):
    """By piece and feature: ids; some pieces have none, one rank has none in one step."""
    random = np.random.default_rng([rank, step])
    sizes = random.permutation([0, 0, 1, 9, 20, 20, 30, 5]) * (step != 1 or rank != 1)
    pieces = [{name: random.integers(-20, 20, size) for name in FEATURES} for size in sizes]
    pieces[3]["item"] = np.concatenate([pieces[3]["item"], EXTREME])
    pieces[6]["item"] = np.concatenate([pieces[6]["item"], EXTREME[:2]])
    return pieces


def _joined(pieces):
    return [{name: np.concatenate([piece[name] for piece in pieces]) for name in FEATURES}]


def _make(name, dtype, **layer):
    tables = [
        fr.TableConfig(name, linear.DIM, fr.optimizers.SGD(0.125), fr.Uniform(-1, 1), dtype=dtype)
        for name in ("item", "user")
    ]
    features = [
        fr.FeatureConfig("item", "item"),
        fr.FeatureConfig("wide", "item", output_dtype="float32" if dtype == "bfloat16" else "bfloat16"),
        fr.FeatureConfig("user", "user"),
    ]
    return fr.FusedEmbedding(features, tables, name=name, gradient_op="sum", **layer)


def _gradients(lookup, bad=None):
    ids = lookup.fused.ids.numpy()
    grads = ((ids[:, np.newaxis] % 5 - 2 + np.arange(linear.DIM)) % 5 - 2) / 8
    if bad is not None:
        grads[ids == bad, 1] = np.nan
    return tf.constant(grads, lookup.output_dtype)


def _train(name, dtype, cut, **layer):
    """Rows by step, feature order apart from pieces; records, statistics and traffic."""
    embedding, found = _make(name, dtype, **layer), []
    for step in range(STEPS):
        state = linear.lookups_of(embedding, cut(_pieces(fr.rank(), step))).send_ids().look_up()
        of_ids = {}
        for lookup, rows in zip(state.lookups, state.return_rows()):
            fused, dtype_of = lookup.fused, lookup.output_dtype
            segments = np.repeat(np.arange(SEGMENTS), np.diff(fused.segment_splits))
            for s, i, row in zip(segments, fused.ids.numpy(), rows.numpy().astype(np.float32)):
                before = of_ids.setdefault((dtype_of, s, i), row)
                np.testing.assert_array_equal(row, before)
        found.append(of_ids)
        state.update(state.send_gradients({i: _gradients(lookup) for i, lookup in enumerate(state.lookups)}))
    (of_layer,) = embedding.internals.groups
    records = {table: of_layer.table.snapshot(table) for table in of_layer.table.names}
    return found, records, of_layer.table.statistics, of_layer.traffic.numpy()


def _bad_gradient():
    """The message of an update in which rank 1 has a gradient that is not finite in two of three pieces."""
    embedding = _make("bad", "float32")
    pieces = [{"item": np.array(ids), "wide": np.arange(0), "user": np.array([9])} for ids in ([7, 3], [7], [3, 4])]
    with logged("tables") as messages:
        step = linear.lookups_of(embedding, pieces).send_ids().look_up()
        bad = 7 if fr.rank() == 1 else None
        step.update(step.send_gradients({i: _gradients(lookup, bad) for i, lookup in enumerate(step.lookups)}))
    return messages, embedding.internals.groups[0].table.statistics["item"]["left_out"]


def _missing_pieces():
    embedding = _make("missing", "float32")
    pieces = [{name: np.array([1]) for name in FEATURES} for _ in range(3)]
    step = linear.lookups_of(embedding, pieces).send_ids().look_up()
    of_item = [(i, _gradients(step.lookups[i])) for i in range(0, len(step.lookups), 2)]
    return [error_of(step.send_gradients, dict(parts)) for parts in (of_item[1:], of_item[:2])]


def _check_known_splits():
    """Lets every all-to-all of this process compare the received splits that its caller knows with the true ones."""
    honest = collectives._engine.all_to_all

    def checked(tensors, splits, known, *, name, **options):
        received, received_splits = honest(tensors, splits, known, name=name, **options)
        assert known or not name.endswith(".rows")
        for of_tensor, true in zip(known, received_splits):
            np.testing.assert_array_equal(of_tensor, true, err_msg=name)
        return received, received_splits

    collectives._engine.all_to_all = checked


def _all():
    _check_known_splits()
    found = {
        (dtype, wire): [
            _train(f"{what}_{dtype}_{wire}", dtype, cut, wire_dtype=wire)
            for what, cut in (("window", lambda pieces: pieces), ("whole", _joined))
        ]
        for dtype, wire in (("float32", None), ("bfloat16", None), ("float32", "bfloat16"))
    }
    extra = (_bad_gradient(), _missing_pieces()) if fr.size() > 1 else None
    return found, extra


@pytest.fixture(scope="module", params=[1, 3])
def results(request):
    return run_ranks(_all, request.param)


several_ranks = pytest.mark.parametrize("results", [3], indirect=True)


def test_micro_batches_are_one_batch(results):
    for found, _ in results:
        for case, (window, whole) in found.items():
            for of_window, of_whole in zip(window[0], whole[0]):
                assert of_window.keys() == of_whole.keys()
                for key in of_whole:
                    np.testing.assert_array_equal(of_window[key], of_whole[key], err_msg=f"{case}, {key}")
            assert window[2] == whole[2], case
            for table in whole[1]:
                for got, wanted in zip(window[1][table], whole[1][table]):
                    np.testing.assert_array_equal(got, wanted, err_msg=f"{case}, {table}")


def test_a_row_and_its_gradient_travel_once(results):
    """8 micro-batches send the ids, rows and gradients of one batch, and beside them headers and marks alone."""
    ranks = len(results)
    for case in results[0][0]:
        window, whole = (np.sum([found[case][i][3] for found, _ in results], axis=0) for i in (0, 1))
        assert window[0] == whole[0]
        if ranks == 1:
            continue
        assert window[1] == whole[1]
        windows = 2  # output dtypes of the one group
        headers = (M - 1) * SEGMENTS * 8 * (ranks - 1) * ranks * windows * STEPS
        assert window[2] - whole[2] == headers + 8 * _mark_words(ranks)


def _mark_words(ranks):
    """Entries of the marks that travel, worked out from the ids: 21 marks of 3 bits in a word."""
    words = 0
    for step in range(STEPS):
        for rank in range(ranks):
            (batch,) = _joined(_pieces(rank, step))
            for keys in ([("item", "item"), ("user", "user")], [("item", "wide")]):
                ids = [i for _, feature in keys for i in np.unique(batch[feature]).tolist()]
                owners = np.bincount([owner_oracle(i, ranks, "hash_range") for i in ids], minlength=ranks)
                words += sum(1 + -(-count // 21) for owner, count in enumerate(owners) if owner != rank)
    return words


@several_ranks
def test_a_gradient_that_is_not_finite_names_its_id_and_rank(results):
    texts = [text for _, ((of_rank, _), _) in results for text in of_rank]
    assert len(texts) == sum(count for _, ((_, count), _) in results) == 1
    assert texts[0].startswith("the gradient of id 7 of table 'item' (features 'item', 'wide') from rank 1 in update 1")


@several_ranks
def test_gradients_of_some_micro_batches_alone_are_refused(results):
    for _, (_, messages) in results:
        assert messages[0].startswith(
            "ValueError: micro-batch 1 of tables ['item', 'user'] came after 0 of 3 micro-batches"
        )
        assert messages[1].startswith("ValueError: gradients came for 2 of 3 micro-batches of tables ['item', 'user']")
