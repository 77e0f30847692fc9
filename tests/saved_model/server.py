"""A server that has nothing but TensorFlow. It loads a SavedModel by every loader of TensorFlow.

python server.py FOLDER INPUTS.npz OUTPUTS: writes the answers of serving_default to OUTPUTS/<loader>.npz; those of
"cli", which is saved_model_cli run, to OUTPUTS/cli/<output>.npy.
"""

import contextlib
import importlib.util
import sys

import numpy as np
import tensorflow as tf
from tensorflow.python.tools import saved_model_cli

SIGNATURE = "serving_default"


def by_saved_model(folder, inputs):
    answer = tf.saved_model.load(folder).signatures[SIGNATURE]
    return {name: y.numpy() for name, y in answer(**inputs).items()}


def by_keras(folder, inputs):
    layer = tf.keras.layers.TFSMLayer(folder, call_endpoint=SIGNATURE)
    return {name: y.numpy() for name, y in layer(inputs).items()}


def by_v1(folder, inputs):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        signature = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def[SIGNATURE]
        feed = {signature.inputs[name].name: value.numpy() for name, value in inputs.items()}
        return session.run({name: tensor.name for name, tensor in signature.outputs.items()}, feed)


def by_cli(folder, given, outputs):
    with np.load(given) as inputs:
        files = ";".join(f"{name}={given}[{name}]" for name in inputs)
    sys.argv = ["saved_model_cli", "run", "--dir", folder, "--tag_set", "serve", "--signature_def", SIGNATURE]
    sys.argv += ["--inputs", files, "--outdir", outputs]
    with contextlib.suppress(SystemExit):  # absl ends its programs so
        saved_model_cli.main()


if __name__ == "__main__":
    for stranger in ("tf_fusedrec", "horovod", "tensorflow_recommenders_addons", "tf_keras"):
        assert importlib.util.find_spec(stranger) is None, stranger
    folder, given, outputs = sys.argv[1:]
    with np.load(given) as arrays:
        inputs = {name: tf.constant(arrays[name]) for name in arrays}
    for load in (by_saved_model, by_keras, by_v1):
        np.savez(f"{outputs}/{load.__name__.removeprefix('by_')}.npz", **load(folder, inputs))
    by_cli(folder, given, f"{outputs}/cli")
