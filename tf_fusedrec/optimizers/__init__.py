"""Update rules of native tables: their records, their Keras counterparts and their state."""

from tf_fusedrec.optimizers import rules
from tf_fusedrec.optimizers.rules import *  # noqa: F403

__all__ = [*rules.__all__]
