"""A server that has nothing but TensorFlow. Four threads ask it while it applies a folder of deltas one by one.

python follower.py FOLDER: `export`, `deltas/` and `expected.npz` (hour.py); the last line of the output is JSON:
{"answers": number, "versions": versions seen, "grown_mib": growth of the memory in use since a quarter of the deltas}.
"""

import importlib.util
import json
import pathlib
import sys
import threading

import numpy as np
import tensorflow as tf


def resident_mib():
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def main(folder):
    with np.load(folder / "expected.npz") as expected:
        question, answers = expected["question"], expected["answers"]
    graph = tf.Graph()
    with graph.as_default():
        session = tf.compat.v1.Session()
        # TensorFlow Serving loads so, too.
        signatures = tf.compat.v1.saved_model.load(session, ["serve"], str(folder / "export")).signature_def

    def call(name, **inputs):
        signature = signatures[name]
        feed = {signature.inputs[key].name: value for key, value in inputs.items()}
        return session.run({key: tensor.name for key, tensor in signature.outputs.items()}, feed)

    stop, problems, seen = threading.Event(), [], set()
    counts = [0] * 4

    def ask(thread):
        last = 0
        while not stop.is_set():
            (answer,) = call("serving_default", x=question, y=question).values()
            (versions,) = np.nonzero((answers == answer).all(axis=(1, 2)))
            if len(versions) != 1 or versions[0] < last:
                problems.append(f"an answer is of versions {versions.tolist()} after {last}")
                return
            last = versions[0]
            seen.add(int(last))
            counts[thread] += 1

    threads = [threading.Thread(target=ask, args=[thread]) for thread in range(4)]
    for thread in threads:
        thread.start()
    deltas, quarter = sorted((folder / "deltas").iterdir()), 0.0
    try:
        for number, delta in enumerate(deltas):
            before = sum(counts)
            told = call("apply_delta", path=str(delta))
            assert told["deltas"] == number + 1, told
            while sum(counts) < before + 4 and not problems:  # The threads see every version.
                stop.wait(0.001)
            if number == len(deltas) // 4:
                quarter = resident_mib()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    grown = resident_mib() - quarter
    assert not problems, problems
    (answer,) = call("serving_default", x=question, y=question).values()
    np.testing.assert_array_equal(answer, answers[-1])
    # A restarted server replays the folder.
    loaded = tf.saved_model.load(str(folder / "export"))
    told_again = loaded.signatures["apply_deltas"](path=tf.constant(str(folder / "deltas")))
    assert told_again["version"].numpy() == told["version"], told_again
    (again,) = loaded.signatures["serving_default"](x=tf.constant(question), y=tf.constant(question)).values()
    np.testing.assert_array_equal(again, answers[-1])
    print(json.dumps({"answers": sum(counts), "versions": len(seen), "grown_mib": grown}))


if __name__ == "__main__":
    for stranger in ("tf_fusedrec", "horovod", "tensorflow_recommenders_addons", "tf_keras"):
        assert importlib.util.find_spec(stranger) is None, stranger
    main(pathlib.Path(sys.argv[1]))
