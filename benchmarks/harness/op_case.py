"""One case of an op's benchmark: our op and a plain peer in turns, and the time that memory traffic alone takes."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import harness

WARMUP = 5


def measure_case(
    axes: Mapping[str, Any],
    *,
    ours: Callable[[], object],
    peer: Callable[[], object],
    peer_name: str,
    ids: int,
    bytes_moved: int,
    memory_bytes_per_s: float,
    quick: bool,
) -> dict[str, Any]:
    """Times our op and its peer, and derives the fields of the table and of the JSON.

    Args:
      axes: Name and value of each axis of the case.
      ours, peer: Calls without arguments and with equal results.
      peer_name: Description of the peer.
      ids: Number of ids in a call.
      bytes_moved: Bytes that any implementation must read and write.
      memory_bytes_per_s: Measured bandwidth of a copy by one thread, bytes read plus written.
      quick: True to run 15 repeats instead of 60.

    Returns:
      axes, peer, ms_ and ms_p90_ of both, ratio (peer / ours), ids_per_s and bytes_per_s of ours, ms_floor.
    """
    times = harness.measure({"ours": ours, "peer": peer}, warmup=WARMUP, repeats=15 if quick else 60)
    seconds = times["ours"].median_s
    return {
        **axes,
        "peer": peer_name,
        "ms_ours": 1e3 * seconds,
        "ms_p90_ours": 1e3 * times["ours"].p90_s,
        "ms_peer": 1e3 * times["peer"].median_s,
        "ms_p90_peer": 1e3 * times["peer"].p90_s,
        "ratio": times["peer"].median_s / seconds,
        "ids_per_s": ids / seconds,
        "bytes_per_s": bytes_moved / seconds,
        "ms_floor": 1e3 * bytes_moved / memory_bytes_per_s,
    }
