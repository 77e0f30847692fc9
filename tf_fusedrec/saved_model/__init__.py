"""From a trained model to a SavedModel that serves without Horovod and TFRA, and, if so wanted, without this package.

    fr.export(model, "runs/a/saved_model")                # all ranks; operations of plain TensorFlow only
    fr.export(model, "runs/a/saved_model", ops="ours")    # the server imports tf_fusedrec
    fr.export(model, "runs/a/delta", base="runs/a/saved_model")   # what has changed since; see applying.py

The model is traced as it is: while that happens its FusedEmbedding answers rows of tables that are part of the
SavedModel (stock_tables.py, native_tables.py), and its attention layers compute with the kernels chosen (serving.py).
Nothing is built again, and nothing of the training graph is left. rows.py brings the rows of all ranks together,
signatures.py says what a server sends and gets; delta.py compares two exports, and applying.py, which needs nothing
of this package, makes the newer one of the older one and what has changed.
"""

from tf_fusedrec.saved_model.applying import apply_delta
from tf_fusedrec.saved_model.export import export
from tf_fusedrec.saved_model.signatures import Signature

__all__ = ["Signature", "apply_delta", "export"]
