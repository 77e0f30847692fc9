"""Without TFRA, everything but tf_fusedrec.tfra and its backend works. Without Horovod, one process works."""

import pytest

from tests.support.blocked import TFRA, run_without

MISSING = (
    "TensorFlow Recommenders Addons (TFRA) is not installed (No module named 'tensorflow_recommenders_addons'). "
    "tf_fusedrec.tfra and FusedEmbedding(backend='tfra') need it. Remedy: pip install "
    "tensorflow-recommenders-addons==0.8.1 typeguard (the extra tf_fusedrec[tfra])"
)
IMPORT_ALL = """
import importlib, pathlib
import tf_fusedrec

failed = []
for path in sorted(pathlib.Path("tf_fusedrec").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__").removesuffix(".__main__")
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(name)
print(*failed)
"""
TRAIN = """
import tf_fusedrec as fr
from tf_fusedrec import keras, optimizers, tf

fr.init()
table = fr.TableConfig("item", 8, optimizers.Adagrad(0.5))
embedding = fr.FusedEmbedding([table], [fr.FeatureConfig("item", "item")])
ids = keras.Input([], dtype=tf.int64, name="item")
model = fr.schedules.PipelinedModel(ids, keras.layers.Dense(1)(embedding({"item": ids})["item"]))
model.compile("sgd", "mse")
losses = model.fit(tf.range(8), tf.range(8.0) / 8, batch_size=8, epochs=20, verbose=0).history["loss"]
assert losses[-1] < 0.1 * losses[0], losses
fr.checkpoint.save("{folder}/checkpoint", model)
fr.export(model, "{folder}/served")
print(len(embedding.export_table("item")[0]), "rows")
"""
ASK = """
import tf_fusedrec as fr

table = fr.TableConfig("item", 8, fr.keras.optimizers.legacy.SGD(0.1))
try:
    {call}
except ImportError as error:
    print(error)
"""
PYTEST = """
import sys, pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *{paths!r}]))
"""


def printed(packages, program):
    done = run_without(packages, program)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_every_module_but_those_of_tfra_imports():
    failed = set(printed([TFRA], IMPORT_ALL).split())
    assert {"tf_fusedrec.tfra", "tf_fusedrec.tables.tfra", "tf_fusedrec.tables.tfra_library"} <= failed
    assert [name for name in failed if not name.startswith(("tf_fusedrec.tfra", "tf_fusedrec.tables.tfra"))] == []


def test_one_process_trains_saves_and_exports_without_tfra_and_horovod(tmp_path):
    program = TRAIN.replace("{folder}", str(tmp_path))
    assert printed([TFRA, "typeguard", "horovod"], program) == "8 rows"


@pytest.mark.parametrize(
    "call",
    [
        "import tf_fusedrec.tfra",
        "fr.FusedEmbedding([table], [fr.FeatureConfig('item', 'item')], backend='tfra')",
    ],
)
def test_what_needs_tfra_says_so_by_name(call):
    assert printed([TFRA], ASK.format(call=call)).startswith(MISSING)


def test_tests_that_need_tfra_are_skipped_with_the_reason():
    """One module that imports TFRA, and one that has tests of both backends."""
    both = "tests/checkpoint/test_warm_start.py::test_rows_are_looked_up_and_trained_from_fresh_slots"
    paths = ["tests/tfra/test_partitioner.py", both]
    done = run_without([TFRA], PYTEST.format(paths=paths))
    assert done.returncode == 0, done.stdout[-3000:]
    for path in paths:
        assert f"{path.split('::')[0]}:0: needs TFRA, the extra tf_fusedrec[tfra]" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 passed, 2 skipped")
