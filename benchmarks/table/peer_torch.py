"""The peers of benchmarks.table, in their interpreter: FBGEMM's CPU tables, torch's sparse embedding, TorchRec.

It imports neither TensorFlow nor tf_fusedrec. The first answer names a missing library.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.table.work import DIM, INITIAL_VALUE, LEARNING_RATE, serve_steps

MISSING = MISSING_TORCHREC = ""
try:
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
except ImportError as error:
    MISSING = str(error)
try:
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor
except ImportError as error:
    MISSING_TORCHREC = MISSING or str(error)
Step = Callable[[Any, Any], Any]  # ids and gradients to rows


def fbgemm(rows: int, pooling: PoolingMode, bag: int = 1, dim: int = DIM) -> Step:
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
        return rows_out.detach()

    return step


def _torch(rows: int, make_optimizer: Callable[[Any], Any]) -> Step:
    """Returns a step of torch.nn.Embedding with sparse gradients."""
    table = torch.nn.Embedding(rows, DIM, sparse=True)
    table.weight.data.fill_(INITIAL_VALUE)
    optimizer = make_optimizer(table.parameters())

    def step(ids: Any, gradients: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        rows_out = table(ids)
        rows_out.backward(gradients)
        optimizer.step()
        return rows_out.detach()

    return step


def _work(folder: str, ids: str) -> tuple[list[Any], Any]:
    place = pathlib.Path(folder)
    batches = [torch.from_numpy(batch) for batch in np.load(place / ids)]
    return batches, torch.from_numpy(np.load(place / "gradients.npy"))


def tables(folder: str, rows: int, threads: int, bag: int) -> None:
    """The peers of peers.compare."""
    if MISSING:
        serve_steps(folder, {}, 0, missing=MISSING)
        return
    torch.set_num_threads(threads)
    batches, gradients = _work(folder, "numbers.npy")
    variants = {
        "fbgemm_sequence": fbgemm(rows, PoolingMode.NONE, bag),
        "fbgemm_pooled": fbgemm(rows, PoolingMode.SUM, bag),
        "torch_sgd": _torch(rows, lambda weights: torch.optim.SGD(weights, lr=LEARNING_RATE)),
        "torch_adam": _torch(rows, lambda weights: torch.optim.SparseAdam(list(weights), lr=LEARNING_RATE, eps=1e-7)),
    }

    def run(step: Step, n: int) -> Any:
        return step(batches[n % len(batches)], gradients)

    serve_steps(folder, {name: functools.partial(run, step) for name, step in variants.items()}, 4)


def managed_collisions(folder: str, rows: int, dim: int, interval: int, threads: int) -> None:
    """The peer of collisions.compare: TorchRec's managed collisions before FBGEMM's table."""
    if MISSING_TORCHREC:
        serve_steps(folder, {}, 0, missing=MISSING_TORCHREC)
        return
    torch.set_num_threads(threads)
    batches, gradients = _work(folder, "ids.npy")
    # The last number stands for all ids without one.
    places = MCHManagedCollisionModule(
        rows + 1, torch.device("cpu"), eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=interval
    )

    def numbers(ids: Any) -> Any:
        return places({"ids": JaggedTensor(ids, lengths=torch.tensor([len(ids)]))})["ids"].values()

    for part in np.array_split(np.load(pathlib.Path(folder) / "resident.npy"), interval):
        numbers(torch.from_numpy(part))  # The last part ends an interval, which gives every id its number.
    table = fbgemm(rows + 1, PoolingMode.NONE, dim=dim)
    serve_steps(folder, {"mch": lambda n: table(numbers(batches[n % len(batches)]), gradients)}, interval)
