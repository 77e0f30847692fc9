"""A rank that stands still or ends alone: who waits for whom is said, a stop is survived, nobody ends with code 0."""

import functools
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from horovod.runner import gloo_run
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from tests.support.ranks import choose_exchange, environment_of_ranks, run_ranks
from tf_fusedrec.exchange import watchdog


@pytest.fixture(params=["horovod", "gloo"])
def exchange(request, monkeypatch):
    """The engine of the exchange in the test's ranks."""
    choose_exchange(request.param, monkeypatch)
    return request.param


def stop_this_process(seconds):
    """SIGSTOP, and SIGCONT after some seconds."""
    subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"], check=True)


def stand_still(stopped_s, blocked_s):
    """Body: 3 steps; rank 1 is stopped before the second one, and its input blocks before the third."""
    from tf_fusedrec import tf
    from tf_fusedrec.exchange import collectives

    said = sys.stderr = io.StringIO()
    rank = collectives.rank()

    @tf.function
    def step(x):
        received, _ = collectives.all_to_all(x, tf.constant([1, 1]), name="watched.ids")
        return collectives.all_reduce_sum(received, name="watched.sum")

    sums = []
    for number in range(3):
        if rank == 1 and number == 1:
            stop_this_process(stopped_s)
        if rank == 1 and number == 2:
            time.sleep(blocked_s)
        sums.append(step(tf.constant([1.0, 2.0]) * (rank + 1 + number)).numpy().tolist())
    return sums, said.getvalue(), os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"], share_of_a_core("tf_fusedrec watchdog")


def share_of_a_core(name):
    """Returns the share of one core that a thread of this process has used."""
    (thread,) = (one for one in threading.enumerate() if one.name == name)
    process = psutil.Process()
    (used,) = (one for one in process.threads() if one.id == thread.native_id)
    return (used.user_time + used.system_time) / (time.time() - process.create_time())


def test_a_stopped_rank_and_one_whose_input_blocks_are_named_and_training_goes_on(exchange, monkeypatch):
    monkeypatch.setenv("FUSEDREC_REPORT_AFTER_SECONDS", "2")
    monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS", raising=False)
    (first, waits, limit, share), (second, blocked, _, _) = run_ranks(stand_still, 2, stopped_s=9, blocked_s=7)
    # Rank r sends (r + 1 + n) * [1, 2]: rank 0 receives the first entries, rank 1 the second ones.
    assert first == second == [[(1 + n) * 3.0, (2 + n) * 3.0] for n in range(3)]
    assert limit == "600" and share < 0.03
    stop, block = waits.split("call 3", 1)
    assert re.search(r"rank 0: it has waited \d+ s in collective 'watched.ids', call 2, for rank 1, ", stop), waits
    # The number of calls is that of the last sign of life.
    assert re.search(r"for rank 1, with its last sign of life \d+ s ago, after [01] of 2 calls", stop), waits
    assert "Horovod ends the job after 600 s (HOROVOD_GLOO_TIMEOUT_SECONDS)" in stop
    assert "it goes on: collective 'watched.ids', call 2, has ended" in stop
    assert "rank 1, which has made 2 of 3 calls and has been in no collective for" in block, waits
    assert "rank 1: this rank itself was stopped for" in blocked, blocked
    assert "rank 1: it has been in no collective for" in blocked and "others wait for it in 'watched.ids'" in blocked
    assert "It may be waiting for its input data." in blocked


PROGRAM = """
import os
import signal
import sys
import numpy as np
import tf_fusedrec as fr
from tests.exchange.test_watchdog import stop_this_process
from tf_fusedrec import keras, tf

fr.init(report_after_s=1 if sys.argv[1].startswith("stops") else 30)
rank = fr.rank()
if rank == 1 and sys.argv[1] == "stops early":
    stop_this_process(12)
embedding = fr.FusedEmbedding(
    tables=[fr.TableConfig(name="t", dim=4, optimizer=fr.optimizers.Adagrad(0.1))],
    features=[fr.FeatureConfig(name="f", table="t", combiner="sum")],
)
inputs = {"f": keras.Input([3], dtype=tf.int64, name="f")}
model = keras.Model(inputs, keras.layers.Dense(1)(embedding(inputs)["f"]))
model.compile(fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.1)), loss="mse")

def batches():
    for step in range(4 if rank == 0 else 2):
        if rank == 1 and step == 1 and sys.argv[1] == "fails":
            raise ValueError("column 'age' of shard-7 is cut off")
        if rank == 1 and step == 1 and sys.argv[1] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and step == 1 and sys.argv[1] == "stops":
            stop_this_process(12)
        yield {"f": np.full([2, 3], step)}, np.zeros([2, 1], np.float32)

if rank == 1 and sys.argv[1] == "exits":
    sys.exit(3)
signature = ({"f": tf.TensorSpec([2, 3], tf.int64)}, tf.TensorSpec([2, 1]))
model.fit(tf.data.Dataset.from_generator(batches, output_signature=signature), verbose=0)
print("fit has ended", flush=True)
"""


