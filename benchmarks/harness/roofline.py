"""The bound of a call on a device: the least time in which it can move its bytes and do its operations.

    bound = max(bytes / copy rate, operations / matrix rate, bytes from or to the host / rate of the link)

The rates are measured on the same device in the same process. A fraction of 1 reaches the bound. A call whose data stay
in the caches may exceed 1, so benchmarks evict the last-level cache before each call.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rates(NamedTuple):
    """Measured rates of a device."""

    copy_bytes_per_s: float  # bytes read plus written by a copy in device memory
    matrix_flops: float  # bfloat16 operations per second of a large matrix product
    link_bytes_per_s: float  # bytes of a copy from pinned host memory to the device


class Work(NamedTuple):
    """The least work of a call, for any implementation."""

    bytes: int = 0  # read plus written in device memory
    flops: float = 0.0
    host_bytes: int = 0  # copied between host memory and the device


def beside(us: float, work: Work, rates: Rates) -> dict[str, Any]:
    """The fields that stand beside a time.

    Args:
      us: Time of the call in microseconds.
      work: Its work.
      rates: Rates of the device.

    Returns:
      us, bytes, flops, host_bytes, bound_us, bound_by ("bytes", "flops" or "host_bytes") and fraction_of_bound.

    Raises:
      ValueError: the call has no work, so it has no bound.
    """
    times = {
        "bytes": work.bytes / rates.copy_bytes_per_s,
        "flops": work.flops / rates.matrix_flops,
        "host_bytes": work.host_bytes / rates.link_bytes_per_s,
    }
    bound_by = max(times, key=lambda name: times[name])
    if times[bound_by] <= 0:
        raise ValueError(f"a call needs bytes, flops or host_bytes above 0 to have a bound, got {work}.")
    bound_us = 1e6 * times[bound_by]
    return {
        "us": us, "bytes": work.bytes, "flops": work.flops, "host_bytes": work.host_bytes, "bound_us": bound_us,
        "bound_by": bound_by, "fraction_of_bound": bound_us / us,
    }  # fmt: skip
