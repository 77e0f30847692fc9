"""The Python face of the custom ops: check, call, gradient, docstring. Knows no Keras, no ranks, no tables."""

from tf_fusedrec.ops._library import *  # noqa: F403
from tf_fusedrec.ops.attention import *  # noqa: F403
from tf_fusedrec.ops.ids import *  # noqa: F403
from tf_fusedrec.ops.recovery import *  # noqa: F403
from tf_fusedrec.ops.table import *  # noqa: F403
from tf_fusedrec.ops.user_states import *  # noqa: F403
