"""Programs that run under both Keras with the same numbers. `python -m tests.keras_3.programs OUT` writes JSON.

A program is a function that returns numbers by name. `ranks` is the largest number of ranks that it runs on.
"""

import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import tf_fusedrec as fr
from tests.keras_3 import model_program
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec._tf_compat import keras_api
from tf_fusedrec.models.user_state import GRMStates

PROGRAMS: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {}
SCHEDULES = ("sync", "frozen_window(2)", "dual_buffer", "nested(2)", "semi_async", "pipelined(3)", "pipelined(6)")
ON_RANKS = ("sync", "nested(2)")  # on two ranks as well


def program(name: str, ranks: int = 1) -> Callable:
    def add(function: Callable[[], dict[str, Any]]) -> Callable:
        PROGRAMS[name] = (ranks, function)
        return function

    return add


def embedding(**options: Any) -> fr.FusedEmbedding:
    tables = [fr.TableConfig("item", 4, optimizers.Adagrad(0.1)), fr.TableConfig("shop", 4, optimizers.Adagrad(0.1))]
    features = [
        fr.FeatureConfig("item", "item"), fr.FeatureConfig("history", "item", combiner="mean"),
        fr.FeatureConfig("last", "item", padding_id=0), fr.FeatureConfig("shop", "shop"),
    ]  # fmt: skip
    return fr.FusedEmbedding(features, tables, **options)


def samples(count: int = 160, *, uneven: bool = True) -> tuple[dict[str, Any], np.ndarray]:
    """The samples of this rank. The first rank has eight fewer."""
    drawn = np.random.default_rng(0)
    x = {"item": drawn.integers(1, 50, count), "shop": drawn.integers(1, 9, count),
         "last": drawn.integers(0, 20, (count, 5))}  # fmt: skip
    history = [drawn.integers(0, 50, drawn.integers(0, 5)) for _ in range(count)]
    y = drawn.normal(size=(count, 1)).astype(np.float32)
    chosen = np.arange(fr.rank(), count, fr.size())
    chosen = chosen[:-8] if uneven and fr.rank() == 0 else chosen
    x = {name: values[chosen] for name, values in x.items()}
    return {**x, "history": tf.ragged.constant([history[i] for i in chosen], dtype=tf.int64)}, y[chosen]


def dense(units: int, value: float, **options: Any) -> Any:
    """A layer that no random number makes."""
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.Constant(value), **options)


def state(model: Any) -> dict[str, Any]:
    """The weights, and the ids and rows of this rank."""
    (layer,) = [layer for layer in model._flatten_layers() if isinstance(layer, fr.FusedEmbedding)]
    rows = {name: [part.tolist() for part in layer.export_table(name)] for name in ("item", "shop")}
    return {"weights": [weight.tolist() for weight in model.get_weights()], "rows": rows}


def scheduled(schedule: str) -> dict[str, Any]:
    """A functional model in the manner of the quick start, with dense, ragged and masked ids, on uneven samples."""
    layer = embedding()
    inputs = {name: keras.Input([], dtype="int64", name=name) for name in ("item", "shop")}
    inputs["history"] = keras.Input([None], dtype="int64", ragged=True, name="history")
    rows = layer(inputs)
    hidden = dense(8, 0.3, activation="relu")(keras.layers.Concatenate()(list(rows.values())))
    outputs = dense(1, 0.2)(keras.layers.BatchNormalization()(hidden))
    model = fr.schedules.PipelinedModel(inputs, outputs, schedule=schedule)
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
    x, y = samples()
    data = tf.data.Dataset.from_tensor_slices(({name: x[name] for name in inputs}, y)).batch(16)
    history = model.fit(data, epochs=2, verbose=0).history
    answers = {**history, "evaluated": model.evaluate(data, verbose=0), "predicted": model.predict(data, verbose=0)}
    return {**answers, **state(model)}


