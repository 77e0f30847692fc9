"""A layer that is extended by the pieces of a row gives the outputs of the whole row, or refuses to be extended.

tests/models/test_kept_states.py keeps the tokens that `attend` returns.
"""

import functools

import numpy as np
import pytest

from tests.layers.cases import cuts, splits_of, times
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import HSTU, FuXi, PositionEmbedding, SASRec, jagged
from tf_fusedrec.layers.stock_attention import STOCK
from tf_fusedrec.ops import SequenceTimes

LENGTHS, TARGETS, COLUMNS = [9, 70, 1, 0, 30], [2, 5, 1, 0, 0], 8
HEADS = {"num_heads": 2, "qk_dim": 4, "value_dim": 4, "max_sequence_length": 80}


def assert_near(got, want):
    """Float32 sums in another order, relative to the largest output."""
    np.testing.assert_allclose(got.values, want.values, rtol=0, atol=1e-6 * np.max(np.abs(want.values)))


def layer_of(kind, **options):
    tf.keras.utils.set_random_seed(3)
    layer = {"hstu": HSTU, "fuxi": FuXi, "sasrec": SASRec}[kind](**options)
    layer.build(tf.TensorShape([None, None, COLUMNS]))
    return layer


LAYERS = {
    "research": functools.partial(layer_of, "hstu", **HEADS),
    "production": functools.partial(
        layer_of, "hstu", **HEADS, form="production", group_norm=True, attention_window=7, divisor="visible_keys"
    ),
    "mtgrboost": functools.partial(
        layer_of, "hstu", **HEADS, form="mtgrboost", time_encoding="none", target_group_size=2
    ),
    "semi_local": functools.partial(layer_of, "hstu", **HEADS, attention_window=7, global_window=3),
    "no_bias": functools.partial(layer_of, "hstu", **HEADS, position_bias=False, time_encoding="power"),
    "fuxi_alpha": functools.partial(layer_of, "fuxi", **HEADS),
    "fuxi_beta": functools.partial(layer_of, "fuxi", **HEADS, form="beta", time_encoding="stretched"),
    "sasrec": functools.partial(layer_of, "sasrec", num_heads=2, max_sequence_length=80),
}


class Rows:
    """Rows of tokens and the times at which they ask; the last tokens of a row are targets where the layer has any."""

    def __init__(self, layer, lengths=LENGTHS, targets=TARGETS):
        random = np.random.default_rng(1)
        self.layer = layer
        self.lengths = np.array(lengths)
        self.targets = np.array(targets) * isinstance(layer, HSTU)
        tokens = random.normal(size=[sum(lengths), COLUMNS]).astype(np.float32)
        self.x = tf.RaggedTensor.from_row_splits(tokens, splits_of(lengths))
        answers = times(lengths)
        self.times = SequenceTimes(tf.constant(answers + random.integers(0, 9000, len(answers))), tf.constant(answers))

    def given(self, times, targets):
        """Returns the arguments of a call that this layer has."""
        given = {"num_targets": tf.constant(targets)} if isinstance(self.layer, HSTU) else {}
        if getattr(self.layer, "time_encoding", "none") != "none":
            given["timestamps"] = times
        return given

    def whole(self, **masks):
        return self.layer(self.x, **self.given(self.times, self.targets), **masks)

    def piece(self, begin, end):
        """Returns tokens [begin[b], end[b]) of each row b, and their times."""
        cut = [tf.constant(n, tf.int64) for n in (begin, end - begin, self.lengths - end)]
        parts = [jagged.split(self.x.with_values(part), cut)[1] for part in (self.x.values, *self.times)]
        return parts[0], SequenceTimes(*(part.values for part in parts[1:]))

    def extend(self, begin, end, state, targets=0, **masks):
        x, times = self.piece(begin, end)
        return self.layer.extend(x, state, **self.given(times, np.zeros_like(end) + targets), **masks)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_pieces_of_a_row_equal_the_whole_row(make, stock):
    layer = make()
    rows = Rows(layer)
    if stock:
        layer.kernels = STOCK
    want = rows.whole()
    history = rows.lengths - rows.targets
    state, outputs = None, []
    for begin, end in zip(cuts(history, 5), cuts(history, 5)[1:]):
        y, state = rows.extend(begin, end, state)
        outputs.append(y)
    y, last = rows.extend(history, rows.lengths, state, rows.targets)
    got = jagged.concat([*outputs, y])
    assert_near(got, want)
    # Targets leave no state.
    for before, after in zip(state, last):
        if before is not None:  # Layers without time bias have no times.
            np.testing.assert_array_equal(after.values, before.values)
            np.testing.assert_array_equal(after.row_splits, splits_of(history))


