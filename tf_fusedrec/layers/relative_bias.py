"""Integer thresholds of the time buckets, so that every machine and device finds the same bucket.

The published float32 formula gives different buckets under different log functions. The layers pass these thresholds
to ops.jagged_attention as a BucketTable.
"""

from __future__ import annotations

import decimal
import fractions
import functools

import numpy as np

MAX_TIME_BUCKETS = 145  # The threshold of bucket 146 does not fit int64.


@functools.cache
def bucket_thresholds(num_buckets: int) -> np.ndarray:
    """Returns the smallest time difference of each bucket, which reproduces the float32 formula exactly.

    The formula (research HSTU) is bucket = clamp(trunc(ln(max(|difference|, 1)) / 0.301), 0, num_buckets), with every
    step rounded to float32. With a correctly rounded logarithm every step is monotonic, so bucket b begins at one
    integer. Exact arithmetic finds it backwards from the last step: quotient >= b  <=>  log >= y, a float32  <=>
    float32(difference) >= x  <=>  difference >= threshold.

    Args:
      num_buckets: J, 1 .. 145.

    Returns:
      <int64>[J]. Entry b-1 is the smallest difference of bucket b. No integer is in bucket 1, so its entry equals
      bucket 2's.

    Raises:
      ValueError: num_buckets is out of range.
    """
    if not 1 <= num_buckets <= MAX_TIME_BUCKETS:
        raise ValueError(
            f"num_buckets must be 1 .. {MAX_TIME_BUCKETS} (the next begins beyond int64), got {num_buckets}."
        )
    return np.array([_bucket_begin(bucket) for bucket in range(1, num_buckets + 1)], np.int64)


def _bucket_begin(bucket: int) -> int:
    """Returns the smallest integer d > 0 with float32(float32(ln(float32(d))) / float32(0.301)) >= bucket."""
    divisor = fractions.Fraction(float(np.float32(0.301)))
    # A bucket number is a float32 with an even mantissa, so a quotient exactly half way below it rounds up to it.
    log = _float32_at_or_above(_half_way_below(np.float32(bucket)) * divisor)
    with decimal.localcontext() as context:
        context.prec = 60
        half_way = _half_way_below(log)
        # e to a rational is irrational, so it never equals a float32 and no tie occurs.
        number = fractions.Fraction((decimal.Decimal(half_way.numerator) / half_way.denominator).exp())
    rounds_to = _float32_at_or_above(number)
    begin = max(int(_half_way_below(rounds_to)) - 1, 1)
    while np.int64(begin).astype(np.float32) < rounds_to:  # np.float32(int) would round twice.
        begin += 1
    return begin


def _half_way_below(number: np.float32) -> fractions.Fraction:
    """Returns the midpoint of `number` and the float32 below it. Reals above the midpoint round to `number`."""
    below = np.nextafter(number, np.float32(-np.inf))
    return (fractions.Fraction(float(below)) + fractions.Fraction(float(number))) / 2


def _float32_at_or_above(number: fractions.Fraction) -> np.float32:
    candidate = np.float32(float(number))
    while fractions.Fraction(float(candidate)) >= number:
        candidate = np.nextafter(candidate, np.float32(-np.inf))
    return np.nextafter(candidate, np.float32(np.inf))
