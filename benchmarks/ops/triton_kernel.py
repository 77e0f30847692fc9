"""A plain Triton kernel of causal SiLU attention over rows of different length, forward, without bias.

A user would write it first. A program per tile of queries of one row and head loops over tiles of keys up to the
diagonal. It is the peer of `attention` in gpu.py. Its import needs Triton, which PyTorch for GPUs brings.
"""

import torch
import triton
import triton.language as tl

BLOCK = 64  # queries per program, and keys per step


@triton.jit
def forward(query, key, value, out, splits, scale, alpha, heads, D: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    begin, end = tl.load(splits + row), tl.load(splits + row + 1)
    first = begin + tl.program_id(0) * BLOCK
    if first < end:
        i, d = first + tl.arange(0, BLOCK), tl.arange(0, D)
        at_queries = (i[:, None] * heads + head) * D + d[None, :]
        q = tl.load(query + at_queries, mask=i[:, None] < end, other=0.0)
        sums = tl.zeros([BLOCK, D], tl.float32)
        for start in range(begin, tl.minimum(first + BLOCK, end), BLOCK):
            j = start + tl.arange(0, BLOCK)
            at_keys = (j[:, None] * heads + head) * D + d[None, :]
            k = tl.load(key + at_keys, mask=j[:, None] < end, other=0.0)
            v = tl.load(value + at_keys, mask=j[:, None] < end, other=0.0)
            s = tl.dot(q, tl.trans(k)) * alpha
            w = tl.where((i[:, None] >= j[None, :]) & (j[None, :] < end), s * tl.sigmoid(s), 0.0)
            sums += tl.dot(w.to(v.dtype), v)
        tl.store(out + at_queries, (sums * tl.load(scale)).to(q.dtype), mask=i[:, None] < end)


def prepare(row_splits, device, heads: int, dim: int, alpha: float):
    """Returns a function that launches the kernel on the arrays of a prepared call (bfloat16 as bits)."""
    numbers = [device[name].view(torch.bfloat16) for name in ("query", "key", "value", "out")]
    scale, splits = device["scale"].view(torch.float32), torch.from_numpy(row_splits).cuda()
    longest = int((row_splits[1:] - row_splits[:-1]).max())
    grid = (triton.cdiv(longest, BLOCK), heads * (len(row_splits) - 1))
    return lambda: forward[grid](*numbers, splits, scale, alpha, heads, dim, BLOCK)