for _name in SCHEDULES:
    program(_name, ranks=2 if _name in ON_RANKS else 1)(lambda name=_name: scheduled(name))


class Tower(fr.schedules.PipelinedModel):
    """A subclass: dot products of rows (DLRM), dense features beside them, masks of padding."""

    def __init__(self, layer: Any = None, **options: Any):
        super().__init__(**options)
        self.embedding = layer or embedding()
        self.pool, self.head = keras.layers.GlobalAveragePooling1D(), dense(1, 1.0)

    def call(self, x: Any, training: bool | None = None) -> Any:
        rows = self.embedding({name: x[name] for name in ("item", "shop", "last")}, training=training)
        pooled = tf.cast(self.pool(rows["last"]), tf.float32)
        dots = tf.reduce_sum(rows["item"] * pooled, -1, keepdims=True)
        return self.head(tf.concat([rows["item"], rows["shop"], pooled, dots], -1))


def tower(layer: Any = None, optimizer: Any = "sgd", **options: Any) -> Tower:
    model = Tower(layer, schedule=options.pop("schedule", "sync"))
    model.compile(optimizer, "mse", **options)
    return model


def arrays() -> tuple[dict[str, Any], np.ndarray]:
    x, y = samples(64, uneven=False)
    return {name: x[name] for name in ("item", "shop", "last")}, y


def fitted(model: Any, **options: Any) -> dict[str, Any]:
    history = model.fit(*arrays(), batch_size=16, epochs=2, verbose=0, shuffle=False, **options).history
    return {**history, **state(model)}


def refused(act: Callable[[], Any], words: str) -> None:
    try:
        act()
    except ValueError as error:
        assert re.search(words, str(error)), error
    else:
        raise AssertionError(f"accepted, wanted a ValueError: {words}")


@program("dlrm", ranks=2)
def dlrm() -> dict[str, Any]:
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.5))
    return fitted(tower(optimizer=optimizer), validation_split=0.25)


@program("accumulate_steps")
def accumulated() -> dict[str, Any]:
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01))
    model = tower(embedding(accumulate_steps=2), optimizer)
    return {**fitted(model), "updates": int(model.optimizer.iterations)}


@program("accumulation of Keras 3's own", ranks=2)
def accumulated_by_keras() -> dict[str, Any]:
    own = {"gradient_accumulation_steps": 2} if keras.__name__ == "keras" else {}
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01, **own))
    answers = fitted(tower(embedding(accumulate_steps=2), optimizer))
    if own:
        refused(lambda: tower(embedding(), optimizer), "gradient_accumulation_steps 2, and the tables .* Use ")
    return answers


@program("an average of weights over steps")
def averaged() -> dict[str, Any]:
    refused(
        lambda: tower(optimizer=keras.optimizers.Adam(0.01, use_ema=True)), "has use_ema=True, .* Use use_ema=False"
    )
    return {}


@program("jit_compile")
def compiled() -> dict[str, Any]:
    refused(lambda: tower(jit_compile=True), "got jit_compile=True, but its lookups have no XLA kernels. Use ")
    return fitted(tower(jit_compile="auto" if keras.__name__ == "keras" else None))


@program("sparse ids")
def sparse() -> dict[str, Any]:
    ids, layer = keras.Input([None], dtype="int64", sparse=True, name="history"), embedding()
    outputs = dense(1, 1.0)(layer({"history": ids})["history"])
    model = fr.schedules.PipelinedModel({"history": ids}, outputs, schedule="nested(2)")
    model.compile("sgd", "mse")
    x, y = samples(64, uneven=False)
    data = tf.data.Dataset.from_tensor_slices(({"history": x["history"].to_sparse()}, y)).batch(16)
    history = model.fit(data, epochs=2, verbose=0).history
    return {**history, "evaluated": model.evaluate(data, verbose=0), **state(model)}


