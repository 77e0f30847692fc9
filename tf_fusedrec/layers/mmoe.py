"""Multi-gate mixture of experts with top-k gates, the head of the generative ranking model.

It maps the HSTU blocks' output tokens, usually the targets only, to one vector per task and token.
"""

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers.base import ConfiguredLayer, check_positive


@keras.saving.register_keras_serializable("tf_fusedrec")
class MMoE(ConfiguredLayer):
    """y_task = sum over its top k experts of g_e(x) * Expert_e(x); Expert_e(x) = relu(x W_e + b_e).

    A task's gate is a softmax over ALL experts. The k largest values are kept and divided by their sum; the paper
    names top k but no normalisation. Ties keep the expert with the lower index. An expert is computed only for the
    tokens with a gate that keeps it, and a token gives no gradient to the other experts.

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

    Examples:
      >>> tower, other = fr.layers.MMoE(num_experts=4, expert_units=16, num_tasks=2, top_k=2)(tf.ones([5, 8]))
      >>> tower.shape
      TensorShape([5, 16])
    """

    def __init__(self, num_experts: int, expert_units: int, num_tasks: int, top_k: int, **layer_arguments):
        super().__init__(**layer_arguments)
        check_positive(num_experts=num_experts, expert_units=expert_units, num_tasks=num_tasks)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be 1 .. num_experts = {num_experts}, got {top_k}.")
        self._configure(locals())

    def build(self, input_shape):
        columns = input_shape[-1]
        # One matrix for all experts. Its initial range follows the fans of a single expert.
        limit = (6.0 / (columns + self.expert_units)) ** 0.5
        self.expert_kernel = self.add_weight(
            name="expert_kernel",
            shape=[columns, self.num_experts * self.expert_units],
            initializer=keras.initializers.RandomUniform(-limit, limit),
        )
        self.expert_bias = self.add_weight(
            name="expert_bias", shape=[self.num_experts * self.expert_units], initializer="zeros"
        )
        self.gate_kernel = self.add_weight(
            name="gate_kernel",
            shape=[columns, self.num_tasks * self.num_experts],
            initializer="glorot_uniform",
        )
        super().build(input_shape)

    def call(self, x):
        logits = tf.reshape(tf.matmul(x, self.gate_kernel), [-1, self.num_tasks, self.num_experts])
        if self.top_k == self.num_experts:
            gates = tf.nn.softmax(logits)
            rows = tf.nn.relu(tf.matmul(x, self.expert_kernel) + self.expert_bias)
            kept = [tf.reshape(rows, [-1, self.num_experts, self.expert_units])] * self.num_tasks
        else:
            largest, chosen = tf.math.top_k(logits, k=self.top_k)
            gates = tf.nn.softmax(largest)  # of all experts and renormalised: the sum over all cancels
            rows, places = self._chosen_experts(x, chosen)
            kept = [tf.gather(rows, places_of_task) for places_of_task in tf.unstack(places, axis=1)]
        gates = tf.unstack(gates[..., tf.newaxis], axis=1)
        return [tf.reduce_sum(gate * experts, axis=1) for gate, experts in zip(gates, kept)]

    def _chosen_experts(self, x: tf.Tensor, chosen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes each expert for the tokens with a gate that keeps it.

        Returns:
          rows: <float>[P, expert_units], expert by expert, the tokens of each in their order.
          places: <int32>[T, tasks, k], where `rows` has the experts of `chosen`.
        """
        is_kept = tf.reduce_max(tf.one_hot(chosen, self.num_experts, dtype=tf.int32), axis=[1, 2])  # [T, E]
        tokens = tf.where(tf.transpose(is_kept) > 0)[:, 1]
        parts = tf.split(tf.gather(x, tokens), tf.reduce_sum(is_kept, axis=0), num=self.num_experts)
        kernels = tf.split(self.expert_kernel, self.num_experts, axis=1)
        biases = tf.split(self.expert_bias, self.num_experts)
        rows = [tf.nn.relu(tf.matmul(*pair) + bias) for *pair, bias in zip(parts, kernels, biases)]
        place = tf.cumsum(tf.reshape(tf.transpose(is_kept), [-1]), exclusive=True)
        place = tf.transpose(tf.reshape(place, [self.num_experts, -1]))
        return tf.concat(rows, axis=0), tf.gather(place, chosen, batch_dims=1)

    def forward_flops(self, columns: int) -> int:
        """Counts multiplications and additions of the matrix products for one token with `columns` columns.

        The tasks keep different experts where there are enough of them.
        """
        computed = min(self.num_experts, self.num_tasks * self.top_k)
        experts = columns * computed * self.expert_units
        gates = columns * self.num_tasks * self.num_experts
        mixing = self.num_tasks * self.top_k * self.expert_units
        return 2 * (experts + gates + mixing)
