"""Oracles for MTGRBoost Algorithm 1 with its tail flushed, and for longest-first assignment. Python lists only."""


def batch_sizes_oracle(lengths, target):
    """Returns the rows of each batch: the prefix closest to the target (the shorter of two), while rows reach it."""
    rows, sizes = list(lengths), []
    while rows and sum(rows) >= target:
        prefixes = range(1, len(rows) + 1)  # at least one row, so a row longer than the target makes progress
        best = min(prefixes, key=lambda k: (abs(sum(rows[:k]) - target), k))
        sizes.append(best)
        rows = rows[best:]
    return sizes + [len(rows)] if rows else sizes


def longest_first_oracle(weights, ranks):
    """Returns the rank of each row. Heaviest rows come first, each to the lowest of the least loaded ranks."""
    sums, owner = [0] * ranks, [None] * len(weights)
    while None in owner:
        row = max((row for row in range(len(weights)) if owner[row] is None), key=lambda row: (weights[row], -row))
        owner[row] = sums.index(min(sums))
        sums[owner[row]] += weights[row]
    return owner