@pytest.mark.parametrize("make", [LAYERS["research"], LAYERS["production"]], ids=["research", "production"])
def test_candidates_in_pieces_equal_all_at_once(make):
    """Every piece meets the same state (M-FALCON). The products of dense layers depend on the number of tokens."""
    rows = Rows(make(), [79, 72], [9, 1])
    history = rows.lengths - rows.targets
    _, state = rows.extend(np.zeros_like(history), history, None)
    together, _ = rows.extend(history, rows.lengths, state, rows.targets)
    pieces = []
    for begin in range(0, 9, 2):
        begins, ends = (np.minimum(history + n, rows.lengths) for n in (begin, begin + 2))
        pieces.append(rows.extend(begins, ends, state, ends - begins)[0])
    assert_near(jagged.concat(pieces), together)


def test_events_that_are_not_kept_come_again():
    rows = Rows(LAYERS["research"]())
    history = rows.lengths - rows.targets
    open_events = np.minimum(history, 1)
    x, times = rows.piece(np.zeros_like(history), history)
    _, state = rows.layer.extend(x, None, times, keep=tf.constant(history - open_events))
    y, _ = rows.extend(history - open_events, rows.lengths, state, rows.targets)
    assert_near(y, jagged.last(rows.whole(), y.row_lengths()))


def test_a_state_with_context_takes_targets_only():
    rows = Rows(LAYERS["research"]())
    history, masks = rows.lengths - rows.targets, {"contextual_length": 2}
    want = rows.whole(**masks)
    y, state = rows.extend(np.zeros_like(history), history, None, **masks)
    scores, _ = rows.extend(history, rows.lengths, state, rows.targets, **masks)
    assert_near(jagged.concat([y, scores]), want)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a state with context takes targets only, got new events"):
        rows.extend(history, rows.lengths, state, 0, **masks)
    x, times = rows.piece(history, rows.lengths)
    with pytest.raises(ValueError, match="takes targets only, got num_targets=None.*makes the context causal"):
        rows.layer.extend(x, state, times, **masks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"divisor": "row_length"}, 'divisor="row_length", every output changes when its row grows'),
        ({"attention_window": 5, "min_full_length": 2}, "the last min_full_length = 2 tokens ignore the window"),
    ],
)
def test_layers_whose_outputs_depend_on_later_tokens_refuse(options, words):
    layer = layer_of("hstu", **HEADS, **options)
    with pytest.raises(ValueError, match=f"cannot keep a state: .*{words}.* or compute whole rows"):
        layer.extend(Rows(layer).x)
    layer_of("hstu", **HEADS, min_full_length=2).check_extendable()  # Without a window, it has no effect.


def test_wrong_arguments_of_extend():
    rows = Rows(LAYERS["research"]())
    history = rows.lengths - rows.targets
    x, times = rows.piece(np.zeros_like(history), history)
    _, state = rows.layer.extend(x, None, times)
    refused = tf.errors.InvalidArgumentError
    with pytest.raises(ValueError, match="must be SequenceTimes where layer .* is extended, got RaggedTensor"):
        rows.layer.extend(x, None, x.with_values(times.answers))
    with pytest.raises(ValueError, match="has a time bias and needs timestamps, got None"):
        rows.layer.extend(x)
    with pytest.raises(refused, match="timestamps must have one time per token of x"):
        rows.layer.extend(x, None, SequenceTimes(times.asks[1:], times.answers[1:]))
    with pytest.raises(ValueError, match="state.answers must be there for layer .*, got none"):
        rows.layer.extend(x, state._replace(answers=None), times)
    with pytest.raises(ValueError, match="x must be a RaggedTensor"):
        rows.layer.extend(x.values, None, times)
    with pytest.raises(ValueError, match="has no weights yet"):
        HSTU(**HEADS).extend(x, None, times)
    with pytest.raises(refused, match="a row of x is longer than max_sequence_length = 80"):
        rows.layer.extend(x, state, times)
    few = tf.gather(x, [0, 1])
    with pytest.raises(refused, match="must have the same number of rows"):
        rows.layer.extend(few, state, SequenceTimes(times.asks[:72], times.answers[:72]))
    for keep in (history + 1, history * 0 - 1):
        with pytest.raises(refused, match="keep must be between 0 and the number of x's tokens that are no targets"):
            rows.layer.extend(x, None, times, keep=tf.constant(keep))
    with pytest.raises(refused, match="longer than max_sequence_length = 80"):
        PositionEmbedding(80)(x, before=tf.constant(history + 60))
