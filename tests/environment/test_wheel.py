"""The wheels are built from the source distribution, contain the compiled ops and work from any folder.

test_build.py has what `make test` checks of them.
"""

import email
import importlib.metadata
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile

import pytest

from tests.support.only_tensorflow import make_environment
from tests.support.setup_py import packed_files

pytestmark = pytest.mark.nightly

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = """
import importlib.util
import tf_fusedrec as fr
from tf_fusedrec import callbacks, keras, optimizers, tf
from tf_fusedrec.ops._library import LIBRARY_PATH

assert not any(map(importlib.util.find_spec, ("horovod", "tensorflow_recommenders_addons", "tf_keras", "typeguard")))
table = fr.TableConfig("item", 8, optimizers.Adagrad(0.5), fr.Uniform(-0.1, 0.1))
embedding = fr.FusedEmbedding([fr.FeatureConfig("items", table, "mean")])
items = keras.Input([None], ragged=True, dtype=tf.int64, name="items")
output = keras.layers.Dense(1)(embedding({"items": items})["items"])
model = fr.schedules.PipelinedModel(items, output)
model.compile(keras.optimizers.Adagrad(0.5), "mse")
batch = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6]], dtype=tf.int64), tf.constant([[1.0], [-1.0], [0.0], [2.0]])
listeners = [callbacks.Checkpoint("checkpoint", 1, {}), callbacks.EmbeddingMetrics(embedding)]
losses = model.fit(tf.data.Dataset.from_tensors(batch), epochs=20, callbacks=listeners, verbose=0).history["loss"]
fr.export(model, "served")
served = tf.saved_model.load("served").signatures["serving_default"]
answer = served(items=batch[0].values, items_row_splits=batch[0].row_splits)
assert losses[-1] < 0.1 * losses[0] and len(embedding.export_table("item")[0]) == 6, losses
assert float(tf.reduce_max(tf.abs(list(answer.values())[0] - model(batch[0], training=False)))) < 1e-5
print(fr.__version__, LIBRARY_PATH)
"""

