"""The engines Gloo and NCCL: the same results as Horovod's, in a graph that does not put all-to-alls in a row.

NCCL runs over an emulation.

tests/schedules/test_matrix.py trains over both engines. test_watchdog.py stops and kills ranks of both.
"""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.harness import network
from tests.support.ranks import choose_exchange, environment_of_ranks, error_of, run_ranks
from tf_fusedrec import Topology, tf
from tf_fusedrec.exchange import collectives, gloo, nccl
from tf_fusedrec.exchange.horovod import Horovod

STEPS = 20
WHY_NOT = network.why_not()
FORMS = [("int64", []), ("float32", [16]), ("float32", [3, 5]), ("float16", [7]), ("bfloat16", [2])]


def blocks(step, dtype, tail, ranks):
    """Returns rows with padding, their splits and those that arrive: uneven, and half of them empty."""
    random = np.random.default_rng(step)
    rows = random.integers(0, 3000, [ranks.size] * 2) * random.integers(0, 2, [ranks.size] * 2)
    of_rank = np.random.default_rng([step, collectives.rank()])
    sent = of_rank.integers(-100, 100, [rows[ranks.index].sum() + 7, *tail])
    return (
        tf.cast(sent, dtype),
        tf.constant(rows[ranks.index], tf.int32),
        tf.constant(rows[:, ranks.index], tf.int32),
    )


def exchange_all():
    """Body: exchanges blocks among all ranks and in groups. Returns the arrays of every way, and the traced ops."""
    gloo.Gloo.joined_from = 2
    world, engine = collectives.world(), collectives._engine
    half = world.size // 2
    begin = collectives.rank() // half * half
    in_groups = half > 1 and collectives.exchange_name() == "gloo"
    groups = [world, *([collectives.among(range(begin, begin + half))] if in_groups else [])]

    @tf.function(autograph=False, reduce_retracing=True)
    def exchange(sent):
        found = []
        for number, (rows, splits, received_splits) in enumerate(sent):
            ranks = groups[number % len(groups)]
            name = f"{number}.{ranks.members[0]}"
            found.append(
                [
                    sum(Horovod.all_to_all(engine, [rows], [splits], [], name=f"h{name}", ranks=ranks.members), []),
                    collectives.all_to_all(rows, splits, name=f"k{name}", ranks=ranks, received_splits=received_splits),
                    collectives.all_to_all(rows, splits, name=f"u{name}", ranks=ranks),
                ]
            )
        for first, ranks in enumerate(groups):
            places = range(first, len(sent), len(groups))
            outgoing = [collectives.Outgoing(f"j{place}.{first}", *sent[place]) for place in places]
            for place, way in zip(places, collectives.all_to_alls(outgoing, ranks), strict=True):
                found[place].append(way)
        return found

    found = []
    for step in range(STEPS):
        sent = [blocks(step, *form, groups[number % len(groups)]) for number, form in enumerate(2 * FORMS)]
        for ways in exchange(sent):
            found.append([[tf.cast(part, tf.float64).numpy() for part in way] for way in ways])
    graph = exchange.get_concrete_function(sent).graph
    ops = [op for op in graph.get_operations() if "Exchange" in op.type or "Nccl" in op.type]
    waiting = [op.name for op in ops if op.op_def.is_stateful or op.control_inputs]
    number = sum(not op.get_attr("collective").startswith(b"j") for op in ops), len(ops), len(groups)

    @tf.function(autograph=False)
    def with_constant_splits(rows):
        splits = tf.fill([world.size], 2)
        return collectives.all_to_all(rows, splits, name="constant", received_splits=tf.fill([world.size], 2))[0]

    constant = [with_constant_splits(tf.fill([2 * world.size], collectives.rank() + 10 * n)).numpy() for n in range(3)]
    return collectives.exchange_name(), found, number, waiting, constant


