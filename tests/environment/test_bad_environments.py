"""A wrong environment is named with its remedy: another Python, no compiler, no space, a cut download, no Horovod."""

from __future__ import annotations

import http.server
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest

from tests.support.shared import ROOT
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives
from tools.steps import StepFailed, run_logged

OLD = "x-0.1.0-cp27-cp27m-manylinux_2_27_x86_64.whl"
FILE = "fusedrec_probe-1.0-py3-none-any.whl"


class CutsDownloads(http.server.BaseHTTPRequestHandler):
    """A package index whose only file ends after ten of its thousand bytes."""

    def do_GET(self):
        is_file = self.path.endswith(".whl")
        body = b"0123456789" if is_file else f'<a href="/{FILE}">{FILE}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if is_file else "text/html")
        self.send_header("Content-Length", "1000" if is_file else str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *arguments):
        pass


@pytest.fixture
def index():
    """The address of such an index on this host."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), CutsDownloads)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def failure(command: list[str], folder: pathlib.Path, env: dict[str, str]) -> str:
    with pytest.raises(StepFailed) as raised:
        run_logged(command, folder / "log", folder, env)
    return str(raised.value)


def test_a_download_that_is_cut_is_named(index, tmp_path):
    without_settings = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env = {**without_settings, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "no_proxy": "127.0.0.1"}
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--index-url", index]
    told = failure([*pip, "fusedrec_probe"], tmp_path, env)
    assert "Remedy: the network or a proxy cut the download. Run the same command again" in told, told


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["sh", "-c", "head -c 9 /dev/zero > /dev/full"],
            "make room, or point XDG_CACHE_HOME and TMPDIR to a larger disk",
        ),
        (
            [sys.executable, "-m", "pip", "install", "--no-deps", OLD],
            "the wheel is for another Python or machine; its name says which.",
        ),
        (["sh", "-c", "echo broken; exit 3"], None),
    ],
)
def test_a_full_disk_and_a_wheel_for_another_python_are_named(tmp_path, command, words):
    (tmp_path / OLD).touch()
    told = failure(command, tmp_path, dict(os.environ))
    assert f"Remedy: {words}" in told if words else "Remedy" not in told, told


# Programs by what they have loaded before the package, which refuses before it loads TensorFlow.
IMPORTS = {
    "nothing": "import sys; sys.modules['tensorflow'] = None; import tf_fusedrec",
    "an old Python": "import sys; sys.version_info = (3, 9, 18); sys.modules['tensorflow'] = None; import tf_fusedrec",
    # Modules in the place of a TensorFlow and a tf_keras that pip has no records of.
    "TensorFlow": """
import importlib.machinery, sys, types
for name in ("tensorflow", "tf_keras"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
sys.modules["tensorflow"].version = types.SimpleNamespace(VERSION="2.16.2")
sys.modules["tf_keras"].__version__ = "2.9.1"
import tf_fusedrec
""",
}
LEGACY, KERAS_3 = {"TF_USE_LEGACY_KERAS": "1"}, {"TF_USE_LEGACY_KERAS": "0"}


@pytest.mark.parametrize(
    ("there", "records", "variables", "words"),
    [
        ("an old Python", {}, {}, r"tf_fusedrec needs Python 3.10 to 3.14, but this is Python 3.9.18. Remedy: make an"),
        ("nothing", {"tensorflow": "2.99.0", "tf_keras": "2.99.0"}, LEGACY,
         r".* built for TensorFlow 2\.\S+, but TensorFlow 2\.99\.0 is installed; .* Remedy: "),
        # The newest tf_keras is one of the number below.
        ("nothing", {"tensorflow": "2.22.0", "tf_keras": "2.21.0"}, LEGACY,
         r".* built for TensorFlow 2\.\S+, but TensorFlow 2\.22\.0 is"),
        ("nothing", {"tf_keras": "2.9.1"}, LEGACY,
         r".*tf_keras 2\.9\.1 is installed beside TensorFlow 2\..* Remedy: pip install --no-deps 'tf-keras==2"),
        ("TensorFlow", {}, LEGACY, r".*tf_keras 2\.9\.1 is installed beside TensorFlow 2\.16\.2. Remedy: pip"),
        ("nothing", {"keras": "3.15.0"}, {**KERAS_3, "KERAS_BACKEND": "jax"},
         r".* has KERAS_BACKEND=jax. Remedy: unset KERAS_BACKEND or set it to tensor"),
        ("nothing", {"keras": "3.8.0"}, KERAS_3,
         r".* needs Keras 3.9 or newer, but keras 3.8.0 is installed. Remedy: pip install --upgrade keras"),
    ],
)  # fmt: skip
def test_an_environment_that_does_not_suit_is_refused(there, records, variables, words, tmp_path):
    for name, version in records.items():
        record = tmp_path / f"{name}-{version}.dist-info"
        record.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (record / "METADATA").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS[there]], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **variables},
        capture_output=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    assert re.match(f"ImportError: {words}", done.stderr.strip().splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ImportError("Extension horovod.tensorflow has not been built: x not found\nmore"),
            "has not been built: x not",
        ),
        (tf.errors.NotFoundError(None, None, "mpi_lib.so: undefined symbol: _ZN10tensorflow"), "undefined symbol"),
    ],
)
def test_a_horovod_without_this_tensorflow_is_named(monkeypatch, error, reason):
    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "horovod.tensorflow":
                raise error

    monkeypatch.setenv("HOROVOD_SIZE", "2")
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    with pytest.raises(ImportError) as raised:
        collectives.init()
    told = str(raised.value)
    assert told.startswith(f"HOROVOD_SIZE is 2, but no Horovod for TensorFlow {tf.version.VERSION} loads (")
    assert reason in told and "more" not in told and "Use `python -m tools.horovod_wheel` in a clone" in told
