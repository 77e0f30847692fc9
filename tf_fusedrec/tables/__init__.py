"""The backends that store rows. A backend knows ids, rows and optimizers, but neither ranks nor features.

The backend of tfra/table.py registers itself when it is imported, because it needs TFRA, which is an extra.
"""

from tf_fusedrec.tables.external import external_table
from tf_fusedrec.tables.native import NativeTable
from tf_fusedrec.tables.table import Message, Table

__all__ = ["Message", "NativeTable", "Table", "external_table"]
