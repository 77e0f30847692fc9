"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

import dataclasses

from tf_fusedrec.optimizers.rule import Rule


@dataclasses.dataclass(frozen=True)
class SGD(Rule):
    """w -= lr g. With momentum mu > 0: m = mu m - lr g; w += m, or with nesterov w += mu m - lr g.

    The forms of Keras; Sutskever et al., "On the importance of initialization and momentum", ICML 2013, eq. 1-4.

    Args:
      momentum: mu, 0 <= mu <= 1.
      nesterov: True to use Nesterov's form. It has no effect without momentum, as in Keras.
    """

    momentum: float = 0.0
    nesterov: bool = False
    clipnorm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", "from 0 to 1", lambda value: 0 <= value <= 1)

    @property
    def rule(self) -> str:
        return "momentum" if self.momentum else "sgd"

    @property
    def wide_slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @property
    def hyperparameters(self) -> list[float]:
        return [self.clipnorm, self.momentum, float(self.nesterov)] if self.momentum else [self.clipnorm]
