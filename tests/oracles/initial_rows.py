"""Oracle for initial_rows: Philox4x32-10 on Python integers. Imports nothing from tf_fusedrec."""

import math

import numpy as np


def philox4x32(counter, key):
    """Ten rounds of Philox (Salmon et al., SC 2011) on four 32-bit words with a 64-bit key."""
    c, k0, k1 = list(counter), key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c


def _normals(a, b):
    radius = math.sqrt(-2 * math.log((a + 0.5) / 2**32))
    angle = 2 * math.pi * (b + 0.5) / 2**32
    return radius * math.cos(angle), radius * math.sin(angle)


def initial_row_oracle(distribution, a, b, seed, id_, dim):
    low, high = int(id_) & 0xFFFFFFFF, int(id_) >> 32 & 0xFFFFFFFF
    row = []
    for d in range(dim):
        if distribution == "constant":
            row.append(a)
        elif distribution == "truncated_normal":
            attempt, normal = 0, math.inf
            while abs(normal) > 2:
                bits = philox4x32([low, high, d, attempt], seed)
                normal, attempt = _normals(bits[0], bits[1])[0], attempt + 1
            row.append(a + b * normal)
        else:
            bits = philox4x32([low, high, d // 4, 0], seed)
            if distribution == "uniform":
                row.append(a + (b - a) * bits[d % 4] / 2**32)
            else:
                pair = _normals(*bits[:2]) if d % 4 < 2 else _normals(*bits[2:])
                row.append(a + b * pair[d % 2])
    return np.array(row, np.float32)
