"""The functions that compute a layer's attention: our op, or stock TensorFlow ops for a server without it.

A layer's attribute `kernels` is FUSED. fr.export replaces it by STOCK while it traces. Both take the same arguments,
and their results differ only in the order of sums. STOCK has no gated_attention: TensorFlow's ops gate its attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import stock_attention
from tf_fusedrec.ops import bias_attention, gated_attention, jagged_attention


class AttentionKernels(NamedTuple):
    """Functions of ops/jagged_attention.py and ops/gated_attention.py, which document their arguments."""

    attention: Callable[..., tf.Tensor]
    bias_attention: Callable[..., tf.Tensor]
    gated_attention: Callable[..., tf.Tensor] | None


FUSED = AttentionKernels(jagged_attention, bias_attention, gated_attention)
STOCK = AttentionKernels(stock_attention.jagged_attention, stock_attention.bias_attention, None)
