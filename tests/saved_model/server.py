"""A stranger's server: loads a SavedModel by one of TensorFlow's loaders. Runs where there is nothing but TensorFlow.

python server.py LOADER MODEL INPUTS.npz OUTPUTS.npz
"""

import importlib.util
import sys

import numpy as np
import tensorflow as tf


def load(loader, folder):
    """A function from arrays by input name to arrays by output name."""
    if loader == "saved_model":
        answer = tf.saved_model.load(folder).signatures["serving_default"]
        return lambda inputs: {name: y.numpy() for name, y in answer(**inputs).items()}
    if loader == "keras":
        layer = tf.keras.layers.TFSMLayer(folder, call_endpoint="serving_default")
        return lambda inputs: {name: y.numpy() for name, y in layer(inputs).items()}
    assert loader == "v1"

    def answer(inputs):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            graph = tf.compat.v1.saved_model.load(session, ["serve"], folder)
            signature = graph.signature_def["serving_default"]
            feed = {signature.inputs[name].name: value.numpy() for name, value in inputs.items()}
            return session.run({name: tensor.name for name, tensor in signature.outputs.items()}, feed)

    return answer


if __name__ == "__main__":
    for stranger in ("tf_fusedrec", "horovod", "tensorflow_recommenders_addons", "tf_keras"):
        assert importlib.util.find_spec(stranger) is None, stranger
    loader, folder, given, answered = sys.argv[1:]
    with np.load(given) as arrays:
        inputs = {name: tf.constant(arrays[name]) for name in arrays}
    np.savez(answered, **load(loader, folder)(inputs))
