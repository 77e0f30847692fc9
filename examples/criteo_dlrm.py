"""Trains DLRM on a click log in the format of Criteo, on one rank or on several.

    python examples/criteo_dlrm.py --data train.txt
    fusedrec run -n 2 examples/criteo_dlrm.py --data train.txt

A line of the log has 40 fields between tabs: the label (0 or 1), 13 integers I1..I13 and 26 strings C1..C26. A missing
integer or string is empty. Logs are in the order of time, so the last lines are the validation part. Any number of
ranks trains on the same batches.

Source of the model: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems,
arXiv:1906.00091. Rows of another dim are projected, as in Ginart et al., Mixed Dimension Embeddings, arXiv:1909.11810.
"""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.metrics import AUC

INTEGERS = [f"I{number}" for number in range(1, 14)]
STRINGS = [f"C{number}" for number in range(1, 27)]
WANTED = "40 fields between tabs: a label 0 or 1, 13 integers or empty, 26 strings or empty"
LINE = rf"[01](?:\t(?:-?\d+)?){{{len(INTEGERS)}}}(?:\t[^\t]*){{{len(STRINGS)}}}\r?"
MISSING = int(fr.hash_strings(""))
SHOWN_CHARACTERS = 60  # Characters of a wrong line in an error.


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the log, not compressed")
    parser.add_argument("--output", default="runs/criteo_dlrm", help="folder of checkpoint/ and saved_model/")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256, help="lines per step, over all ranks; 2048 for a full log")
    parser.add_argument("--validation", type=float, default=0.1, help="part of the lines, at the end of the log")
    parser.add_argument("--dim", type=int, default=16, help="columns of the interacting vectors")
    parser.add_argument("--dims", default="", help="fields with rows of another dim, such as C6=4,C9=8")
    parser.add_argument("--learning_rate", type=float, default=0.001, help="of rows and of dense weights")
    found = parser.parse_args(arguments)
    if not pathlib.Path(found.data).is_file():
        parser.error(f"--data {found.data} is no file. Wanted: a log with {WANTED}.")
    if found.batch < 1 or found.batch % fr.size():
        parser.error(f"--batch must be a multiple of the {fr.size()} ranks, got {found.batch}.")
    if not 0 < found.validation < 1:
        parser.error(f"--validation must lie between 0 and 1, got {found.validation}.")
    if (pathlib.Path(found.output) / "saved_model").exists():
        parser.error(f"--output {found.output} has a saved_model. Remedy: another folder, or remove it.")
    try:
        found.dims = {name: int(dim) for name, dim in (one.split("=") for one in found.dims.split(",") if one)}
    except ValueError:
        parser.error(f"--dims must look like C6=4,C9=8, got {found.dims!r}.")
    if not set(found.dims) <= set(STRINGS):
        parser.error(f"--dims names {sorted(set(found.dims) - set(STRINGS))}. Wanted: fields among C1..C26.")
    return found


def read_clicks(path: str) -> np.ndarray:
    """Returns the labels of all lines, <bool>[N]."""
    with open(path, "rb") as log:
        return np.fromiter((line.startswith(b"1") for line in log), bool)


