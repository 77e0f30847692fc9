"""Which samples of a batch share a micro-batch: a balanced partition that repeats few ids (NestPipe, section V.C).

An id travels once to every micro-batch that holds it, so the rows that travel are the sum over ids of the number of
micro-batches with that id: the connectivity of a hypergraph whose vertices are samples and whose nets are ids. The
paper names the goal and no algorithm; this one keeps every micro-batch's number of samples as it is:

  - Samples lie sorted by tokens. A block, that is neighbours in this order, gives up its places, and its samples are
    given those same places anew, so that counts never change, and tokens only by what neighbours differ.
  - A sample wants to be where its ids are. Only an id that leaves a micro-batch altogether saves anything, which single
    moves seldom do; so a place is judged by copies, n of an id being worth 1 - 0.9 ** n, as well as by presence, and
    from sweep to sweep less by copies and more by presence. What is left of the former at last decides ties.
  - A place costs a price per token, higher where a micro-batch has more than its share.
"""

from __future__ import annotations

import numpy as np

from tf_fusedrec.exchange.micro_batches import piece_bounds

# Settings were found on batches of the three logs of benchmarks/clustering; results depend little on any of them.
_SWEEPS = 30  # times that every sample is placed
_BY_COPIES = (0.95, 0.02)  # weight of copies against presence, in the first and in the last sweep
_FEW = 0.9  # what a copy of an id leaves to the next one
_BLOCK = 256  # samples at most that are placed at once: they do not see each other
_BLOCKS = 16  # at least, where there are so many samples
_FAR = 0.1  # part of the line over which neighbours are mixed at first
_PRICE_STEP = 0.05  # ids by which a token grows dearer, per block, in a micro-batch of twice its share


def partition_samples(ids: np.ndarray, samples: np.ndarray, tokens: np.ndarray, micro_batches: int) -> np.ndarray:
    """Distributes samples to micro-batches so that few ids are in several of them. Deterministic.

    Args:
      ids: <int64>[N], any numbers; equal ones are one row of one table.
      samples: <int64>[N], in [0, B): the sample of each id.
      tokens: <int64>[B], work of each sample, >= 0.
      micro_batches: M >= 1.

    Returns:
      <int64>[B], micro-batch of each sample; micro-batch i has as many as piece i of schedules.cut, and nearly that
      share of the tokens.
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
    block = max(micro_batches, min(_BLOCK, count // _BLOCKS))  # with fewer places there is little to exchange
    for by_copies in np.linspace(*_BY_COPIES, _SWEEPS):
        # Other neighbours and other bounds in every sweep: a block only exchanges the places of its own samples.
        reach = block + _FAR * by_copies * count
        leaves = by_copies * _FEW ** np.arange(count + 1, dtype=np.float32)
        leaves[0] = 1
        line = by_tokens[np.argsort(np.arange(count) + reach * random.random(count), kind="stable")]
        bounds = [0, *range(1 + int(random.integers(block)), count, block), count]
        for i in random.permutation(len(bounds) - 1):
            search.place(line[bounds[i] : bounds[i + 1]], leaves, random)
    return search.part


def _shared(ids: np.ndarray, samples: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Each (sample, id) once, ids renumbered from 0; without ids of one sample, which cost the same anywhere."""
    _, number = np.unique(ids, return_inverse=True)
    pairs = np.unique(number * count + samples)
    number, samples = pairs // max(count, 1), pairs % max(count, 1)
    kept = np.bincount(number)[number] > 1 if len(number) else np.zeros(0, bool)
    _, number = np.unique(number[kept], return_inverse=True)
    order = np.argsort(samples[kept], kind="stable")
    return number[order], samples[kept][order]


def _dealt(by_tokens: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Samples dealt out like cards, there and back, so that neighbours in tokens go to different micro-batches.

    A micro-batch of half the size is dealt to half as often.
    """
    piece = np.repeat(np.arange(len(sizes)), sizes)
    turn = np.concatenate([np.arange(size) for size in sizes])
    back = np.where(turn % 2, -piece, piece)
    part = np.empty(len(by_tokens), np.int64)
    part[by_tokens] = piece[np.lexsort((back, (turn + 0.5) / sizes[piece]))]
    return part


class _Links:
    """Ids of each sample: those of sample s are ids[splits[s]:splits[s + 1]]."""

    def __init__(self, ids: np.ndarray, samples: np.ndarray, count: int):
        self.ids = ids
        self.lengths = np.bincount(samples, minlength=count)
        self.splits = np.concatenate([[0], np.cumsum(self.lengths)])

    def of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids <int64>[n] of the chosen samples <int64>[b], and the row of each, in [0, b)."""
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        at = np.arange(ends[-1]) + np.repeat(self.splits[chosen] - ends + lengths, lengths)
        return self.ids[at], np.repeat(np.arange(len(chosen)), lengths)


class _Search:
    """A partition under change: where every id and how many tokens are."""

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

    def place(self, chosen: np.ndarray, leaves: np.ndarray, random: np.random.Generator) -> None:
        """Gives the chosen samples <int64>[b] the places that they have now, anew.

        leaves: <float32>[B+1], what an id still costs where so many samples have it already.
        """
        m = self._micro_batches
        ids, rows = self._links.of(chosen)
        at, tokens = ids * m, self._tokens[chosen]
        places = np.bincount(self.part[chosen], minlength=m)
        np.subtract.at(self._copies, at + self.part[chosen][rows], 1)
        copies = self._copies.reshape(-1, m)[ids]
        missing = leaves[copies]
        cost = _sum_by_row(missing, self._links.lengths[chosen])
        cost += np.outer(tokens - tokens.mean(), self._price)
        # Parts that cost the same are taken as chance has it, else all would take the first.
        cost += 1e-6 * random.random(cost.shape)
        new = _assign(cost, places)
        self._load += np.bincount(new, tokens, minlength=m) - np.bincount(self.part[chosen], tokens, minlength=m)
        self._price += _PRICE_STEP * (self._load / self._share - 1)
        self.part[chosen] = new
        np.add.at(self._copies, at + new[rows], 1)


def _sum_by_row(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """<float64>[b, M] sums of consecutive rows of values [n, M], lengths[i] >= 0 of them for row i."""
    sums = np.zeros((len(lengths), values.shape[1]))
    some = lengths > 0
    if some.any():
        sums[some] = np.add.reduceat(values, (np.cumsum(lengths) - lengths)[some], axis=0)
    return sums


def _assign(cost: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A cheap assignment of b samples to b places.

    Args:
      cost: [b, M] of a sample in a micro-batch.
      places: <int64>[M] with sum b.

    Returns:
      <int64>[b]. Everyone asks for the cheapest place; where too many ask, those for whom the next best is worst have
      it, and the others ask again. At least one micro-batch fills up in a round, so there are M rounds at most.
    """
    places = places.copy()
    new = np.empty(len(cost), np.int64)
    asking = np.arange(len(cost))
    while len(asking):
        offers = np.where(places > 0, cost[asking], np.inf)
        best = offers.argmin(axis=1)
        if np.count_nonzero(places) > 1:
            two = np.partition(offers, 1, axis=1)
            regret = two[:, 1] - two[:, 0]
        else:
            regret = np.zeros(len(asking))
        order = np.lexsort((-regret, best))
        wanted = best[order]
        turn = np.arange(len(order)) - np.searchsorted(wanted, wanted)
        served = turn < places[wanted]
        new[asking[order[served]]] = wanted[served]
        places -= np.bincount(wanted[served], minlength=len(places))
        asking = np.sort(asking[order[~served]])
    return new
