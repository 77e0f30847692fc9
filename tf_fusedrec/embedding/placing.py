"""Where operations on ids run. docs/gpu.md, "Streams", says why ids of some tables travel in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.tables import Table


def placing_ids(tables: Iterable[Table]) -> contextlib.AbstractContextManager:
    """Operations made inside run in host memory if the ids of one of these tables travel there; else anywhere."""
    if any(table.ids_on_host for table in tables):
        return tf.device("/CPU:0")
    return contextlib.nullcontext()
