"""GRM of configs/grm_kuairand.yaml with short sequences and nothing drawn, on tests/support/small_log."""

import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 20
SHORT = (
    "model.max_history=24", "model.max_exposures=12", "model.dropout=0", "model.item_dropout=0",
    "train.target_tokens=96",
)  # fmt: skip


def experiment(*overrides):
    from models.experiment import load

    return load(ROOT / "configs/grm_kuairand.yaml", [*SHORT, *overrides])


def batches(folder, steps=STEPS):
    """Returns this rank's batches, equal for every topology."""
    import tf_fusedrec as fr
    from models.build import columns, length_columns
    from tf_fusedrec.data import ParquetFolder, TokenBatches

    model, rank, size = experiment().model, fr.rank(), fr.size()
    data = ParquetFolder(folder, columns(model, "train"), rank=rank, world_size=size, shuffle_seed=0)
    batches = TokenBatches(data, length_columns=length_columns(model), target_tokens=48)
    return list(batches.dataset().repeat().take(steps))


def train(batches, name, schedule="sync", table=None, overrides=(), **layer):
    """Trains by model.fit from the same weights each time. Returns losses, dense weights and this rank's records."""
    import tf_fusedrec as fr
    from models.build import make_embedding, make_model
    from tests.models.batches import of_any_size
    from tf_fusedrec import keras, tf

    run = experiment(*overrides)
    config = make_embedding(run).get_config()
    config["tables"] = [{**fields, **(table or {})} for fields in config["tables"]]
    if "topology" in layer:
        layer["topology"] = layer["topology"].to_dict()
    embedding = fr.FusedEmbedding.from_config({**config, "name": name, **layer})
    keras.utils.set_random_seed(3)
    model = make_model(run, embedding, np.arange(1, 60), np.ones(59))
    model.schedule = schedule
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.002)))
    model(batches[0], training=False)
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=of_any_size(batches[0]))
    losses = []
    on_end = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model.fit(dataset, steps_per_epoch=len(batches), verbose=0, callbacks=[on_end])
    return {"loss": losses, "dense": [w.numpy() for w in model.trainable_weights], "tables": records(embedding)}


def records(embedding):
    """Returns this rank's ascending ids and records, by table."""
    found = {}
    for group in embedding.internals.groups:
        for name in group.table.names:
            ids, rows = group.table.snapshot(name)
            order = np.argsort(ids)
            found[name] = ids[order], rows[order]
    return found


def merged(results, ranks):
    """Returns the ascending ids and records of all ranks of one replica, by table."""
    tables = {}
    for name in results[0]["tables"]:
        ids, rows = (np.concatenate(parts) for parts in zip(*[results[rank]["tables"][name] for rank in ranks]))
        order = np.argsort(ids)
        tables[name] = ids[order], rows[order]
    return tables
