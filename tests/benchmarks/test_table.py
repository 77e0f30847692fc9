"""benchmarks.table: its pure parts, its cases, and the check of each comparison, which must be able to fail."""

import sys

import numpy as np
import pytest

from benchmarks.harness import children, harness, machine
from benchmarks.table import __main__ as table
from benchmarks.table import collisions as table_collisions
from benchmarks.table import dedup as table_dedup
from benchmarks.table import dimensions as table_dimensions
from benchmarks.table import growth as table_growth
from benchmarks.table import peers as table_peers
from benchmarks.table import variants as table_variants
from benchmarks.table import versus_tfra as table_versus_tfra
from benchmarks.table import work as table_work
from tf_fusedrec import optimizers, tf


def test_every_id_that_is_drawn_has_a_row():
    resident = table_work.all_ids(1000)
    assert len(np.unique(resident)) == 1000
    for uniform in (False, True):
        work = table_work.make_work(1000, n=500, dim=2, uniform=uniform)
        assert np.isin(work.ids, resident).all()
        assert work.distinct == np.mean([len(set(ids.tolist())) for ids in work.ids])


def test_gradients_have_exact_sums_in_any_order():
    gradients = table_work.make_work(1000, n=5000, dim=3).gradients
    forwards, backwards = gradients.cumsum(axis=0)[-1], gradients[::-1].cumsum(axis=0)[-1]
    np.testing.assert_array_equal(forwards, backwards)
    np.testing.assert_array_equal(forwards, gradients.astype(np.float64).sum(axis=0))


def test_floor_counts_what_its_fields_say():
    floor = table_work.floor_bytes(n=100, distinct=10, dim=4, payload=20)
    assert floor == (800, 640, 160, 1600, 1600, 400)
    assert floor.total == 5200


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_copies_everything(threads):
    copy = table_work.Copy(threads, megabytes_each=1)
    copy()
    assert copy.bytes_moved == 2 * threads << 20
    assert len(copy._parts) == threads
    for target, source in copy._parts:
        np.testing.assert_array_equal(target, source)


def test_available_memory_is_read_in_bytes():
    assert table_work.available_bytes("MemTotal: 9 kB\nMemAvailable:   2048 kB\n") == 2 << 20


def test_tables_that_do_not_fit_are_skipped_with_the_sizes():
    # TFRA has 2^19 buckets of four for rows and as many for slots, at 272 bytes per entry. We have 592 bytes per row.
    assert table_variants.Tfra.bytes_wanted(2_000_000, 64, slots=1) == 2 * 4 * 2**19 * 272
    assert table_variants.Native.bytes_wanted(2_000_000, 64, slots=1) == 2_000_000 * 592
    assert table_versus_tfra._memory_lacks(2_000_000, 1, available=10 << 30) == ""
    assert "take 4.5 GB, available are 4.0 GB" in table_versus_tfra._memory_lacks(2_000_000, 1, available=4 * 10**9)


def test_a_pause_counts_when_it_comes_in_every_repeat():
    quiet = [0.001, 0.001, 0.001, 0.001, 0.001]
    disturbed = [0.001, 0.900, 0.001, 0.001, 0.001]
    assert table_growth.pauses(np.array([quiet, disturbed])) == pytest.approx(
        {"median_step_ms": 1, "max_growth_pause_ms": 0, "rows_at_pause": 1000, "longest_single_step_ms": 900}
    )
    growing = [0.001, 0.001, 0.005, 0.001, 0.001]
    pauses = table_growth.pauses(np.array([growing, growing]))
    assert pauses["max_growth_pause_ms"] == pytest.approx(4) and pauses["rows_at_pause"] == 1000 + 2 * 2048


