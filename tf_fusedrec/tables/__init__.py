"""Where rows live. A table backend knows ids, rows and optimizers; it knows no ranks and no features."""

from tf_fusedrec.tables.tfra import Lookup, TfraTable

__all__ = ["Lookup", "TfraTable"]
