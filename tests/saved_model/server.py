"""A server that has nothing but TensorFlow. It loads SavedModels by every loader of TensorFlow.

python server.py JOBS.json: a list of {"model": folder, "signature": name, "inputs": file.npz, "outputs": prefix,
"loaders": names}. Writes <prefix>.<loader>.npz; for "cli", which is saved_model_cli run, <prefix>.cli/<output>.npy.
"""

import contextlib
import importlib.util
import json
import pathlib
import sys

import numpy as np
import tensorflow as tf
from tensorflow.python.tools import saved_model_cli


def by_saved_model(folder, signature, inputs):
    answer = tf.saved_model.load(folder).signatures[signature]
    return {name: y.numpy() for name, y in answer(**inputs).items()}


def by_keras(folder, signature, inputs):
    layer = tf.keras.layers.TFSMLayer(folder, call_endpoint=signature)
    return {name: y.numpy() for name, y in layer(inputs).items()}


def by_v1(folder, name, inputs):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        signature = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def[name]
        feed = {signature.inputs[name].name: value.numpy() for name, value in inputs.items()}
        return session.run({name: tensor.name for name, tensor in signature.outputs.items()}, feed)


def by_cli(folder, signature, given, outputs):
    with np.load(given) as inputs:
        files = ";".join(f"{name}={given}[{name}]" for name in inputs)
    sys.argv = ["saved_model_cli", "run", "--dir", folder, "--tag_set", "serve", "--signature_def", signature]
    sys.argv += ["--inputs", files, "--outdir", outputs]
    with contextlib.suppress(SystemExit):  # absl ends its programs so
        saved_model_cli.main()


if __name__ == "__main__":
    for stranger in ("tf_fusedrec", "horovod", "tensorflow_recommenders_addons", "tf_keras"):
        assert importlib.util.find_spec(stranger) is None, stranger
    for job in json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")):
        folder, signature, given, outputs = (job[name] for name in ("model", "signature", "inputs", "outputs"))
        with np.load(given) as arrays:
            inputs = {name: tf.constant(arrays[name]) for name in arrays}
        for name in job["loaders"]:
            if name == "cli":
                by_cli(folder, signature, given, f"{outputs}.cli")
            else:
                np.savez(f"{outputs}.{name}.npz", **globals()[f"by_{name}"](folder, signature, inputs))
