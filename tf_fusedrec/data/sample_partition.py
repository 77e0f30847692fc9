"""Partition of a batch's samples into balanced micro-batches that share few ids (NestPipe, section V.C).

An id is sent once to every micro-batch that holds it. The number of rows sent is the sum over ids of the number of
micro-batches with that id. It is the connectivity of a hypergraph whose vertices are samples and whose nets are ids.
The paper gives the goal, but no algorithm. This algorithm keeps every micro-batch's number of samples:

  - Samples are sorted by tokens. A block of neighbours gives up its places, and its samples are assigned to the same
    places anew. Counts never change, and tokens change only by the differences between neighbours.
  - A sample prefers the micro-batch with its ids. Only an id that leaves a micro-batch entirely saves rows, and single
    moves seldom achieve that. The cost of a place therefore counts copies, n copies of an id being worth 1 - 0.9 ** n,
    as well as presence. The weight of copies falls from sweep to sweep and finally only breaks ties.
  - A place has a price per token, which is higher in a micro-batch with more than its share of tokens.
"""

from __future__ import annotations

import numpy as np

from tf_fusedrec.exchange.micro_batches import piece_bounds

# The settings were tuned on batches of the three logs of benchmarks/clustering. Results depend little on them.
_SWEEPS = 30  # number of times that every sample is placed
_COPY_WEIGHT = (0.95, 0.02)  # weight of copies against presence, in the first and in the last sweep
_COPY_DECAY = 0.9  # factor on the cost of an id for each copy in the micro-batch
_MAX_BLOCK = 256  # samples placed at once, which do not see each other
_MIN_BLOCKS = 16  # blocks per sweep, if the batch has enough samples
_REACH = 0.1  # fraction of the samples over which neighbours are shuffled in the first sweeps
_PRICE_STEP = 0.05  # increase of the price of a token, in ids per block, in a micro-batch with twice its share


