"""tf_fusedrec: fused embedding exchange and generative recommenders for TensorFlow 2.

`import tf_fusedrec` checks the environment. The package is loaded at the first use of a public name, and at once where
TensorFlow is loaded. That changes the process only by the statements of this list. The last three run with
`import tf_fusedrec.tfra` or FusedEmbedding(backend="tfra").

  _public.py              sync_batch_normalization.reduce_by        A layer gets the all-reduce.
  _tf_compat/__init__.py  _autograph.CONVERSION_RULES               AutoGraph skips tf_keras, TFRA and tf_fusedrec.
  _tf_compat/legacy.py    keras.src.backend.*                       tf_keras before 2.19 draws seeds on Python 3.12.
  _tf_compat/legacy.py    keras.layers.SpectralNormalization.*      AutoGraph converts its branch.
  data/fingerprint.py     keras.saving.register_keras_serializable  Keras can load a model with hash_strings.
  embedding/*.py          keras.saving.register_keras_serializable  Keras can load FusedEmbedding and Embedding.
  layers/*.py             keras.saving.register_keras_serializable  Keras can load these layers.
  metrics/streaming.py    keras.saving.register_keras_serializable  Keras can load the metrics.
  ops/_library.py         load                                      TensorFlow gets the custom ops.
  ops/_library.py         _functions.*                              C functions of that library get their types.
  ops/*.py                tf.no_gradient                            An op has no gradient.
  ops/*.py                tf.RegisterGradient                       An op has a gradient.
  schedules/*.py          register                                  Saved models find a schedule by its name.
  schedules/one_keras.py  functools.wraps                           The next two keep the text of Keras.
  schedules/one_keras.py  _Model.compile                            compile of models with tables refuses Keras 3.
  schedules/one_keras.py  _OpLayer.__init__                         Keras 3 layers in functional models are refused.
  schedules/model.py      keras.saving.register_keras_serializable  Keras can load a PipelinedModel.
  tables/legacy_savers.py _hdf5.*                                   Keras' HDF5 writers and readers refuse tables.
  tables/legacy_savers.py _files.save_weights                       Keras' save_weights refuses tables.
  tables/legacy_savers.py _archive.export_model                     Keras' model.export refuses tables.
  tables/legacy_savers.py keras.layers.Layer.?et_weights            Keras' lists of weights have the rows of tables.
  tables/legacy_savers.py keras.callbacks.CallbackList.*            fit refuses callbacks that omit tables.
  tfra/fused_layer.py     keras.saving.register_keras_serializable  Keras can load FusedTfraEmbedding.
  tfra/table.py           register_backend                          FusedEmbedding gets the backend "tfra".
  tfra/tfra_library.py    tf.get_logger().setLevel                  TFRA's import prints no notices.
"""

# ruff: noqa: F405  The public names are those of _public.py.

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tf_fusedrec import _environment  # noqa: F401  (first: it checks the versions)

if TYPE_CHECKING:
    from tf_fusedrec._public import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Constant",
    "Embedding",
    "External",
    "FeatureConfig",
    "FusedEmbedding",
    "Limits",
    "Normal",
    "Signature",
    "Storage",
    "TableConfig",
    "Tier",
    "Topology",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
    "apply_delta",
    "callbacks",
    "checkpoint",
    "collectives",
    "data",
    "export",
    "hash_strings",
    "init",
    "keras",
    "layers",
    "losses",
    "metrics",
    "optimizers",
    "plan",
    "rank",
    "saved_model",
    "schedules",
    "size",
    "tf",
]

# Modules of this package, which load what they need. tfra is not in __all__, because it needs TFRA.
_ROOMS = (
    "callbacks", "checkpoint", "collectives", "data", "layers", "losses", "metrics", "optimizers", "saved_model",
    "schedules", "tfra",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"tf_fusedrec.{name}")
    if name in __all__:
        _load()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


def _load() -> None:
    public = vars(importlib.import_module("tf_fusedrec._public"))
    globals().update({name: public[name] for name in __all__ if name in public})


if "tensorflow" in sys.modules:  # a program may load a saved model next, without a name of this package
    _load()
