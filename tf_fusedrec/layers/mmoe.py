"""Multi-gate mixture of experts with top-k gates, the head of the generative ranking model.

It maps the HSTU blocks' output tokens, usually the targets only, to one vector per task and token.
"""

from tf_fusedrec._tf_compat import keras, tf


class MMoE(keras.layers.Layer):
    """y_task = sum over its top k experts of g_e(x) * Expert_e(x); Expert_e(x) = relu(x W_e + b_e).

    A task's gate is a softmax over ALL experts. The k largest values are kept and divided by their sum; the paper
    names top k but no normalisation. Ties keep the expert with the lower index. Every expert is computed for every
    token. A token gives no gradient to an expert that none of its gates keeps.

    Args:
      num_experts: Number of experts, E.
      expert_units: Columns of an expert's output.
      num_tasks: Number of gates and of outputs.
      top_k: Number of experts kept per task and token, 1 .. E.

    Call:
      x: <float>[T, D].
      returns a list of num_tasks tensors <float>[T, expert_units].

    Raises:
      ValueError: An argument is out of range.

    Source: MTGRBoost, section 2, eq. 4; Ma et al., Modeling Task Relationships with MMoE
    (KDD 2018).
    """

    def __init__(self, num_experts: int, expert_units: int, num_tasks: int, top_k: int, **layer_arguments):
        super().__init__(**layer_arguments)
        for name, number in (
            ("num_experts", num_experts),
            ("expert_units", expert_units),
            ("num_tasks", num_tasks),
        ):
            if number < 1:
                raise ValueError(f"{name} must be >= 1, got {number}.")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be 1 .. num_experts = {num_experts}, got {top_k}.")
        self.num_experts = num_experts
        self.expert_units = expert_units
        self.num_tasks = num_tasks
        self.top_k = top_k

    def build(self, input_shape):
        columns = input_shape[-1]
        # One matrix holds all experts, but its initial range follows the fans of a single expert.
        limit = (6.0 / (columns + self.expert_units)) ** 0.5
        self.expert_kernel = self.add_weight(
            "expert_kernel",
            [columns, self.num_experts * self.expert_units],
            initializer=keras.initializers.RandomUniform(-limit, limit),
        )
        self.expert_bias = self.add_weight("expert_bias", [self.num_experts * self.expert_units], initializer="zeros")
        self.gate_kernel = self.add_weight(
            "gate_kernel",
            [columns, self.num_tasks * self.num_experts],
            initializer="glorot_uniform",
        )
        super().build(input_shape)

    def call(self, x):
        experts = tf.nn.relu(tf.matmul(x, self.expert_kernel) + self.expert_bias)
        experts = tf.reshape(experts, [-1, self.num_experts, self.expert_units])
        logits = tf.reshape(tf.matmul(x, self.gate_kernel), [-1, self.num_tasks, self.num_experts])
        gates = _top_gates(logits, self.top_k)
        return [tf.reduce_sum(gate[:, :, tf.newaxis] * experts, axis=1) for gate in tf.unstack(gates, axis=1)]

    def forward_flops(self, columns: int) -> int:
        """Counts multiplications and additions of the matrix products for one token with `columns` columns."""
        experts = columns * self.num_experts * self.expert_units
        gates = columns * self.num_tasks * self.num_experts
        mixing = self.num_tasks * self.num_experts * self.expert_units
        return 2 * (experts + gates + mixing)

    def get_config(self):
        return {
            **super().get_config(),
            "num_experts": self.num_experts,
            "expert_units": self.expert_units,
            "num_tasks": self.num_tasks,
            "top_k": self.top_k,
        }


def _top_gates(logits: tf.Tensor, top_k: int) -> tf.Tensor:
    """Maps logits <float>[T, tasks, E] to gates: the k largest softmax values, renormalised, and 0 elsewhere."""
    gates = tf.nn.softmax(logits)
    _, largest = tf.math.top_k(logits, k=top_k)
    kept = gates * tf.reduce_sum(tf.one_hot(largest, logits.shape[-1], dtype=gates.dtype), axis=-2)
    return kept / tf.reduce_sum(kept, axis=-1, keepdims=True)
