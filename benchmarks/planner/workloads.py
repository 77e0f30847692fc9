"""The workloads of benchmarks.planner: sizes of a step, networks, compute and lookups."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.overlap.device_model import DeviceSize
from benchmarks.overlap.variants import VARIANTS

RANKS, RANKS_PER_HOST = 4, 2
INSIDE_BYTES_PER_S = 2e9  # assumed: the loop-back inside a host
TOLERATED = ("stale_rows", "bfloat16_wire", "weight_sync")
MICRO_BATCHES = (4, 8)
# Variants of benchmarks.overlap between which fr.plan chooses, all with the batches of sync.
CHOICES = tuple(
    name
    for name, variant in VARIANTS.items()
    if not variant.clustered and not variant.lookup and variant.micro_batches in (1, *MICRO_BATCHES)
)
QUICK_CHOICES = ("sync", "frozen_M4", "dual", "nested_M8", "semi_async")

SIZES = {
    "wide rows": DeviceSize(users=32, tokens_per_user=128, dim=512),
    "narrow rows": DeviceSize(users=64, tokens_per_user=128, dim=128),
    "short batches": DeviceSize(users=64, tokens_per_user=32, dim=512),
}


class Network(NamedTuple):
    """The surroundings of a step."""

    rate: str  # of the cable between the hosts
    bytes_per_s: float  # the same
    ratio: float  # compute over the exchange of sync
    lookup: float  # part of the step of sync that its lookups take


NETWORKS = (
    Network("1gbit", 1e9 / 8, 1.4, 0.0),
    Network("1gbit", 1e9 / 8, 0.6, 0.0),
    Network("2500mbit", 2.5e9 / 8, 1.4, 0.3),
    Network("500mbit", 0.5e9 / 8, 2.0, 0.0),
)
