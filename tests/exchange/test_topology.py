"""Topology gives each rank its group and shard, and refuses unsuitable numbers."""

import types

import pytest

import tf_fusedrec as fr
from tf_fusedrec import keras, optimizers
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout, Topology


@pytest.mark.parametrize(
    ("together", "groups", "shards"),
    [
        (False, [(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)]),
        (True, [(0, 2, 4), (1, 3, 5)], [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_each_rank_is_in_one_group_and_holds_one_shard(together, groups, shards, monkeypatch):
    topology = Topology(2, replicas_together=together)
    assert topology.sets(6) == (groups, shards)
    monkeypatch.setattr(collectives, "size", lambda: 6)
    monkeypatch.setattr(collectives, "_sets", {*groups, *shards})
    pieces = []
    for rank in range(6):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        layout = RankLayout(topology)
        assert layout.group.members[layout.group.index] == layout.replicas.members[layout.replicas.index] == rank
        assert shards[layout.group.index] == layout.replicas.members
        pieces.append(layout.piece)
        assert layout.piece // 2 == layout.group.index  # R pieces lie in R / C shards
    assert sorted(pieces) == list(range(6))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"groups": 0}, "Topology.groups must be an int >= 1, got 0"),
        ({"groups": True}, "Topology.groups must be an int >= 1, got True"),
        ({"rule": "average"}, r"Topology.rule must be one of \('gradient_sync', 'weight_sync'\), got 'average'"),
        ({"rule": "weight_sync", "sync_every": 0}, "Topology.sync_every must be an int >= 1, got 0"),
        ({"groups": 2, "rule": "weight_sync", "moment_scale": 3.0}, r"must be in \(0, groups=2\], got 3.0"),
        ({"groups": 2, "rule": "weight_sync", "moment_scale": 0.0}, r"must be in \(0, groups=2\], got 0.0"),
        ({"average_late": True}, "Topology.average_late needs the rule 'weight_sync', got 'gradient_sync'"),
        ({"rule": "weight_sync", "average_late": 1}, "Topology.average_late must be True or False, got 1"),
        ({"groups": 2, "sync_every": 4}, "need the rule 'weight_sync', got 4 and None with 'gradient_sync'"),
    ],
)
def test_senseless_fields_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Topology(**fields)


def _layer(topology, backend="native", wire_dtype=None, **table):
    optimizer = keras.optimizers.SGD(0.1) if backend == "tfra" else optimizers.SGD(0.1)
    config = fr.TableConfig("item", 4, optimizer, **table)
    return fr.FusedEmbedding(
        [fr.FeatureConfig("item", "item")], [config], topology=topology, backend=backend, wire_dtype=wire_dtype
    )  # fmt: skip


def test_one_process_is_no_two_groups_and_tfra_has_one():
    words = r"groups must divide the number of ranks, 1, got 2. Use one of \[1\]"
    for make in (fr.init, _layer):
        with pytest.raises(ValueError, match=words):
            make(Topology(2))
    with pytest.raises(ValueError, match="needs backend='native', and it has 'tfra'"):
        _layer(Topology(2), backend="tfra")
    with pytest.raises(ValueError, match="wire_dtype must be one of .*, got 'int8'"):
        _layer(Topology(), wire_dtype="int8")


def test_a_topology_that_the_processes_did_not_join_with_is_refused(monkeypatch):
    monkeypatch.setattr(collectives, "size", lambda: 4)
    with pytest.raises(
        RuntimeError, match=r"joined without the set of ranks \(0, 1\). Use tf_fusedrec.init\(topology\)"
    ):
        RankLayout(Topology(2))
    monkeypatch.setattr(collectives, "_engine", types.SimpleNamespace(rank=0, size=4))
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"without the sets of ranks \[\(0, 1\)"):
        fr.init(Topology(2))
    with pytest.raises(ValueError, match="must divide the number of ranks, 4, got 3"):
        fr.init(Topology(3))


def test_averaged_tables_do_not_count_lookups_of_all_ranks(monkeypatch):
    monkeypatch.setattr(collectives, "size", lambda: 2)
    counting = {"limits": fr.Limits(max_rows_per_rank=9, eviction="lfu", frequency_decay_steps=5)}
    for table in (
        {"limits": fr.Limits(admission_count=2)},
        {"storage": fr.Storage(dtype="mixed", hot_after=3)},
        counting,
    ):
        with pytest.raises(ValueError, match="where replicas are averaged .*: it counts lookups of all ranks"):
            _layer(Topology(2, "weight_sync"), **table)
