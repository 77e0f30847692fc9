"""Oracle for initial_rows: Philox4x32-10 on Python integers. Imports nothing from tf_fusedrec."""

import statistics

import numpy as np


def philox4x32(counter, key):
    """Ten rounds of Philox (Salmon et al., SC 2011) on four 32-bit words with a 64-bit key."""
    c, k0, k1 = list(counter), key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c


def initial_row_oracle(distribution, a, b, seed, id_, dim):
    low, high = int(id_) & 0xFFFFFFFF, int(id_) >> 32 & 0xFFFFFFFF
    normal = statistics.NormalDist()
    row = []
    for d in range(dim):
        p = (philox4x32([low, high, d // 4, 0], seed)[d % 4] + 0.5) / 2**32
        inside = normal.cdf(-2) + p * (normal.cdf(2) - normal.cdf(-2))
        row.append(
            {
                "constant": lambda: a,
                "uniform": lambda p=p: a + (b - a) * p,
                "normal": lambda p=p: a + b * normal.inv_cdf(p),
                "truncated_normal": lambda inside=inside: a + b * normal.inv_cdf(inside),
            }[distribution]()
        )
    return np.array(row, np.float32)
