"""The peer's side of the benchmark, in the peer's interpreter: the same click model in TorchRec, a process per rank.

TorchRec's planner chooses the shards. Tables are static arrays of FBGEMM with row-wise Adagrad in the backward pass.
They know all ids in advance, so that a feature's ids are row numbers. Keyed jagged tensors are made before the clock.

It imports neither TensorFlow nor tf_fusedrec. Its first answer names a missing library.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import processes
from benchmarks.harness.harness import Batches

try:
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch import distributed, nn
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    MISSING = ""
except ImportError as error:
    MISSING = str(error)

RANKS = 2
FEATURES = 26
NAMES = [f"f{feature:02d}" for feature in range(FEATURES)]
HIDDEN_UNITS = 64
LEARNING_RATE = 0.05
INITIAL_VALUE = 0.05
ROW_EPSILON = 1e-8
# Adagrad of the dense layers, as in keras.optimizers.legacy.Adagrad.
DENSE_ACCUMULATOR, DENSE_EPSILON = 0.1, 1e-7


class Shape(NamedTuple):
    """Sizes of the click model and its batches."""

    dim: int
    batch_size: int  # of a rank
    ids_per_feature: int
    zipf_alpha: float  # 0: uniform

    def batches(self) -> Batches:
        return Batches(
            features=FEATURES, batch_size=self.batch_size, ids_per_feature=self.ids_per_feature, alpha=self.zipf_alpha
        )


def tower_weights(inputs: int) -> list[np.ndarray]:
    """Returns kernel and bias of both dense layers, <float32>[inputs, outputs] and [outputs]."""
    random, shapes = np.random.default_rng(0), [(inputs, HIDDEN_UNITS), (HIDDEN_UNITS,), (HIDDEN_UNITS, 1), (1,)]
    return [random.normal(0, 0.1, shape).astype(np.float32) for shape in shapes]


class Clicks:
    """The model of one rank: sharded tables and replicated dense layers. `sharding` has the tables by sharding type."""

    def __init__(self, shape: Shape, rank: int):
        self._rank, self._shape, self._batches = rank, shape, shape.batches()
        # Frequent rows are not neighbors in memory.
        self._rows = [np.random.default_rng(rows).permutation(rows) for rows in self._batches.vocabularies]
        rule = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LEARNING_RATE, "eps": ROW_EPSILON}
        sharders, module = [EmbeddingBagCollectionSharder(fused_params=rule)], self._tables()
        bags = ParameterConstraints(pooling_factors=[float(shape.ids_per_feature)])
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=RANKS, compute_device="cpu"), batch_size=shape.batch_size,
            constraints=dict.fromkeys(NAMES, bags),
        )  # fmt: skip
        plan = planner.collective_plan(module, sharders, distributed.group.WORLD)
        types = [table.sharding_type for table in plan.plan[""].values()]
        self.sharding = {name: types.count(name) for name in sorted(set(types))}
        self._embeddings = DistributedModelParallel(module, device=torch.device("cpu"), plan=plan, sharders=sharders)
        with torch.no_grad():
            pooled = self._embeddings(self.batch(0)[0]).keys()  # grouped by the rank of their table
        tower = self._dense_layers([NAMES.index(name) for name in pooled])
        self._tower = nn.parallel.DistributedDataParallel(tower, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.Adagrad(
            self._tower.parameters(), lr=LEARNING_RATE, initial_accumulator_value=DENSE_ACCUMULATOR, eps=DENSE_EPSILON
        )

    def _tables(self) -> Any:
        """Returns the tables, without memory until they are sharded."""
        tables = [
            EmbeddingBagConfig(
                name=name, feature_names=[name], num_embeddings=rows, embedding_dim=self._shape.dim,
                pooling=PoolingType.MEAN, init_fn=functools.partial(nn.init.constant_, val=INITIAL_VALUE),
            )
            for name, rows in zip(NAMES, self._batches.vocabularies)
        ]  # fmt: skip
        return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

    def _dense_layers(self, features: list[int]) -> Any:
        """Returns the dense layers for pooled rows of `features` in that order."""
        inputs = FEATURES * self._shape.dim
        kernel, *rest = tower_weights(inputs)
        kernel = kernel.reshape(FEATURES, self._shape.dim, HIDDEN_UNITS)[features].reshape(kernel.shape)
        tower = nn.Sequential(nn.Linear(inputs, HIDDEN_UNITS), nn.ReLU(), nn.Linear(HIDDEN_UNITS, 1))
        with torch.no_grad():
            for weight, value in zip(tower.parameters(), [kernel, *rest]):
                weight.copy_(torch.from_numpy(value.T))  # torch has [outputs, inputs]
        return tower

    def batch(self, number: int) -> tuple[Any, Any]:
        """Returns the batch of a step, as a keyed jagged tensor and <float32>[B] labels, once all ranks have theirs."""
        drawn = self._batches.batch(number, self._rank)
        rows = np.concatenate([row_of[order.ravel()] for row_of, order in zip(self._rows, drawn.order)])
        lengths = torch.full([rows.size // self._shape.ids_per_feature], self._shape.ids_per_feature)
        ids = KeyedJaggedTensor(NAMES, torch.from_numpy(rows), lengths=lengths)
        distributed.barrier()
        return ids, torch.from_numpy(drawn.labels)

    def step(self, batch: tuple[Any, Any]) -> float:
        """Trains on a batch and returns its mean loss."""
        ids, labels = batch
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._tower(self._embeddings(ids).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


@contextlib.contextmanager
def ours_stopped(pid: int) -> Iterator[None]:
    """Stops process `pid`, the rank that started this one, in the body.

    The first barrier shows that all ranks wait for an answer, so that no rank is inside a collective.
    """
    distributed.barrier()
    with processes.stopped(pid):
        yield
        distributed.barrier()


def peer(shape: dict[str, Any], folder: str, rank: int, threads: int, checked: int) -> None:
    """Serves steps. Its check has the losses of the first `checked` steps. The measured steps follow them."""
    if MISSING:
        processes.serve({}, dict, {"missing": MISSING})
        return
    torch.set_num_threads(threads)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    clicks = Clicks(Shape(**shape), rank)

    def losses() -> list[float]:
        return [clicks.step(clicks.batch(number)) for number in range(checked)]

    facts = {"missing": "", "sharding": clicks.sharding}
    processes.serve(
        {"torchrec": clicks.step}, losses, facts, prepare=lambda n: clicks.batch(checked + n),
        turn=functools.partial(ours_stopped, os.getppid()),
    )  # fmt: skip
