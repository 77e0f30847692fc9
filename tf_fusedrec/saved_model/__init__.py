"""From a trained model to a SavedModel that serves without Horovod and TFRA, and, if so wanted, without this package.

    fr.export(model, "runs/a/saved_model")                # all ranks; operations of plain TensorFlow only
    fr.export(model, "runs/a/saved_model", ops="ours")    # the server imports tf_fusedrec

The model is traced as it is: while that happens its FusedEmbedding answers rows of tables that are part of the
SavedModel (stock_tables.py, native_tables.py), and its attention layers compute with the kernels chosen (serving.py).
Nothing is built again, and nothing of the training graph is left. rows.py brings the rows of all ranks together,
signatures.py says what a server sends and gets.
"""

from tf_fusedrec.saved_model.export import export
from tf_fusedrec.saved_model.signatures import Signature

__all__ = ["Signature", "export"]
