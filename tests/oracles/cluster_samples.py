"""Oracle for cluster_samples. NumPy only; imports nothing from tf_fusedrec.

It makes the choices that custom_ops/cluster_samples/cluster_samples.h describes, one block of samples at a time. Costs
are integers and random numbers are hashes of a counter, so results compare exactly.
"""

from __future__ import annotations

import numpy as np

SWEEPS = 30
UNIT = 2**26  # one id, in units of cost
FIRST_WEIGHT, LAST_WEIGHT = 950, 20  # weight of copies against presence, in thousandths
MAX_BLOCK, MIN_BLOCKS, REACH = 256, 16, 10
MOST_CHAINED = 64
PRICE_STEP, MOST_PRICE = 0.05 * UNIT, 16 * UNIT


class _Random:
    """A stream of random <uint64>: MurmurHash3's finalizer of a counter."""

    def __init__(self):
        self._drawn = 0

    def __call__(self, count):
        counter = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        x = counter * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        return x ^ (x >> np.uint64(33))


def cluster_samples_oracle(features, sizes):
    """Returns the order of the samples. features: (table, ids, row_splits) of each; sizes: samples by micro-batch."""
    sizes = np.asarray(sizes, np.int64)
    part = partition_oracle(features, sizes)
    return np.argsort(part, kind="stable")


def partition_oracle(features, sizes):
    """Returns the micro-batch of each sample <int64>[B]."""
    count, m = int(sizes.sum()), len(sizes)
    lengths = [np.diff(splits) for _, _, splits in features]
    tokens = np.sum(lengths, axis=0).astype(np.int64)
    links = _shared(features, lengths, count)
    by_tokens = np.argsort(-tokens, kind="stable")
    part = _dealt(by_tokens, sizes)
    if m == 1 or not len(links):
        return part
    random, search = _Random(), _Search(links, tokens, part, sizes)
    block = max(m, min(MAX_BLOCK, count // MIN_BLOCKS))
    for sweep in range(SWEEPS):
        last = SWEEPS - 1
        weight = UNIT * (FIRST_WEIGHT * last - (FIRST_WEIGHT - LAST_WEIGHT) * sweep) // (1000 * last)
        id_cost, decay = [UNIT], UNIT
        while decay:
            decay = decay * 9 // 10
            id_cost.append(weight * decay // UNIT)
        reach = block + weight * count // (REACH * UNIT)
        keys = np.arange(count) * 2**20 + reach * (random(count) >> np.uint64(44)).astype(np.int64)
        order = by_tokens[np.argsort(keys, kind="stable")]
        first = 1 + (int(random(1)[0]) * block >> 64)
        bounds = [0, *range(first, count, block), count]
        for i in np.argsort(random(len(bounds) - 1), kind="stable"):
            search.place(order[bounds[i] : bounds[i + 1]], np.array(id_cost), random)
    return search.chained(sizes) if m <= MOST_CHAINED else part


def _shared(features, lengths, count):
    """Returns the (number of the id, sample) pairs of ids with several samples, sorted, as <int64>[n, 2]."""
    rows: dict[tuple[int, int], set[int]] = {}
    for (table, ids, _), of_feature in zip(features, lengths):
        for id_, sample in zip(np.asarray(ids).tolist(), np.repeat(np.arange(count), of_feature).tolist()):
            rows.setdefault((table, id_), set()).add(sample)
    shared = [samples for _, samples in sorted(rows.items()) if len(samples) > 1]
    return np.array([(i, s) for i, samples in enumerate(shared) for s in sorted(samples)], np.int64).reshape(-1, 2)


def _dealt(by_tokens, sizes):
    """Deals samples like cards in alternating directions; a micro-batch of half the size gets one half as often."""
    piece = np.repeat(np.arange(len(sizes)), sizes)
    turn = np.concatenate([np.arange(size) for size in sizes])
    back = np.where(turn % 2, -piece, piece)
    part = np.empty(len(by_tokens), np.int64)
    part[by_tokens] = piece[np.lexsort((back, (turn + 0.5) / sizes[piece]))]
    return part


class _Search:
    """The state of the search: a partition, the copies of every id and the tokens in each micro-batch."""

    def __init__(self, links, tokens, part, sizes):
        self.part, self._tokens, self._m = part, tokens, len(sizes)
        self._ids = [links[links[:, 1] == sample, 0] for sample in range(len(tokens))]
        self._copies = np.zeros((links[:, 0].max() + 1, self._m), np.int64)
        np.add.at(self._copies, (links[:, 0], part[links[:, 1]]), 1)
        self._load = np.bincount(part, tokens, minlength=self._m).astype(np.int64)
        self._share = np.maximum(1.0, (tokens.sum() * sizes) / len(tokens))
        self._price = np.zeros(self._m, np.int64)

    def place(self, chosen, id_cost, random):
        """Reassigns the chosen samples to the places that they hold together."""
        m, tokens = self._m, self._tokens[chosen]
        places = np.bincount(self.part[chosen], minlength=m)
        for sample in chosen:
            self._copies[self._ids[sample], self.part[sample]] -= 1
        most = len(id_cost) - 1
        cost = np.array([id_cost[np.minimum(self._copies[self._ids[s]], most)].sum(axis=0) for s in chosen], np.int64)
        cost += np.floor(np.outer(tokens - tokens.sum() / len(chosen), self._price)).astype(np.int64)
        cost += (random(cost.size) >> np.uint64(58)).astype(np.int64).reshape(cost.shape)
        new = _assign(cost, places)
        for sample, to in zip(chosen, new):
            self._load[self.part[sample]] -= self._tokens[sample]
            self._load[to] += self._tokens[sample]
            self._copies[self._ids[sample], to] += 1
        self.part[chosen] = new
        self._price += np.floor((self._load / self._share - 1) * PRICE_STEP).astype(np.int64)
        self._price = np.clip(self._price, -MOST_PRICE, MOST_PRICE)

    def chained(self, sizes):
        """Returns the parts renumbered: each place goes to the one of its size that shares most with the one before."""
        holds = self._copies > 0
        order = [0]
        for place in range(1, self._m):
            free = [m for m in range(self._m) if m not in order and sizes[m] == sizes[place]]
            order.append(max(free, key=lambda m: ((holds[:, order[-1]] & holds[:, m]).sum(), -m)))
        return np.argsort(order)[self.part]


def _assign(cost, places):
    """Returns the micro-batch of each sample: rounds of choices, in which the largest regrets are served first."""
    places = places.copy()
    new = np.empty(len(cost), np.int64)
    waiting = list(range(len(cost)))
    while waiting:
        free = np.flatnonzero(places)
        choices = []
        for sample in waiting:
            best, *others = sorted((int(cost[sample, m]), int(m)) for m in free)
            choices.append((best[1], best[0] - others[0][0] if others else 0, sample))
        waiting = []
        for to, _, sample in sorted(choices):
            if places[to]:
                places[to] -= 1
                new[sample] = to
            else:
                waiting.append(sample)
        waiting.sort()
    return new
