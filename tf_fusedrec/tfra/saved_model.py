"""SavedModels that give a TFRA table's rows under every loader.

TFRA restores the rows of a FileSystemSaver table in TensorFlow's V1 loader only; under tf.saved_model.load and Keras'
load_model a model answers initial rows, without a word. Here every table of a SavedModel is initialized, which all
loaders do, by an operation that reads its files: those of all ranks, beside the SavedModel's own variables.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
import types
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.tables.tfra import de

_MARK = "tfra_tables.txt"


@functools.cache
def _mark() -> tf.saved_model.Asset:
    """A file in a SavedModel's `assets`: by its path, the graph of a loaded model knows where it was loaded from."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="tf_fusedrec-")) / _MARK
    path.write_text("The rows of this model's tables are in ../variables/TFRADynamicEmbedding.\n", encoding="utf-8")
    return tf.saved_model.Asset(str(path))


def restore_when_loaded(params: Any) -> None:
    """Makes the tables of a `de.Variable` read their files when a SavedModel that holds them is loaded.

    Variables that a FileSystemSaver does not save keep their rows in the checkpoint, which all loaders restore.
    """
    if not isinstance(params.kv_creator.saver, de.FileSystemSaver):
        return
    for table in params.tables:
        table._track_trackable(_mark(), "where_rows_are", overwrite=True)
        table._initialize = types.MethodType(_read_files, table)


def _read_files(table: Any) -> Any:
    mark = _mark().asset_path
    folder = tf.strings.regex_replace(mark, f"assets/{_MARK}$", "variables/TFRADynamicEmbedding")
    files = tf.io.matching_files(tf.strings.join([folder, f"/{table._name}_*-keys"]))

    def load() -> tf.Tensor:
        done = table.load_from_file_system(folder, file_name=table._name, load_entire_dir=True)
        with tf.control_dependencies([done] if done is not None else []):
            return tf.constant(True)

    return tf.cond(tf.size(files) > 0, load, lambda: tf.constant(False))
