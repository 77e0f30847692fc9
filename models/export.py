"""Exports a trained model as a SavedModel and defines its signatures: `fusedrec export`.

Unknown ids get the same rows as in evaluation (TableConfig.unknown). Signatures take flat tensors. A ragged feature is
a tensor of values; the features of a role share their row_splits <int64>[B+1]:

ranking, "serving_default"
  history_item, history_action, history_time <int64>[H], history_row_splits; exposed_item, exposed_time <int64>[E],
  exposed_row_splits; history_<name> and exposed_<name> of item_features, and of dense names as <float32>; every
  contextual column [B]. item_lists: <role>_<name> with the ids of all events in turn, and <role>_<name>_count with
  their number for each event. contextual_lists: <name> and <name>_row_splits.
  ->  probabilities <float>[E] of ctr, ctcvr and the other tasks.
retrieval, "serving_default"
  item_id, timestamp <int64>[T], row_splits, query_time <int64>[B] (seconds).  ->  user_embedding <float>[B, D].
retrieval, "top_k"
  the same and k <int32>[].  ->  ids <int64>[B, k], scores <float>[B, k], without the items of the history; ids -1
  where there are fewer than k others. Where the data set has texts of items: items <string>[B, k], "" for the id -1.
  A server takes requests in the columns of the data for it: serve/user_columns.py.
retrieval with an index, "top_k_ivf"
  the same, from the lists of an inverted-file index (item_index.py).
Histories longer than the model's are cut to their newest events.

With states (ops "ours"; the model extends states, see user_state.py), kept_states.py says what a request names:

"with_state"
  the inputs of "serving_default"; user, events_before <int64>[B].
  ->  the same answers, NaN where found is false, and found <bool>[B]: false asks for the user's whole history, with
  events_before 0.
"next_version"
  ->  version <int64>[]. No earlier state is found. "apply_delta" needs no such call; another change in place does.
"spill_states"
  tier_folder <string>[], tier_bytes <int64>[].  ->  bytes <int64>[]. From then on, states leave memory to a file.
"state_statistics"
  ->  the counts of ops.UserStatesStatistics, <int64>[] each.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import tf
from tf_fusedrec.checkpoint.dense import read
from tf_fusedrec.checkpoint.loading import dense_prefix
from tf_fusedrec.files.saves import read_manifest
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.build import columns, make_embedding, make_model, no_rows
from tf_fusedrec.models.data_sets.strings import texts_of
from tf_fusedrec.models.experiment import Experiment
from tf_fusedrec.models.experiment.ranking_config import ROLES, RankingConfig
from tf_fusedrec.models.grm import GRM
from tf_fusedrec.models.item_index import IndexOptions
from tf_fusedrec.models.kept_states import Answer, KeptStates, StateOptions
from tf_fusedrec.models.ranking import RankingModel
from tf_fusedrec.models.retrieval import HSTURetrieval
from tf_fusedrec.models.retrieval_server import RetrievalServer
from tf_fusedrec.models.saved_run import saved_experiment
from tf_fusedrec.models.user_state import GRMStates
from tf_fusedrec.saved_model import applying

Model = RankingModel | HSTURetrieval


def export(
    model: Model,
    output: str | os.PathLike,
    ops: str = "stock",
    states: StateOptions | None = None,
    *,
    index: IndexOptions | None = None,
    rows: str | None = None,
    base: str | os.PathLike | None = None,
    experiment: Experiment | None = None,
    data: str | pathlib.Path | None = None,
) -> None:
    """Writes the SavedModel of a trained model, or a delta to the export `base`, by fr.export. Collective.

    experiment: Experiment of the model. The export of a retrieval model, or one with data.source "table", takes
      requests in the user's columns, too (serve/user_columns.py).
    states: The cache of user states of an export with ops "ours", for its signature "with_state"; None: no cache.
    index: Sizes of the index of a retrieval model, for its signature "top_k_ivf"; None: no index.
    rows: dtype of the rows on the server; see fr.export.
    data: Folder of the data set, whose texts of items the searches of a retrieval model answer; None: ids only.

    Raises:
      ValueError: fr.export refuses, the model cannot keep states, states.max_bytes holds no longest history, or an
        option of the index is out of range.
    """
    signatures = signatures_of(model, ops, states, index, data)
    assets = {} if experiment is None else assets_of(experiment)
    fr.export(model, output, ops, signatures=signatures, row_dtype=rows, assets=assets, base=base)


def assets_of(experiment: Experiment) -> dict[str, str]:
    """Returns columns.json, which says what a server needs of requests in user columns, where the data have them."""
    columns, tasks = experiment.to_dict()["data"]["columns"], {}
    if isinstance(experiment.model, RankingConfig):
        if experiment.data.source != "table":
            return {}
        task_of_label = {label: task for task, label in reversed(experiment.model.label_of_task.items())}
        tasks = {task: label for label, task in task_of_label.items()}
    of_user = {"columns": columns or {"user": "user", "item": "item", "time": "time"}, "tasks": tasks}
    return {"columns.json": json.dumps(of_user, indent=1)}


def signatures_of(
    model: Model,
    ops: str = "stock",
    states: StateOptions | None = None,
    index: IndexOptions | None = None,
    data: str | pathlib.Path | None = None,
) -> dict[str, fr.Signature]:
    """Returns the signatures of a model's export, by name. Raises ValueError as `export`. Collective with an index."""
    server: _RankingServer | RetrievalServer
    if isinstance(model, RankingModel):
        server = _RankingServer(model)
    else:
        server = RetrievalServer(model, None if data is None else _texts_of_items(model, data))
    signatures = server.signatures()
    if states is not None:
        if ops != "ours":
            raise ValueError(f'states need ops "ours", got ops {ops!r}. Export with ops="ours", or without states.')
        signatures |= _with_state(*server.with_state(states), signatures["serving_default"].inputs)
    if index is not None:
        if not isinstance(server, RetrievalServer):
            raise ValueError(f"an index needs a retrieval model, got {type(model).__name__}. Export without an index.")
        signatures |= server.with_index(index)
    return signatures


