"""DCN-V2, a baseline for GRM: crossed features of a bounded degree beside a deep network.

    dense of exposure and history ───────────────────┐       ┌─▶ cross layers ─┐
    context ids, item, its features ─ embeddings ────┼─▶ x_0 ┤                 ├─▶ one logit for each task
    history items, actions ─ embeddings, their mean ─┘       └─▶ deep network ─┘

Source: Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
Systems (WWW 2021), the parallel structure. The paper's mixture of low-rank experts is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_fusedrec import keras, tf
from tf_fusedrec.layers import FeatureCross
from tf_fusedrec.models.base import Batch
from tf_fusedrec.models.experiment.model_config import DCNConfig
from tf_fusedrec.models.exposure_model import ExposureModel, network, products
from tf_fusedrec.models.parts.dense_inputs import DenseInputs


class DCN(ExposureModel):
    """Scores every exposure of every user from crosses of its own features and of the mean of the user's history.

    RankingModel documents the arguments and the call.
    """

    config: DCNConfig

    def __init__(
        self,
        config: DCNConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        popularity: np.ndarray,
        name: str = "dcn",
    ):
        super().__init__(config, embedding, catalogue, popularity, name)
        self.crosses = [
            FeatureCross(config.cross_rank or None, name=f"cross_{number}") for number in range(config.cross_layers)
        ]
        self.deep = network(config.deep_units, config.dropout, "deep")
        self._columns = self.dense_columns + config.dim * (self.num_vectors + len(self.event_columns))

    def hidden(self, inputs: Batch, rows: dict[str, Any], numbers: DenseInputs, training: bool | None) -> tf.Tensor:
        dense = tf.cast(self.dense(inputs, numbers), self.compute_dtype)
        x_0 = tf.concat([dense, *self.vectors(inputs, rows), *self.mean_vectors(inputs, rows)], axis=1)
        x_0 = crossed = self.dropout(x_0, training=training)
        for cross in self.crosses:
            crossed = cross(x_0, crossed)
        return tf.concat([crossed, self.deep(x_0, training=training)], axis=1)

    def hidden_flops(self, batch: Batch) -> tf.Tensor:
        config, columns = self.config, self._columns
        cross = products([columns, config.cross_rank, columns] if config.cross_rank else [columns, columns])
        deep = products([columns, *config.deep_units])
        head = products([columns + config.deep_units[-1], len(config.tasks)])
        return tf.cast(self.num_positions(batch) * (config.cross_layers * cross + deep + head), tf.float64)
