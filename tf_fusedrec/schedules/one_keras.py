"""Refuses objects of one Keras in a model of the other, which would not train or save their weights.

Keras 3 refuses optimizers of tf_keras in the `compile` of any model. tf_keras calls neither this package nor Keras 3
where they could refuse. So `compile` of every model checks first there, and so does the layer that records an operation
on the output of another layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, keras_api, of_other_keras, tf
from tf_fusedrec.embedding import embeddings_of


def check(model: keras.Model, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises ValueError if an argument of `compile`, or an attribute of the model or of a layer, is of the other."""
    arguments = [("compile got", value) for value in tf.nest.flatten([args, kwargs])]
    for place, value in [*arguments, *_attributes(model)]:
        if of_other_keras(value):
            raise ValueError(f"Model {model.name!r}: {place} {type(value).__name__}, which {keras_api.OTHER_KERAS}")


def _attributes(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yields each attribute, and each item of a list or dict, after words that say where it is."""
    for layer in model._flatten_layers():
        owner = "" if layer is model else f" of layer {layer.name!r}"
        for name, value in vars(layer).items():
            if not name.startswith("_self_"):  # Keras' and TensorFlow's own lists of the others
                for item in _items(value):
                    yield f"attribute {name!r}{owner} is or holds", item


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _items(item)
    else:
        yield value


if KERAS_IS_LEGACY:
    _Model, _OpLayer = keras.Model, keras.src.layers.core.tf_op_layer.TFOpLambda
    _compile, _make_op_layer = _Model.compile, _OpLayer.__init__

    @functools.wraps(_compile)
    def _compile_legacy(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        if isinstance(self, keras.Model) and embeddings_of(self):
            check(self, args, kwargs)
        _compile(self, *args, **kwargs)

    @functools.wraps(_make_op_layer)
    def _make_legacy_op_layer(self: Any, *args: Any, **kwargs: Any) -> None:
        caller = keras_api.layer_of_other_keras()
        if caller is not None:
            raise ValueError(
                f"layer {caller.name!r} got a tensor of a functional model of legacy Keras, which would record its "
                f"operations and never train its weights. It is a {type(caller).__name__}, which "
                f"{keras_api.OTHER_KERAS}"
            )
        _make_op_layer(self, *args, **kwargs)

    _Model.compile, _OpLayer.__init__ = _compile_legacy, _make_legacy_op_layer
