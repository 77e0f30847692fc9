"""Cluster predicts the times of collectives, and refuses unsuitable numbers."""

import dataclasses

import pytest

import tf_fusedrec as fr

# 2 hosts of 2 ranks, 8 bytes per second inside a host and 1 between hosts, without latency.
CLUSTER = fr.Cluster(4, 1e9, 2, inside_bytes_per_s=8.0, between_bytes_per_s=1.0, latency_s=0.0)
FAST, SLOW = (0, 1), (0, 2)


def test_all_to_alls_between_hosts_share_the_card():
    assert CLUSTER.all_to_all_s(FAST, 16.0) == 16 / 8
    assert CLUSTER.all_to_all_s(SLOW, 16.0) == 2 * 16 / 1  # both ranks of a host send at once
    # Two thirds of the bytes leave the host.
    assert CLUSTER.all_to_all_s((0, 1, 2, 3), 16.0) == pytest.approx(2 * 16 * 2 / 3)
    assert CLUSTER.all_to_all_s((0,), 16.0) == 0


def test_a_ring_leaves_a_host_once_for_all_its_ranks():
    assert CLUSTER.all_reduce_s((0, 1, 2, 3), 16.0) == 2 * 3 / 4 * 16 / 1
    assert CLUSTER.all_reduce_s(SLOW, 16.0) == 2 * (2 * 1 / 2 * 16)  # two such rings share the card
    assert CLUSTER.all_reduce_s(FAST, 16.0) == 2 * 1 / 2 * 16 / 8


def test_latency_is_paid_per_message():
    late = dataclasses.replace(CLUSTER, latency_s=0.5)
    assert late.all_to_all_s((0, 1, 2, 3), 0.0) == 3 * 0.5
    assert late.all_reduce_s((0, 1, 2, 3), 0.0) == 6 * 0.5


def test_topologies_divide_the_ranks():
    found = [(one.groups, one.replicas_together) for one in CLUSTER.topologies()]
    assert found == [(1, False), (2, False), (2, True), (4, False)]


def test_it_comes_back_from_its_dict():
    assert fr.Cluster(**CLUSTER.to_dict()) == CLUSTER


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ranks": 0}, "Cluster.ranks must be an int >= 1, got 0"),
        ({"ranks": 10**6}, "Cluster.ranks must be at most 65,536, got 1000000"),
        ({"ranks": True}, "Cluster.ranks must be an int >= 1, got True"),
        ({"ranks_per_host": 3}, r"ranks_per_host must divide Cluster.ranks, which is 4, got 3. Use one of \[1, 2,"),
        ({"between_bytes_per_s": -1e9}, "Cluster.between_bytes_per_s must be a finite number > 0, got -1000000000.0"),
        ({"inside_bytes_per_s": 0}, "Cluster.inside_bytes_per_s must be a finite number > 0, got 0"),
        ({"memory_bytes_per_rank": float("nan")}, "Cluster.memory_bytes_per_rank must be a finite number > 0, got nan"),
        ({"memory_bytes_per_rank": "80GB"}, "Cluster.memory_bytes_per_rank must be a finite number > 0, got '80GB'"),
        ({"latency_s": -1.0}, "Cluster.latency_s must be a finite number >= 0, got -1.0"),
        ({"file_bytes_per_rank": -1.0}, "Cluster.file_bytes_per_rank must be a finite number >= 0, got -1.0"),
        ({"file_bytes_per_s": 0.0}, "Cluster.file_bytes_per_s must be a finite number > 0, got 0.0"),
    ],
)
def test_senseless_fields_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CLUSTER, **fields)
