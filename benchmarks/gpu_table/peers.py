"""Lookup and training of rows by PyTorch, the peers of benchmarks.gpu_table. They know every row by its number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.gpu_peers import Call, Libraries
from benchmarks.harness.roofline import Work


class Trained(NamedTuple):
    """A training step of a table, which a peer must repeat."""

    start: np.ndarray  # <float32>[n, dim], the rows of the ids before the step
    trained: np.ndarray  # <float32>[n, dim], behind it
    numbers: np.ndarray  # <int64>[n], number of each id's row
    learning_rate: float
    epsilon: float


def embedding(libraries: Libraries, n: int, num_rows: int, dim: int) -> dict[str, Call]:
    """torch embedding of n random rows of num_rows."""
    torch = libraries.get("torch")
    if torch is None:
        return {}
    weight = torch.rand(num_rows, dim, device="cuda")
    numbers = torch.randperm(num_rows, device="cuda")[:n]

    def run() -> Any:
        return torch.nn.functional.embedding(numbers, weight)

    def check() -> None:
        assert torch.equal(run(), weight[numbers])

    return {"torch embedding": Call(run, Work(bytes=n * (8 + 8 * dim)), check)}


def step(libraries: Libraries, wanted: Trained, work: Work) -> dict[str, Call]:
    """embedding, torch.unique, index_add_ and row-wise Adagrad, on gradients of 1e-3."""
    torch = libraries.get("torch")
    if torch is None:
        return {}
    numbers = torch.from_numpy(wanted.numbers).cuda()
    weight = torch.zeros(int(wanted.numbers.max()) + 1, wanted.start.shape[1], device="cuda")
    weight[numbers] = torch.from_numpy(wanted.start).cuda()
    accumulator = torch.zeros(len(weight), device="cuda")
    grads = torch.full(wanted.start.shape, 1e-3, device="cuda")

    def run() -> Any:
        rows = torch.nn.functional.embedding(numbers, weight)
        distinct, inverse = torch.unique(numbers, return_inverse=True)
        sums = torch.zeros(len(distinct), weight.shape[1], device="cuda").index_add_(0, inverse, grads)
        accumulator[distinct] += sums.square().sum(dim=1)
        weight[distinct] -= wanted.learning_rate * sums / (accumulator[distinct].sqrt() + wanted.epsilon)[:, None]
        return rows

    def check() -> None:
        run()
        # Sums of some float32 numbers in another order.
        np.testing.assert_allclose(weight[numbers].cpu().numpy(), wanted.trained, rtol=1e-4, atol=1e-6)

    return {"torch step": Call(run, work, check)}