def _texts_of_items(model: HSTURetrieval, data: str | pathlib.Path) -> list[str] | None:
    """Returns the text of each item of the catalogue, the id where it has none; None if the data have no text."""
    ids = tf.convert_to_tensor(model.catalogue).numpy().tolist()
    texts = texts_of(data, "item", ids)
    return [texts.get(item, str(item)) for item in ids] if texts else None


def trained_model(checkpoint: str | os.PathLike) -> Model:
    """Returns the model of a `fusedrec train` checkpoint, with its rows. Collective.

    A run with train.keep_best gives its best epoch, any other run its last save.

    Raises:
      ValueError: The folder has no checkpoint of `fusedrec train`, or the checkpoint lacks weights of the model.
    """
    experiment = saved_experiment(checkpoint)
    extra = read_manifest(checkpoint)["extra"]
    # The checkpoint holds the true ids and serving draws no negatives, so any distinct ids of this number will do.
    items = max(extra["items"], 1)
    model = make_model(experiment, make_embedding(experiment), np.arange(items), np.ones(items, np.int64), {})
    model(no_rows(columns(experiment.model, "train")))  # Creates the weights.
    save = "best" if "best" in extra else None
    fr.checkpoint.load(checkpoint, model, save=save)
    _check_all_restored(model, dense_prefix(checkpoint, save))
    return model


def _check_all_restored(model: Model, prefix: str) -> None:
    try:
        read(pathlib.Path(prefix).parent, model, None, whole=True)
    except ValueError as error:
        raise ValueError(
            f"checkpoint {prefix} does not hold all weights of the model that its experiment describes: {error} "
            "Pass a checkpoint that `fusedrec train` of this version wrote."
        ) from error


