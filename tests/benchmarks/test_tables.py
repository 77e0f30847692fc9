"""benchmarks.table, its ablations, checkpoint, train_step: figures, and checks that can fail."""

import functools
import json
import sys

import numpy as np
import pytest

from benchmarks.checkpoint import __main__ as checkpoint
from benchmarks.harness import harness, processes, ranks
from benchmarks.harness.harness import Batches
from benchmarks.table import __main__ as table
from benchmarks.table import peers, work
from benchmarks.train_step import __main__ as train_step
from tf_fusedrec import optimizers, tf
from tf_fusedrec.files import table_reader

pytestmark = pytest.mark.legacy


def test_every_drawn_id_has_a_row_and_gradients_have_exact_sums():
    resident = work.all_ids(1000)
    for uniform in (False, True):
        made = work.make_work(1000, n=5000, dim=3, uniform=uniform)
        assert np.isin(made.ids, resident).all() and len(np.unique(resident)) == 1000
        forwards, backwards = made.gradients.cumsum(axis=0)[-1], made.gradients[::-1].cumsum(axis=0)[-1]
        np.testing.assert_array_equal(forwards, backwards)
        np.testing.assert_array_equal(forwards, made.gradients.astype(np.float64).sum(axis=0))
    assert work.floor_bytes(n=100, distinct=10, dim=4, payload=20) == sum((800, 640, 160, 1600, 1600, 400))


def test_tables_that_do_not_fit_are_skipped_with_the_sizes():
    # TFRA has 2^19 buckets of four for rows and as many for slots, at 272 bytes per entry. We have 592 bytes per row.
    assert table.Tfra.bytes_wanted(2_000_000, 64, slots=1) == 2 * 4 * 2**19 * 272
    assert table.Native.bytes_wanted(2_000_000, 64, slots=1) == 2_000_000 * 592
    assert table.memory_lacks(10**6) == "" and "available, 1000000.0 GB are needed" in table.memory_lacks(10**15)


@pytest.mark.nightly
def test_ours_and_tfra_are_compared_before_time_is_taken(monkeypatch):
    case = table.versus_tfra(rows=300, optimizer="adagrad", repeats=1)
    assert case["ratio"] == pytest.approx(case["ms_tfra"] / case["ms_ours"])
    faster = functools.partial(optimizers.Adagrad, 1.001 * work.LEARNING_RATE, 0.1)
    honest = table.OPTIMIZERS["adagrad"]
    rules = iter([faster, honest])
    monkeypatch.setitem(table.OPTIMIZERS, "adagrad", lambda: next(rules)())
    with pytest.raises(harness.CheckFailed, match="rows of adagrad after 1 steps against the rows of TFRA"):
        table.versus_tfra(rows=300, optimizer="adagrad", repeats=1)


class Side:
    """A side of table.peers: rows that its check writes, and the milliseconds of its steps."""

    def __init__(self, path, rows, milliseconds):
        self._path, self._rows, self._seconds = path, rows, [each / 1e3 for each in milliseconds]

    def check(self):
        np.save(self._path, self._rows)

    def steps(self, variant, count):
        assert count == len(self._seconds)
        return self._seconds