def test_summary_takes_the_worst_case_and_passes_over_what_was_skipped():
    versus = [
        {"optimizer": "adagrad", "ratio": 7.0},
        {"optimizer": "adagrad", "ratio": 6.0},
        {"optimizer": "adam", "ratio": 9.0},
        {"optimizer": "adam", "skipped": "too large"},
    ]
    rates = [
        {"threads": 1, "ids_per_s": 8e6, "ratio_vs_memory_floor": 0.5, "bytes_per_row_overhead": 70.0},
        {"threads": 1, "ids_per_s": 7e6, "ratio_vs_memory_floor": 0.6, "bytes_per_row_overhead": 60.0},
        {"threads": 2, "ids_per_s": 9e6, "ratio_vs_memory_floor": 0.4, "bytes_per_row_overhead": 60.0},
    ]
    growth = {"max_growth_pause_ms": 3.0, "copy_rows_ms": 200.0, "rows": 10}
    peers = [{"peer": "torch_sgd", "ratio": 2.0}, {"peer": "torch_sgd", "ratio": 1.5}]
    assert table.summary(versus, rates, growth, peers) == {
        "ratio_vs_tfra_adagrad": 6.0, "ratio_vs_tfra_adam": 9.0, "ids_per_s_1thread": 7e6, "ids_per_s_2threads": 9e6,
        "ratio_vs_memory_floor": 0.4, "bytes_per_row_overhead": 70.0, "max_growth_pause_ms": 3.0, "copy_rows_ms": 200.0,
        "ratio_vs_torch_sgd": 1.5,
    }  # fmt: skip


def test_a_page_remembers_what_it_printed_and_names_what_was_skipped(capsys):
    page = table.Page()
    page.table("title", [{"rows": 10, "ms": 1.5}, {"rows": 20, "skipped": "no memory"}])
    assert capsys.readouterr().out == page.text
    assert "1.5" in page.text and "skipped: rows 20: no memory" in page.text


def test_the_machine_is_described_without_its_name():
    cpuinfo = "processor\t: 0\nmodel name\t: Brand X\nflags\t\t: fpu hypervisor avx2 avx512f\nprocessor\t: 1\n"
    text = machine.describe(cpuinfo, gpu=False)
    assert text.startswith("virtual machine, 2 ") and text.endswith(" cores (AVX-512), no GPU")
    assert machine.describe("processor\t: 0\nflags\t\t: fpu\n", gpu=True).endswith(" cores, a GPU")


def test_a_case_that_answers_nothing_ends_the_run_with_its_last_lines():
    with pytest.raises(harness.CheckFailed, match=r"(?s)this with \{'rows': 1\} ended with code 0.*honking great idea"):
        children.ask("this", rows=1)


def test_ours_and_tfra_are_compared_before_time_is_taken(monkeypatch):
    for optimizer in ("adagrad", "adam"):
        case = table_versus_tfra.main(rows=300, optimizer=optimizer, repeats=1)
        assert case["ratio"] == pytest.approx(case["ms_tfra"] / case["ms_ours"])


def test_a_variant_that_trains_otherwise_is_not_measured(monkeypatch):
    class Faster(table_variants.Native):
        def _make_layer(self, optimizer):
            return super()._make_layer(optimizers.Adagrad(1.001 * table_work.LEARNING_RATE, 0.1))

    monkeypatch.setattr(table_versus_tfra, "Native", Faster)
    with pytest.raises(harness.CheckFailed, match="rows of adagrad after 1 steps against the rows of TFRA"):
        table_versus_tfra.main(rows=300, optimizer="adagrad", repeats=1)


def test_an_interpreter_without_the_peers_is_skipped_with_the_reason():
    assert table_peers.compare(sys.executable, rows=100, threads=1, repeats=1) == "No module named 'torch'"


def test_peers_get_the_same_rows_by_number(tmp_path):
    work, resident = table_work.make_work(50, n=30, dim=2), table_work.all_ids(50)
    table_peers.write_work(tmp_path, work, resident)
    ids, numbers = np.load(tmp_path / "ids.npy"), np.load(tmp_path / "numbers.npy")
    assert ids.shape == numbers.shape and set(numbers.ravel()) <= set(range(50))
    np.testing.assert_array_equal(np.array(sorted(resident))[numbers], ids)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(table_dedup, "IDS_PER_RANK", 300)


def test_dedup_none_source_owner_and_both_train_the_same_rows(small_batches):
    table_dedup._check(dim=3)


