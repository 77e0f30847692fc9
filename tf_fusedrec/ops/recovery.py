"""Copies rows to the places of their ids, and pools them. The gradient is a deterministic sum.

16-bit types are summed in float32 and rounded once. Results have the same bits for any number of threads. `pad` rounds
the first dimension up to a bucketed size, for a send buffer; the added rows are 0. InvalidArgumentError: an index is
out of range, or the shapes do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


def recover(rows: tf.Tensor, index: tf.Tensor, *, pad: bool = False) -> tf.Tensor:
    """out[n] = rows[index[n]] (FusedRec, section 3, "Embedding Recovery"). Differentiable in rows.

    Args:
      rows: <float32, float16 or bfloat16>[P, D].
      index: <int32>[N], each in [0, P).

    Returns:
      [N, D], or [bucketed N, D] with pad.
    """
    return library.fusedrec_recover(rows=rows, index=index, pad=pad)


def recover_grad(grads: tf.Tensor, index: tf.Tensor, num_rows: tf.Tensor, *, pad: bool = False) -> tf.Tensor:
    """out[u] = sum of grads[n] over n with index[n] == u, in the order of n. Differentiable in grads.

    Args:
      grads: <float32, float16 or bfloat16>[M, D], M >= N; rows after N are ignored.
      index: <int32>[N], each in [0, num_rows).
      num_rows: <int64>[], U.

    Returns:
      [U, D], or [bucketed U, D] with pad.
    """
    return library.fusedrec_recover_grad(grads=grads, index=index, num_rows=num_rows, pad=pad)


def pooled_recover(rows: tf.Tensor, index: tf.Tensor, bag_splits: tf.Tensor, bag_scale: tf.Tensor) -> tf.Tensor:
    """out[g] = bag_scale[g] * sum of rows[index[n]] over the n of bag g, without the rows in between.

    Args:
      rows: <float32, float16 or bfloat16>[P, D]. Differentiable.
      index: <int32>[N], each in [0, P).
      bag_splits: <int64>[G+1], bag g is index[bag_splits[g]:bag_splits[g+1]]; an empty bag gives zeros.
      bag_scale: <float32>[G]. No gradient flows to it.

    Returns:
      [G, D].
    """
    return library.fusedrec_pooled_recover(rows=rows, index=index, bag_splits=bag_splits, bag_scale=bag_scale)


def pooled_recover_parts(
    parts: Sequence[tf.Tensor], index: tf.Tensor, bag_splits: tf.Tensor, bag_scale: tf.Tensor, *, pad: bool = False
) -> tf.Tensor:
    """pooled_recover of rows in several tensors [P_i, D], numbered one part after another. Not differentiable.

    Returns:
      [G, D], or [bucketed G, D] with pad.
    """
    return library.fusedrec_pooled_recover_parts(
        rows=list(parts), index=index, bag_splits=bag_splits, bag_scale=bag_scale, pad=pad
    )


def pooled_recover_grad(
    grads: tf.Tensor,
    index: tf.Tensor,
    bag_splits: tf.Tensor,
    bag_scale: tf.Tensor,
    num_rows: tf.Tensor,
    *,
    pad: bool = False,
) -> tf.Tensor:
    """out[u] = sum of bag_scale[g] * grads[g] over all n with index[n] == u, g the bag of n, in the order of n.

    Args:
      grads: <float32, float16 or bfloat16>[G, D].
      index, bag_splits, bag_scale: As in pooled_recover, each index in [0, num_rows).
      num_rows: <int64>[], U.

    Returns:
      [U, D], or [bucketed U, D] with pad.
    """
    return library.fusedrec_pooled_recover_grad(
        grads=grads, index=index, bag_splits=bag_splits, bag_scale=bag_scale, num_rows=num_rows, pad=pad
    )


@tf.RegisterGradient("Fusedrec>PooledRecover")
def _pooled_recover_gradient(op, grad):
    rows, index, bag_splits, bag_scale = op.inputs
    num_rows = tf.shape(rows, out_type=tf.int64)[0]
    return pooled_recover_grad(grad, index, bag_splits, bag_scale, num_rows), None, None, None


tf.no_gradient("Fusedrec>PooledRecoverParts")
tf.no_gradient("Fusedrec>PooledRecoverGrad")


@tf.RegisterGradient("Fusedrec>Recover")
def _recover_gradient(op, grad):
    rows, index = op.inputs
    return recover_grad(grad, index, tf.shape(rows, out_type=tf.int64)[0]), None


@tf.RegisterGradient("Fusedrec>RecoverGrad")
def _recover_grad_gradient(op, grad):
    grads, index, _ = op.inputs
    ignored = tf.shape(grads)[0] - tf.shape(index)[0]
    return tf.pad(recover(grad, index), [[0, ignored], [0, 0]]), None, None
