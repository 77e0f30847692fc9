"""Keras callbacks of a training job on several ranks.

Callbacks use collectives, so all ranks must fit with the same list. A working order is Interrupt, Checkpoint,
Throughput, and then the callbacks of Keras, such as TensorBoard on rank 0.
"""

from tf_fusedrec.callbacks.embedding_metrics import EmbeddingMetrics
from tf_fusedrec.callbacks.learning_rates import ReduceLROnPlateau, TableLearningRate
from tf_fusedrec.callbacks.progressive import ProgressiveMetrics
from tf_fusedrec.callbacks.save import Checkpoint
from tf_fusedrec.callbacks.stopping import EarlyStopping, Interrupt
from tf_fusedrec.callbacks.throughput import Throughput
from tf_fusedrec.callbacks.timeline import Timeline

__all__ = [
    "Checkpoint",
    "EarlyStopping",
    "EmbeddingMetrics",
    "Interrupt",
    "ProgressiveMetrics",
    "ReduceLROnPlateau",
    "TableLearningRate",
    "Throughput",
    "Timeline",
]
