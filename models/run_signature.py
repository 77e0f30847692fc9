"""Loads a SavedModel of models/export.py and runs one signature, as a server does, with TensorFlow and NumPy only.

    python models/run_signature.py --model runs/grm_tiny/saved_model --inputs inputs.npz --outputs outputs.npz

inputs.npz holds the signature's inputs by name. The program writes the outputs by name to outputs.npz.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tensorflow as tf


def run_signature(model: str, signature: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the outputs of a SavedModel's signature, by name.

    Raises:
      ValueError: The model has no such signature, or the names of the inputs differ from the signature's.
    """
    loaded = tf.saved_model.load(model)
    if signature not in loaded.signatures:
        known = sorted(loaded.signatures)
        raise ValueError(f"SavedModel {model!r} has no signature {signature!r}, it has {known}. Pass one of these.")
    function = loaded.signatures[signature]
    wanted = set(function.structured_input_signature[1])
    if set(inputs) != wanted:
        raise ValueError(f"inputs are {sorted(inputs)}, {signature!r} wants {sorted(wanted)}. Pass exactly these.")
    outputs = function(**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in outputs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the SavedModel")
    parser.add_argument("--signature", default="serving_default")
    parser.add_argument("--inputs", required=True, help=".npz file with the inputs by name")
    parser.add_argument("--outputs", required=True, help=".npz file to write")
    arguments = parser.parse_args()
    with np.load(arguments.inputs) as inputs:
        try:
            outputs = run_signature(arguments.model, arguments.signature, dict(inputs))
        except ValueError as error:
            sys.exit(f"error: {error}")
    np.savez(arguments.outputs, **outputs)


if __name__ == "__main__":
    main()