# The ranks of all jobs are forks of one process that has imported TensorFlow. Each is the main program, so Python ends
# it as it ends every program.
FORKS = """
import json
import os
import runpy
import sys

import horovod.tensorflow
import tf_fusedrec

for line in sys.stdin:
    program, words, environments = json.loads(line)
    ranks = []
    for rank, environment in enumerate(environments):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            break
    if ranks[-1] == 0:
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(f"{program}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [program, *words]
        runpy.run_path(program, run_name="__main__")
        break
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]), flush=True)
"""


@functools.cache
def forking_process():
    """Starts the process. It ends with this one, because its stdin ends."""
    return subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment_of_ranks(os.environ), start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip


def run_program(folder: pathlib.Path, *words: str, source: str = PROGRAM, number: int = 2):
    """Returns the exit codes and the stderr of the ranks of a program."""
    program = folder / "program.py"
    program.write_text(source, encoding="utf-8")
    rendezvous = RendezvousServer()
    slots = get_host_assignments(parse_hosts(f"localhost:{number}"), number)
    port = rendezvous.start()
    forking = forking_process()
    limit = threading.Timer(150, os.killpg, [forking.pid, signal.SIGKILL])
    limit.start()
    try:
        rendezvous.init(slots)
        shared = environment_of_ranks(os.environ) | gloo_run.create_run_env_vars("127.0.0.1", ["lo"], port)
        environments = [
            {name: str(value) for name, value in (shared | gloo_run.create_slot_env_vars(slot)).items()}
            for slot in slots
        ]
        print(json.dumps([str(program), words, environments]), file=forking.stdin, flush=True)
        codes = forking.stdout.readline()
    finally:
        limit.cancel()
        rendezvous.stop()
    errors = [pathlib.Path(f"{program}.{rank}").read_text(encoding="utf-8", errors="replace") for rank in range(number)]
    if not codes:
        forking_process.cache_clear()
        pytest.fail(f"the ranks did not end within 150 s: {errors}")
    return json.loads(codes), errors


def test_no_rank_of_a_job_with_uneven_data_ends_with_code_0_and_the_remedy_is_named(exchange, tmp_path):
    codes, errors = run_program(tmp_path, "uneven")
    assert codes == [1, 1]
    for rank, text in enumerate(errors):
        last = text.strip().splitlines()[-1]
        # Rank 1 hears of its end from rank 0, or notices it first.
        told = (
            rf"tf_fusedrec: rank {rank}: failed: (rank 0 failed first: )?the program of rank 1 has ended after 2 calls"
        )
        assert re.match(told, last), text
        assert "and other ranks wait in call 3." in last and "PipelinedModel" in last


@pytest.mark.parametrize(
    ("how", "cause"),
    [("fails", ".*column 'age' of shard-7 is cut off"), ("exits", r"its program called sys.exit\(3\)\.$")],
)
def test_the_cause_of_a_failing_rank_stands_last_on_every_rank(exchange, how, cause, tmp_path):
    codes, errors = run_program(tmp_path, how)
    assert codes[0] not in (0, 3) and (codes[1] == 3 if how == "exits" else codes[1] != 0)
    for text in errors:
        assert re.match(f"tf_fusedrec: rank 1 failed first: {cause}", text.strip().splitlines()[-1]), text
    assert how == "exits" or "Traceback" not in errors[0], "a traceback of Horovod's tells nothing"