def _with_state(kept: KeptStates, answer: Answer, inputs: Mapping[str, tf.TensorSpec]) -> dict[str, fr.Signature]:
    def function(given: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        # The version comes before all rows and weights, so that no state of old weights gets a new version.
        version = kept.cache.version()
        with tf.control_dependencies([version]):
            return answer({name: tf.identity(value) for name, value in given.items()}, version)

    of_users = {name: tf.TensorSpec([None], tf.int64) for name in ("user", "events_before")}
    return {"with_state": fr.Signature(function, {**inputs, **of_users}, (kept.cache,)), **kept.signatures()}


class _RankingServer:
    """The signatures of a ranking model."""

    def __init__(self, model: RankingModel):
        self._config: RankingConfig = model.config
        self._model = model

    def signatures(self) -> dict[str, fr.Signature]:
        config = self._config
        names = [*config.contextual_features, *(f"{name}_row_splits" for name in config.contextual_lists)]
        numbers = [*config.contextual_dense]
        for role in ROLES:
            names += [f"{role}_row_splits", *event_columns(config, role), *config.list_columns(role)]
            numbers += config.dense_columns(role)
        inputs = {name: tf.TensorSpec([None], tf.float32 if name in numbers else tf.int64) for name in names + numbers}
        return {"serving_default": fr.Signature(self.scores, inputs)}

    def scores(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        logits = self._model(self._batch(inputs, self._config.max_history), training=False)
        return {task: tf.sigmoid(logits[task]) for task in logits}

    def with_state(self, options: StateOptions) -> tuple[KeptStates, Answer]:
        if not isinstance(self._model, GRM):
            raise ValueError(f"states need a GRM, got {type(self._model).__name__}. Export without states.")
        states = GRMStates(self._model)
        kept = KeptStates(states, self._model.config, options)

        def scores(inputs: dict[str, tf.Tensor], version: tf.Tensor) -> dict[str, tf.Tensor]:
            batch = self._batch(inputs, None)
            resumed = kept.resume(inputs["user"], version, inputs["events_before"], batch["history_time"])
            of_history = [name for name in batch if name.startswith("history_")]
            batch |= zip(of_history, resumed.only_new([batch[name] for name in of_history]))
            if options.piece:
                logits, change = states.answer_in_pieces(batch, resumed.state, options.piece)
            else:
                logits, change = states.answer(batch, resumed.state)
            kept.keep(resumed, change)
            found = tf.gather(resumed.found, jagged.token_rows(batch["exposed_item"].row_splits))
            scored = {task: tf.where(found, tf.sigmoid(logits[task]), math.nan) for task in logits}
            return {**scored, "found": resumed.found}

        return kept, scores

    def _batch(self, inputs: dict[str, tf.Tensor], max_history: int | None) -> dict[str, Any]:
        """Returns the model's batch, with the newest events of each history; None: with all."""
        config = self._config
        batch: dict[str, Any] = {name: inputs[name] for name in (*config.contextual, *config.contextual_dense)}
        for name in config.contextual_lists:
            batch[name] = tf.RaggedTensor.from_row_splits(inputs[name], inputs[f"{name}_row_splits"])
        for role, longest in (("history", max_history), ("exposed", None)):
            names = [*event_columns(config, role), *config.dense_columns(role)]
            columns = _rows_of({name: inputs[name] for name in names}, inputs[f"{role}_row_splits"])
            for ids in config.list_columns(role):
                lengths = tf.reduce_sum(columns[f"{ids}_count"], axis=1)
                batch[ids] = tf.RaggedTensor.from_row_lengths(inputs[ids], lengths)
            if longest is not None:
                lengths = columns[f"{role}_time"].row_lengths()
                newest = tf.minimum(lengths, longest)
                columns = dict(zip(columns, jagged.cut(list(columns.values()), lengths - newest, newest)))
            batch |= columns
        return batch


def _rows_of(columns: dict[str, tf.Tensor], row_splits: tf.Tensor) -> dict[str, tf.RaggedTensor]:
    """Returns columns of equal size by row, after one check of the row splits for all of them."""
    first = next(iter(columns.values()))
    checked = tf.RaggedTensor.from_row_splits(first, row_splits)
    same = tf.debugging.assert_equal(
        tf.stack([tf.size(column) for column in columns.values()]), tf.size(first),
        message=f"columns {list(columns)} must have the same number of values, got these numbers:",
    )  # fmt: skip
    with tf.control_dependencies([] if same is None else [same]):
        row_splits = tf.identity(checked.row_splits)
    return {
        name: tf.RaggedTensor.from_row_splits(column, row_splits, validate=False) for name, column in columns.items()
    }


def event_columns(config: RankingConfig, role: str) -> list[str]:
    """Returns the integer columns with one value for each event of a role, which a server takes."""
    action = ["history_action"] if role == "history" else []
    counts = [f"{name}_count" for name in config.list_columns(role)]
    return [*config.id_columns(role), *action, f"{role}_time", *counts]


def summary(path: str | os.PathLike) -> str:
    """Rows, bytes and version of an export, or what a delta changes, in a line."""
    path = pathlib.Path(path)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if not (path / "delta.json").is_file():
        rows = sum(len(ids) for ids, _ in applying.read_tables(path).values())
        return f"{rows:,} rows, {size:,} bytes, version {applying.identity(path)['version']}"
    rows, removed = (
        sum(len(np.load(file, mmap_mode="r")) for file in (path / "changes").glob(f"*.{part}.npy"))
        for part in ("ids", "removed")
    )
    base = json.loads((path / "delta.json").read_text(encoding="utf-8"))["identity"].get("version")
    version = applying.identity(path / "model")["version"]
    return f"{rows:,} changed rows, {removed:,} removed, {size:,} bytes, version {base} -> {version}"
