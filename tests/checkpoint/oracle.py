"""The hash of ids and the owners of ranges, as custom_ops/common/hash.h has them, in Python's integers.

Imports nothing from tf_fusedrec.
"""

MASK = (1 << 64) - 1


def mix64(number: int) -> int:
    x = number & MASK
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = ((x ^ (x >> 33)) * factor) & MASK
    return x ^ (x >> 33)


def owner(number: int, ranks: int) -> int:
    return mix64(number) * ranks >> 64


def tfra_owner(number: int, ranks: int) -> int:
    return (number & 0x7FFFFFFF) % ranks


OWNERS = {"hash_range": owner, "tfra": tfra_owner}
EDGE_IDS = [0, 1, -1, 2**63 - 1, -(2**63), 12345]