def test_a_killed_rank_is_not_taken_for_a_failure_of_another_one(exchange, tmp_path):
    codes, errors = run_program(tmp_path, "dies")
    assert codes[0] == 1 and codes[1] == -signal.SIGKILL
    last = errors[0].strip().splitlines()[-1]
    named = "(a rank|rank 1)" if exchange == "gloo" else "a rank"  # Horovod does not know which one
    assert re.match(f"tf_fusedrec: {named} ended without naming a cause. It was killed,", last), errors[0]
    assert "rank 0 failed" not in errors[0] and "Traceback" not in errors[0]


KILLED_IN_A_MESSAGE = """
import os, pathlib, signal, sys, threading, time
import tf_fusedrec as fr
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives

def die_after_8_megabytes():
    sent = lambda: int(pathlib.Path("/proc/self/io").read_text().split()[3])  # bytes written
    begin = sent()
    while sent() < begin + 2**23:
        time.sleep(0.001)
    pathlib.Path(sys.argv[1]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)

fr.init()
if fr.rank() == 1:
    threading.Thread(target=die_after_8_megabytes, daemon=True).start()
collectives.all_to_all(tf.zeros([2**25]), tf.constant([2**24 - 1, 1, 2**24]), name="large")
"""


def test_a_rank_killed_inside_a_message_ends_all_ranks_at_once(exchange, tmp_path):
    """Gloo forgot the messages that it was reading and writing, so their waiters waited for the limit of 600 s."""
    codes, errors = run_program(tmp_path, str(tmp_path / "killed_at"), source=KILLED_IN_A_MESSAGE, number=3)
    took_s = time.time() - float((tmp_path / "killed_at").read_text(encoding="utf-8"))
    assert codes[1] == -signal.SIGKILL and 0 not in codes
    assert took_s < 20  # 2 s on an idle machine, with the ends of the interpreters
    if exchange == "gloo":  # the other two may lose each other first, as both close their connections
        for text in (errors[0], errors[2]):
            assert "tf_fusedrec: rank 1 ended without naming a cause" in text, text


@pytest.mark.parametrize("when", ["stops", "stops early"])  # others wait in an op, or in a collective that Python calls
def test_the_limit_that_ends_a_job_is_the_one_that_was_set_and_the_rank_that_stood_still_is_named(
    exchange, tmp_path, monkeypatch, when
):
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "4")
    codes, errors = run_program(tmp_path, when)
    assert 0 not in codes
    last = errors[0].strip().splitlines()[-1]
    ended = r"tf_fusedrec: rank 0(: failed| failed first): rank 1 has given no sign of life for \d+ s; "
    assert re.match(f"{ended}(Horovod waits|the limit is) 4 s", last)


PARTED = """
import sys
import numpy as np
import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.schedules import PipelinedModel

fr.init(report_after_s=1, give_up_after_s=4)

class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = fr.rank() == 1 and batch == 1

embedding = fr.FusedEmbedding([fr.FeatureConfig("f", fr.TableConfig("t", 4, fr.optimizers.SGD(0.1)))])
inputs = {"f": keras.Input([3], dtype=tf.int64, name="f")}
outputs = keras.layers.Dense(1)(keras.layers.Flatten()(embedding(inputs)["f"]))
model = PipelinedModel(inputs, outputs)
model.compile(fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.1)), loss="mse")
data = tf.data.Dataset.from_tensors(({"f": np.ones([2, 3], np.int64)}, np.zeros([2, 1], np.float32))).repeat(8)
model.fit(data, verbose=0, callbacks=[Stops()])
"""


def test_ranks_that_wait_for_each_other_end_and_are_named(exchange, tmp_path):
    """A user's callback stops one rank in the middle of an epoch. Each would wait for the other for ever."""
    codes, errors = run_program(tmp_path, source=PARTED)
    assert codes == [1, 1], errors
    lines = [line for line in errors[0].splitlines() if line.startswith("tf_fusedrec: ")]
    assert re.search(r"it waits for rank \d in collective '.*', call \d, and rank \d waits for it in", lines[-1]), (
        errors
    )
    assert "Use callbacks.Interrupt" in lines[-1] and "The limit is 4 s" in lines[-1]


