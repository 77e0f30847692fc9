"""Oracle and cases for join_messages and split_messages, on lists. Imports nothing from tf_fusedrec."""

# Messages, the lengths of their blocks by rank, and the segments of each lookup.
EDGE_CASES = {
    "two ranks": ([[1, 7, 2, 5, 9], [2, 4, 4, 0]], [[2, 3], [3, 1]], [1, 1]),
    "no ids": ([[0, 0], [0, 0]], [[1, 1], [1, 1]], [1, 1]),
    "one rank, extreme ids": ([[1, -(2**63), 0], [0, 2, -1, 2**63 - 1]], [[2], [4]], [1, 2]),
    "no ranks": ([[], []], [[], []], [1, 2]),
    "one lookup, padding": ([[1, 5, 8, 8, 8]], [[2]], [1]),
}
# A message of two lookups with one segment each whose counts do not fit, its splits, and the words of the refusal.
LIES = [
    ([1, 5, 0, 3, 1, 0], [3, 3], "message of rank 1 counts 3 ids in segment 0 of lookup 0, more than the 2"),
    ([1, 5, 0, 2, 1, 0], [3, 3], "message of rank 1 must hold 1 counts of lookup 1, got 0 entries"),
    ([-1, 0], [2], "message of rank 0 counts -1 ids in segment 0 of lookup 0"),
    ([2**62, 2**62], [2], "message of rank 0 counts 4611686018427387904 ids in segment 0 of lookup 0"),
    ([1, 5], [2], "message of rank 0 must hold 1 counts of lookup 1, got 0 entries"),
    ([1, 5, 0, 9], [4], "message of rank 0 must end after the last lookup, got 1 more entries"),
    ([], [0], "message of rank 0 must hold 1 counts of lookup 0, got 0 entries"),
]


def join_oracle(messages, splits):
    """Returns the joined entries without padding, and the entries of each rank's block."""
    joined, lengths = [], []
    for rank in range(len(splits[0])):
        block = []
        for message, of_message in zip(messages, splits):
            begin = sum(of_message[:rank])
            block += message[begin : begin + of_message[rank]]
        joined += block
        lengths.append(len(block))
    return joined, lengths


def split_oracle(message, splits, segments):
    """Returns [(entries, length of each block)] of each lookup."""
    parts = [([], []) for _ in segments]
    at = 0
    for _ in splits:
        for (entries, lengths), count in zip(parts, segments):
            length = count + sum(message[at : at + count])
            entries += message[at : at + length]
            lengths.append(length)
            at += length
    return parts
