"""Fingerprints: string ids as 64-bit integers, equal in the reader, in tf.data and in a served graph.

The fingerprint is TensorFlow's tf.fingerprint, FarmHash's Fingerprint64 of the bytes. Its authors promise not to change
it. The probability that two of n distinct strings share a fingerprint is about n^2 / 2^65:

    n            any collision      colliding ids, expected
    10^6         2.7e-8             5.4e-8
    10^8         2.7e-4             5.4e-4
    10^9         2.7 %              0.054
    10^10        93 %               5.4

Colliding ids share and train one row; nothing else breaks. Fingerprint64 is not a cryptographic hash, so chosen ids can
collide on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.data.columns import FLOAT_TEXT, INT64_TEXT

if TYPE_CHECKING:
    import pyarrow as pa


def hash_strings(strings: Any, integers: bool = False) -> Any:
    """Ids of strings, equal to the Parquet reader's fingerprints for a Column(dtype="string").

    The function works in tf.data, in a model and in an exported graph. It uses stock TensorFlow ops, so a server needs
    no other library. A str is hashed by its UTF-8 bytes. The empty string has the id -7286425919675154353, which can
    serve as padding: FeatureConfig(padding_id=int(hash_strings(""))).

    Args:
      strings: <string>[...] of any shape: Tensor, RaggedTensor, SparseTensor, or an input of a functional Keras model;
        or a NumPy array, pandas Series, Arrow array, (nested) list of str or bytes, or one str.
      integers: True gives the ids of data.source: table, where the text of an int64, such as "12" or "12.0", is that
        integer, the empty text is -1, and every other text, such as "007", is its fingerprint.

    Returns:
      <int64>[...], of the same shape and kind for a TensorFlow argument, else a NumPy array.

    Raises:
      ValueError: an element is not a string, such as a missing value (None, NaN, null).

    Examples:
      >>> fr.hash_strings(["red shoe", "blue shoe"])
      array([3386405145116121313, 8568005408895243774])
    """
    if isinstance(strings, keras_api.KerasTensor):
        return HashStrings(integers)(strings)
    if isinstance(strings, tf.RaggedTensor):
        return strings.with_flat_values(hash_strings(strings.flat_values, integers))
    if isinstance(strings, tf.SparseTensor):
        return strings.with_values(hash_strings(strings.values, integers))
    if tf.is_tensor(strings):
        return _ids(strings, integers)
    if type(strings).__module__.startswith("pyarrow."):
        return _of_arrow(strings, integers)
    return _of_objects(np.asarray(strings, object), integers)


@keras.saving.register_keras_serializable("tf_fusedrec")
class HashStrings(keras.layers.Layer):
    """hash_strings in a functional model."""

    def __init__(self, integers: bool = False, **layer_arguments: Any):
        super().__init__(**layer_arguments)
        self.integers = integers

    def call(self, strings: Any) -> Any:
        return hash_strings(strings, self.integers)

    def compute_output_spec(self, strings: Any) -> Any:
        """The symbol of the ids. Keras 3 would lose that they are ragged."""
        form = {"sparse": strings.sparse, "ragged": strings.ragged, "ragged_rank": strings.ragged_rank}
        return keras_api.KerasTensor(strings.shape, "int64", **form)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "integers": self.integers}


def fingerprint_arrow(array: pa.Array, integers: bool = False) -> np.ndarray:
    """Ids <int64>[n] of an Arrow array of strings, plain or dictionary-encoded, without nulls; see hash_strings."""
    import pyarrow as pa

    # Each distinct string is hashed once.
    encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    # A NumPy array of str, unlike one of objects, pads every string to the longest.
    return _of_objects(np.array(encoded.dictionary.to_pylist(), object), integers)[encoded.indices.to_numpy()]


def _ids(strings: tf.Tensor, integers: bool) -> tf.Tensor:
    if strings.dtype != tf.string:
        raise ValueError(f"strings must have dtype string, got {strings.dtype.name}. Integers are ids as they are.")
    # tf.fingerprint returns 8 little-endian bytes per string.
    flat = tf.bitcast(tf.fingerprint(tf.reshape(strings, [-1])), tf.int64)
    fingerprints = tf.reshape(flat, tf.shape(strings))
    if not integers:
        return fingerprints
    plain = tf.strings.regex_replace(strings, FLOAT_TEXT, r"\1", replace_global=False)
    is_int64 = tf.strings.regex_full_match(plain, INT64_TEXT)
    numbers = tf.strings.to_number(tf.where(is_int64, plain, "-1"), tf.int64)
    return tf.where(is_int64 | (strings == ""), numbers, fingerprints)


def _of_arrow(array: pa.Array | pa.ChunkedArray, integers: bool) -> np.ndarray:
    import pyarrow as pa

    if array.null_count:
        _refuse("null", (int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0]),))
    values = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if values not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        raise ValueError(f"strings must be an Arrow array of strings, got {array.type}. Hash the flat values of lists.")
    return fingerprint_arrow(pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array, integers)


def _of_objects(values: np.ndarray, integers: bool = False) -> np.ndarray:
    for i, value in enumerate(values.flat):
        if not isinstance(value, (str, bytes)):
            _refuse(repr(value), tuple(int(index) for index in np.unravel_index(i, values.shape)))
    return _ids(tf.constant(values, tf.string), integers).numpy() if values.size else np.empty(values.shape, np.int64)


def _refuse(value: str, place: tuple[int, ...]) -> None:
    raise ValueError(
        f"strings must be str or bytes, got {value} at {place[0] if len(place) == 1 else place}. Use '' for missing "
        "values, and FeatureConfig(padding_id=int(fr.hash_strings(''))), which has a zero row."
    )
