"""Joins, splits, pads and trims RaggedTensors along the sequence axis.

Every layer of this folder and the models use these functions. They work on values and row splits directly, because
TensorFlow's ragged slicing and concatenation build many small ops per call. Nothing here has weights. Every function
accepts zero-length rows and a batch without rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops import contextual_lengths


def token_positions(row_splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the row of every token and its position inside that row.

    Args:
      row_splits: <int64>[B+1].

    Returns:
      rows: <int64>[T], non-decreasing.
      positions: <int64>[T], counted from 0 in each row.

    Example:
      row_splits 0 2 2 5  ->  rows 0 0 2 2 2,  positions 0 1 0 1 2
    """
    rows = token_rows(row_splits)
    return rows, tf.range(row_splits[-1]) - tf.gather(row_splits, rows)


def token_rows(row_splits: tf.Tensor) -> tf.Tensor:
    """Returns the row of every token, <int64>[T], non-decreasing. row_splits is <int64>[B+1].

    RaggedTensor.value_rowids gives the same by 40 ops and a mask of rows x longest row.
    """
    ends, tokens = row_splits[tf.newaxis, 1:], tf.range(row_splits[-1])[tf.newaxis]
    [rows] = tf.unstack(tf.raw_ops.UpperBound(sorted_inputs=ends, values=tokens, out_type=tf.int64), 1)
    return rows


def to_dense(ragged: tf.RaggedTensor) -> tf.Tensor:
    """Pads every row with zeros to the longest row of the batch: [B,(L),...] -> [B, n, ...]."""
    check_sequence("ragged", ragged)
    return _pad(ragged.values, ragged.row_splits)


def padded(tokens: tf.Tensor, row_splits: tf.Tensor) -> tf.Tensor:
    """Pads tokens [T, ...] with zeros to [B, n, ...], in float32 or wider."""
    return _pad(_wide(tokens), row_splits)


def from_dense(dense: tf.Tensor, row_splits: tf.Tensor) -> tf.RaggedTensor:
    """Keeps the first L_b entries of row b and drops the padding. The inverse of `to_dense`.

    Args:
      dense: <any>[B, n, ...].
      row_splits: <int64>[B+1]. Row b of the result has row_splits[b+1] - row_splits[b] <= n tokens.

    Returns:
      RaggedTensor <any>[B,(L),...].
    """
    rows, positions = token_positions(row_splits)
    values = tf.gather_nd(dense, tf.stack([rows, positions], axis=1))
    return tf.RaggedTensor.from_row_splits(values, row_splits, validate=False)


def concat(parts: Sequence[tf.RaggedTensor]) -> tf.RaggedTensor:
    """Joins rows: row b of the result is row b of the first part, then of the second, and so on.

    Args:
      parts: One or more RaggedTensors <any>[B,(L_p),...] with equal dtypes and inner shapes.

    Returns:
      RaggedTensor <any>[B,(sum of L_p),...].

    Raises:
      ValueError: `parts` is empty or has something other than a RaggedTensor.
      InvalidArgumentError: The parts have different numbers of rows.

    Example:
      [[1, 2], []] and [[3], [4, 5]]  ->  [[1, 2, 3], [4, 5]]
    """
    return concat_alike([parts])[0]


def concat_alike(sequences: Sequence[Sequence[tf.RaggedTensor]]) -> list[tf.RaggedTensor]:
    """Joins the parts of each sequence, as `concat`, and computes once where their tokens go.

    Args:
      sequences: One or more sequences of P parts. Part p has the same row lengths in all sequences.

    Raises:
      ValueError: A sequence is empty or has something other than a RaggedTensor.
      InvalidArgumentError: The parts have different numbers of rows, or part p has different numbers of tokens.
    """
    for parts in sequences:
        if not parts:
            raise ValueError("parts must hold at least one RaggedTensor, got none. Pass the sequences to join.")
        for number, part in enumerate(parts):
            check_sequence(f"parts[{number}]", part)
    lengths = [part.row_lengths() for part in sequences[0]]
    same = tf.debugging.assert_equal(
        tf.stack([tf.size(part_lengths) for part_lengths in lengths]),
        tf.size(lengths[0]),
        message="parts must have the same number of rows, got these numbers:",
    )
    with tf.control_dependencies([] if same is None else [same]):
        row_splits = _splits(tf.add_n(lengths))
    places, start = [], row_splits[:-1]
    for part, part_lengths in zip(sequences[0], lengths):
        places.append(tf.cast(_tokens(part.row_splits, start), tf.int32))
        start = start + part_lengths
    return [
        tf.RaggedTensor.from_row_splits(
            tf.dynamic_stitch(places, [part.values for part in parts]), row_splits, validate=False
        )
        for parts in sequences
    ]


