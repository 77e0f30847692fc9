"""benchmarks.horovod_queue parts its times, and the cable that it uses delays and loses nothing."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks.harness import delayed_cable, network
from benchmarks.horovod_queue import __main__ as horovod_queue

WHY_NOT = network.why_not()


def case(latency_ms, empty, of_eight, **more):
    return {"latency_ms": latency_ms, "ms_empty": empty, "ms_empty_8": of_eight, "ms_rows": 50.0, **more}


def test_a_step_is_charged_with_its_splits():
    steps = {"sync": {"ms": 300.0, "all_to_alls": 3}, "nested_M8": {"ms": 200.0, "all_to_alls": 17}}
    quick = {"sync": {"ms": 240.0, "all_to_alls": 3}, "nested_M8": {"ms": 220.0, "all_to_alls": 17}}
    queue = {"ms_exchange_alone": 5.0, "ms_exchange_queued": 65.0, "ms_reduce_alone": 70.0}
    # Eight at once take 14 ms more than one, so an all-to-all of nothing makes two exchanges of 1 ms.
    slow = case(1.0, 8.0, 22.0, steps=steps)
    found = horovod_queue.figures(slow, case(1.0, 11.0, 25.0, **queue), case(0.0, 1.0, 2.0, steps=quick))
    assert found["splits_ms"] == 1 and found["negotiation_ms"] == 6 and found["negotiation_ms_with_sets"] == 9
    assert found["latency_part_sync"] == pytest.approx(0.2) and found["latency_part_nested"] == 0
    assert found["splits_part_sync"] == pytest.approx(0.2 / 8)
    assert found["splits_bound_nested"] == 17 / 200 and found["blocked_ms"] == 60
    fields = horovod_queue.fields([found])
    assert fields["latency_part_sync_1ms"] == found["latency_part_sync"] and fields["latency_part_sync_5ms"] is None


def test_without_root_fields_are_null_and_the_reason_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["horovod_queue", "--quick", "--json", str(tmp_path / "queue.json")])
    horovod_queue.main()
    result = json.loads((tmp_path / "queue.json").read_text(encoding="utf-8"))
    assert all(result[name] is None for name in horovod_queue.fields([])) and result["cases"] == []
    assert "not measured: network namespaces need root" in capsys.readouterr().out


ECHO = """
import socket
with socket.create_server(("10.0.0.2", 9999)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while data := connection.recv(1 << 20):
        connection.sendall(data)
"""
# Round trips of one byte, then a megabyte that must come back as it was.
ASK = """
import os, socket, time
with socket.create_connection(("10.0.0.2", 9999)) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(20):
        begin = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        print(time.monotonic() - begin)
    sent, got = os.urandom(1 << 20), b""
    connection.sendall(sent)
    while len(got) < len(sent):
        got += connection.recv(1 << 20)
    assert got == sent
"""


@pytest.mark.skipif(WHY_NOT is not None or not delayed_cable.DEVICE.exists(), reason=f"{WHY_NOT}, or no TAP devices")
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_the_cable_delays_and_loses_nothing(tmp_path, delay_s):
    with network.two_hosts(tmp_path, tmp_path / "delay") as (on_first, _):
        first, second = re.findall(r"exec (fusedrec-\w+) ", (tmp_path / "ssh").read_text(encoding="utf-8"))
        delayed_cable.set_delay(tmp_path / "delay", delay_s)
        with subprocess.Popen(network.inside(second, [sys.executable, "-c", ECHO]), stdout=subprocess.PIPE) as echo:
            assert echo.stdout.readline() == b"ready\n"
            done = subprocess.run([*on_first, sys.executable, "-c", ASK], capture_output=True, check=True, timeout=60)
    trips = sorted(float(line) for line in done.stdout.split())
    assert first in on_first
    assert trips[0] >= 2 * delay_s
    assert trips[0] <= 2 * delay_s + 0.02  # the shortest of 20, because a loaded machine makes some longer
