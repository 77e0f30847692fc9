"""The peer's side of the benchmark, in the peer's interpreter: the same HSTU and loss in PyTorch, in two forms.

"padded" computes on rows padded to the longest of the batch. "jagged" pads queries, keys and values for the attention
only, by FBGEMM's CPU operators. Both get their batches padded in advance and compute the time buckets once per step.
They multiply the queries by all items, which is faster here than gathered negatives.

It imports neither TensorFlow nor tf_fusedrec. Its first answer names a missing library.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import processes

try:
    import torch
    from torch.nn import functional

    MISSING = ""
except ImportError as error:
    MISSING = str(error)
try:
    import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)

    NO_JAGGED = ""
except ImportError as error:
    NO_JAGGED = str(error)

EPSILON = 1e-6
COLLISION = -5e4  # logit of a negative that is the positive


class Users(NamedTuple):
    items: np.ndarray  # <int64>[T], places in the ascending catalogue
    times: np.ndarray  # <int64>[T], seconds, ascending for each user
    splits: np.ndarray  # <int64>[B+1], user b has the events splits[b]:splits[b+1]


def write_batches(path: pathlib.Path, batches: Sequence[Users]) -> None:
    np.savez(
        path, **{f"{name}_{n}": array for n, users in enumerate(batches) for name, array in users._asdict().items()}
    )


def read_batches(path: pathlib.Path) -> list[Users]:
    with np.load(path) as arrays:
        count = len(arrays.files) // len(Users._fields)
        return [Users(*(arrays[f"{name}_{n}"] for name in Users._fields)) for n in range(count)]


class Positions(NamedTuple):
    """One batch: the first L - 1 events of each user, which predict the last L - 1. P in all, n at most per user."""

    items: Any  # <int64>[P]
    positives: Any  # <int64>[P]
    asks: Any  # <int64>[B, n], times of the next events, 0 where padded
    answers: Any  # <int64>[B, n], times of the events, 0 where padded
    valid: Any  # <bool>[B, n]
    offsets: Any  # <int64>[B+1]


def positions_of(users: Users) -> Positions:
    lengths = np.maximum(np.diff(users.splits) - 1, 0)
    begin = np.repeat(users.splits[:-1], lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    events = begin + np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    valid = np.arange(max(lengths.max(initial=0), 1)) < lengths[:, np.newaxis]
    asks, answers = np.zeros(valid.shape, np.int64), np.zeros(valid.shape, np.int64)
    asks[valid], answers[valid] = users.times[events + 1], users.times[events]
    return Positions(users.items[events], users.items[events + 1], asks, answers, valid, offsets)


class Hstu:
    """HSTU blocks of one head in the research form, and the sampled softmax over normalised vectors.

    Args:
      weights: Arrays by the names of ours.dense_weights, and items <float32>[I, D].
      sizes: qk_dim, value_dim, num_blocks, max_length (N), dropout, temperature, num_negatives.
      jagged: True if the layers but the attention take flat tokens.
    """

    def __init__(self, weights: dict[str, np.ndarray], sizes: dict[str, Any], jagged: bool):
        self.weights = {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}
        self.sizes, self.jagged = sizes, jagged

    def loss(self, batch: Positions, negatives: Any, training: bool) -> Any:
        items = functional.normalize(self.weights["items"], dim=1, eps=EPSILON)
        query = functional.normalize(self._encode(batch, training), dim=1, eps=EPSILON)
        own = batch.positives[:, None]
        logits = (query @ items.T).gather(1, torch.cat([own, negatives], dim=1)) / self.sizes["temperature"]
        collides = functional.pad(negatives == own, (1, 0))
        return functional.cross_entropy(logits.masked_fill(collides, COLLISION), torch.zeros_like(own[:, 0]))

    def _encode(self, batch: Positions, training: bool) -> Any:
        """Returns <float32>[P, D]."""
        weights, dropout = self.weights, functools.partial(self._dropout, training=training)
        rows, places = weights["items"][batch.items], batch.valid.cumsum(1)[batch.valid] - 1
        x = dropout(rows * rows.shape[1] ** 0.5 + weights["positions"][places])
        x = x if self.jagged else self._padded(x, batch)
        buckets = self._buckets(batch)
        for number in range(self.sizes["num_blocks"]):
            normalized = functional.layer_norm(x, x.shape[-1:], eps=EPSILON)
            qk, value = self.sizes["qk_dim"], self.sizes["value_dim"]
            gate, *heads = functional.silu(normalized @ weights[f"projection_{number}"]).split(
                [value, value, qk, qk], dim=-1
            )
            v, q, k = (self._padded(part, batch) if self.jagged else part for part in heads)
            attended = self._attended(q, k, v, self._bias(number, buckets))
            attended = self._flat(attended, batch) if self.jagged else attended
            gated = dropout(gate * functional.layer_norm(attended, attended.shape[-1:], eps=EPSILON))
            x = x + gated @ weights[f"output_{number}"] + weights[f"output_bias_{number}"]
        return x if self.jagged else x[batch.valid]

    def _dropout(self, x: Any, training: bool) -> Any:
        return functional.dropout(x, self.sizes["dropout"], training)

    def _padded(self, x: Any, batch: Positions) -> Any:
        if self.jagged:
            return torch.ops.fbgemm.jagged_to_padded_dense(x, [batch.offsets], [batch.valid.shape[1]], 0.0)
        return x.new_zeros([*batch.valid.shape, x.shape[1]]).masked_scatter(batch.valid[..., None], x)

    def _flat(self, x: Any, batch: Positions) -> Any:
        return torch.ops.fbgemm.dense_to_jagged(x, [batch.offsets], len(batch.items))[0]

    def _buckets(self, batch: Positions) -> Any:
        """Returns <int64>[B, n, n]."""
        difference = (batch.asks[:, :, None] - batch.answers[:, None, :]).abs().clamp(min=1)
        return (difference.float().log() / 0.301).long().clamp(max=len(self.weights["time_bias_0"]) - 1)

    def _bias(self, number: int, buckets: Any) -> Any:
        places = torch.arange(buckets.shape[1])
        of_places = self.weights[f"position_bias_{number}"][
            self.sizes["max_length"] - 1 + places[None, :] - places[:, None]
        ]
        return of_places + self.weights[f"time_bias_{number}"].index_select(0, buckets.flatten()).view(buckets.shape)

    def _attended(self, q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = functional.silu(torch.baddbmm(bias, q, k.transpose(1, 2))) / self.sizes["max_length"]
        return torch.bmm(scores.tril(), v)


def peer(folder: str, sizes: dict[str, Any], adam: dict[str, Any], threads: int) -> None:
    if MISSING:
        processes.serve({}, dict, {"missing": MISSING})
        return
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    place = pathlib.Path(folder)
    weights, check = dict(np.load(place / "weights.npz")), np.load(place / "check.npz")
    epoch = [Positions(*map(torch.from_numpy, positions_of(users))) for users in read_batches(place / "batches.npz")]
    negatives = torch.from_numpy(check["negatives"].astype(np.int64))
    forms = {"padded": False, **({} if NO_JAGGED else {"jagged": True})}
    models = {name: Hstu(weights, sizes, jagged) for name, jagged in forms.items()}
    optimizers = {name: torch.optim.Adam(list(model.weights.values()), **adam) for name, model in models.items()}

    def step(name: str, n: int) -> float:
        batch = epoch[n % len(epoch)]
        optimizers[name].zero_grad(set_to_none=True)
        drawn = torch.randint(len(weights["items"]), [len(batch.items), sizes["num_negatives"]])
        loss = models[name].loss(batch, drawn, training=True)
        loss.backward()
        optimizers[name].step()
        return float(loss.detach())

    def losses() -> dict[str, float]:
        with torch.no_grad():
            return {name: float(model.loss(epoch[0], negatives, training=False)) for name, model in models.items()}

    for name, model in models.items():
        model.loss(epoch[0], negatives, training=False).backward()
        np.savez(place / f"gradients_{name}.npz", **{key: weight.grad.numpy() for key, weight in model.weights.items()})
    facts = {"missing": "", "no_jagged": NO_JAGGED, "torch": torch.__version__, "variants": list(models)}
    processes.serve({name: functools.partial(step, name) for name in models}, losses, facts)
