"""Signatures of a served model: flat input and output tensors, from a function or a functional Keras model.

A ragged input `x` becomes `x` (its flat values) and `x_row_splits` <int64>[B+1]. A sparse input becomes `x_indices`,
`x` and `x_dense_shape`. Ragged outputs have the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, keras_api, of_other_keras, tf
from tf_fusedrec.config import check_input_name
from tf_fusedrec.data.fingerprint import hash_strings

_ATTRIBUTES = ("dense_weights", "resources", "served_tables", "versions")


class Signature(NamedTuple):
    """A served function.

    function: Function from {input name: tensor} to {output name: tensor}. It may call the model, because export traces
      it with the layers switched to serving. It must not call a tf.function that is traced already.
    inputs: tf.TensorSpec by input name.
    resources: Objects that the function uses and the SavedModel must have, such as a StateCache.
    weights: Variables that the function uses in addition to the model's. A delta replaces them, too.
    """

    function: Callable[[dict[str, tf.Tensor]], Mapping[str, tf.Tensor]]
    inputs: Mapping[str, tf.TensorSpec]
    resources: tuple[tf.Module, ...] = ()
    weights: tuple[tf.Variable, ...] = ()

    def trace(self) -> Any:
        """Returns a traced tf.function of one dict. Its inputs take their names from `inputs`, not from the specs."""
        named = {name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in self.inputs.items()}
        once = tf.function(self.function, input_signature=[named], autograph=False).get_concrete_function()
        # tf.saved_model.save traces its functions again. This one is small, because it only calls.
        function = tf.function(lambda inputs: once(inputs), input_signature=[named], autograph=False)
        function.get_concrete_function()
        return function


def default_signatures(model: keras.Model) -> dict[str, Signature]:
    """The model's `serving_signatures()`, or the inputs and outputs of a functional model as "serving_default"."""
    if of_other_keras(model):
        raise ValueError(f"export got {model.name!r}, which {keras_api.OTHER_KERAS}")
    if hasattr(model, "serving_signatures"):
        return model.serving_signatures()
    if not isinstance(model, (keras_api.Functional, keras.Sequential)) or not getattr(model, "inputs", None):
        raise ValueError(
            f"export cannot derive the signature of {model.name!r}, which is not a functional Keras model. Use "
            "export(..., signatures={'serving_default': Signature(function, inputs)}), or a method serving_signatures."
        )
    # The structure is copied, because tf.nest does not handle Keras' own wrappers.
    structure = tf.nest.map_structure(lambda symbol: symbol, keras_api.symbolic_inputs(model))
    names = [keras_api.input_name(symbol) for symbol in tf.nest.flatten(structure)]
    specs: dict[str, tf.TensorSpec] = {}
    packs = {}
    for name, symbol in zip(names, tf.nest.flatten(structure)):
        flat, packs[name] = _flat_form(name, keras_api.spec_of(symbol))
        if doubled := sorted(set(flat) & set(specs)):
            raise ValueError(
                f"two inputs of {model.name!r} have the name {doubled[0]!r} in a signature. A ragged input x also has "
                "x_row_splits, and a sparse one x_indices and x_dense_shape. Rename one keras.Input."
            )
        specs.update(flat)

    output_names = getattr(model, "output_names", None) or [model.layers[-1].name]  # Keras 3's Sequential has none

    def function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        values = {name: pack(inputs) for name, pack in packs.items()}
        batch = tf.nest.pack_sequence_as(structure, [values[name] for name in names])
        return flat_outputs(model(batch, training=False), output_names)

    return {"serving_default": Signature(function, specs)}


def check_names(signatures: Mapping[str, Signature]) -> None:
    """Raises ValueError if TensorFlow would refuse or change the name of a signature or of an input."""
    for name, signature in signatures.items():
        # The SavedModel's module has these attributes, and an attribute for each signature.
        if not name or name in _ATTRIBUTES or hasattr(tf.Module, name):
            raise ValueError(
                f"the name {name!r} of a signature is empty or an attribute of the SavedModel's module. Use "
                "another name, such as 'serving_default'."
            )
        for input_name in signature.inputs:
            check_input_name(f"the name of an input of signature {name!r}", input_name)


def taking_strings(
    signatures: Mapping[str, Signature], names: Sequence[str] | Mapping[str, bool]
) -> dict[str, Signature]:
    """Signatures with inputs `names` of <string> in place of <int64>, which they hash with hash_strings.

    names: Names of inputs; or by name, the argument `integers` of hash_strings.
    """
    integers = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, False)
    for name in integers:
        dtypes = [signature.inputs[name].dtype for signature in signatures.values() if name in signature.inputs]
        if set(dtypes) != {tf.int64}:
            known = sorted({known for signature in signatures.values() for known in signature.inputs})
            raise ValueError(
                f"strings names {name!r}, whose dtypes are {[dtype.name for dtype in dtypes]}, want int64 ids in some "
                f"signature. Use inputs of ids, among {known}."
            )

    def of_strings(signature: Signature) -> Signature:
        hashing = [name for name in integers if name in signature.inputs]
        specs = {name: tf.TensorSpec(signature.inputs[name].shape, tf.string) for name in hashing}

        def function(inputs: dict[str, tf.Tensor]) -> Mapping[str, tf.Tensor]:
            hashed = {name: hash_strings(inputs[name], integers[name]) for name in hashing}
            return signature.function({**inputs, **hashed})

        return signature._replace(function=function, inputs={**signature.inputs, **specs})

    return {name: of_strings(signature) for name, signature in signatures.items()}


def flat_outputs(outputs: Any, names: Any) -> dict[str, tf.Tensor]:
    """Outputs of a model as {name: tensor}. Names are the keys of a dict, or `names`."""
    named = outputs if isinstance(outputs, Mapping) else dict(zip(names, tf.nest.flatten(outputs)))
    flat: dict[str, tf.Tensor] = {}
    for name, output in named.items():
        if isinstance(output, tf.RaggedTensor):
            flat[f"{name}_row_splits"] = tf.cast(output.row_splits, tf.int64)
            output = output.values
        flat[name] = output
    return flat


def _flat_form(name: str, spec: Any) -> tuple[dict[str, tf.TensorSpec], Callable[[Mapping[str, tf.Tensor]], Any]]:
    """Flat specs of an input by name, and the function that makes the input of their tensors."""
    if isinstance(spec, tf.RaggedTensorSpec):
        shapes = {"": ([None, *spec.shape[spec.ragged_rank + 1 :]], spec.dtype), "_row_splits": ([None], tf.int64)}
        pack = tf.RaggedTensor.from_row_splits
    elif isinstance(spec, tf.SparseTensorSpec):
        rank = spec.shape.rank
        shapes = {"_indices": ([None, rank], tf.int64), "": ([None], spec.dtype), "_dense_shape": ([rank], tf.int64)}
        pack = tf.SparseTensor
    else:
        shapes, pack = {"": (spec.shape.as_list(), spec.dtype)}, lambda tensor: tensor
    specs = {name + suffix: tf.TensorSpec(*shape) for suffix, shape in shapes.items()}
    return specs, lambda inputs: pack(*(inputs[key] for key in specs))
