"""Oracle for MTGRBoost Algorithm 1 with its tail flushed. Python lists; imports nothing from tf_fusedrec."""


def batch_sizes_oracle(lengths, target):
    """Rows of each batch: while the rows hold the target, cut the prefix closest to it (the shorter one of two)."""
    rows, sizes = list(lengths), []
    while rows and sum(rows) >= target:
        prefixes = range(1, len(rows) + 1)  # at least one row, so a row longer than the target makes progress
        best = min(prefixes, key=lambda k: (abs(sum(rows[:k]) - target), k))
        sizes.append(best)
        rows = rows[best:]
    return sizes + [len(rows)] if rows else sizes