PACKED = {*packed_files("**/*.py"), *packed_files("configs/**/*.yaml")}


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> pathlib.Path:
    """Makes the source distribution from a copy of the sources."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("custom_ops", "tf_fusedrec", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (folder / "tools").mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder)
    for name in ("__init__.py", "object_cache.py", "gloo_sources.py", "horovod.patch", "gloo.patch"):
        shutil.copy2(ROOT / "tools" / name, folder / "tools")
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=folder, check=True)
    (path,) = (folder / "dist").glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def clone(archive, tmp_path_factory) -> pathlib.Path:
    """Unpacks the source distribution, and adds the tools."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (clone,) = folder.iterdir()
    shutil.copytree(ROOT / "tools", clone / "tools", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return clone


@pytest.fixture(scope="module")
def wheels(clone) -> list[pathlib.Path]:
    subprocess.run([sys.executable, "-m", "tools.wheel"], cwd=clone, check=True)
    return list((clone / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(wheels) -> pathlib.Path:
    (path,) = (path for path in wheels if path.name.startswith("tf_fusedrec-"))
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> pathlib.Path:
    """Returns the Python of an environment with the wheel's declared requirements and nothing else."""
    (metadata,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA"))
    required = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata)).get_all("Requires-Dist")
    declared = [re.match(r"[\w.-]+", line).group() for line in required if "extra ==" not in line]
    of_tfra = [re.match(r"[\w.-]+", line).group() for line in required if re.search(r"extra == .tfra.", line)]
    assert sorted(of_tfra) == ["tensorflow-recommenders-addons", "tf-keras", "typeguard"]
    assert not {*of_tfra, "horovod"} & set(declared)
    return make_environment(tmp_path_factory.mktemp("empty") / "venv", declared)


@pytest.fixture(scope="module")
def installed(wheel, python) -> pathlib.Path:
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    install(wheel, folder)
    return folder


def install(wheel: pathlib.Path, folder: pathlib.Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, cwd=folder, check=True)


def test_the_wheel_is_for_any_python_on_this_platform_and_carries_the_library(wheel):
    tensorflow = re.escape(importlib.metadata.version("tensorflow"))
    assert re.fullmatch(
        rf"tf_fusedrec-\d+\.\d+\.\d+\.{tensorflow}-py3-none-(manylinux_\d+_\d+_\w+\.?)+\.whl", wheel.name
    )
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {f"tf_fusedrec/ops/{name}" for name in ("_fusedrec_ops.so", "_fusedrec_gloo.so", "_build_info.py")} <= set(
        names
    )
    assert {*PACKED, "tf_fusedrec/py.typed"} <= set(names)
    assert wheel.stat().st_size < 5e6  # GPU kernels have their own
    assert [n for n in names if not n.startswith("tf_fusedrec/") and ".dist-info/" not in n] == []
    (entries,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert "fusedrec = tf_fusedrec.cli.main:main" in entries
    (licence,) = (name for name in names if name.endswith(".dist-info/LICENSE"))
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_a_model_trains_where_there_is_only_what_the_wheel_declares(installed, python, tmp_path):
    env = {"PATH": os.environ["PATH"], "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [str(python), "-c", TRAIN], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", errors="replace"
    )
    assert done.returncode == 0, done.stderr
    (version,) = re.findall(r'__version__ = "(.*)"', (ROOT / "tf_fusedrec/__init__.py").read_text(encoding="utf-8"))
    assert done.stdout.splitlines()[-1] == f"{version} {installed / 'tf_fusedrec/ops/_fusedrec_ops.so'}"


def test_an_empty_environment_trains_on_two_processes_within_a_minute_and_serves_without_a_compiler(wheel, tmp_path):
    """pip finds this package and Horovod in the folder of the wheels. Its downloads are not counted."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", errors="replace")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = [str(tmp_path / "venv/bin/python"), "-m"]
    named = ["tf_fusedrec[distributed,serve]", f"tensorflow=={importlib.metadata.version('tensorflow')}"]
    pip = [*python, "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "-f", str(wheel.parent), "-d", str(tmp_path / "all"), *named], check=True)
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    install = [*pip, "install", "--no-index", "-f", str(tmp_path / "all"), *named]
    (tmp_path / "env").symlink_to(shutil.which("env"))  # with which horovodrun starts the ranks
    env = {"PATH": f"{tmp_path / 'venv/bin'}:{tmp_path}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    run(*install)
    run(*python, "pip", "check")
    fusedrec = str(tmp_path / "venv/bin/fusedrec")
    found = run(fusedrec, "doctor")
    assert re.search(r"two processes +10 steps, .* rows are those of one process", found), found
    # Processor time, because other tests may run beside this one. Most of it is pip's, which uses one core.
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before < 80
    events = [f"u{n % 40},s{n % 23},{1709251200 + 60 * n},{n % 3 % 2}" for n in range(2000)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,time,clicked", *events]), encoding="utf-8")
    run(fusedrec, "new", "clicks.csv")
    assert "report  run/report.html" in run(
        fusedrec, "train", "clicks.yaml", "-n", "2", "--output", "run", "--set", "train.epochs=3"
    )
    assert "run/report.html" in run(fusedrec, "report", "run")
    assert re.search(r"^item +23 ", run(fusedrec, "inspect", "run"), re.MULTILINE)
    serve = [fusedrec, "serve", "run", "--port", "0"]
    with subprocess.Popen(serve, cwd=tmp_path, env=env, stdout=subprocess.PIPE, encoding="utf-8") as server:
        (address,) = re.findall(r"http://\S+", server.stdout.readline())
        request = (tmp_path / "run/request.json").read_bytes()
        with urllib.request.urlopen(f"{address}:predict", request, timeout=60) as answer:
            assert "clicked" in json.load(answer)["predictions"][0]
        server.terminate()
    assert server.returncode == 0
