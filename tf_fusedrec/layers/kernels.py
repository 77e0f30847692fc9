"""Which functions compute the attention of a layer: our op, or stock TensorFlow ops for a server that has no other.

A layer holds one of these in its attribute `kernels`, FUSED from the start; fr.export puts STOCK there while
it traces. Both take the same arguments and answer alike, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import stock_attention
from tf_fusedrec.ops import bias_attention, jagged_attention


class AttentionKernels(NamedTuple):
    """The two functions of ops/jagged_attention.py, where their arguments are told."""

    attention: Callable[..., tf.Tensor]
    bias_attention: Callable[..., tf.Tensor]


FUSED = AttentionKernels(jagged_attention, bias_attention)
STOCK = AttentionKernels(stock_attention.jagged_attention, stock_attention.bias_attention)
