"""A group that loses a rank, or whose rank stands still: all ranks of all groups end, none with 0, and say why.

Horovod's thread ends the process of a rank that loses another one, and no collective returns an error to Python.
"""

import re
import signal

import pytest

from tests.exchange.watchdog.test_watchdog import run_program

PROGRAM = """
import os
import signal
import sys
import numpy as np
import tf_fusedrec as fr
from tests.exchange.watchdog.test_watchdog import stop_this_process
from tf_fusedrec import keras, optimizers, tf

how, rule = sys.argv[1:]
topology = fr.Topology(2, rule)
fr.init(topology, report_after_s=1, give_up_after_s=4)
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
    if rank == 3 and number == 2:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        stop_this_process(12)
    step(tf.range(20) + number)
print("all steps were made", flush=True)
"""


# A rank that hears first of the loss reports the silent rank. The others may quote it.
LOST = r"rank \d(: Horovod has lost its connection to another rank| failed first: rank 3 has given no sign)"


@pytest.mark.parametrize(("how", "rule"), [("dies", "weight_sync"), ("stops", "gradient_sync")])
def test_the_loss_of_a_rank_ends_all_groups(tmp_path, how, rule):
    codes, errors = run_program(tmp_path, how, rule, source=PROGRAM, number=4)
    assert codes == [1, 1, 1, -signal.SIGKILL if how == "dies" else 1], errors
    for text in errors[: 3 if how == "dies" else 4]:
        assert re.match(f"tf_fusedrec: {LOST}", text.strip().splitlines()[-1]), (codes, errors)
