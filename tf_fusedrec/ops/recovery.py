"""Step 7 of 7 (docs/concepts.md): copies rows to the places of their ids. The gradient is a deterministic sum."""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


def recover(rows: tf.Tensor, index: tf.Tensor, *, pad: bool = False) -> tf.Tensor:
    """out[n] = rows[index[n]] (FusedRec, section 3, "Embedding Recovery"). Differentiable in rows.

    Args:
      rows: <float32, float16 or bfloat16>[P, D].
      index: <int32>[N], each in [0, P); for the way back restore[inverse], composed.
      pad: round the first dimension up to a bucketed size, for a send buffer; the rows behind N are 0.

    Returns:
      [N, D], or [bucketed N, D] with pad.

    Raises:
      InvalidArgumentError: an index is out of range.
    """
    return library.fusedrec_recover(rows=rows, index=index, pad=pad)


def recover_grad(grads: tf.Tensor, index: tf.Tensor, num_rows: tf.Tensor, *, pad: bool = False) -> tf.Tensor:
    """out[u] = sum of grads[n] over n with index[n] == u, in the order of n; 16-bit types are summed in float32.

    Args:
      grads: <float32, float16 or bfloat16>[M, D], M >= N; rows behind N are ignored.
      index: <int32>[N], each in [0, num_rows).
      num_rows: <int64>[], U.
      pad: round the first dimension up to a bucketed size, for a send buffer; the rows behind U are 0.

    Returns:
      [U, D], or [bucketed U, D] with pad. The same bits for any number of threads. Differentiable in grads.

    Raises:
      InvalidArgumentError: an index is out of range, or grads has fewer rows than index.
    """
    return library.fusedrec_recover_grad(grads=grads, index=index, num_rows=num_rows, pad=pad)


def pooled_recover(rows: tf.Tensor, index: tf.Tensor, bag_splits: tf.Tensor, bag_scale: tf.Tensor) -> tf.Tensor:
    """out[g] = bag_scale[g] * sum of rows[index[n]] over the n of bag g, without the rows in between. Differentiable.

    Args:
      rows: <float32, float16 or bfloat16>[P, D].
      index: <int32>[N], each in [0, P).
      bag_splits: <int64>[G+1], bag g is index[bag_splits[g]:bag_splits[g+1]]; an empty bag gives zeros.
      bag_scale: <float32>[G]. No gradient flows to it.

    Returns:
      [G, D]; 16-bit types are summed in float32 and rounded once.

    Raises:
      InvalidArgumentError: an index is out of range, or bag_splits do not run from 0 to N without decreasing.
    """
    return library.fusedrec_pooled_recover(rows=rows, index=index, bag_splits=bag_splits, bag_scale=bag_scale)


def pooled_recover_parts(
    parts: Sequence[tf.Tensor], index: tf.Tensor, bag_splits: tf.Tensor, bag_scale: tf.Tensor, *, pad: bool = False
) -> tf.Tensor:
    """pooled_recover of rows that lie in several tensors, without joining them. Not differentiable.

    Args:
      parts: <float32, float16 or bfloat16>[P_i, D] each. Rows are numbered one part after another.
      index: <int32>[N], each in [0, sum of all P_i).
      bag_splits, bag_scale: as in pooled_recover.
      pad: round the first dimension up to a bucketed size, for a send buffer; the rows behind G are 0.

    Returns:
      [G, D], or [bucketed G, D] with pad; 16-bit types are summed in float32 and rounded once.

    Raises:
      InvalidArgumentError: as in pooled_recover, or parts of different numbers of columns.
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
      index, bag_splits, bag_scale: as in pooled_recover, each index in [0, num_rows).
      num_rows: <int64>[], U.
      pad: round the first dimension up to a bucketed size, for a send buffer; the rows behind U are 0.

    Returns:
      [U, D], or [bucketed U, D] with pad. The same bits for any number of threads.

    Raises:
      InvalidArgumentError: as in pooled_recover, or grads has not one row per bag.
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
    gathered = recover(grad, index)
    behind = tf.shape(grads)[0] - tf.shape(index)[0]
    return tf.pad(gathered, [[0, behind], [0, 0]]), None, None