def test_dedup_counts_ids_sent_and_rows_read(small_batches):
    ids = table_dedup.batch_of(0, 0)
    distinct = len(np.unique(ids))
    for mode, want in {"none": (300, 300), "source": (distinct, distinct), "owner": (300, distinct)}.items():
        native = table_dedup._table(f"count/{mode}", 3, optimizers.SGD(0.25))
        at_source, at_owner = table_dedup.MODES[mode]
        lookup = table_dedup._make_rows(native, f"count.{mode}.made", [tf.constant(ids)], 3)
        step = table_dedup.make_step(native, f"count.{mode}", at_source=at_source, at_owner=at_owner, lookup=lookup)
        _, (sent, read, _) = step(tf.constant(ids), tf.zeros([300, 3]))
        assert (int(sent), int(read)) == want


def test_dedup_that_loses_gradients_is_found(small_batches, monkeypatch):
    honest = table_dedup.make_step

    def wrong(native, name, *, at_source, at_owner, **lookup):
        step = honest(native, name, at_source=at_source, at_owner=at_owner, **lookup)
        return lambda ids, gradients: step(ids, gradients * (0.5 if at_source else 1.0))

    monkeypatch.setattr(table_dedup, "make_step", wrong)
    with pytest.raises(harness.CheckFailed, match="rows of dedup 'source' after 2 steps"):
        table_dedup._check(dim=3)


def test_dimensions_count_distinct_ids_by_owner():
    ids = np.array([[5, 5, 7, 8], [5, 9, 9, 9]])
    together, alone = table_dimensions.sent_ids(ids)
    assert alone.shape == (2, table_dimensions.RANKS) and alone.sum(axis=1).tolist() == [3, 2]
    np.testing.assert_array_equal(together, alone.sum(axis=0))


def test_arguments(tmp_path):
    got = table.parse_arguments(
        ["--quick", "--json", "x.json", "--ablation", "--peer", "python", "--keep", str(tmp_path)]
    )
    assert got.quick and got.ablation and got.peer == "python" and got.keep == tmp_path and got.json.name == "x.json"
    assert table.parse_arguments([]) == (False, None, False, None, None)


def test_an_ablation_that_fails_ends_the_run(monkeypatch):
    monkeypatch.setattr(table.processes, "run", lambda *a, **k: type("Done", (), {"returncode": 3, "stdout": "why"}))
    with pytest.raises(harness.CheckFailed, match=r"(?s)benchmarks\.table\.dedup ended with code 3.*why"):
        table.run_ablation("dedup", quick=True)


class Side:
    """A side of table.collisions whose steps take given times, in milliseconds."""

    def __init__(self, path, rows, milliseconds):
        self._path, self._rows, self._seconds = path, rows, [each / 1e3 for each in milliseconds]

    def ask(self, do, variant=None, steps=0):
        if do == "check":
            np.save(self._path, self._rows)
            return None
        assert steps == table_collisions.INTERVAL == len(self._seconds)
        return self._seconds


def test_managed_collisions_are_timed_with_their_sorts_and_compared_first(tmp_path):
    ours = Side(tmp_path / "ours.npy", np.ones([2, 3]), [1.0] * 8)
    theirs = Side(tmp_path / "peer.npy", np.ones([2, 3]), [2.0] * 7 + [18.0])
    record = table_collisions.measure({"ours": ours, "mch": theirs}, tmp_path, 256, 2)
    assert record["factor"] == 8 and record["ms_peer_between"] == pytest.approx(2)
    assert (record["ms_ours"], record["ms_peer"], record["ratio"]) == pytest.approx((1, 4, 4))
    other = Side(tmp_path / "peer.npy", np.array([[1, 1, 1], [1, 1, 1.001]]), [1.0] * 8)
    with pytest.raises(harness.CheckFailed, match="rows of 256 columns after training"):
        table_collisions.measure({"ours": ours, "mch": other}, tmp_path, 256, 2)


def test_a_peer_without_torchrec_is_refused(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(table_collisions, "ROWS", 100)
    with pytest.raises(SystemExit, match="lacks a library: no torch here. Install it there"):
        table_collisions.main(["--peer", sys.executable])
