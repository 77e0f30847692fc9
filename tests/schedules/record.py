"""Records 50 steps of each schedule under each topology on 1 to 3 ranks: bits, names of collectives, counts of ops.

    python -m tests.schedules.record FILE [--against FILE] [--ranks N ...]

A change that must not change a step is recorded before and after on one machine: the bits depend on the processor.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
from collections import Counter

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # the Keras of recorded bits

from tests.schedules import clicks
from tests.support.graphs import without_fusions
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync

STEPS, SAMPLES = 50, 4
SCHEDULES = (Sync(), DualBuffer(), FrozenWindow(2), Nested(2), SemiAsync(), Pipelined(4), Pipelined(6))
TOPOLOGIES = {
    1: (Topology(),),
    2: (Topology(), Topology(2, "weight_sync", sync_every=2), Topology(2, "gradient_sync")),
    3: (Topology(), Topology(3, "weight_sync", average_late=True), Topology(3, "gradient_sync")),
}


def _record(ranks):
    """Body: returns {"topology, schedule": what must stay} of this rank."""
    import tf_fusedrec as fr

    without_fusions()
    rank, records = fr.rank(), {}
    batches = [clicks.batch(SAMPLES, 10 * step + rank) for step in range(STEPS)]
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=clicks.SIGNATURE)
    for topology in TOPOLOGIES[ranks]:
        for schedule in SCHEDULES:
            keras.backend.clear_session()
            embedding = clicks.make_embedding(topology=topology, name="rows")
            optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.01))
            model, losses = clicks.make_model(embedding, schedule, optimizer), []
            keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs, to=losses: to.append(logs["loss"]))
            model.fit(data, verbose=0, callbacks=[keep])
            function = getattr(model.train_function, "_step", model.train_function)  # one rank needs no equal steps
            step = function.get_concrete_function(iter(data))
            digest = hashlib.sha256(repr([float(loss) for loss in losses]).encode())
            for name, values in sorted(clicks.state(model, embedding).items()):
                digest.update(name.encode() + values.tobytes())
            records[f"{ranks} ranks, {topology}, {schedule}"] = {"bits": digest.hexdigest(), **_graph(step)}
    return records


def _graph(step):
    graph = step.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    ours = [node for node in nodes if re.match("Horovod|Fusedrec>", node.op)]
    names = (f"{node.op} {node.name.rpartition('/')[2]}" for node in ours if node.op.startswith("Horovod"))
    return {
        "collectives": dict(sorted(Counter(re.sub(r"_\d+$", "", name) for name in names).items())),
        "ops": dict(sorted(Counter(node.op for node in ours).items())),
        "nodes": len(nodes),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(TOPOLOGIES))
    arguments = parser.parse_args()
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"  # A ring's order of sums depends on the place in the buffer.
    records = {}
    for ranks in arguments.ranks:
        of_ranks = run_ranks(_record, ranks, timeout_s=560, topologies=list(TOPOLOGIES[ranks]), ranks=ranks)
        for rank, record in enumerate(of_ranks):
            records |= {f"{case}, rank {rank}": fields for case, fields in record.items()}
    arguments.file.write_text(json.dumps(records, indent=1))
    print(f"{len(records)} records in {arguments.file}")
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        differences = [
            f"{case}: {field} was {before[case][field]}, is {fields[field]}"
            for case, fields in records.items()
            for field in fields
            if fields[field] != before[case][field]
        ]
        print("\n".join(differences) or "equal")
        raise SystemExit(bool(differences))


if __name__ == "__main__":
    main()
