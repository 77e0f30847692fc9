"""GRM, the generative ranking model of MTGRBoost (section 2): HSTU blocks, MMoE, CTR and CTCVR heads.

    context ids [B] x C ┐
    history item+action ├─ embeddings ─▶ [context | history | exposed] ─▶ HSTU x n ─▶ exposed ─▶ MMoE ─▶ CTR
    exposed items       ┘                                                                            └─▶ CTCVR

Columns of numbers enter by a projection for each kind of token. The context's numbers are one more token. The numbers
of history and exposures are added to the tokens.

A token is the sum of its features, and a target reaches its user by attention alone. With config.cross_layers, the
experts take the crosses of x_0. It joins the target's normalised output of the blocks, everything that DCN-V2 crosses
(dcn.py), and the profiles of the user's history (parts/pooled_history.py) with their products by the target's item.

One sample is one user. Every exposure is a separate target that sees context, history and itself, but no other
exposure. The logits therefore equal the logits of one row per exposure, at the cost of one pass over the history.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_fusedrec import keras, tf
from tf_fusedrec.layers import FeatureCross, MMoE, PositionEmbedding, jagged, sequence_times
from tf_fusedrec.models.base import Batch
from tf_fusedrec.models.experiment.model_config import GRMConfig
from tf_fusedrec.models.experiment.ranking_config import ROLES
from tf_fusedrec.models.exposure_model import products
from tf_fusedrec.models.parts.dense_inputs import DenseInputs, dense_width
from tf_fusedrec.models.parts.encoders import attends_by_time, encoder_blocks
from tf_fusedrec.models.parts.group_norm import GroupLayerNorm
from tf_fusedrec.models.parts.pooled_history import EventProfiles
from tf_fusedrec.models.ranking import RankingModel
from tf_fusedrec.ops import SequenceTimes

KINDS = ("contextual", *ROLES)  # of tokens, in their order in a row


class GRM(RankingModel):
    """Scores every exposure of every user.

    RankingModel documents the arguments and the call.

    Raises:
      InvalidArgumentError: A row has more tokens than config.max_sequence_length.
    """

    config: GRMConfig

    def __init__(
        self,
        config: GRMConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        popularity: np.ndarray,
        name: str = "grm",
    ):
        super().__init__(config, embedding, catalogue, popularity, name)
        self.positions = PositionEmbedding(config.max_sequence_length, config.dropout, name="positions")
        self.exposed_marker = self.add_weight(
            name="exposed_marker",
            shape=[config.dim],
            initializer=_small(),
        )
        # One projection of numbers for each kind of token.
        self.of_numbers = {
            role: keras.layers.Dense(config.dim, kernel_initializer=_small(), name=f"{role}_numbers")
            for role in KINDS
            if dense_width(config, role)
        }
        self.blocks = encoder_blocks(config)
        self.group_norms = [
            GroupLayerNorm(len(KINDS), name=f"group_norm_{number}")
            for number in range(config.num_blocks if config.group_norm else 0)
        ]
        self.crosses = [
            FeatureCross(config.cross_rank or None, name=f"cross_{number}") for number in range(config.cross_layers)
        ]
        has_profiles = config.cross_layers and config.profiles
        self.profiles = EventProfiles(config.profiles, name="profiles") if has_profiles else None
        self.cross_dropout = keras.layers.Dropout(config.dropout)
        self.experts = MMoE(config.num_experts, config.expert_units, len(config.tasks), config.top_k, name="mmoe")
        self.heads = [
            keras.Sequential(
                [
                    keras.layers.Dense(config.head_units, activation="relu"),
                    keras.layers.Dense(1),
                ],
                name=f"head_{task}",
            )
            for task in config.tasks
        ]

    def call(self, inputs: Batch, training: bool | None = None) -> dict[str, tf.Tensor]:
        num_targets = inputs["exposed_item"].row_lengths()
        inputs, rows, numbers = self.read(inputs, training)
        tokens = jagged.concat(self.token_parts(rows, numbers))
        x = self.positions(tokens, num_targets=num_targets, training=training)
        times = self._times(inputs, num_targets)
        options = {"timestamps": times, "num_targets": num_targets, "contextual_length": self.seeing_context}
        if self.config.group_norm:
            kind = self._kinds(inputs)
            for norm, block in zip(self.group_norms, self.blocks):
                normalized = x.with_values(norm(x.values, kind))
                # A block adds its input to its result. The sum of the tokens themselves goes on instead.
                change = block(normalized, training=training, **options).values - normalized.values
                x = x.with_values(x.values + change)
        else:
            for block in self.blocks:
                x = block(x, training=training, **options)
        exposed = jagged.last(x, num_targets).values
        if self.crosses:
            own = [*self.own_numbers(inputs, numbers), *self.vectors(inputs, rows)]
            past = [*self.mean_numbers(inputs, numbers), *self.mean_vectors(inputs, rows)]
            past += self._profiles(inputs, rows, numbers, training)
            # The blocks add to scaled tokens, so their sums are an order of magnitude above the rows beside them.
            exposed = self._crossed([jagged.layer_norm(exposed), *own, *past], training)
        return self.logits(exposed)

    def _profiles(
        self, inputs: Batch, rows: dict[str, Any], numbers: DenseInputs, training: bool | None
    ) -> list[tf.Tensor]:
        """Returns each profile and its products by the exposure's item, <float>[E, config.dim] each."""
        if self.profiles is None:
            return []
        history, user = rows["history_item"], jagged.token_rows(inputs["exposed_item"].row_splits)
        events = [history.values, rows["history_action"].values]
        if numbers.history is not None:
            events.append(tf.cast(numbers.history.values, self.compute_dtype))
        scale = self.config.dim**0.5  # as the tokens of the blocks are scaled
        if training:
            scale *= (1 - self.config.history_dropout) ** -0.5  # the sum of fewer events is as large as the sum of all
        scaled = history.with_values(history.values * scale)
        found = self.profiles(scaled, history.with_values(tf.concat(events, axis=1)))
        of_exposures = [tf.gather(profile, user) for profile in found]
        return of_exposures + [profile * rows["exposed_item"].values for profile in of_exposures]

    def _crossed(self, parts: list[tf.Tensor], training: bool | None) -> tf.Tensor:
        """Returns the crosses of all columns of the parts, <float>[E, n]."""
        x_0 = tf.concat([tf.cast(part, self.compute_dtype) for part in parts], axis=1)
        x_0 = x = self.cross_dropout(x_0, training=training)
        for cross in self.crosses:
            x = cross(x_0, x)
        return x

    @property
    def expert_columns(self) -> int:
        """Columns n of the experts' input."""
        if not self.config.cross_layers:
            return self.config.dim
        vectors = 1 + self.num_vectors + len(self.event_columns) + 2 * self.config.profiles
        return self.dense_columns + vectors * self.config.dim

    @property
    def seeing_context(self) -> int:
        """Number of context tokens that see the whole context and history."""
        return 0 if self.config.causal_context else self.config.context_tokens

    def logits(self, exposed: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the logits of exposures from the input of the experts, <float>[E, expert_columns]."""
        logits = [head(y) for head, y in zip(self.heads, self.experts(exposed))]
        return {task: tf.cast(tf.squeeze(logit, -1), tf.float32) for task, logit in zip(self.config.tasks, logits)}

    def counts(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        history, exposed = batch["history_item"], batch["exposed_item"]
        users = history.nrows()
        events = tf.size(history.values, tf.int64) + tf.size(exposed.values, tf.int64)
        return users, events + users * self.config.context_tokens

    def forward_flops(self, batch: Batch) -> tf.Tensor:
        exposed = batch["exposed_item"].row_lengths()
        context = self.config.context_tokens
        lengths = context + batch["history_item"].row_lengths() + exposed
        splits = tf.concat([[0], tf.cumsum(lengths)], axis=0)
        blocks = [block.forward_flops(splits, self.config.dim, exposed, self.seeing_context) for block in self.blocks]
        columns, rank = self.expert_columns, self.config.cross_rank
        cross = products([columns, rank, columns] if rank else [columns, columns])
        per_exposure = self.experts.forward_flops(columns) + len(self.crosses) * cross
        per_exposure += 2 * len(self.config.tasks) * (self.config.expert_units + 1) * self.config.head_units
        heads = tf.cast(tf.reduce_sum(exposed) * per_exposure, tf.float64)
        parts = (self._number_flops(batch), self._profile_flops(batch), self.projection_flops(batch))
        return tf.add_n([*blocks, heads, *parts])

    def _profile_flops(self, batch: Batch) -> tf.Tensor:
        if self.profiles is None:
            return tf.zeros([], tf.float64)
        columns = 2 * self.config.dim + dense_width(self.config, "history")
        events = tf.size(batch["history_item"].values, tf.int64)
        return tf.cast(events * products([columns, self.config.profiles]), tf.float64)

    def _number_flops(self, batch: Batch) -> tf.Tensor:
        users = batch["exposed_item"].nrows()
        tokens = {"contextual": users, **{role: tf.size(batch[f"{role}_item"].values) for role in ROLES}}
        counted = {role: tf.cast(tokens[role], tf.float64) for role in self.of_numbers}
        columns = {role: dense_width(self.config, role) for role in counted}
        return sum(
            (2.0 * self.config.dim * columns[role] * count for role, count in counted.items()), tf.zeros([], tf.float64)
        )

    def token_parts(self, rows: dict[str, Any], of_columns: DenseInputs) -> list[tf.RaggedTensor]:
        """Returns the tokens of context (if any), history and exposures, each the sum of its features' embeddings.

        Args:
          rows: Result of `rows_of`.
          of_columns: Result of `dense_of`.
        """
        numbers = self._projected_numbers(of_columns)
        history_parts = [rows[name].values for name in (*self.config.columns_of("history"), "history_action")]
        history = rows["history_item"].with_values(tf.add_n([*history_parts, *numbers["history"]]))
        # History and exposures share the item's row, so a marker distinguishes them.
        exposed_parts = [rows[name].values for name in self.config.columns_of("exposed")]
        exposed = tf.add_n([*exposed_parts, *numbers["exposed"]]) + self.exposed_marker
        parts = [history, rows["exposed_item"].with_values(exposed)]
        if self.config.context_tokens:
            context = [*(rows[name] for name in self.config.contextual_features), *numbers["contextual"]]
            parts.insert(0, self._context_rows(tf.stack(context, axis=1)))
        return parts

    def _projected_numbers(self, numbers: DenseInputs) -> dict[str, list[tf.Tensor]]:
        """Returns by role one tensor <float>[N, config.dim], or none without columns of numbers."""
        found: dict[str, list[tf.Tensor]] = {}
        for role, x in numbers._asdict().items():
            values = x.values if isinstance(x, tf.RaggedTensor) else x
            found[role] = [] if x is None else [tf.cast(self.of_numbers[role](values), self.compute_dtype)]
        return found

    def _kinds(self, inputs: Batch) -> tf.Tensor:
        """Returns the kind of each token, its number in KINDS: <int32>[T]."""
        history = inputs["history_item"].row_lengths()
        context = tf.fill(tf.shape(history), tf.constant(self.config.context_tokens, tf.int64))
        lengths = tf.stack([context, history, inputs["exposed_item"].row_lengths()], axis=1)
        kinds = tf.tile(tf.range(len(KINDS)), tf.shape(history))
        return tf.repeat(kinds, tf.reshape(lengths, [-1]))

    def _times(self, inputs: Batch, num_targets: tf.Tensor) -> SequenceTimes | None:
        if not attends_by_time(self.config):
            return None
        parts = [inputs["history_time"], inputs["exposed_time"]]
        if self.config.context_tokens:
            # Context has no time of its own. It takes the time of the oldest event in the history, or 0 without one.
            oldest = jagged.first_tokens(inputs["history_time"])
            context = tf.repeat(oldest[:, tf.newaxis], self.config.context_tokens, axis=1)
            parts.insert(0, self._context_rows(context))
        return sequence_times(jagged.concat(parts), num_targets=num_targets)

    def _context_rows(self, dense: tf.Tensor) -> tf.RaggedTensor:
        """Converts [B, C, ...] to a RaggedTensor [B,(C),...]."""
        width = self.config.context_tokens
        splits = tf.range(tf.shape(dense, tf.int64)[0] + 1) * width
        values = tf.reshape(dense, tf.concat([[-1], tf.shape(dense)[2:]], axis=0))
        values.set_shape([None, *dense.shape[2:]])
        return tf.RaggedTensor.from_row_splits(values, splits, validate=False)


def _small() -> keras.initializers.Initializer:
    """Returns a new initializer of numbers no larger than a table's, so that no part of a token hides the others."""
    return keras.initializers.TruncatedNormal(stddev=0.02)