IN_GROUPS = """
import os
import signal
import sys
import numpy as np
import tf_fusedrec as fr
from tests.exchange.test_watchdog import stop_this_process
from tf_fusedrec import keras, optimizers, tf

how, rule = sys.argv[1:]
topology = fr.Topology(2, rule)
fr.init(topology, report_after_s=1, give_up_after_s=4 if how == "stops" else 9)
rank = fr.rank()
table = fr.TableConfig("t", 4, optimizers.SGD(0.1))
embedding = fr.FusedEmbedding([fr.FeatureConfig("f", table)], topology=topology)

@tf.function
def step(ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedding({"f": ids})["f"] ** 2)
    tape.gradient(loss, embedding.trainable_variables)
    return loss

for number in range(4):
    if rank == 0 and number == 2 and how == "dies":
        stop_this_process(5)  # as on a busy host: its silence is not why the job ends
    if rank == 3 and number == 2:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        stop_this_process(12)
    step(tf.range(20) + number)
print("all steps were made", flush=True)
"""


# A rank that hears first of the loss reports the silent rank. The others may quote it.
SILENT = r"\d(: failed| failed first): rank 3 has given no sign|3.*: it was stopped for \d+ s"
LOST = rf"rank (\d: Horovod has lost its connection|{SILENT}|3 ended without)"


@pytest.mark.parametrize(("how", "rule"), [("dies", "weight_sync"), ("stops", "gradient_sync")])
def test_the_loss_of_a_rank_ends_all_groups(exchange, tmp_path, how, rule):
    """Horovod's thread ends the process of a rank that loses another one. No collective returns an error to Python."""
    codes, errors = run_program(tmp_path, how, rule, source=IN_GROUPS, number=4)
    assert codes == [1, 1, 1, -signal.SIGKILL if how == "dies" else 1], errors
    for text in errors[: 3 if how == "dies" else 4]:
        # Horovod may write more lines after it.
        lines = [line for line in text.splitlines() if line.startswith("tf_fusedrec: ")]
        assert re.match(f"tf_fusedrec: {LOST}", lines[-1]), (codes, errors)


OVER_NCCL = """
import os
import signal
import sys
import tf_fusedrec as fr
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives

fr.init()
how, failing = sys.argv[1], int(sys.argv[2])

@tf.function
def step(x):
    sums = [collectives.all_reduce_sum(x + n, name=f"sum.{n}") for n in range(4)]
    rows, _ = collectives.all_to_all(x, tf.ones([fr.size()], tf.int32), name="rows")
    return tf.add_n([*sums, collectives.all_reduce_sum(rows, name="after")])

@tf.function
def fails(x):
    total = collectives.all_reduce_sum(x, name="never")
    tf.debugging.assert_less(x, 0.0, message="loss is not finite")
    return total

for number in range(20):
    if number == 2 and fr.rank() == failing:
        if how == "step":
            fails(tf.zeros([fr.size()]))
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    step(tf.range(fr.size(), dtype=tf.float32))
"""


@pytest.mark.parametrize(
    ("how", "failing", "cause"),
    [
        ("launch", 0, "ncclGroupEnd failed with error 2"),
        ("launch", 1, "ncclGroupEnd failed with error 2"),
        ("later", 1, "NCCL failed with error 6"),
        ("step", 0, "loss is not finite"),
        ("step", 1, "loss is not finite"),
        ("dies", 0, None),
        ("dies", 1, None),
    ],
)
def test_a_failure_of_nccl_or_of_a_step_ends_all_ranks_with_its_cause(how, failing, cause, tmp_path, monkeypatch):
    choose_exchange("nccl", monkeypatch)
    monkeypatch.setenv("FUSEDREC_TEST_NCCL_FAILS", f"{how} {failing} 14")
    begin = time.monotonic()
    codes, errors = run_program(tmp_path, how, str(failing), source=OVER_NCCL, number=4)
    assert 0 not in codes and time.monotonic() - begin < 90
    told = "ended without naming a cause" if cause is None else f"failed first: .*{cause}"
    for rank, text in enumerate(errors):
        if codes[rank] != -signal.SIGKILL:
            lines = [line for line in text.splitlines() if line.startswith("tf_fusedrec: ")]  # Horovod may write more
            assert re.match(f"tf_fusedrec: rank {failing} {told}", lines[-1]), errors


