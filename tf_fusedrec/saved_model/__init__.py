"""Exports a trained model to a SavedModel that serves without Horovod and TFRA, and optionally without this package.

    fr.export(model, "runs/a/saved_model")                # all ranks; stock TensorFlow ops only
    fr.export(model, "runs/a/saved_model", ops="ours")    # the server imports tf_fusedrec
    fr.export(model, "runs/a/delta", base="runs/a/saved_model")   # changes since the base; see applying.py

export.py traces the model as it is, without rebuilding it. During the trace, FusedEmbedding reads rows from tables that
are part of the SavedModel (served_rows.py, native_tables.py), and attention layers use the chosen kernels. The
SavedModel contains nothing of the training graph.

state_cache.py keeps states of users between requests. warmup.py adds the requests that TensorFlow Serving sends first.
signatures.py defines a server's inputs and outputs. delta.py compares two exports. applying.py, which needs nothing of
this package, applies a delta to the older export on disk.

A running server also takes a delta. versions.py lets every answer read one version: dense weights and changed rows,
which are replaced at once. served_rows.py reads changed rows before loaded ones, for all tables of a group at once.
"""

from tf_fusedrec.saved_model.state_cache import StateCache
from tf_fusedrec.saved_model.warmup import write_warmup_requests

__all__ = ["StateCache", "write_warmup_requests"]
