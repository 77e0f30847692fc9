"""The peer's side of collisions.py, in the peer's interpreter: TorchRec's managed collisions before FBGEMM's table.

It imports neither TensorFlow nor tf_fusedrec. Its first answer names a missing library.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np

from benchmarks.harness import rounds
from benchmarks.table import peer_torch

try:
    import torch
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor

    MISSING = peer_torch.MISSING
except ImportError as error:
    MISSING = str(error)


def main(folder: str, rows: int, dim: int, interval: int, threads: int) -> None:
    if MISSING:
        rounds.serve({}, dict, {"missing": MISSING})
        return
    torch.set_num_threads(threads)
    place = pathlib.Path(folder)
    batches = [torch.from_numpy(ids) for ids in np.load(place / "ids.npy")]
    gradients = torch.from_numpy(np.load(place / "gradients.npy"))
    # The last number stands for all ids without one.
    places = MCHManagedCollisionModule(
        rows + 1, torch.device("cpu"), eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=interval
    )

    def numbers(ids: Any) -> Any:
        return places({"ids": JaggedTensor(ids, lengths=torch.tensor([len(ids)]))})["ids"].values()

    for part in np.array_split(np.load(place / "resident.npy"), interval):
        numbers(torch.from_numpy(part))  # The last part ends an interval, which gives every id its number.
    table = peer_torch.fbgemm(rows + 1, peer_torch.PoolingMode.NONE, dim=dim)

    def step(n: int) -> Any:
        return table(numbers(batches[n % len(batches)]), gradients)

    def check() -> None:
        for n in range(interval):
            rows_out = step(n)
        np.save(place / "peer.npy", rows_out.detach().numpy())

    rounds.serve({"mch": step}, check, {"torch": torch.__version__, "missing": ""})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