@pytest.mark.parametrize(("engine", "ranks"), [("gloo", 2), ("gloo", 3), ("gloo", 4), ("nccl", 2), ("nccl", 4)])
def test_rows_are_those_of_horovod_and_no_all_to_all_waits_for_another(engine, ranks, monkeypatch):
    choose_exchange(engine, monkeypatch)
    if engine == "gloo":
        monkeypatch.delenv("FUSEDREC_EXCHANGE")  # the default
    topologies = [Topology(2)] if ranks == 4 and engine == "gloo" else []
    for name, found, (number, with_joined, groups), waiting, constant in run_ranks(
        exchange_all, ranks, topologies=topologies
    ):
        assert name == engine and len(found) == STEPS * 2 * len(FORMS)
        for through_horovod, *others in found:
            for way in others:
                for part, wanted in zip(way, through_horovod, strict=True):
                    np.testing.assert_array_equal(part, wanted)
        # A known exchange over Gloo has an op more, for the receives; an unknown one over NCCL has two for the splits.
        floating = len(FORMS) - 1 if engine == "nccl" else 0
        assert number == 2 * (3 * len(FORMS) + floating) and waiting == []
        if engine == "gloo":
            assert with_joined == number + 2 * groups
        for step, rows in enumerate(constant):  # no optimizer makes a constant of the receives
            np.testing.assert_array_equal(rows, np.repeat(np.arange(ranks), 2) + 10 * step)


SIZES = (0, 1, 5, 300, 1025, 100_003)  # of one message to each rank, and of parts