def split(ragged: tf.RaggedTensor, lengths: Sequence[tf.Tensor]) -> list[tf.RaggedTensor]:
    """Cuts every row into consecutive pieces. The inverse of `concat`.

    Args:
      ragged: RaggedTensor <any>[B,(L),...].
      lengths: One <int>[B] per piece. Their sums must equal the row lengths.

    Returns:
      One RaggedTensor <any>[B,(lengths[p]),...] per piece.

    Raises:
      ValueError: `ragged` is not a RaggedTensor, or `lengths` is empty.
      InvalidArgumentError: The lengths do not add up to the row lengths.
    """
    check_sequence("ragged", ragged)
    if not lengths:
        raise ValueError("lengths must hold one [B] tensor per piece, got none.")
    lengths = [tf.cast(length, tf.int64) for length in lengths]
    covered = tf.debugging.assert_equal(
        tf.add_n(lengths),
        ragged.row_lengths(),
        message="lengths must add up to the row lengths of ragged",
    )
    rows, positions = token_positions(ragged.row_splits)
    piece, end = tf.zeros_like(rows, tf.int32), tf.zeros_like(lengths[0])
    with tf.control_dependencies([] if covered is None else [covered]):
        for length in lengths[:-1]:
            end = end + length
            piece += tf.cast(positions >= tf.gather(end, rows), tf.int32)
    pieces = tf.dynamic_partition(ragged.values, piece, len(lengths))
    return [
        tf.RaggedTensor.from_row_splits(values, _splits(length), validate=False)
        for values, length in zip(pieces, lengths)
    ]


def last(ragged: tf.RaggedTensor, count: int | tf.Tensor) -> tf.RaggedTensor:
    """Keeps the last `count` tokens of every row; a shorter row is kept whole.

    Args:
      ragged: RaggedTensor <any>[B,(L),...].
      count: Number of tokens, an int or <int>[B] by row (for example the number of targets).

    Returns:
      RaggedTensor <any>[B,(min(L, count)),...].

    Raises:
      ValueError: `ragged` is not a RaggedTensor, or `count` is a negative int.
    """
    check_sequence("ragged", ragged)
    if isinstance(count, int) and count < 0:
        raise ValueError(f"count must be >= 0, got {count}.")
    lengths = ragged.row_lengths()
    keep = tf.minimum(lengths, tf.cast(count, tf.int64))
    return cut([ragged], lengths - keep, keep)[0]


def cut(parts: Sequence[tf.RaggedTensor], begins: tf.Tensor, lengths: tf.Tensor) -> list[tf.RaggedTensor]:
    """Keeps tokens [begins[b], begins[b] + lengths[b]) of each row b. All parts have the same row lengths.

    Args:
      parts: RaggedTensors <any>[B,(L),...].
      begins, lengths: <int64>[B], within the rows.

    Returns:
      One RaggedTensor <any>[B,(lengths),...] per part.
    """
    splits = _splits(lengths)
    tokens = _tokens(splits, parts[0].row_splits[:-1] + begins)
    return [tf.RaggedTensor.from_row_splits(tf.gather(part.values, tokens), splits, validate=False) for part in parts]


def first_tokens(ragged: tf.RaggedTensor) -> tf.Tensor:
    """Returns the first token of each row, <any>[B,...], zeros for an empty row."""
    zeros = tf.zeros([1, *ragged.values.shape[1:]], ragged.dtype)
    at = tf.where(ragged.row_lengths() > 0, ragged.row_splits[:-1], ragged.row_splits[-1])
    return tf.gather(tf.concat([ragged.values, zeros], axis=0), at)


def check_sequence(name: str, ragged: tf.RaggedTensor) -> None:
    """Raises ValueError unless `ragged` is a RaggedTensor that is ragged in axis 1 only."""
    if not isinstance(ragged, tf.RaggedTensor):
        raise ValueError(
            f"{name} must be a RaggedTensor [B,(L),...], got {type(ragged).__name__}. "
            "Build it with tf.RaggedTensor.from_row_splits or .from_tensor(dense, lengths)."
        )
    if ragged.ragged_rank != 1:
        raise ValueError(
            f"{name} must be ragged in axis 1 only, got ragged_rank {ragged.ragged_rank}. "
            "Give its inner axes a uniform size (ragged.merge_dims, or .to_tensor() inside)."
        )


