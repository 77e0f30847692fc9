"""The backends that store rows. A backend knows ids, rows and optimizers, but neither ranks nor features.

The backend in tfra.py is not imported here, because it needs TFRA, which is an extra.
"""

from tf_fusedrec.tables.base import Answer, InferenceRows, StoredTable, Table
from tf_fusedrec.tables.external import ExternalTable
from tf_fusedrec.tables.native import NativeTable

__all__ = ["Answer", "ExternalTable", "InferenceRows", "NativeTable", "StoredTable", "Table"]
