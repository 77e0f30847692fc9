"""One HSTU block: project, attend, gate, project back, add.

A model is a PositionEmbedding (positions.py) and a stack of HSTU blocks. ops/attention.py computes the attention,
relative_bias.py its bias, and gated_output.py the output stage after it.
"""

from __future__ import annotations

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.base import AttentionState, SequenceBlock, check_choice, check_positive, only_targets
from tf_fusedrec.layers.gated_output import GATE_ACTIVATIONS, GatedOutput
from tf_fusedrec.layers.jagged import visible_keys
from tf_fusedrec.layers.relative_bias import BiasWeights, check_bias_arguments
from tf_fusedrec.layers.stock_attention import FUSED
from tf_fusedrec.ops import SequenceTimes, checked_windows

FORMS = ("research", "production", "mtgrboost")
DIVISORS = ("max_length", "row_length", "visible_keys")


@keras.saving.register_keras_serializable("tf_fusedrec")
class HSTU(SequenceBlock):
    """Hierarchical sequential transduction unit over ragged sequences, in one of three published forms.

    "research", the layer of the public experiments:
      u, v, q, k = split(SiLU(LN(x) W));               out = x + dropout(u * LN(attention)) W_o + b_o
      LN has no weights, W has no bias and is drawn from N(0, 0.02).
    "production", the layer of the public operators ("STU"):
      u, v, q, k = split(LN'(x) W + b), u = SiLU(u);   out = x + dropout(u * LN'(attention)) W_o
      LN' has weights. Scores are divided by sqrt(qk_dim). The public layer has no relative bias, as with
      position_bias=False and time_encoding="none".
    "mtgrboost", equations 1-3 of MTGRBoost:
      u, q, k, v = split(SiLU(x W + b));               out = x + dropout(LN'(attention * u)) W_o + b_o
      The paper's equations show neither the residual x nor a divisor. This layer adds both, as HSTU does.
    attention = sum_j SiLU(q_i k_j + bias_ij) v_j / divisor, over the tokens j that the masks of
    layers.jagged_attention let token i see. All epsilons are 1e-6.

    Args:
      num_heads: Number of heads, H.
      qk_dim, value_dim: Columns of one head's query and key, and of its value.
      form: Published form, one of FORMS.
      max_sequence_length: N, at least the longest row; size of the position table.
      dropout: Dropout rate before the last projection.
      attention_dropout: Share of the weights of the attention that a training step sets to 0. The published layers
        declare it and do not use it.
      position_bias, time_encoding, time_buckets: Options of BiasWeights. The heads of a block share its weights.
      divisor: "max_length", "row_length" or "visible_keys". "max_length" is N, as published; the result does not
        depend on the row's length. "visible_keys" is the number of tokens that the query token sees.
      attention_window: Number of preceding positions that a token sees, or 0 for all.
      min_full_length: Number of newest tokens per row that ignore the window.
      global_window: Number of oldest history tokens that every token sees, as it sees the context; only with a window.
      target_group_size: Size of the groups of a row's targets. A target sees the earlier targets of its group; with
        size 1 it sees no other target. See layers.jagged_attention.
      concat: True to project three parts instead of the gated one. They are [u, LN(attention), u * LN(attention)]
        in "research" and [u, attention, u * LN'(attention)] in "production".
      group_norm: True if LN' normalises the attention per head, with one weight per head; "production" only.
      gate_activation: Second activation of u, one of "none", "silu", "sigmoid"; "production" only.

    Call:
      x: RaggedTensor <float>[B,(L),D].
      timestamps: RaggedTensor <int64>[B,(L)] in seconds, or SequenceTimes, which a stack computes once by
        `layers.sequence_times`. A time bias needs it.
      num_targets: None or <int>[B], number of targets at the end of each row.
      contextual_length: C, number of context tokens at the start of each row: an int, or <int>[B] by row.
      returns RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: An argument is out of range or of another form, x is not ragged, timestamps are missing or unexpected.
      InvalidArgumentError: A row is longer than max_sequence_length, or the row lengths of timestamps differ from x's.

    Source: Zhai et al., Actions Speak Louder than Words (ICML 2024) and its public code; MTGRBoost, section 2.

    Examples:
      >>> x = tf.RaggedTensor.from_row_lengths(tf.ones([5, 8]), [3, 2])
      >>> seconds = tf.RaggedTensor.from_row_lengths(tf.constant([10, 20, 60, 5, 7], tf.int64), [3, 2])
      >>> layer = fr.layers.HSTU(num_heads=2, qk_dim=4, value_dim=4, max_sequence_length=16)
      >>> times = fr.layers.sequence_times(seconds)  # once for a stack of layers
      >>> layer(fr.layers.PositionEmbedding(16)(x), times).shape
      TensorShape([2, None, 8])
    """

    def __init__(
        self,
        num_heads: int = 2,
        qk_dim: int = 16,
        value_dim: int = 16,
        form: str = "research",
        max_sequence_length: int = 211,
        dropout: float = 0.0,
        position_bias: bool = True,
        time_encoding: str = "buckets",
        time_buckets: int = 128,
        divisor: str = "max_length",
        attention_window: int = 0,
        min_full_length: int = 0,
        global_window: int = 0,
        target_group_size: int = 1,
        concat: bool = False,
        group_norm: bool = False,
        gate_activation: str = "none",
        attention_dropout: float = 0.0,
        **layer_arguments,
    ):
        super().__init__(**layer_arguments)
        check_positive(num_heads=num_heads, qk_dim=qk_dim, value_dim=value_dim, target_group_size=target_group_size)
        checked_windows(attention_window, min_full_length, global_window)
        check_choice("form", form, FORMS)
        check_choice("divisor", divisor, DIVISORS)
        check_choice("gate_activation", gate_activation, tuple(GATE_ACTIVATIONS))
        if not 0 <= attention_dropout < 1:
            raise ValueError(f"attention_dropout must be >= 0 and < 1, got {attention_dropout}.")
        check_bias_arguments(max_sequence_length, time_encoding, time_buckets)
        if form != "production" and (group_norm or gate_activation != "none"):
            raise ValueError(f'group_norm and gate_activation belong to form "production", got form {form!r}.')
        if form == "mtgrboost" and concat:
            raise ValueError('concat belongs to the forms "research" and "production", got form "mtgrboost".')
        self._configure(locals())
        self.kernels = FUSED  # fr.export replaces it by STOCK while it traces.

    def build(self, input_shape):
        columns, inner = input_shape[-1], self.num_heads * self.value_dim
        research, production = self.form == "research", self.form == "production"
        self.projection = keras.layers.Dense(
            2 * self.num_heads * (self.value_dim + self.qk_dim),
            use_bias=not research,
            kernel_initializer=keras.initializers.RandomNormal(stddev=0.02) if research else "glorot_uniform",
            activation=None if production else tf.nn.silu,
            dtype=self.dtype_policy,
            name="projection",
        )
        if production:
            self.input_norm_weight = self.add_weight(name="input_norm_weight", shape=[columns], initializer="ones")
            self.input_norm_bias = self.add_weight(name="input_norm_bias", shape=[columns], initializer="zeros")
        bias_options = (self.max_sequence_length, self.position_bias, self.time_encoding, self.time_buckets)
        self.bias_weights = BiasWeights(*bias_options, name=f"{self.name}_bias")
        concat = ("normalized" if research else "raw") if self.concat else "none"
        self.output_stage = GatedOutput(
            self.num_heads,
            norm="plain" if research else "per_head" if self.group_norm else "affine",
            gate_before_norm=self.form == "mtgrboost",
            gate_activation=self.gate_activation,
            concat=concat,
            use_bias=not production,
            dropout=self.dropout,
            dtype=self.dtype_policy,
            name="output_stage",
        )
        # The order of building decides which weights a seed draws.
        for layer, shape in (
            (self.projection, (None, columns)),
            (self.output_stage, [(None, width) for width in (columns, inner, inner)]),
            (self.bias_weights, None),
        ):
            with tf.name_scope(layer.name):
                layer.build(shape)
        super().build(input_shape)

    def call(self, x, timestamps=None, num_targets=None, contextual_length=0, training=None):
        x = jagged.checked_lengths(x, self.max_sequence_length, self.name)
        bias = self.bias_weights(x.row_splits, timestamps, num_targets)
        gate, *heads = self._project(x.values)
        masks = self._masks(num_targets, contextual_length)
        scale, dropout = self._scale(x.row_splits, masks), {}
        if training and self.attention_dropout:
            seed = tf.random.uniform([], tf.int64.min, tf.int64.max, tf.int64)
            dropout = {"dropout": self.attention_dropout, "dropout_seed": seed}
        gated = self._gated(gate, *heads, x.row_splits, scale=scale, bias=bias, **masks, **dropout)
        return x.with_values(self.output_stage([x.values, *gated], training=training))

    def attend(  # type: ignore[override]
        self,
        x: tf.RaggedTensor,
        state: AttentionState | None = None,
        timestamps: SequenceTimes | None = None,
        num_targets: tf.Tensor | None = None,
        contextual_length: int | tf.Tensor = 0,
    ) -> tuple[tf.RaggedTensor, AttentionState]:
        self.check_extendable()
        x = self._cast(x)
        if state is not None:
            x = only_targets(x, state, num_targets, contextual_length, self.name)
        gate, query, key, value = self._project(x.values)
        new, rows, times = self._grown(x, state, key, value, timestamps)
        row_splits, masks = rows.values.row_splits, self._masks(num_targets, contextual_length)
        gated = self._gated(
            gate, query, rows.keys.values, rows.values.values, row_splits,
            scale=self._scale(row_splits, masks, x.row_lengths()), bias=self.bias_weights(row_splits, times),
            query_splits=x.row_splits, **masks,
        )  # fmt: skip
        return x.with_values(self.output_stage([x.values, *gated], training=False)), new

    def check_extendable(self) -> None:
        if self.divisor == "row_length":
            raise ValueError(
                f'layer {self.name!r} cannot keep a state: with divisor="row_length", every output changes when its '
                'row grows. Build it with divisor="max_length" or "visible_keys", or compute whole rows.'
            )
        if self.attention_window and self.min_full_length:
            raise ValueError(
                f"layer {self.name!r} cannot keep a state: the last min_full_length = {self.min_full_length} tokens "
                "ignore the window, and they change when the row grows. Build it with min_full_length=0, or compute "
                "whole rows."
            )

    def forward_flops(
        self,
        row_splits: tf.Tensor,
        columns: int,
        num_targets: tf.Tensor | None = None,
        contextual_length: int | tf.Tensor = 0,
    ) -> tf.Tensor:
        """Counts multiplications and additions of the matrix products, <float64>[], over visible pairs only."""
        qk, inner = self.num_heads * self.qk_dim, self.num_heads * self.value_dim
        per_token = 2 * columns * 2 * (qk + inner) + 2 * (3 if self.concat else 1) * inner * columns
        return self._flops(row_splits, per_token, 2 * (qk + inner), **self._masks(num_targets, contextual_length))

    def _normalized(self, tokens: tf.Tensor) -> tf.Tensor:
        if self.form == "mtgrboost":
            return tokens
        normalized = jagged.layer_norm(tokens)
        if self.form == "research":
            return normalized
        weight, bias = (tf.cast(w, normalized.dtype) for w in (self.input_norm_weight, self.input_norm_bias))
        return normalized * weight + bias

    def _project(self, tokens: tf.Tensor) -> list[tf.Tensor]:
        """Returns gate, queries, keys and values, the last three by head. The column order is the source's."""
        projected = self.projection(self._normalized(tokens))
        qk, inner = self.num_heads * self.qk_dim, self.num_heads * self.value_dim
        if self.form == "mtgrboost":
            gate, query, key, value = tf.split(projected, [inner, qk, qk, inner], axis=-1)
        else:
            gate, value, query, key = tf.split(projected, [inner, inner, qk, qk], axis=-1)
        gate = tf.nn.silu(gate) if self.form == "production" else gate
        return [gate, *(self._heads(x, self.qk_dim) for x in (query, key)), self._heads(value, self.value_dim)]

    def _masks(self, num_targets: tf.Tensor | None, contextual_length: int | tf.Tensor) -> dict:
        return {
            "num_targets": num_targets,
            "contextual_length": contextual_length,
            "attention_window": self.attention_window,
            "min_full_length": self.min_full_length,
            "global_window": self.global_window,
            "target_group_size": self.target_group_size,
        }

    def _gated(self, gate, query, key, value, row_splits, **arguments) -> list[tf.Tensor]:
        """Returns the inputs of the output stage, <float>[Tq, H * Dv]: the gated attention, or gate and attention."""
        arguments["alpha"] = self.qk_dim**-0.5 if self.form == "production" else 1.0
        inner = [-1, self.num_heads * self.value_dim]
        output_gate = self.output_stage.output_gate(gate) if self.kernels.gates else None
        if output_gate is not None:
            arguments["gate"] = output_gate
        out = tf.reshape(self.kernels.attention(query, key, value, row_splits, **arguments), inner)
        return [gate, out] if output_gate is None else [out]

    def _scale(self, row_splits: tf.Tensor, masks: dict, queries: tf.Tensor | None = None) -> float | tf.Tensor:
        """Returns one over the divisor, of the last `queries` <int64>[B] tokens of each row; None: of all tokens."""
        if self.divisor == "max_length":
            return 1.0 / self.max_sequence_length
        if self.divisor == "visible_keys":
            keys = visible_keys(row_splits, **masks)
        else:
            lengths = row_splits[1:] - row_splits[:-1]
            keys = tf.gather(lengths, jagged.token_positions(row_splits)[0])
        if queries is not None:
            keys = jagged.last(tf.RaggedTensor.from_row_splits(keys, row_splits, validate=False), queries).values
        return 1.0 / tf.cast(keys, tf.float32)