def sum_all(ranks_of_host):
    """Body: returns sums and means through both engines, by step, and the types of the ops."""
    world, engine = collectives.world(), collectives._engine
    engine._hosts = [rank // ranks_of_host for rank in world.members]

    @tf.function(autograph=False)
    def sums(step):
        counts = tf.stack([tf.cast(step, tf.int64), 2**40])
        values = [step, counts, tf.cast(counts, tf.float64)[tf.newaxis]]
        values += [tf.random.stateless_normal([size], [world.index, step]) for size in SIZES]
        *means, of_counts, nothing = collectives.average([*values[3:], values[2], None])
        assert nothing is None
        return [
            [collectives.all_reduce_sum(value, name=f"sum.{number}"),
             *([] if mean is None else [mean * world.size]),
             Horovod.all_reduce(engine, value, name=f"horovod.{number}", ranks=world.members)]
            for number, (value, mean) in enumerate(zip(values, [None, None, of_counts, *means]))
        ]  # fmt: skip

    found = []
    for n in range(3):
        found.append(tf.nest.map_structure(lambda part: part.numpy(), sums(tf.constant(10 * n + world.index))))
    ops = sums.get_concrete_function(tf.constant(0)).graph.get_operations()
    return found, [op.type for op in ops], [op.type for op in ops if op.op_def.is_stateful]


GLOO_SUMS = [("gloo", *ranks) for ranks in ((2, 2), (2, 1), (3, 3), (3, 1), (4, 4), (4, 2), (4, 3))]


@pytest.mark.parametrize(("engine", "ranks", "ranks_of_host"), [*GLOO_SUMS, ("nccl", 2, 2), ("nccl", 3, 3)])
def test_sums_are_those_of_horovod(engine, ranks, ranks_of_host, monkeypatch):
    choose_exchange(engine, monkeypatch)
    answers = run_ranks(sum_all, ranks, ranks_of_host=ranks_of_host)
    for found, types, stateful in answers:
        # Small gradients of one dtype share an op. Integers of 32 bits are in host memory on a GPU, too.
        of_nccl = 3 + len(SIZES) + 3 - 1 if engine == "nccl" else 0
        assert types.count("Fusedrec>NcclSum") == of_nccl
        assert types.count("Fusedrec>ExchangeSum") == 3 + len(SIZES) + 3 - of_nccl
        assert not set(collectives.SUMS[1:]) & set(stateful)
        for step, values in enumerate(found):
            np.testing.assert_array_equal(values[1][0], [10 * step * ranks + sum(range(ranks)), ranks * 2**40])
            for number, (*ours, of_horovod) in enumerate(values):
                # Engines add in other orders, and one divides by the number of ranks: some units in the last place.
                close = {"rtol": 0, "atol": 0} if ranks == 2 else {"rtol": 1e-6, "atol": 1e-6}
                for way, of_way in enumerate(ours):
                    np.testing.assert_allclose(of_way, of_horovod, **close)
                    np.testing.assert_array_equal(of_way, answers[0][0][step][number][way])  # on all ranks alike


def test_the_library_exports_nothing_of_gloo(monkeypatch):
    choose_exchange("gloo", monkeypatch)
    command = ["nm", "--dynamic", "--defined-only", str(gloo.LIBRARY_PATH)]
    exported = {line.split()[-1] for line in subprocess.check_output(command, text=True).splitlines()}
    of_mesh = {f"fusedrec_exchange_{name}" for name in ("listen", "connect", "own_failure")}
    assert exported == of_mesh | {"fusedrec_nccl_load", "fusedrec_nccl_join"}


def send_other_lengths(difference):
    """Body: rank 1 sends rank 0 another number of rows than rank 0 expects."""
    rank = collectives.rank()
    splits = [2 + difference if rank == 1 else 2, 2]
    return error_of(
        collectives.all_to_all, tf.zeros([8, 3]), tf.constant(splits), name="lengths", received_splits=tf.fill([2], 2)
    )


@pytest.mark.parametrize("difference", [-2, -1, 1])
def test_a_block_of_another_length_than_expected_is_an_error(difference, monkeypatch):
    choose_exchange("gloo", monkeypatch)
    first, second = run_ranks(send_other_lengths, 2, difference=difference)
    assert "collective 'lengths': the exchange has ended at rank 1: it has sent" in first, first
    assert f"{12 * (2 + difference)} bytes where 24 were expected" in first, first
    assert not second or "the exchange has ended at rank 0" in second  # its own rows may have arrived before


IPV6 = """
import multiprocessing, os, subprocess
from tf_fusedrec import tf
from tf_fusedrec.exchange.gloo import Gloo

subprocess.run("ip link set lo up && ip -4 address flush dev lo", shell=True, check=True)
pipes = multiprocessing.Pipe()
child = os.fork()

class WithoutHorovod(Gloo):
    rank, size, host = int(child == 0), 2, 0

    def __init__(self):
        pass

    def all_gather_object(self, value):
        pipes[self.rank].send(value)
        other = pipes[self.rank].recv()
        return [other, value] if self.rank else [value, other]

engine = WithoutHorovod()
engine._connect()
sent = tf.constant([1, 2, 2]) + 10 * engine.rank
(received,), _ = engine.all_to_all([sent], [tf.constant([1, 2])], [], name="x", ranks=(0, 1))
assert received.numpy().tolist() == [[1, 11], [2, 2, 12, 12]][engine.rank]
engine.all_gather_object("ended")
if child:
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_it_connects_over_an_interface_that_has_an_ipv6_address_only(monkeypatch):
    choose_exchange("gloo", monkeypatch)
    environment = environment_of_ranks(os.environ | {"HOROVOD_GLOO_IFACE": "lo"})
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", IPV6], env=environment, timeout=100, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def misuse():
    """Body: returns the errors of bad calls, none of which sends anything, and the rows of a good one."""
    import tf_fusedrec as fr

    rows, splits = tf.zeros([4, 2]), tf.fill([2], 2)
    engine, ranks = collectives._engine, {"collective": "left", "ranks": (0, 1)}
    expect = functools.partial(engine._ops.fusedrec_exchange_expect, T=[tf.float32], row_shapes=[[2]], **ranks)
    assert expect(expect([splits]))[0].numpy().tolist() == [2, 2]
    all_to_all = functools.partial(engine._ops.fusedrec_exchange_all_to_all, [tf.range(4)], [splits])
    own = [error_of(all_to_all, [tf.constant([3, 3])], collective="own", ranks=(0, 1)) for _ in range(2)]
    return [
        all_to_all([splits], collective="own", ranks=(0, 1))[0][0].numpy().tolist(),
        own,
        error_of(engine._ops.fusedrec_exchange_all_to_all, [rows] * 2, [splits] * 2, [], **ranks),
        error_of(collectives.all_to_all, rows, tf.constant([4, 1]), name="many"),
        error_of(collectives.all_to_all, rows, tf.constant([-1, 1]), name="negative"),
        error_of(collectives.all_to_all, rows, tf.constant([1]), name="one"),
        error_of(engine._ops.fusedrec_exchange_all_to_all, [tf.zeros([4, 3])], [splits], [splits], **ranks),
        error_of(expect, [tf.constant([2, 3])]),
        error_of(fr.init, exchange="horovod"),
    ]


def test_bad_calls_are_refused(monkeypatch):
    choose_exchange("gloo", monkeypatch)
    for rank, (good, own, unknown, many, negative, one, width, left, init) in enumerate(run_ranks(misuse, 2)):
        assert good == [2 * rank, 2 * rank + 1] * 2
        for refused in own:
            assert "collective 'own': known_splits must have 2 rows of this rank, as splits, got 3" in refused, own
        assert "splits and known_splits must be those of 2 tensors, got 2 and 0" in unknown, unknown
        assert "splits must have a sum of at most 4, the number of rows, got 5" in many, many
        assert "splits must not be negative, got -1" in negative, negative
        assert "splits must have one entry for each of 2 ranks, got 1" in one, one
        for refused in (width, left):
            assert "collective 'left': it has expected rows of other lengths for a call that was never made" in refused
        assert "have joined with exchange='gloo', got 'horovod'" in init, init


@pytest.mark.parametrize(
    ("name", "timeline", "error"),
    [
        ("mpi", False, "exchange must be one of ['horovod', 'gloo', 'nccl'], got 'mpi'"),
        ("gloo", True, "exchange must be 'horovod', got 'gloo', because on rank 0 a timeline is wanted"),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused_when_the_ranks_join(name, timeline, error, monkeypatch):
    choose_exchange(name, monkeypatch)
    with pytest.raises(AssertionError) as caught:
        run_ranks(misuse, 2, timeline=timeline)
    assert error in str(caught.value)


class Joined(Horovod):
    """Two ranks that have joined. This one is rank 0, and `other` is rank 1's name of an engine and its obstacle."""

    def __init__(self, other):
        self.other = other

    def all_gather_object(self, value):
        return [value, self.other]


@pytest.mark.parametrize(
    ("name", "other", "store", "variables", "answer"),
    [
        (None, (None, None), True, {}, "gloo"),
        (None, (None, "its library does not load"), True, {}, "horovod"),
        (None, (None, None), False, {}, "horovod"),
        (None, (None, None), True, {"HOROVOD_TIMELINE": "DYNAMIC"}, "horovod"),
        ("horovod", ("horovod", None), True, {}, "horovod"),
        ("gloo", ("gloo", None), True, {}, "gloo"),
        ("gloo", ("gloo", "its library does not load"), True, {}, "got 'gloo', because on rank 1 its library does not"),
        ("gloo", ("gloo", None), False, {}, "because on rank 0 the launcher has no store"),
        ("gloo", (None, None), True, {}, "exchange must be the same on all ranks, got ['gloo', None] by rank"),
    ],
)
def test_the_engine_is_one_that_all_ranks_can_use(name, other, store, variables, answer, monkeypatch):
    choose_exchange("gloo", monkeypatch)  # skips the test without the library
    monkeypatch.setattr(gloo.Gloo, "_connect", lambda self: None)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    try:
        chosen = gloo.choose(Joined(other), name, has_store=store).name
    except ValueError as error:
        chosen = str(error)
    assert answer in chosen if " " in answer else answer == chosen


def test_nccl_is_refused_without_its_library_without_a_gpu_and_for_groups(monkeypatch):
    choose_exchange("nccl", monkeypatch)
    monkeypatch.setenv("FUSEDREC_NCCL_LIBRARY", "/no/libnccl.so.2")
    monkeypatch.setattr(nccl, "built_with_cuda", lambda: False)
    choose = functools.partial(gloo.choose, Joined(("nccl", None)), "nccl", has_store=True, engine=nccl.Nccl)
    assert "exchange must be 'gloo', got 'nccl', because on rank 0 NCCL does not load (/no/lib" in error_of(choose)
    monkeypatch.delenv("FUSEDREC_NCCL_LIBRARY")
    assert "because on rank 0 TensorFlow sees no GPU" in error_of(choose)
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    refused = error_of(collectives.init, [(0, 1)])
    assert "exchange must be 'gloo' or 'horovod' for the sets of ranks [(0, 1)], got 'nccl'" in refused