def test_peers_get_the_same_rows_by_number_and_are_compared_first(tmp_path):
    made, resident = work.make_work(50, n=30, dim=2), work.all_ids(50)
    peers.write_work(tmp_path, made, resident)
    ids, numbers = np.load(tmp_path / "ids.npy"), np.load(tmp_path / "numbers.npy")
    np.testing.assert_array_equal(np.array(sorted(resident))[numbers], ids)
    with pytest.raises(harness.CheckFailed, match="lacks a library: No module named 'torch'. Install it"):
        peers.compare(sys.executable, rows=100, threads=1, repeats=1)
    ours = Side(tmp_path / "ours.npy", np.ones([2, 3]), [1.0, 2.0])
    theirs, other = (Side(tmp_path / "mch.npy", rows, [4.0, 8.0]) for rows in (np.ones([2, 3]), np.full([2, 3], 1.001)))
    pairs = {"mch": ("ours", "rowwise_adagrad_mean", 0)}
    ms = peers.take_turns(theirs, ours, tmp_path, pairs, 2, 3)
    assert ms["ours"].tolist() == [[1, 2]] * 3 and ms["mch"].tolist() == [[4, 8]] * 3
    with pytest.raises(harness.CheckFailed, match="rows of ours against the rows of mch"):
        peers.take_turns(other, ours, tmp_path, pairs, 2, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_served_rows_are_those_of_the_peer_by_number(tmp_path, ops):
    made, resident = work.make_work(50, n=40, dim=4), work.all_ids(50)
    peers.write_work(tmp_path, made, resident)
    with pytest.raises(harness.CheckFailed, match="lacks a library: No module named 'torch'. Install it"):
        peers.quantized(sys.executable, "int8", 4, ops, rows=50, repeats=1)
    request = {"folder": str(tmp_path), "threads": 1, "variants": [["bags", ops, 20]], "checked": 3}
    with processes.Remote(sys.executable, peers.served, **request) as ours:
        ours.check()
    numbers = np.load(tmp_path / "numbers.npy")[2].reshape(-1, 20)
    sums = work.random_rows(50, 4)[numbers].sum(axis=1)
    np.testing.assert_allclose(np.load(tmp_path / "bags.npy"), sums, atol=20 * work.INITIAL_VALUE / 127 / 2)


def test_all_variants_train_alike_and_take_turns(monkeypatch):
    import horovod.tensorflow as hvd  # after tf_fusedrec, which chooses the version of Keras

    hvd.init()  # TFRA's layers need it in a single process too
    batches = Batches(features=2, batch_size=8, ids_per_feature=2, alpha=1.05)

    def batch(number):
        drawn = batches.batch(number, 0)
        return {name: tf.constant(ids) for name, ids in zip("ab", drawn.ids)}, tf.constant(drawn.labels)

    variants = {variant.name: variant(["a", "b"]) for variant in train_step.VARIANTS}
    fields = ranks.compare_steps({name: one.step for name, one in variants.items()}, batch, warmup=1, repeats=2)
    assert [len(variants[name].embedding.trainable_variables) for name in ("tfra", "swapped")] == [2, 1], "not fused"
    assert fields["max_loss_difference"] <= ranks.LOSS_TOLERANCE
    assert fields["ratio_vs_tfra"] == fields["ms_tfra"] / fields["ms_ours"]
    with pytest.raises(harness.CheckFailed, match="losses of ours by step against the losses of tfra"):
        ranks.check_losses({"tfra": [0.7, 0.6], "ours": [0.7, 0.61]})
    with pytest.raises(harness.CheckFailed, match="do not move"):
        ranks.check_losses({"tfra": [0.7, 0.7], "ours": [0.7, 0.7]})


class TorchRec:
    """A peer with given losses, whose steps take 2 ms on the wall and 1 ms of a processor."""

    facts = {"missing": "", "sharding": {"table_wise": 26}}

    def __init__(self, losses):
        self.asked, self._losses = [], losses

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def check_libraries(self):
        pass

    def check(self):
        return self._losses

    def times(self, variant, count):
        self.asked.append((variant, count))
        return [[2e-3, 1e-3]] * count


def test_torchrec_is_compared_first_and_both_sides_train_on_the_same_batches(monkeypatch):
    shape, drawn = train_step.Shape(dim=4, batch_size=8, ids_per_feature=2, zipf_alpha=0.0), []
    request = {"shape": shape._asdict(), "folder": "", "turns": 2}
    with pytest.raises(harness.CheckFailed, match="lacks a library: No module named 'torch'. Install it"):
        train_step.beside_torchrec(sys.executable, **request)
    batches = shape.batches()
    twin = train_step.BesideTorchRec(train_step.NAMES, shape.dim, 1000)
    losses = [float(twin.step(*train_step.on_this_rank(batches)(n))) for n in range(train_step.CHECKED)]
    monkeypatch.setattr(train_step, "Remote", lambda *_, **__: side)
    draw = Batches.batch
    monkeypatch.setattr(Batches, "batch", lambda self, step, rank: drawn.append(step) or draw(self, step, rank))
    side = TorchRec([*losses[:-1], losses[-1] + 1e-3])
    with pytest.raises(harness.CheckFailed, match="losses of torchrec by step against the losses of ours"):
        train_step.beside_torchrec("python", **request)
    side = TorchRec(losses)
    drawn.clear()
    record = train_step.beside_torchrec("python", **request)
    assert side.asked == [("torchrec", 20)] * 3, "a warm-up and two turns"
    assert drawn == list(range(train_step.CHECKED + 3 * 20)), "the peer counts its batches alike"
    assert (record["dim"], record["zipf_alpha"]) == (4, 0.0)
    assert (record["ms_torchrec"], record["p10_ms_torchrec"], record["cpu_ms_torchrec"]) == pytest.approx((2, 2, 1))
    assert record["ratio_vs_torchrec"] == record["ms_torchrec"] / record["ms_ours"]
    assert record["cpu_ratio_vs_torchrec"] == record["cpu_ms_torchrec"] / record["cpu_ms_ours"]


def test_figures_of_all_shapes_are_joined(monkeypatch):
    ratios = iter(range(1, 1 + len(train_step.SHAPES)))
    asked = []

    def ask_ranks(function, count, *, python, shape, folder, turns):
        asked.append(train_step.Shape(**shape))
        return {"ratio_vs_torchrec": float(next(ratios)), "cpu_ratio_vs_torchrec": 0.5}

    monkeypatch.setattr(train_step.processes, "ask_ranks", ask_ranks)
    fields = train_step.versus_torchrec("python", quick=True)
    assert asked == list(train_step.SHAPES) and len(set(asked)) == 8
    assert [train_step.steps_of_turn(shape) for shape in asked[::2]] == [20, 20, 3, 19]
    assert (fields["ratio_vs_torchrec"], fields["cpu_ratio_vs_torchrec"]) == (1.0, 0.5)
    assert fields["mean_ratio_vs_torchrec"] == 4.5 and len(fields["torchrec"]) == 8


def test_a_tier_reads_its_file_and_a_table_that_differs_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"rows": 4096, "ids": 512, "blocks": 1}
    result = table.tier(**sizes)
    assert result["ratio"] == result["ids_per_s_tier_lookahead"] / result["ids_per_s_memory"]
    assert list(tmp_path.iterdir()) == []
    honest = table.Native.plain_step

    def careless(self, ids, gradients, coming=None):
        rows = honest(self, ids, gradients, coming)
        return rows if coming is None else rows + 1e-3

    monkeypatch.setattr(table.Native, "plain_step", careless)
    with pytest.raises(harness.CheckFailed, match="rows of tier_lookahead"):
        table.tier(**sizes)


