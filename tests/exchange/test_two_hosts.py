"""`fusedrec run -H` over two hosts trains as on one host. The hosts are network namespaces, joined by a cable."""

import pathlib
import sys

import pytest

import tf_fusedrec as fr
from benchmarks.harness import network
from tests.schedules import clicks
from tests.support.launched import launch_ranks
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf

STEPS = 3
WHY_NOT = network.why_not()
# test_ranks.py trains over several ranks of one host.
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def train():
    """Body: runs `model.fit` over a few batches. Returns the state, the rank's host, and its card's sent bytes."""
    import horovod.tensorflow as hvd

    model = clicks.make_model(
        clicks.make_embedding(),
        optimizer=fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01)),
    )
    batches = [clicks.batch(9, 10 * step + fr.rank()) for step in range(STEPS)]
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=clicks.SIGNATURE)
    model.fit(dataset, steps_per_epoch=STEPS, verbose=0)
    cards = [line.split() for line in pathlib.Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()]
    sent = [card for card in cards if card[0] == "eth0:"]
    return {
        "state": clicks.state(model, model.get_layer("fused_embedding")),
        "place": (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        "bytes_sent": int(sent[0][9]) if sent else 0,
    }


@pytest.mark.parametrize("exchange", ["horovod", "gloo"])
def test_training_over_two_hosts_equals_training_on_one(exchange, tmp_path):
    with network.two_hosts(tmp_path) as (on_first_host, environment):
        hosts = ",".join(f"{host}:1" for host in network.HOSTS)
        program = [sys.executable, "-m", "tf_fusedrec.cli.main", "run", "-H", hosts, "--network-interface", "eth0"]
        launch = [*on_first_host, *program, "--logs", str(tmp_path / "logs")]
        two = launch_ranks(launch, environment | {"FUSEDREC_EXCHANGE": exchange}, train, 2, timeout_s=100)
    one = run_ranks(train, 2)
    assert [result["place"] for result in two] == [(0, 1, 0, 2), (0, 1, 1, 2)]
    assert [result["place"] for result in one] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    for here, there in zip(two, one):
        assert here["bytes_sent"] > 10_000  # rows, gradients and dense all-reduces passed the cable
        clicks.assert_same(here["state"], there["state"])
