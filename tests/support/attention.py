"""Cases of jagged attention: one set of arrays for the op in any dtype and for the oracle."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.oracles import jagged_attention as oracle
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

# Two equal thresholds leave bucket 1 empty, as in the published table. The largest does not fit 32 bits.
THRESHOLDS = np.array([2, 2, 5, 40, 41, 300, 1000, 90_000, 2**33], np.int64)
SEED = -(2**40) - 7  # of the dropout, negative and beyond 32 bits
PARAMETERS = {"power": [0.8, 0.4], "exponential": [0.7, -8.0], "stretched": [0.9, -3.0, 0.3]}


@dataclasses.dataclass(frozen=True)
class Case:
    """Parameters that a test varies."""

    lengths: tuple[int, ...]
    heads: int = 2
    qk_dim: int = 5
    value_dim: int = 3
    targets: int | None = None  # Largest number per row.
    contextual_length: int | tuple[int, ...] = 0  # One number for all rows, or one per row.
    attention_window: int = 0
    min_full_length: int = 0
    target_group_size: int = 1
    global_window: int = 0
    position: bool = False
    time: str | None = None
    far: bool = False  # True if times are more than 2^31 seconds apart.
    one_time: bool = False  # True if the targets of a row ask at one time.
    dropout: float = 0.0
    queries: tuple[int, ...] | None = None  # Per row, how many of its last tokens ask. None: all.
    seed: int = 0

    @property
    def masks(self) -> dict[str, int | np.ndarray]:
        names = ("contextual_length", "attention_window", "min_full_length", "target_group_size", "global_window")
        masks = {name: getattr(self, name) for name in names}
        if isinstance(self.contextual_length, tuple):
            masks["contextual_length"] = np.array(self.contextual_length, np.int64)
        return masks

    @property
    def splits(self) -> np.ndarray:
        return _splits(self.lengths)

    @property
    def query_splits(self) -> np.ndarray | None:
        return None if self.queries is None else _splits(self.queries)

    @property
    def asking(self) -> np.ndarray:
        """Returns the indices of the asking tokens."""
        queries = self.lengths if self.queries is None else self.queries
        ranges = [np.arange(end - count, end) for end, count in zip(self.splits[1:], queries)]
        return np.concatenate([np.empty(0, np.int64), *ranges]).astype(np.int64)


def _splits(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


class Arrays:
    """Draws the float32 arrays of a case."""

    def __init__(self, case: Case):
        self.case = case
        random = np.random.default_rng(case.seed)
        tokens = sum(case.lengths)
        dims = (case.qk_dim, case.qk_dim, case.value_dim)
        # Scores of size 1 lie where SiLU bends.
        self.weights = {
            name: (random.normal(size=(tokens, case.heads, dim)) * dim**-0.25).astype(np.float32)
            for name, dim in zip(("query", "key", "value"), dims)
        }
        longest = max(case.lengths, default=1) + 2
        if case.position:
            self.weights["position"] = random.normal(size=2 * longest - 1).astype(np.float32)
        if case.time == "buckets":
            self.weights["time"] = random.normal(size=len(THRESHOLDS) + 1).astype(np.float32)
        elif case.time is not None:
            self.weights["time"] = np.array(PARAMETERS[case.time], np.float32)
        self.weights["query"] = self.weights["query"][case.asking]
        self.scale = (random.uniform(0.5, 1.5, tokens) / longest).astype(np.float32)
        self.num_targets = None
        if case.targets is not None:
            drawn = random.integers(0, case.targets + 1, len(case.lengths))
            most = case.lengths if case.queries is None else case.queries
            self.num_targets = np.minimum(drawn, most).astype(np.int64)
        self.answers = random.integers(0, 2**61 if case.far else 200_000, tokens)
        self.asks = self.answers + random.integers(-50, 5000, tokens)
        if case.one_time:
            for end, targets in zip(case.splits[1:], self.num_targets):
                self.asks[end - targets : end] = self.asks[end - 1]

    def cotangent(self, shape) -> np.ndarray:
        """Returns a gradient of the output."""
        return np.random.default_rng(7).normal(size=shape).astype(np.float32)

    def bias(self, weights) -> ops.RelativeBias | None:
        """Returns the op's bias. The caller chooses the dtype of `weights`."""
        kind, time, times = self.case.time, None, None
        if kind is not None:
            times = ops.SequenceTimes(tf.constant(self.asks[self.case.asking]), tf.constant(self.answers))
            table = ops.BucketTable(weights["time"], tf.constant(THRESHOLDS))
            time = table if kind == "buckets" else ops.TimeFunction(kind, weights["time"])
        if time is None and "position" not in weights:
            return None
        return ops.RelativeBias(weights.get("position"), time, times)

    def definition(self, weights) -> dict[str, np.ndarray]:
        """Returns the arguments of the oracle, in which every token asks: those that do not, ask with zeros."""
        case = {"num_targets": self.num_targets, "masks": self.case.masks, "row_splits": self.case.splits}
        case.update({name: np.asarray(w, np.float64) for name, w in weights.items() if name in ("key", "value")})
        case.update(asks=self.asks, answers=self.answers, thresholds=THRESHOLDS, time=self.case.time)
        case.update({f"{name}_weights": weights[name] for name in ("position", "time") if name in weights})
        if "query" in weights:
            case["query"] = np.zeros(self.weights["key"].shape)
            case["query"][self.case.asking] = weights["query"]
        if self.case.dropout:
            case.update(oracle.dropout_of(self.case.dropout, SEED))
        return {**case, "scale": self.scale.astype(np.float64) / (1 - self.case.dropout), "alpha": 0.7}

    def out(self, weights, channels=False) -> np.ndarray:
        """Returns the oracle's output."""
        function = oracle.bias_attention if channels else oracle.attention
        return function(**self.definition(weights))[self.case.asking]

    def exact(self, channels=False) -> dict[str, np.ndarray]:
        """Returns output and gradients of the oracle."""
        out, asking = self.out(self.weights, channels), self.case.asking
        grads = np.zeros([sum(self.case.lengths), *out.shape[1:]])
        grads[asking] = self.cotangent(out.shape)
        function = oracle.bias_attention_grad if channels else oracle.attention_grad
        found = function(grads=grads, **self.definition(self.weights))
        found["query_grads"] = found["query_grads"][asking] if not channels else None
        names = [name for name in self.weights if not channels or name not in ("query", "key")]
        return {"out": out, **{f"d_{name}": found[f"{name}_grads"] for name in names}}

    def ours(self, weights, channels=False):
        """Returns the op's output."""
        return self.computed(ops, weights, channels)

    def computed(self, functions, weights, channels=False, **more):
        """Returns the output of `functions`, the ops or others with their arguments."""
        given = {"num_targets": self.num_targets, "bias": self.bias(weights), **self.case.masks}
        given["query_splits"] = self.case.query_splits
        if channels:
            return functions.bias_attention(weights["value"], self.case.splits, **given)
        tokens = [weights[name] for name in ("query", "key", "value")]
        scale = self.scale[self.case.asking]
        if self.case.dropout:
            given.update(dropout=self.case.dropout, dropout_seed=tf.constant(SEED, tf.int64))
        return functions.jagged_attention(*tokens, self.case.splits, scale=scale, alpha=0.7, **given, **more)

    def results(self, function, dtype, channels=False) -> dict[str, np.ndarray]:
        """Returns output and gradients as float64 arrays. Bias weights stay float32 beside 16-bit tokens."""
        tokens = ("query", "key", "value")
        weights = {name: tf.cast(w, dtype if name in tokens else tf.float32) for name, w in self.weights.items()}
        if channels:
            weights = {name: w for name, w in weights.items() if name not in ("query", "key")}
        with tf.GradientTape() as tape:
            tape.watch(weights)
            out = function(weights, channels)
            total = tf.reduce_sum(tf.cast(out, tf.float32) * self.cotangent(out.shape))
        gradients = tape.gradient(total, weights, unconnected_gradients="zero")
        found = {"out": out, **{f"d_{name}": tf.convert_to_tensor(g) for name, g in gradients.items()}}
        return {name: np.asarray(tf.cast(x, tf.float64)) for name, x in found.items()}


def assert_close(case: Case, channels: bool = False) -> None:
    """Compares the op in float32 with the oracle in float64.

    The limit is relative to the largest entry of each array. Sums of a few hundred float32 products differ by at most
    4e-6 here. Gradients of a bias weight sum over all pairs.
    """
    arrays = Arrays(case)
    ours = arrays.results(arrays.ours, tf.float32, channels)
    exact = arrays.exact(channels)
    assert set(ours) == set(exact)
    for name, want in exact.items():
        error = np.max(np.abs(ours[name] - want), initial=0.0)
        limit = 2e-5 * np.max(np.abs(want), initial=0.0) + 1e-9
        assert error <= limit, f"{name}: max error {error:.3g} exceeds {limit:.3g} in {case}"