def test_a_checkpoint_is_measured_from_beginning_to_end(tmp_path, monkeypatch):
    fields = checkpoint.measure(tmp_path, 2_000, repeats=1)
    assert fields["bytes"] == 2_000 * (8 + 16 + 2 * 4 * checkpoint.DIM)
    assert all(np.isfinite(value) and value > 0 for value in fields.values()) and json.dumps(fields)
    chunks = table_reader.TableReader.chunks
    mixed = lambda *reader: ((ids, np.roll(records, 1)) for ids, records in chunks(*reader))  # noqa: E731
    monkeypatch.setattr(table_reader.TableReader, "chunks", mixed)
    with pytest.raises(harness.CheckFailed, match="Mismatched elements"):
        checkpoint.measure(tmp_path, 2_000, repeats=1)
    seconds = {"save": [2.0], "plain_write": [1.0], "load": [4.0], "plain_read": [0.5], "copy": [0.25]}
    wanted = {
        "save_gb_per_s": 2, "load_gb_per_s": 1, "disk_write_gb_per_s": 4, "disk_read_gb_per_s": 8,
        "save_ratio_vs_disk": 0.5, "load_ratio_vs_disk": 0.125, "snapshot_pause_ms": 300, "delta_pause_ms": 10,
        "copy_rows_ms": 250,
    }  # fmt: skip
    assert checkpoint.summary(seconds, 4 * 10**9, {"full": [0.3], "delta": [0.01]}) == pytest.approx(wanted)