def checked_lengths(
    ragged: tf.RaggedTensor, longest: int, layer: str, before: tf.Tensor | None = None
) -> tf.RaggedTensor:
    """Returns the rows after a check that none is longer than `longest`, the max_sequence_length of `layer`.

    before: None or <int64>[B], tokens of each row that are not in `ragged`.
    """
    check_sequence("x", ragged)
    fits = tf.debugging.assert_less_equal(
        ragged.row_lengths() if before is None else ragged.row_lengths() + before,
        tf.constant(longest, tf.int64),
        message=f"layer {layer!r}: a row of x is longer than max_sequence_length = {longest}. "
        "Trim it with jagged.last.",
    )
    return checked_by(fits, ragged)


def checked_by(check: tf.Operation | None, ragged: tf.RaggedTensor) -> tf.RaggedTensor:
    """Returns the sequence, in a graph after a check."""
    with tf.control_dependencies([] if check is None else [check]):
        return ragged.with_values(tf.identity(ragged.values))


def interleave(
    first: tf.RaggedTensor,
    second: tf.RaggedTensor,
    num_targets: tf.Tensor | None = None,
    *,
    interleave_targets: bool = True,
) -> tf.RaggedTensor:
    """Interleaves two sequences, for example content and action tokens, into rows f_0 s_0 f_1 s_1 ...

    Args:
      first, second: RaggedTensors <any>[B,(L),...] with equal row lengths.
      num_targets: <int>[B], number of targets at the end of each row. Only interleave_targets=False needs it.
      interleave_targets: True if targets have a second token. Use True in training, where the action is a learned
        dummy, and False at inference, where no action exists.

    Returns:
      With interleave_targets, RaggedTensor <any>[B,(2L),...]. Its rows end with 2 * num_targets targets in groups of
      two; target_group_size=2 of the attention lets a second token see its first.
      Without, RaggedTensor <any>[B,(2L - num_targets),...]. Its rows end with num_targets first tokens of targets.

    Raises:
      ValueError: An argument is not a RaggedTensor, or interleave_targets=False lacks num_targets.
      InvalidArgumentError: The row lengths differ, or a row has more targets than tokens.

    Example:
      [[1, 2], [3]] and [[10, 20], [30]]  ->  [[1, 10, 2, 20], [3, 30]]
      with num_targets [1, 1] and interleave_targets=False  ->  [[1, 10, 2], [3]]

    Source: the public HSTU ranking model interleaves so in training and at inference.

    Examples:
      >>> items, actions = tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[10, 20], [30]])
      >>> fr.layers.interleave(items, actions).to_list()
      [[1, 10, 2, 20], [3, 30]]
    """
    check_sequence("first", first)
    check_sequence("second", second)
    same = tf.debugging.assert_equal(
        first.row_splits, second.row_splits, message="first and second must have the same row lengths"
    )
    with tf.control_dependencies([] if same is None else [same]):
        pairs = tf.stack([first.values, second.values], axis=1)
    values = tf.reshape(pairs, tf.concat([[-1], tf.shape(pairs)[2:]], axis=0))
    values.set_shape([None, *pairs.shape[2:]])
    joined = tf.RaggedTensor.from_row_splits(values, 2 * first.row_splits, validate=False)
    if interleave_targets:
        return joined
    if num_targets is None:
        raise ValueError("interleave_targets=False needs num_targets, got None. Pass the targets per row, <int>[B].")
    history = first.row_lengths() - tf.cast(num_targets, tf.int64)
    fits = tf.debugging.assert_non_negative(history, message="a row has more targets than tokens")
    with tf.control_dependencies([] if fits is None else [fits]):
        rows, positions = token_positions(joined.row_splits)
        after_history = positions - tf.gather(2 * history, rows)
    kept = (after_history < 0) | (after_history % 2 == 0)
    splits = _splits(first.row_lengths() + history)
    return tf.RaggedTensor.from_row_splits(tf.boolean_mask(joined.values, kept), splits, validate=False)


@tf.custom_gradient
def gather_rows(table: tf.Tensor, rows: tf.Tensor):
    """Gathers table[rows], <float>[N, D] and <int>[T] -> <float>[T, D], with a dense gradient.

    tf.gather's gradient is IndexedSlices, which optimizers sort and Horovod gathers from all ranks.
    """

    def gradient(upstream):
        return tf.math.unsorted_segment_sum(upstream, rows, tf.shape(table)[0]), None

    return tf.gather(table, rows), gradient


