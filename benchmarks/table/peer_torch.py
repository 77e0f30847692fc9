"""The peers' side of peers.py, in the peers' interpreter: FBGEMM's CPU tables and torch's sparse embedding.

It imports neither TensorFlow nor tf_fusedrec. Its first answer names a missing library.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import rounds
from benchmarks.table.work import DIM, INITIAL_VALUE, LEARNING_RATE

try:
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    MISSING = ""
except ImportError as error:
    MISSING = str(error)


def fbgemm(rows: int, pooling: PoolingMode, bag: int = 1, dim: int = DIM) -> Callable[[Any, Any], Any]:
    """Returns a step of FBGEMM's table batched embeddings, with one table and row-wise Adagrad."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LEARNING_RATE, eps=1e-8, pooling_mode=pooling,
    )  # fmt: skip
    for weights in table.split_embedding_weights():
        weights.data.fill_(INITIAL_VALUE)

    def step(ids: Any, gradients: Any) -> Any:
        # `offsets` has an entry per bag. Without pooling it bounds the ids of the table.
        offsets = torch.arange(0, len(ids) + 1, bag if pooling == PoolingMode.SUM else len(ids))
        rows_out = table(ids, offsets)
        rows_out.backward(gradients[: len(rows_out)])
        return rows_out

    return step


def _torch(rows: int, make_optimizer: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a step of torch.nn.Embedding with sparse gradients."""
    table = torch.nn.Embedding(rows, DIM, sparse=True)
    table.weight.data.fill_(INITIAL_VALUE)
    optimizer = make_optimizer(table.parameters())

    def step(ids: Any, gradients: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        rows_out = table(ids)
        rows_out.backward(gradients)
        optimizer.step()
        return rows_out

    return step


def main(folder: str, rows: int, threads: int, bag: int) -> None:
    if MISSING:
        rounds.serve({}, dict, {"missing": MISSING})
        return
    torch.set_num_threads(threads)
    batches = [torch.from_numpy(ids) for ids in np.load(pathlib.Path(folder) / "numbers.npy")]
    gradients = torch.from_numpy(np.load(pathlib.Path(folder) / "gradients.npy"))
    variants = {
        "fbgemm_sequence": fbgemm(rows, PoolingMode.NONE, bag),
        "fbgemm_pooled": fbgemm(rows, PoolingMode.SUM, bag),
        "torch_sgd": _torch(rows, lambda weights: torch.optim.SGD(weights, lr=LEARNING_RATE)),
        "torch_adam": _torch(rows, lambda weights: torch.optim.SparseAdam(list(weights), lr=LEARNING_RATE, eps=1e-7)),
    }

    def step(name: str, n: int) -> Any:
        return variants[name](batches[n % len(batches)], gradients)

    def check() -> None:
        for name in variants:
            for n in range(3):
                step(name, n)
            np.save(pathlib.Path(folder) / f"{name}.npy", step(name, 0).detach().numpy())

    facts = {"torch": torch.__version__, "missing": ""}
    rounds.serve({name: functools.partial(step, name) for name in variants}, check, facts)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