HANGS = """
import atexit, sys, time
from tf_fusedrec import ops
from tf_fusedrec.exchange.job_end import Ending
from tf_fusedrec.exchange.watchdog import Watchdog

class Board:
    def first_failure(self, wait_s=0.0):
        return None
    def report_failure(self, rank, cause):
        return {"rank": rank, "cause": cause}

atexit.register(time.sleep, 600)
watchdog = Watchdog(0, 1, None, report_after_s=1, gives_up_after_s=1, members={})
Ending(0, Board(), watchdog, report_after_s=1, gives_up_after_s=1, exit_within_s=2).install()
watchdog.start()
ops.mark_now("slow", ended=False)
while not watchdog._next_report_s:
    time.sleep(0.01)
try:
    sys.exit(4)  # as argparse does
except SystemExit:
    pass
class Nameless(ValueError):
    def __str__(self):
        raise RuntimeError("no text")
ops.mark_now("slow", ended=True)
raise Nameless()
"""


def test_a_failing_rank_whose_exit_hangs_is_ended_and_an_exception_without_a_text_is_named():
    done = subprocess.run([sys.executable, "-c", HANGS], stderr=subprocess.PIPE, encoding="utf-8", timeout=100)
    assert done.returncode == -signal.SIGALRM
    assert "s in collective 'slow'" in done.stderr  # Its end would be news, but not after the cause.
    last = done.stderr.strip().splitlines()[-1]
    assert last == "tf_fusedrec: rank 0 failed first: Nameless: its __str__ raises RuntimeError"


def state(begun, waits=(), idle=None, ended=False):
    return {"begun": {"x": begun}, "waits": list(waits), "idle": idle, "ended": ended}


def test_a_summary_names_the_ranks_of_the_collective_only():
    told = watchdog.summarize({0: state(5, [["x", 5, [0, 2]]]), 1: state(0), 2: state(4)}, {2: 33.0})
    text = watchdog.whom_it_waits_for(told, 0, "x", 5)
    assert text.startswith("for rank 2, with its last sign of life 33 s ago, after 4 of 5 calls")
    assert "rank 1" not in text and watchdog.left_behind(told) is None


def test_a_rank_that_came_and_was_stopped_then_is_named_and_a_rank_that_told_nothing_has_not_come():
    told = watchdog.summarize({0: state(5, [["x", 5, [0, 1, 2]]]), 1: state(5)}, {1: 9.0})
    text = watchdog.whom_it_waits_for(told, 0, "x", 5)
    assert "rank 1, with its last sign of life 9 s ago (" in text
    assert "rank 2, which has made 0 of 5 calls" in text


def waiting(*calls):
    """The summary of ranks 0, 1, ..., each of which is in the first call of one collective: its name and its ranks."""
    return {rank: {**state(0, [[name, 1, ranks]]), "begun": {name: 1}} for rank, (name, ranks) in enumerate(calls)}


def test_a_circle_of_waits_is_named_whatever_its_length():
    pair = watchdog.summarize(waiting(("a", [0, 1]), ("b", [0, 1]), ("b", [0, 1, 2])), {})
    start = "it waits for rank 1 in collective 'a', call 1, and rank 1 waits for it in 'b', call 1. Usually"
    assert watchdog.circle_of_waits(pair, 0, "a", 1).startswith(start)
    assert watchdog.circle_of_waits(pair, 2, "b", 1) is None  # the circle is of others
    three = waiting(("a", [0, 1]), ("b", [1, 2]), ("c", [0, 2]))
    told = watchdog.circle_of_waits(watchdog.summarize(three, {}), 1, "b", 1)
    start = (
        "it waits for rank 2 in collective 'b', call 1, rank 2 waits for rank 0 in 'c', call 1, and rank 0 waits for it"
    )
    assert told.startswith(start)
    assert watchdog.circle_of_waits(watchdog.summarize(three, {2: 9.0}), 1, "b", 1) is None  # its wait may be over
    line = watchdog.summarize({**three, 2: state(0)}, {})
    assert watchdog.circle_of_waits(line, 0, "a", 1) is None


def test_an_end_with_all_calls_made_leaves_nobody_behind():
    assert watchdog.left_behind(watchdog.summarize({0: state(5), 1: state(4, ended=True)}, {})) is None
    waits = watchdog.summarize({0: state(5, [["x", 5, [0, 1]]]), 1: state(4, ended=True)}, {})
    assert "the program of rank 1 has ended after 4 calls" in str(watchdog.left_behind(waits))