@program("two outputs", ranks=2)
def two_outputs() -> dict[str, Any]:
    """On one process, Keras 3 weighs batches of all sizes alike when it evaluates."""
    ids = {name: keras.Input([], dtype="int64", name=name) for name in ("item", "shop")}
    outputs = {f"of_{name}": dense(1, 0.2, name=f"of_{name}")(row) for name, row in embedding()(ids).items()}
    model = fr.schedules.PipelinedModel(ids, outputs, schedule="nested(3)")
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01)), dict.fromkeys(outputs, "mse"))
    x, y = samples()
    data = tf.data.Dataset.from_tensor_slices(({name: x[name] for name in ids}, dict.fromkeys(outputs, y))).batch(16)
    history = model.fit(data, epochs=2, verbose=0).history
    logs = {"fitted": history}
    if fr.size() > 1:
        logs["evaluated"] = model.evaluate(data, verbose=0, return_dict=True)
    for of in logs.values():
        np.testing.assert_allclose(np.add(of["of_item_loss"], of["of_shop_loss"]), of["loss"], rtol=1e-6)
    return {**logs, **state(model)}


@program("parts that are Sequential", ranks=2)
def sequential_parts() -> dict[str, Any]:
    ids = keras.Input([None], dtype="int64", ragged=True, name="ids")
    rows = keras.Sequential([ids, fr.Embedding(4, "adagrad", "mean", name="item"), dense(4, 0.2)])
    head = keras.Sequential([dense(8, 0.1, activation="relu"), keras.layers.BatchNormalization(), dense(1, 0.3)])
    model = fr.schedules.PipelinedModel(ids, head(rows(ids)), schedule="dual_buffer")
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01)), "mse")
    x, y = samples(64)
    history = model.fit(x["history"], y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
    (layer,) = [layer for layer in model._flatten_layers() if isinstance(layer, fr.Embedding)]
    weights = [weight.tolist() for weight in model.get_weights()]
    return {**history, "weights": weights, "rows": [part.tolist() for part in layer.export_table("item")]}


@program("groups of ranks", ranks=4)
def grouped() -> dict[str, Any]:
    """Two groups on 2 and 4 ranks, whose rows are averaged."""
    topology = fr.Topology(fr.size() if fr.size() % 2 else 2, "weight_sync", sync_every=2)
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01))
    return fitted(tower(embedding(topology=topology), optimizer))


@program("subclass ahead")
def ahead() -> dict[str, Any]:
    return fitted(tower(schedule="dual_buffer", steps_per_execution=2))


@program("eager")
def eager() -> dict[str, Any]:
    return fitted(tower(schedule="frozen_window(2)", run_eagerly=True))


@program("steps_per_execution and a schedule of rates")
def several_steps() -> dict[str, Any]:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return fitted(tower(optimizer=keras.optimizers.SGD(rate), steps_per_execution=2))


@program("frozen tables, and a frozen model", ranks=2)
def frozen() -> dict[str, Any]:
    model, answers = Tower(), {}
    for name, layer in (("tables", model.embedding), ("model", model)):
        layer.trainable = False
        model.compile(fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.01)), "mse")
        answers[name] = fitted(model)
    return answers


@program("keras.Model")
def plain() -> dict[str, Any]:
    inputs = {name: keras.Input(shape, dtype="int64", name=name) for name, shape in (("item", []), ("last", [5]))}
    rows = embedding()(inputs)
    joined = keras.layers.Concatenate()([rows["item"], keras.layers.GlobalAveragePooling1D()(rows["last"])])
    model = keras.Model(inputs, dense(1, 1.0)(joined))
    model.compile("sgd", "mse")
    x, y = arrays()
    x.pop("shop")
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
    return {**history, **state(model)}