@tf.custom_gradient
def _pad(values, row_splits):
    """Pads with a dense gradient, `from_dense`. TensorFlow's gradient of to_tensor is IndexedSlices."""

    def gradient(upstream):
        return from_dense(upstream, row_splits).values, None

    return tf.RaggedTensor.from_row_splits(values, row_splits, validate=False).to_tensor(), gradient


def _splits(lengths: tf.Tensor) -> tf.Tensor:
    """Converts lengths <int64>[B] to row splits <int64>[B+1]."""
    return tf.concat([tf.zeros([1], lengths.dtype), tf.cumsum(lengths)], axis=0)


def _tokens(row_splits: tf.Tensor, begins: tf.Tensor) -> tf.Tensor:
    """Returns begins[b], begins[b] + 1, ... for the tokens of each row b, <int64>[T]."""
    return tf.range(row_splits[-1]) + tf.gather(begins - row_splits[:-1], token_rows(row_splits))


EPSILON = 1e-6  # HSTU and FuXi use the same value.


def layer_norm(x: tf.Tensor, epsilon: float = EPSILON) -> tf.Tensor:
    """Returns (x - mean) / sqrt(variance + epsilon), without weights, in the shape and dtype of x <float>[..., D]."""
    wide = _wide(x)
    centered = wide - tf.reduce_mean(wide, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centered), axis=-1, keepdims=True)
    return tf.cast(centered * tf.math.rsqrt(variance + epsilon), x.dtype)


def rms_norm(x: tf.Tensor, epsilon: float = EPSILON) -> tf.Tensor:
    """Returns x / sqrt(mean(x^2) + epsilon), without weights, in the shape and dtype of x <float>[..., D]."""
    wide = _wide(x)
    return tf.cast(wide * tf.math.rsqrt(tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True) + epsilon), x.dtype)


def _wide(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def visible_keys(
    row_splits: tf.Tensor,
    num_targets: tf.Tensor | None = None,
    contextual_length: int | tf.Tensor = 0,
    attention_window: int = 0,
    min_full_length: int = 0,
    global_window: int = 0,
    target_group_size: int = 1,
) -> tf.Tensor:
    """Counts the visible keys of each query token under the masks of ops.jagged_attention, without making the pairs.

    Context tokens have number 0, history tokens 1, 2, ... (0, 1, ... without context), and all targets the next number.
    A token sees itself and the lower numbers within its window, or among the first of a global window. A context token
    sees all context and history tokens. A target also sees the earlier targets of its group.

    Args:
      row_splits: <int64>[B+1].
      num_targets: None or <int>[B], number of targets at the end of each row.
      contextual_length, attention_window, min_full_length, global_window, target_group_size: Masks of
        ops.jagged_attention.

    Returns:
      <int64>[T], each >= 1.
    """
    row_splits = tf.cast(row_splits, tf.int64)
    lengths = row_splits[1:] - row_splits[:-1]
    rows, positions = token_positions(row_splits)
    context = contextual_lengths(contextual_length, row_splits)
    context = tf.zeros_like(rows) if context is None else tf.gather(context, rows)
    context_beyond_one = tf.maximum(context - 1, 0)
    number = tf.maximum(positions - context_beyond_one, 0)
    history_end = lengths if num_targets is None else lengths - tf.cast(num_targets, tf.int64)
    history_end = tf.gather(history_end, rows)
    top = history_end - context_beyond_one
    if num_targets is not None:
        number = tf.minimum(number, top)
    lowest, outside = tf.zeros_like(number), tf.zeros_like(number)
    if attention_window:
        windowed = tf.ones_like(number, tf.bool)
        if min_full_length:
            windowed = number < top - min_full_length
        lowest = tf.where(windowed, tf.maximum(number - attention_window, 0), lowest)
        if global_window:  # the lowest numbers, as far as the window does not reach them
            outside = tf.minimum(global_window + tf.cast(context > 0, tf.int64), lowest)
    # All context tokens have number 0.
    sees_context = ((lowest == 0) | (outside > 0)) & (number > 0)
    before = number - lowest + outside + tf.cast(sees_context, tf.int64) * context_beyond_one
    if target_group_size > 1:
        before += tf.maximum(positions - history_end, 0) % target_group_size
    is_context = (context > 0) & (number == 0) & (top > 0)
    return tf.where(is_context, history_end, before + 1)
