"""The peers of benchmarks.table, in their interpreter: FBGEMM's CPU tables, torch's sparse embedding, TorchRec.

It imports neither TensorFlow nor tf_fusedrec. The first answer names a missing library.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.table.work import (
    BAG,
    DIM,
    INITIAL_VALUE,
    INTERVAL,
    LEARNING_RATE,
    QUANTIZED_BAGS,
    random_rows,
    serve_steps,
)

MISSING = MISSING_TORCHREC = ""
try:
    import torch
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from fbgemm_gpu.tbe.utils import quantize_embs
except ImportError as error:
    MISSING = str(error)
try:
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor
except ImportError as error:
    MISSING_TORCHREC = MISSING or str(error)
Step = Callable[[Any, Any], Any]  # ids and gradients to rows


def fbgemm(rows: int, pooling: PoolingMode, dim: int) -> Step:
    """Returns a step of FBGEMM's table batched embeddings, with one table and row-wise Adagrad."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LEARNING_RATE, eps=1e-8, pooling_mode=pooling,
    )  # fmt: skip
    for weights in table.split_embedding_weights():
        weights.data.fill_(INITIAL_VALUE)

    def step(ids: Any, gradients: Any) -> Any:
        # `offsets` has an entry per bag. Without pooling it bounds the ids of the table.
        offsets = torch.arange(0, len(ids) + 1, BAG if pooling == PoolingMode.SUM else len(ids))
        rows_out = table(ids, offsets)
        rows_out.backward(gradients[: len(rows_out)])
        return rows_out.detach()

    return step


def _torch(rows: int, make_optimizer: Callable[[Any], Any]) -> Step:
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


def _load(folder: str, *names: str) -> list[np.ndarray]:
    return [np.load(pathlib.Path(folder) / f"{name}.npy") for name in names]


def tables(folder: str, threads: int) -> None:
    if MISSING:
        serve_steps(folder, {}, 0, missing=MISSING)
        return
    torch.set_num_threads(threads)
    numbers, grads, resident = _load(folder, "numbers", "gradients", "resident")
    batches, gradients, rows = torch.from_numpy(numbers), torch.from_numpy(grads), len(resident)
    variants = {
        "fbgemm_sequence": fbgemm(rows, PoolingMode.NONE, DIM),
        "fbgemm_pooled": fbgemm(rows, PoolingMode.SUM, DIM),
        "torch_sgd": _torch(rows, lambda weights: torch.optim.SGD(weights, lr=LEARNING_RATE)),
        "torch_adam": _torch(rows, lambda weights: torch.optim.SparseAdam(list(weights), lr=LEARNING_RATE, eps=1e-7)),
    }

    def run(step: Step, n: int) -> Any:
        return step(batches[n % len(batches)], gradients)

    serve_steps(folder, {name: functools.partial(run, step) for name, step in variants.items()}, 4)


def managed_collisions(folder: str, threads: int) -> None:
    """The peer of peers.collisions: TorchRec's managed collisions before FBGEMM's table."""
    if MISSING_TORCHREC:
        serve_steps(folder, {}, 0, missing=MISSING_TORCHREC)
        return
    torch.set_num_threads(threads)
    ids, grads, resident = _load(folder, "ids", "gradients", "resident")
    batches, gradients, rows = torch.from_numpy(ids), torch.from_numpy(grads), len(resident) + 1
    # The last number stands for all ids without one.
    places = MCHManagedCollisionModule(
        rows, torch.device("cpu"), eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=INTERVAL
    )

    def numbers(ids: Any) -> Any:
        return places({"ids": JaggedTensor(ids, lengths=torch.tensor([len(ids)]))})["ids"].values()

    for part in np.array_split(resident, INTERVAL):
        numbers(torch.from_numpy(part))  # The last part ends an interval, which gives every id its number.
    table = fbgemm(rows, PoolingMode.NONE, gradients.shape[1])
    serve_steps(folder, {"mch": lambda n: table(numbers(batches[n % len(batches)]), gradients)}, INTERVAL)


def quantized(folder: str, threads: int) -> None:
    """The peer of peers.quantized: FBGEMM's tables for inference, with pooled rows in float32."""
    if MISSING:
        serve_steps(folder, {}, 0, missing=MISSING)
        return
    torch.set_num_threads(threads)
    numbers, grads, resident = _load(folder, "numbers", "gradients", "resident")
    weights = torch.from_numpy(random_rows(len(resident), grads.shape[1]))
    batches = torch.from_numpy(numbers.astype(np.int32))
    tables = {}
    for dtype in (SparseType.INT8, SparseType.INT4):
        tables[dtype.value] = IntNBitTableBatchedEmbeddingBagsCodegen(
            [("rows", *weights.shape, dtype, EmbeddingLocation.HOST)], device="cpu", output_dtype=SparseType.FP32
        )
        tables[dtype.value].initialize_weights()
        tables[dtype.value].assign_embedding_weights([quantize_embs(weights, dtype)])

    def step(table: Any, offsets: Any, n: int) -> Any:
        return table(batches[n % len(batches)], offsets)

    serve_steps(folder, {
        f"{dtype}_{bag}": functools.partial(step, table, torch.arange(0, numbers.shape[1] + 1, bag, dtype=torch.int32))
        for dtype, table in tables.items() for bag in QUANTIZED_BAGS
    }, 4)  # fmt: skip
