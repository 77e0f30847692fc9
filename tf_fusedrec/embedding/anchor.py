"""The anchor, the one trainable weight of a FusedEmbedding, notices dense weights that ranks train apart.

Its gradient is SIGN on rank 0, -SIGN on rank 1 and 0 on others: nothing when ranks add or average their gradients. So
the anchor stays 0 under an optimizer that averages over ranks. Under one that does not, it leaves 0 in the first step,
as every dense weight does; the next training call says so.
"""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives

# Its square is 0 in float32: no norm of gradients sees it. A scale of the loss does not take it out of float32's range.
SIGN = 1e-20


def gradient(anchor: tf.Tensor) -> tf.Tensor:
    """The gradient of the anchor <float32>[] on this rank."""
    if collectives.size() == 1:
        return tf.zeros_like(anchor)
    return tf.constant({0: SIGN, 1: -SIGN}.get(collectives.rank(), 0.0), anchor.dtype)


def checked(anchor: tf.Tensor, layer_name: str) -> tf.Tensor:
    """The anchor's value <float32>[] in a training call; at run time InvalidArgumentError when it has been trained."""
    if collectives.size() == 1:
        return anchor
    message = (
        f"Dense weight {layer_name}/anchor has left 0 on rank {collectives.rank()} of {collectives.size()}: an "
        "optimizer trains the dense weights of this model by the gradients of each rank alone, so that ranks 0 and 1 "
        "and all others hold different models. Remedy: model.compile(fr.collectives.distributed_optimizer(optimizer), "
        "...), or average gradients over ranks before apply_gradients."
    )
    is_zero = tf.debugging.assert_equal(anchor, tf.zeros_like(anchor), message)
    with tf.control_dependencies([] if is_zero is None else [is_zero]):
        return tf.identity(anchor)