@program("one feature")
def one_feature() -> dict[str, Any]:
    layer, ids = fr.Embedding(4, "adagrad", "mean", name="item"), keras.Input([None], dtype="int64", ragged=True)
    crossed = fr.layers.FeatureCross(name="cross")
    crossed.build([None, 4])
    crossed.set_weights([np.full([4, 4], 0.1, np.float32), np.zeros(4, np.float32)])
    rows = layer(ids)
    dots = fr.layers.DotInteraction()([rows, crossed(rows)])
    model = fr.schedules.PipelinedModel(ids, dense(1, 1.0)(dots), schedule="nested(2)")
    model.compile("sgd", "mse")
    x, y = samples(64, uneven=False)
    history = model.fit(x["history"], y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
    return {**history, "rows": [part.tolist() for part in layer.export_table("item")]}


@program("names of Keras, and an exported Sequential")
def names_and_export() -> dict[str, Any]:
    names = [fr.TableConfig(name, 4, "adagrad", "constant") for name in "abc"]
    groups = len(fr.FusedEmbedding([fr.FeatureConfig(table.name, table) for table in names]).internals.groups)
    ids = keras.Input([None], dtype="int64", ragged=True, name="ids")
    layer = fr.Embedding(4, "adagrad", "mean", name="served", initializer=keras.initializers.Ones)
    model = keras.Sequential([ids, layer, dense(1, 0.5, name="score")])
    model.compile("sgd", "mse")
    x, y = samples(64, uneven=False)
    model.fit(x["history"], y, batch_size=16, verbose=0, shuffle=False)
    folder = pathlib.Path(tempfile.mkdtemp(), "export")
    fr.export(model, folder)
    served = tf.saved_model.load(str(folder)).signatures["serving_default"]
    (answer,) = served(ids=x["history"].values, ids_row_splits=x["history"].row_splits).values()
    np.testing.assert_allclose(answer, model.predict(x["history"], verbose=0), rtol=1e-6)
    return {"groups": groups, "answer": answer}


@program("a layer that is frozen after a save")
def frozen_after_a_save() -> dict[str, Any]:
    def made(*, frozen: bool) -> Any:
        ids = keras.Input([], dtype="int64")
        hidden = dense(4, 0.1, name="b")(dense(4, 0.2, name="a")(fr.Embedding(4, "adagrad", name="item")(ids)))
        model = fr.schedules.PipelinedModel(ids, dense(1, 0.3, name="c")(hidden))
        model.get_layer("a").trainable = not frozen
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    def slots(model: Any) -> list[Any]:
        kernels = [model.get_layer(name).kernel for name in "bc"]
        return [dict(of) for _, of in sorted(keras_api.slots(model.optimizer, kernels).items())]

    x, y = samples(64, uneven=False)
    model, loaded = made(frozen=False), made(frozen=True)
    for each in (model, loaded):
        each.fit(x["item"], y, batch_size=16, verbose=0, shuffle=False)
    folder = pathlib.Path(tempfile.mkdtemp(), "checkpoint")
    fr.checkpoint.save(folder, model, model.optimizer)
    fr.checkpoint.load(folder, loaded, loaded.optimizer)
    for before, after in zip(slots(model), slots(loaded), strict=True):
        for place, slot in before.items():
            np.testing.assert_array_equal(np.asarray(slot), np.asarray(after[place]))
    return {"weights": [weight.tolist() for weight in loaded.get_weights()]}


@program("batch by batch", ranks=2)
def by_batch() -> dict[str, Any]:
    model, (x, y) = tower(optimizer=fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.01))), arrays()
    losses = [float(model.train_on_batch(x, y)) for _ in range(3)]
    return {"losses": losses, "tested": float(model.test_on_batch(x, y)),
            "predicted": np.asarray(model.predict_on_batch(x)), **state(model)}  # fmt: skip


@program("a loop", ranks=2)
def loop() -> dict[str, Any]:
    model, (x, y), losses = Tower(), arrays(), []
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.01))
    x = {name: tf.constant(values) for name, values in x.items()}

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    for run in (step, step, *[tf.function(step)] * 2):
        losses.append(float(run()))
    return {"losses": losses, **state(model)}


