"""A training step calls the functions of the walk in docs/concepts.md, in this order."""

import pathlib
import re
import sys

import tf_fusedrec as fr
from tf_fusedrec import tf

PACKAGE = pathlib.Path(fr.__file__).parent
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/concepts.md"
# These are no stations: Keras' call for the mask, a decorator, bodies that TensorFlow calls, properties, counts for
# statistics, and the choice of a step.
BESIDE_THE_WALK = {
    "compute_mask", "_look_up", "forward", "pooled_by_lookup", "bytes_sent", "trained", "takes_calls", "__init__",
    "by_group",
}  # fmt: skip


def listed():
    """Returns (file, function) of the page's numbered list."""
    section = re.search(r"## The walk of a batch\n(.*?)\n## ", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    return re.findall(r"^\d+\. `([\w/]+\.py)`, `(\w+)`:", section, re.MULTILINE)


def recorded(step, files):
    """Returns (file, function) of every call from one of the files into another."""
    calls = []

    def note(frame, event, _):
        into, code = pathlib.Path(frame.f_code.co_filename), frame.f_code
        if event != "call" or code.co_filename == frame.f_back.f_code.co_filename or not into.is_relative_to(PACKAGE):
            return
        file = into.relative_to(PACKAGE).as_posix()
        if file in files and code.co_name not in BESIDE_THE_WALK:
            calls.append((file, code.co_name))

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def test_a_batch_walks_as_the_page_says():
    table = fr.TableConfig("item", 4, fr.optimizers.SGD(0.1))
    embedding = fr.FusedEmbedding([table], [fr.FeatureConfig("past", "item", combiner="mean")])
    ids = tf.constant([[1, 2], [3, 1]], tf.int64)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(embedding({"past": ids})["past"])
        tape.gradient(loss, embedding.trainable_variables)

    step()  # Keras and TensorFlow load modules in the first one
    walk = listed()
    assert len(walk) == 23
    assert recorded(step, {file for file, _ in walk}) == walk
