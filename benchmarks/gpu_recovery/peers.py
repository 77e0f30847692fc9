"""Gather and sum of rows by PyTorch and CuPy, the peers of benchmarks.gpu_recovery."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness.gpu_peers import Call, Libraries
from benchmarks.harness.roofline import Work

LIBRARIES = ("torch", "cupy", "cupyx")


def peer_calls(
    libraries: Libraries, rows: np.ndarray, index: np.ndarray, wanted: np.ndarray, gather: Work, scatter: Work
) -> dict[str, Call]:
    """The calls of the libraries that are there.

    Args:
      libraries: Libraries of LIBRARIES.
      rows: <float32>[num_rows, dim].
      index: <int32>[n].
      wanted: <float64>[num_rows, dim], the sums of rows[index].
      gather, scatter: Work of a gather and of a sum.
    """
    calls = {}
    torch, cupy, cupyx = (libraries.get(name) for name in LIBRARIES)

    def equal(got: np.ndarray, want: np.ndarray) -> None:
        np.testing.assert_allclose(got, want, rtol=1e-6)  # of integers; a sum above 2^24 rounds

    if torch is not None:
        tensor, long_index = torch.from_numpy(rows).cuda(), torch.from_numpy(index.astype(np.int64)).cuda()
        gathered, sums = tensor[long_index], torch.empty_like(tensor)

        def add() -> Any:
            return sums.zero_().index_add_(0, long_index, gathered)

        def embedding() -> Any:
            return torch.nn.functional.embedding(long_index, tensor)

        calls["torch embedding"] = Call(embedding, gather, lambda: equal(embedding().cpu().numpy(), rows[index]))
        calls["torch index_add_"] = Call(add, scatter, lambda: equal(add().cpu().numpy(), wanted))
    if cupy is not None and cupyx is not None:
        array, short_index = cupy.asarray(rows), cupy.asarray(index)
        taken, added = array[short_index], cupy.empty_like(array)

        def scatter_add() -> Any:
            added.fill(0)
            cupyx.scatter_add(added, short_index, taken)
            return added

        def take() -> Any:
            return cupy.take(array, short_index, axis=0)

        calls["cupy take"] = Call(take, gather, lambda: equal(cupy.asnumpy(take()), rows[index]))
        calls["cupyx scatter_add"] = Call(scatter_add, scatter, lambda: equal(cupy.asnumpy(scatter_add()), wanted))
    return calls
