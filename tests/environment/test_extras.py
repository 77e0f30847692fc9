"""Without TFRA, everything but tf_fusedrec.tfra and its backend works. Without Horovod, one process works."""

import json

from tests.support.blocked import TFRA, run_without

MISSING = (
    "TensorFlow Recommenders Addons (TFRA) is not installed (No module named 'tensorflow_recommenders_addons'). "
    "tf_fusedrec.tfra and FusedEmbedding(backend='tfra') need it. Remedy: pip install "
    "tensorflow-recommenders-addons==0.8.1 typeguard (the extra tf_fusedrec[tfra])"
)
PROGRAM = """
import importlib, json, pathlib, sys
import tf_fusedrec as fr

assert "pyarrow" not in sys.modules
import tensorflow, tf_keras
from tf_fusedrec import keras, optimizers, tf

assert tensorflow.keras.layers.Layer is tf_keras.layers.Layer
fr.init()
table = fr.TableConfig("item", 8, optimizers.Adagrad(0.5))
features = [fr.FeatureConfig("item", "item")]
embedding = fr.FusedEmbedding(features, [table])
ids = keras.Input([], dtype=tf.int64, name="item")
model = fr.schedules.PipelinedModel(ids, keras.layers.Dense(1)(embedding({"item": ids})["item"]))
model.compile("sgd", "mse")
losses = model.fit(tf.range(8), tf.range(8.0) / 8, batch_size=8, epochs=20, verbose=0).history["loss"]
fr.checkpoint.save("{folder}/checkpoint", model)
fr.export(model, "{folder}/served")
rows = len(embedding.export_table("item")[0])

refused = []
for call in (lambda: importlib.import_module("tf_fusedrec.tfra"),
             lambda: fr.FusedEmbedding(features, [fr.TableConfig("item", 8, keras.optimizers.Adam())], backend="tfra")):
    try:
        call()
    except ImportError as error:
        refused.append(str(error))
failed = []
for path in sorted(pathlib.Path("tf_fusedrec").rglob("*.py")):
    if path.name.startswith("keras_3_"):  # of the other Keras
        continue
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__").removesuffix(".__main__")
    try:
        importlib.import_module(name)
    except ImportError:
        failed.append(name)
print(json.dumps([losses, rows, refused, failed]))
"""


def test_one_process_works_without_tfra_and_horovod_and_what_needs_tfra_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")  # the Keras of TFRA
    done = run_without([TFRA, "typeguard", "horovod"], PROGRAM.replace("{folder}", str(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    losses, rows, refused, failed = json.loads(done.stdout.splitlines()[-1])
    assert losses[-1] < 0.1 * losses[0] and rows == 8
    assert len(refused) == 2 and all(words.startswith(MISSING) for words in refused), refused
    assert {"tf_fusedrec.tfra", "tf_fusedrec.tfra.table", "tf_fusedrec.tfra.tfra_library"} <= set(failed)
    assert [name for name in failed if not name.startswith(("tf_fusedrec.tfra", "tf_fusedrec.tfra.table"))] == []
