"""Loads TensorFlow and the public names of the package: __init__.py imports it when one of them is used."""

from tf_fusedrec._tf_compat import keras as keras
from tf_fusedrec._tf_compat import tf as tf

from tf_fusedrec import checkpoint as checkpoint  # isort: skip
from tf_fusedrec import collectives as collectives
from tf_fusedrec import layers as layers
from tf_fusedrec import optimizers as optimizers
from tf_fusedrec import schedules as schedules
from tf_fusedrec.config import Constant as Constant
from tf_fusedrec.config import External as External
from tf_fusedrec.config import FeatureConfig as FeatureConfig
from tf_fusedrec.config import Limits as Limits
from tf_fusedrec.config import Normal as Normal
from tf_fusedrec.config import Storage as Storage
from tf_fusedrec.config import TableConfig as TableConfig
from tf_fusedrec.config import Tier as Tier
from tf_fusedrec.config import TruncatedNormal as TruncatedNormal
from tf_fusedrec.config import Uniform as Uniform
from tf_fusedrec.config import Zeros as Zeros
from tf_fusedrec.data.fingerprint import hash_strings as hash_strings
from tf_fusedrec.embedding import Embedding as Embedding
from tf_fusedrec.embedding import FusedEmbedding as FusedEmbedding
from tf_fusedrec.exchange.collectives import all_reduce_sum
from tf_fusedrec.exchange.collectives import rank as rank
from tf_fusedrec.exchange.collectives import size as size
from tf_fusedrec.exchange.topology import Topology as Topology
from tf_fusedrec.exchange.topology import init as init
from tf_fusedrec.layers import sync_batch_normalization
from tf_fusedrec.saved_model.applying import apply_delta as apply_delta
from tf_fusedrec.saved_model.export import export as export
from tf_fusedrec.saved_model.signatures import Signature as Signature
from tf_fusedrec.schedules import model  # noqa: F401  It changes Keras.
from tf_fusedrec.schedules.planning import Cluster as Cluster
from tf_fusedrec.schedules.planning import plan as plan

sync_batch_normalization.reduce_by(all_reduce_sum)  # layers know no collectives
