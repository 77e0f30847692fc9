"""Refuses parts of Keras 3 in a model of legacy Keras, which would not train or save their weights.

Legacy Keras calls neither this package nor Keras 3 where it could refuse. So `compile` of every model asks here first,
and so does the legacy layer that records an operation on the output of another layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from tf_fusedrec._tf_compat import KERAS_3, keras, keras_3_caller, of_keras_3, tf
from tf_fusedrec.embedding import embeddings_of

_Model, _OpLayer = keras.Model, keras.src.layers.core.tf_op_layer.TFOpLambda
_compile, _make_op_layer = _Model.compile, _OpLayer.__init__


def check_no_keras_3(model: keras.Model, args: tuple, kwargs: dict[str, Any]) -> None:
    """Checks the arguments of `compile`, and the attributes of the model and of its layers.

    Args:
      model: The model that is compiled.
      args, kwargs: Arguments of its `compile`.

    Raises:
      ValueError: one is of Keras 3.
    """
    given = [("compile got", value) for value in tf.nest.flatten([args, kwargs])]
    for what, value in [*given, *_attributes(model)]:
        if of_keras_3(value):
            raise ValueError(f"Model {model.name!r}: {what} {type(value).__name__}, which {KERAS_3}")


def _attributes(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yields the words for each attribute and each item of a list or dict, and its value."""
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


@functools.wraps(_compile)
def _compile_legacy(self: keras.Model, *args: Any, **kwargs: Any) -> None:
    if isinstance(self, keras.Model) and embeddings_of(self):
        check_no_keras_3(self, args, kwargs)
    _compile(self, *args, **kwargs)


@functools.wraps(_make_op_layer)
def _make_legacy_op_layer(self: Any, *args: Any, **kwargs: Any) -> None:
    caller = keras_3_caller()
    if caller is not None:
        raise ValueError(
            f"layer {caller.name!r} got a tensor of a functional model of legacy Keras, which would record its "
            f"operations and never train its weights. It is a {type(caller).__name__}, which {KERAS_3}"
        )
    _make_op_layer(self, *args, **kwargs)


_Model.compile, _OpLayer.__init__ = _compile_legacy, _make_legacy_op_layer