def partition_samples(ids: np.ndarray, samples: np.ndarray, tokens: np.ndarray, micro_batches: int) -> np.ndarray:
    """Distributes samples to micro-batches so that few ids are in several of them. Deterministic.

    Args:
      ids: <int64>[N], any numbers; equal ids mean one row of one table.
      samples: <int64>[N], the sample of each id, in [0, B).
      tokens: <int64>[B], work of each sample, >= 0.
      micro_batches: Number of micro-batches, M >= 1.

    Returns:
      <int64>[B], the micro-batch of each sample. Micro-batch i has as many samples as micro-batch i of schedules.cut,
      and nearly that share of the tokens.
    """
    count = len(tokens)
    sizes = np.diff(piece_bounds(count, micro_batches))
    links = _Links(*_shared(ids, samples, count), count)
    by_tokens = np.argsort(-tokens, kind="stable")
    part = _dealt(by_tokens, sizes)
    if micro_batches == 1 or not len(links.ids):
        return part
    random = np.random.default_rng(0)
    search = _Search(links, tokens, part, sizes)
    block = max(micro_batches, min(_MAX_BLOCK, count // _MIN_BLOCKS))  # A smaller block has few places to exchange.
    for copy_weight in np.linspace(*_COPY_WEIGHT, _SWEEPS):
        # Neighbours and bounds differ in every sweep, because a block only exchanges the places of its own samples.
        reach = block + _REACH * copy_weight * count
        id_cost = copy_weight * _COPY_DECAY ** np.arange(count + 1, dtype=np.float32)
        id_cost[0] = 1
        order = by_tokens[np.argsort(np.arange(count) + reach * random.random(count), kind="stable")]
        bounds = [0, *range(1 + int(random.integers(block)), count, block), count]
        for i in random.permutation(len(bounds) - 1):
            search.place(order[bounds[i] : bounds[i + 1]], id_cost, random)
    return search.part


def _shared(ids: np.ndarray, samples: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (id, sample) pairs, ids renumbered from 0. Ids of a single sample are dropped: their cost is fixed."""
    _, number = np.unique(ids, return_inverse=True)
    pairs = np.unique(number * count + samples)
    number, samples = pairs // max(count, 1), pairs % max(count, 1)
    kept = np.bincount(number)[number] > 1 if len(number) else np.zeros(0, bool)
    _, number = np.unique(number[kept], return_inverse=True)
    order = np.argsort(samples[kept], kind="stable")
    return number[order], samples[kept][order]


def _dealt(by_tokens: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Deals samples like cards, in alternating directions, so that neighbours in tokens go to different micro-batches.

    A micro-batch of half the size gets a sample half as often.
    """
    piece = np.repeat(np.arange(len(sizes)), sizes)
    turn = np.concatenate([np.arange(size) for size in sizes])
    back = np.where(turn % 2, -piece, piece)
    part = np.empty(len(by_tokens), np.int64)
    part[by_tokens] = piece[np.lexsort((back, (turn + 0.5) / sizes[piece]))]
    return part


class _Links:
    """Ids of each sample. Sample s has ids[splits[s]:splits[s + 1]]."""

    def __init__(self, ids: np.ndarray, samples: np.ndarray, count: int):
        self.ids = ids
        self.lengths = np.bincount(samples, minlength=count)
        self.splits = np.concatenate([[0], np.cumsum(self.lengths)])

    def of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids <int64>[n] of the chosen samples <int64>[b], and the index of each id's sample, in [0, b)."""
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        at = np.arange(ends[-1]) + np.repeat(self.splits[chosen] - ends + lengths, lengths)
        return self.ids[at], np.repeat(np.arange(len(chosen)), lengths)


class _Search:
    """The state of the search: a partition, the copies of every id and the tokens in each micro-batch."""

    def __init__(self, links: _Links, tokens: np.ndarray, part: np.ndarray, sizes: np.ndarray):
        micro_batches = len(sizes)
        self.part = part
        self._links = links
        self._tokens = tokens
        self._micro_batches = micro_batches
        where = links.ids * micro_batches + part[np.repeat(np.arange(len(tokens)), links.lengths)]
        self._copies = np.bincount(where, minlength=micro_batches * (int(links.ids.max()) + 1))
        self._load = np.bincount(part, tokens, minlength=micro_batches)
        self._share = np.maximum(1.0, tokens.sum() * sizes / sizes.sum())
        self._price = np.zeros(micro_batches)

    def place(self, chosen: np.ndarray, id_cost: np.ndarray, random: np.random.Generator) -> None:
        """Reassigns the chosen samples <int64>[b] to the places that they hold together.

        Args:
          chosen: <int64>[b], distinct samples.
          id_cost: <float32>[B+1], cost of an id in a micro-batch, by the number of samples that have it there.
          random: Generator that breaks ties.
        """
        m = self._micro_batches
        ids, rows = self._links.of(chosen)
        at, tokens = ids * m, self._tokens[chosen]
        places = np.bincount(self.part[chosen], minlength=m)
        np.subtract.at(self._copies, at + self.part[chosen][rows], 1)
        copies = self._copies.reshape(-1, m)[ids]
        cost = _sum_by_row(id_cost[copies], self._links.lengths[chosen])
        cost += np.outer(tokens - tokens.mean(), self._price)
        # Equal costs are broken at random. Else all samples would take the first micro-batch.
        cost += 1e-6 * random.random(cost.shape)
        new = _assign(cost, places)
        self._load += np.bincount(new, tokens, minlength=m) - np.bincount(self.part[chosen], tokens, minlength=m)
        self._price += _PRICE_STEP * (self._load / self._share - 1)
        self.part[chosen] = new
        np.add.at(self._copies, at + new[rows], 1)


def _sum_by_row(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums <float64>[b, M] of consecutive rows of values [n, M]. Sum i has lengths[i] >= 0 rows."""
    sums = np.zeros((len(lengths), values.shape[1]))
    some = lengths > 0
    if some.any():
        sums[some] = np.add.reduceat(values, (np.cumsum(lengths) - lengths)[some], axis=0)
    return sums


def _assign(cost: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A cheap assignment of b samples to b places.

    In each round every waiting sample chooses its cheapest micro-batch. If too many choose one, those with the largest
    regret, the cost of their second choice minus the first, get a place. The others choose again. Each round but the
    last fills a micro-batch, so at most M rounds are needed.

    Args:
      cost: <float64>[b, M], cost of each sample in each micro-batch.
      places: <int64>[M], free places, with sum b.

    Returns:
      <int64>[b], the micro-batch of each sample.
    """
    places = places.copy()
    new = np.empty(len(cost), np.int64)
    waiting = np.arange(len(cost))
    while len(waiting):
        offers = np.where(places > 0, cost[waiting], np.inf)
        best = offers.argmin(axis=1)
        if np.count_nonzero(places) > 1:
            two = np.partition(offers, 1, axis=1)
            regret = two[:, 1] - two[:, 0]
        else:
            regret = np.zeros(len(waiting))
        order = np.lexsort((-regret, best))
        wanted = best[order]
        turn = np.arange(len(order)) - np.searchsorted(wanted, wanted)
        served = turn < places[wanted]
        new[waiting[order[served]]] = wanted[served]
        places -= np.bincount(wanted[served], minlength=len(places))
        waiting = np.sort(waiting[order[~served]])
    return new
