"""Refuses parts of Keras 3 in a model of legacy Keras, which would not train or save their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tf_fusedrec._tf_compat import KERAS_3, keras, of_keras_3, tf


def check_no_keras_3(model: keras.Model, args: tuple, kwargs: dict[str, Any]) -> None:
    """Checks the arguments of `compile`, and the attributes of the model.

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
    """Yields the words for each attribute and each item of a list, and its value."""
    for name, value in vars(model).items():
        if name.startswith("_self_"):  # Keras' and TensorFlow's own lists of the others
            continue
        for item in value if isinstance(value, (list, tuple)) else [value]:
            yield f"attribute {name!r} is or holds", item
