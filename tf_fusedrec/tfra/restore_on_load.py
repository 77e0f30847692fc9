"""Makes a SavedModel's TFRA tables read their rows under every loader.

TFRA restores the rows of a FileSystemSaver table in TensorFlow's V1 loader only. Under tf.saved_model.load and Keras'
load_model, the model silently returns initial rows. Every loader initializes tables, so here the initializer of a
table reads its files. They lie beside the SavedModel's variables and hold the rows of all ranks.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
import types
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.tables.tfra_library import de

_MARK = "tfra_tables.txt"


@functools.cache
def _mark() -> tf.saved_model.Asset:
    """Returns an asset file. Its path in the `assets` folder gives a loaded graph the SavedModel's location."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="tf_fusedrec-")) / _MARK
    path.write_text("The rows of this model's tables are in ../variables/TFRADynamicEmbedding.\n", encoding="utf-8")
    return tf.saved_model.Asset(str(path))


def restore_when_loaded(params: Any) -> None:
    """Makes the tables of a `de.Variable` read their files when a loader opens their SavedModel.

    Without a FileSystemSaver, a variable's rows are in the checkpoint, which every loader restores.
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
