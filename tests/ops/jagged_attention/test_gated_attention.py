"""The gate of jagged_attention, both passes: the definition of the attention and the formulas of gate and norm."""

import numpy as np
import pytest

from tests.oracles import jagged_attention as oracle
from tests.support.attention import Arrays, Case
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

TOKENS = ("query", "key", "value", "gate")
FORMS = {
    "plain": {"weights": False},
    "weights": {},
    "per_head": {"per_head": True},
    "gate_first": {"gate_first": True},
    "gate_first_per_head_plain": {"weights": False, "gate_first": True, "per_head": True},
}
# Two of them have several units per row, one has rows of one panel, and one has columns that fill no vector.
CASES = {
    "short": Case((5, 0, 63), 2, 16, 16, targets=3),
    "odd": Case((70, 9), 3, 5, 7, contextual_length=2, position=True, time="buckets"),
    "units": Case((1100, 3), 2, 4, 4),
    "dropout": Case((70, 9), 2, 4, 6, dropout=0.3),
    "queries": Case((90, 600, 4), 2, 4, 6, queries=(0, 520, 4)),
}


class Gated:
    """The arrays of a case, and those of gate and norm."""

    def __init__(self, case, weights=True, per_head=False, gate_first=False):
        self.arrays, self.per_head, self.gate_first = Arrays(case), per_head, gate_first
        random, columns = np.random.default_rng(3), case.heads * case.value_dim
        self.given = dict(self.arrays.weights)
        self.given["gate"] = random.normal(size=[len(case.asking), case.heads, case.value_dim]).astype(np.float32)
        if weights:
            self.given.update({n: random.normal(size=columns).astype(np.float32) for n in ("norm_weight", "norm_bias")})

    def ours(self, given):
        norm = [given.get(name) for name in ("norm_weight", "norm_bias")]
        # As small as the attention is, so that both parts of the deviation count.
        gate = ops.OutputGate(given["gate"], *norm, self.per_head, self.gate_first, epsilon=1e-3)

        return self.arrays.computed(ops, given, gate=gate)

    def exact(self):
        """Returns output and gradients of the oracle."""
        given, asking = {name: x.astype(np.float64) for name, x in self.given.items()}, self.arrays.case.asking
        case = self.arrays.definition(given)
        form = {"per_head": self.per_head, "gate_first": self.gate_first, "epsilon": 1e-3}
        form.update({name: x for name, x in given.items() if "gate" in name or "norm" in name})
        attended = oracle.attention(**case)
        out, gradients = oracle.gate(attended[asking], grads=self.arrays.cotangent(attended[asking].shape), **form)
        grads = np.zeros(attended.shape)
        grads[asking] = gradients["attended_grads"]
        gradients.update(oracle.attention_grad(grads=grads, **case))
        gradients["query_grads"] = gradients["query_grads"][asking]
        return {"out": out, **{name: gradients[f"{name}_grads"] for name in given}}

    def results(self, dtype=tf.float32):
        """Returns output and gradients of the op in float64. Weights are float32."""
        given = {name: tf.cast(x, dtype if name in TOKENS else tf.float32) for name, x in self.given.items()}
        with tf.GradientTape() as tape:
            tape.watch(given)
            out = self.ours(given)
            total = tf.reduce_sum(tf.cast(out, tf.float32) * self.arrays.cotangent(out.shape))
        gradients = tape.gradient(total, given)
        found = {"out": out, **{name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()}}
        return {name: np.asarray(tf.cast(x, tf.float64)) for name, x in found.items()}


def assert_near(found, exact, relative):
    assert set(found) == set(exact)
    for name, want in exact.items():
        error, limit = np.max(np.abs(found[name] - want), initial=0.0), relative * np.max(np.abs(want), initial=0.0)
        assert error <= limit, f"{name}: max error {error:.3g} exceeds {limit:.3g}"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_definitions_forward_and_backward(case, form):
    gated = Gated(case, **form)
    # As for the attention itself, and a norm divides by a small deviation.
    assert_near(gated.results(), gated.exact(), 5e-5)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=str)
def test_half_precision(dtype):
    """The rounded inputs give an error of a few units in the last place."""
    gated = Gated(Case((40, 13), 2, 8, 8, targets=3), gate_first=True)
    gated.given.update({n: tf.cast(tf.cast(gated.given[n], dtype), tf.float32).numpy() for n in TOKENS})
    exact, found = gated.exact(), gated.results(dtype)
    # The backward pass reads the attention rounded to 16 bits, which the norm divides by the deviation.
    assert_near(found, exact, 16 * 2.0 ** -(11 if dtype == tf.float16 else 8))


def test_the_last_head_of_a_block_gates_it_whatever_the_threads():
    gated = Gated(Case((1300, 700, 20), 3, 8, 8))
    first = gated.results()
    for _ in range(3):
        for name, again in gated.results().items():
            np.testing.assert_array_equal(again, first[name])


def test_no_tokens():
    for case in (Case((0, 0)), Case(())):
        gated = Gated(case)
        found = gated.results()
        assert found["out"].size == 0 and not np.any(found["norm_weight"])


def test_refusals():
    tokens, splits = tf.zeros([3, 2, 4]), tf.constant([0, 3], tf.int64)

    def refuses(words, error=tf.errors.InvalidArgumentError, gate=tokens, **norm):
        with pytest.raises(error, match=words):
            given = ops.OutputGate(gate, **norm)
            tf.function(lambda: ops.jagged_attention(tokens, tokens, tokens, splits, scale=1.0, gate=given))()

    refuses("weight and bias of an OutputGate must be given together", ValueError, weight=tf.ones(8))
    refuses(
        "norm_weight must have one entry per column of all heads, that is 8, got 4", weight=tf.ones(4), bias=tf.ones(4)
    )
    refuses(
        "norm_bias must have one entry per column of all heads, that is 8, got 1", weight=tf.ones(8), bias=tf.ones(1)
    )

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def call(gate):
        return ops.jagged_attention(tokens, tokens, tokens, splits, scale=1.0, gate=ops.OutputGate(gate))

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"gate must have the shape of the attention \[3,2,4\]"):
        call(tf.zeros([3, 8]))


def test_shape_function():
    def attend(q, v, splits, gate):
        return ops.jagged_attention(q, q, v, splits, scale=1.0, gate=ops.OutputGate(gate))

    unknown = (tf.float32, [None, None, None])
    shapes = (tf.float32, [7, None, 8]), (tf.float32, [None, None, 3]), (tf.int64, [3])
    assert inferred(attend, *shapes, (tf.float32, [None, 2, None])) == [[7, 2, 3]]
    assert inferred(attend, *shapes, unknown) == [[7, None, 3]]
    with pytest.raises(ValueError, match="must be equal"):
        inferred(attend, *shapes, (tf.float32, [7, 2, 4]))
