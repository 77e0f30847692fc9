"""The backends that store rows. A backend knows ids, rows and optimizers, but neither ranks nor features."""

from tf_fusedrec.tables.base import Answer, InferenceRows, StoredTable, Table
from tf_fusedrec.tables.external import ExternalTable
from tf_fusedrec.tables.native import NativeTable
from tf_fusedrec.tables.tfra import TfraTable

__all__ = ["Answer", "ExternalTable", "InferenceRows", "NativeTable", "StoredTable", "Table", "TfraTable"]
