"""Private names of TensorFlow and Keras are few, listed here, and there in the running release."""

import ast
import importlib
import pathlib
import re

import pytest

from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import KERAS_IS_LEGACY

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRIVATE = {
    "tf_fusedrec/_tf_compat/legacy.py": {
        "keras.src.backend.RandomGenerator._create_seed",
        "keras.src.backend._SEED_GENERATOR",
        "keras.src.backend.unique_object_name",
        "keras.src.engine.keras_tensor.KerasTensor",
        "keras.src.saving.legacy.saving_utils.is_hdf5_filepath",
        "keras.src.utils.generic_utils.to_snake_case",
        "tf.__internal__.autograph",
    },
    "tf_fusedrec/_tf_compat/__init__.py": {
        "tensorflow.python.autograph.core.config",
        "tensorflow.python.eager.record",
        "tensorflow.python.ops.control_flow_util",
        "tensorflow.tsl.profiler.protobuf.xplane_pb2.XSpace",
        "tf.__internal__.autograph.control_status_ctx",
        "tf.__internal__.autograph.tf_convert",
    },
    "tf_fusedrec/ops/ancestors.py": {"tf.__internal__.FuncGraph"},
    "tf_fusedrec/ops/table.py": {"tf.__internal__.eager_context.eager_mode"},
    "tf_fusedrec/schedules/keras_3_inputs.py": {"keras.src.trainers.data_adapters"},
    "tf_fusedrec/schedules/legacy_inputs.py": {"keras.src.engine.data_adapter"},
    "tf_fusedrec/schedules/one_keras.py": {"keras.src.layers.core.tf_op_layer.TFOpLambda"},
    "tf_fusedrec/tables/legacy_savers.py": {
        "keras.src.export.export_lib",
        "keras.src.saving.legacy.hdf5_format",
        "keras.src.saving.legacy.save",
    },
    "tf_fusedrec/tfra/fusing.py": {"keras.src.engine.base_layer_utils.call_context"},
    "tf_fusedrec/tfra/native_files.py": {"keras.src.engine.compile_utils"},
    "benchmarks/harness/stage_times.py": {"tensorflow.python.framework.auto_control_deps.AutomaticControlDependencies"},
}


def private_names(path: pathlib.Path) -> set[str]:
    """Returns the private modules that a file imports, and the longest private attributes of `tf` and `keras`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and re.match(r"tensorflow\.(python|tsl|core|compiler)\b", node.module):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found |= set(re.findall(r"^(?:tf\.__internal__|keras\.src)[\w.]+$", ast.unparse(node)))
    return {name for name in found if not any(longer.startswith(f"{name}.") for longer in found)}


def test_every_private_name_is_listed():
    folders = [ROOT / name for name in ("tf_fusedrec", "models", "benchmarks", "tools")]
    files = (path for folder in folders for path in folder.rglob("*.py"))
    used = {str(path.relative_to(ROOT)): names for path in files if (names := private_names(path))}
    assert used == PRIVATE


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            name
            for path, names in PRIVATE.items()
            for name in names
            if not name.startswith("keras.") or ("keras_3" in path) != KERAS_IS_LEGACY
        }
    ),
)
@pytest.mark.both
def test_the_running_release_has_it(name):
    root, _, rest = name.partition(".")
    if root == "tensorflow":
        module, _, rest = name.rpartition(".")
        start = importlib.import_module(module)
    else:
        start = {"tf": tf, "keras": keras}[root]
    for part in rest.split("."):
        start = getattr(start, part, None) or importlib.import_module(f"{start.__name__}.{part}")