def parse(path: str, numbers: tf.Tensor, lines: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Parses lines <string>[B] with line numbers <int64>[B], counted from 1, into inputs and labels.

    Returns:
      {"integers": <float32>[B, 13], NaN where missing; "strings": <string>[B, 26]}, labels <float32>[B, 1].

    Raises:
      InvalidArgumentError: A line has another form. The message names the first one.
    """
    valid = tf.strings.regex_full_match(lines, LINE)
    wrong = tf.argmin(tf.cast(valid, tf.int32))
    fields = tf.strings.split(lines, "\t")
    message = tf.strings.join(
        [
            f"{path}, line ", tf.strings.as_string(numbers[wrong]), ": got ",
            tf.strings.as_string(fields.row_lengths()[wrong]), " fields (",
            tf.strings.substr(lines[wrong], 0, SHOWN_CHARACTERS), f"), wanted {WANTED}.",
        ]
    )  # fmt: skip
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(valid), [message])]):
        fields = tf.strings.regex_replace(fields.to_tensor(shape=[None, 40]), r"\r$", "")
    integers = fields[:, 1:14]
    integers = tf.strings.to_number(tf.where(integers == "", "nan", integers))
    return {"integers": integers, "strings": fields[:, 14:]}, tf.strings.to_number(fields[:, :1])


def read(path: str, first: int, last: int, batch: int, shuffle: bool) -> tf.data.Dataset:
    """Reads this rank's part of each batch of the lines first <= number < last, counted from 0."""
    data = tf.data.TextLineDataset(path).enumerate(start=1).skip(first).take(last - first)
    # Without a known length, Keras ends an epoch with a failing step, which Adam counts in a single process.
    data = data.apply(tf.data.experimental.assert_cardinality(last - first))
    if shuffle:
        data = data.shuffle(64 * batch, seed=1)  # One seed before the shard gives all ranks the same batches.
    data = data.shard(fr.size(), fr.rank()).batch(batch // fr.size())
    return data.map(lambda numbers, lines: parse(path, numbers, lines), tf.data.AUTOTUNE).prefetch(2)


def log_of_known(integers: tf.Tensor) -> tf.Tensor:
    """log(1 + x) of counts; 0 for missing (NaN) and negative ones."""
    known = tf.where(tf.math.is_nan(integers), tf.zeros_like(integers), integers)
    return tf.math.log1p(tf.maximum(known, 0.0))


def mlp(widths: Sequence[int], name: str) -> keras.Sequential:
    return keras.Sequential([keras.layers.Dense(width, activation="relu") for width in widths], name=name)


def make_model(
    dim: int, dims: Mapping[str, int], learning_rate: float, click_rate: float
) -> fr.schedules.PipelinedModel:
    """Returns a model from raw log fields to the log odds of a click, so that a server needs no preprocessing.

    An untrained model answers `click_rate`: otherwise the first steps would learn it before anything else.
    """
    # Adam, because most rows are seen a few times: Adagrad's first steps are as small as the gradients.
    adam = fr.optimizers.Adam(learning_rate)
    tables = [fr.TableConfig(field, dims.get(field, dim), adam) for field in STRINGS]
    # padding_id gives missing strings a row of zeros.
    embedding = fr.FusedEmbedding([fr.FeatureConfig(table.name, table, padding_id=MISSING) for table in tables])
    integers = keras.Input([len(INTEGERS)], dtype="float32", name="integers")
    strings = keras.Input([len(STRINGS)], dtype="string", name="strings")
    bottom = mlp([64, dim], "bottom")(keras.layers.Lambda(log_of_known, name="log_of_known")(integers))
    ids = fr.hash_strings(strings)
    rows = embedding({field: ids[:, column] for column, field in enumerate(STRINGS)})
    vectors = [
        keras.layers.Dense(dim, use_bias=False, name=f"project_{field}")(row) if row.shape[-1] != dim else row
        for field, row in rows.items()
    ]
    interactions = fr.layers.DotInteraction(name="interactions")([bottom, *vectors])
    top = mlp([128, 64], "top")(keras.layers.Concatenate()([bottom, interactions]))
    log_odds = keras.initializers.Constant(math.log(click_rate / (1 - click_rate)))
    return fr.schedules.PipelinedModel(
        {"integers": integers, "strings": strings}, keras.layers.Dense(1, bias_initializer=log_odds)(top)
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains, saves and exports. Returns loss, auc, val_loss and val_auc of each epoch over all ranks' lines."""
    fr.init()
    options = parse_arguments(arguments)
    clicks = read_clicks(options.data)
    lines = len(clicks)
    held_out = round(lines * options.validation)
    if not 0 < held_out < lines:
        raise SystemExit(
            f"{options.data} has {lines} lines, of which {held_out} would be the validation part. Wanted: at least one "
            "line to train on and one to validate on."
        )
    click_rate = float(clicks[: lines - held_out].mean())
    if not 0 < click_rate < 1:
        raise SystemExit(f"{options.data} has equal labels on its {lines - held_out} training lines. Wanted: 0 and 1.")
    training = read(options.data, 0, lines - held_out, options.batch, shuffle=True)
    validation = read(options.data, lines - held_out, lines, options.batch, shuffle=False)

    keras.utils.set_random_seed(0)
    model = make_model(options.dim, options.dims, options.learning_rate, click_rate)
    model.compile(
        fr.collectives.distributed_optimizer(keras.optimizers.Adam(options.learning_rate)),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[AUC()],
    )
    verbose = 2 if fr.rank() == 0 else 0
    history = model.fit(training, validation_data=validation, epochs=options.epochs, verbose=verbose).history

    output = pathlib.Path(options.output)
    fr.checkpoint.save(output / "checkpoint", model, model.optimizer, extra={"epochs": options.epochs})
    served = keras.Model(model.input, {"click": keras.layers.Activation("sigmoid")(model.output)})
    fr.export(served, output / "saved_model")
    if fr.rank() == 0:
        print(
            f"validation on {held_out} of {lines} lines: AUC {history['val_auc'][-1]:.4f}, "
            f"log loss {history['val_loss'][-1]:.4f}; {output} has checkpoint and saved_model"
        )
    return history


if __name__ == "__main__":
    main()
