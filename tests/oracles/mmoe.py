"""Oracle for layers/mmoe.py: one token, one task, one expert at a time. NumPy only."""

import numpy as np


def mmoe_oracle(x, expert_kernel, expert_bias, gate_kernel, num_experts, num_tasks, top_k):
    """Returns float64 outputs [num_tasks, T, units]. The weights have the layer's layout, experts side by side."""
    units = expert_kernel.shape[1] // num_experts
    out = np.zeros((num_tasks, len(x), units))
    for t, token in enumerate(np.asarray(x, np.float64)):
        for task in range(num_tasks):
            logits = token @ gate_kernel[:, task * num_experts : (task + 1) * num_experts]
            gates = np.exp(logits - logits.max())
            gates /= gates.sum()
            kept = sorted(range(num_experts), key=lambda e: -gates[e])[:top_k]
            for expert in kept:
                columns = slice(expert * units, (expert + 1) * units)
                answer = np.maximum(token @ expert_kernel[:, columns] + expert_bias[columns], 0.0)
                out[task, t] += gates[expert] / sum(gates[kept]) * answer
    return out
