"""The way of ids through all stages, forward and backward: group.py of one group, together.py of several at once."""

from tf_fusedrec.lookup.group import Context, GroupLookup, Routed, gradient_scale
from tf_fusedrec.lookup.together import LaneCall, WaitingGradients, apply_waiting, fetch, look_ahead, route

__all__ = [
    "Context",
    "GroupLookup",
    "LaneCall",
    "Routed",
    "WaitingGradients",
    "apply_waiting",
    "fetch",
    "gradient_scale",
    "look_ahead",
    "route",
]