@program("callbacks", ranks=2)
def called_back() -> dict[str, Any]:
    model = tower(optimizer=fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.1)))
    layer = model.embedding
    callbacks = [
        fr.callbacks.Interrupt(), fr.callbacks.EmbeddingMetrics(layer),
        fr.callbacks.TableLearningRate(layer, lambda epoch, rate: rate * 0.9),
        fr.callbacks.ReduceLROnPlateau(layer, "loss", factor=0.5, patience=1, min_delta=100.0),
        fr.callbacks.EarlyStopping("loss", patience=1, restore_best=True),
    ]  # fmt: skip
    answers = fitted(model, callbacks=callbacks, validation_data=arrays())
    rates = answers.pop("lr", None) or answers.pop("learning_rate")
    return {**answers, "rates of the dense weights": rates}


@program("a loss that is not finite at one rank", ranks=2)
def not_finite() -> dict[str, Any]:
    """Rank 0 stops all ranks after the second of four steps."""
    model, (x, y) = tower(optimizer=fr.collectives.distributed_optimizer(keras.optimizers.SGD(0.01))), arrays()
    if fr.rank() == 0:
        y[20] = np.nan
    callbacks = [keras.callbacks.TerminateOnNaN(), fr.callbacks.Interrupt()]
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    return {"updates": int(model.optimizer.iterations)}


@program("a scaled loss", ranks=2)
def scaled() -> dict[str, Any]:
    """An overflow at rank 0 skips the second step of all ranks."""
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1024.0)
    model = tower(optimizer=fr.collectives.distributed_optimizer(optimizer))
    x, y = arrays()
    if fr.rank() == 0:
        y[16] = 3e38
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    return state(model)


@program("a step of one's own, weighed by samples", ranks=2)
def own_step() -> dict[str, Any]:
    class Own(Tower):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss}

    model = Own()
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01)), "mse")
    x, y = samples()
    x.pop("history")
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
    return state(model)


@program("a checkpoint of a callback", ranks=2)
def saved() -> dict[str, Any]:
    def averaged() -> Any:
        return fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.1))

    folder = pathlib.Path(fr.collectives.all_gather_object(tempfile.mkdtemp())[0], "checkpoint")
    model, (x, y) = tower(optimizer=averaged()), arrays()
    fitted(model, callbacks=[fr.callbacks.Checkpoint(folder)])
    loaded = tower(optimizer=averaged())
    loaded(x)
    position = fr.callbacks.Checkpoint(folder).load(loaded)
    np.testing.assert_allclose(loaded.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0), rtol=1e-6)
    return {"position": position, **fitted(loaded)}


def trained(name: str, steps: int, **options: Any) -> dict[str, Any]:
    model = model_program.made(name, **options)
    return {"losses": model_program.train(model, name, steps), **model_program.state(model)}


for _name in model_program.FIELDS:
    if _name in model_program.EXCHANGED:
        program(f"models: {_name}", ranks=2)(lambda name=_name: trained(name, 20))
    else:  # A trace takes longer than these steps.
        program(f"models: {_name}")(lambda name=_name: trained(name, 4, run_eagerly=True))


@program("answers from kept states of users")
def kept_states() -> dict[str, Any]:
    model, batch = model_program.made("user states"), model_program.batches("user states")[0]
    states = GRMStates(model)
    logits, state = states.update(batch, states.none(3))
    return {"logits": logits, "tokens": [part.values for part in state.layers[0] if part is not None]}


def main(out: pathlib.Path) -> None:
    fr.init()
    assert keras.__version__.startswith("2." if out.name.startswith("legacy") else "3.")
    answers = {name: run() for name, (ranks, run) in PROGRAMS.items() if fr.size() <= ranks}
    # Numbers of NumPy and TensorFlow become lists.
    text = json.dumps(answers, default=lambda value: np.asarray(value).tolist())
    out.with_suffix(f".{fr.rank()}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
