"""Every layer keeps its configuration, supports mixed precision and dropout, and accepts a batch without rows."""

import json

import numpy as np
import pytest

from tests.layers.cases import ROW_LENGTHS, splits_of, times, tokens
from tf_fusedrec import layers
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers.gated_output import GatedOutput
from tf_fusedrec.layers.relative_bias import BiasWeights

N = 30
HSTU_SIZES = {"num_heads": 2, "qk_dim": 4, "value_dim": 6, "max_sequence_length": N}
FUXI_SIZES = {**HSTU_SIZES, "dropout": 0.2}
# Class, arguments and use of timestamps by name. A new layer adds one entry.
LAYERS = {
    "hstu_research": (layers.HSTU, {**HSTU_SIZES, "concat": True, "dropout": 0.3, "time_buckets": 17}, True),
    "hstu_production": (
        layers.HSTU,
        {
            **HSTU_SIZES,
            "form": "production",
            "group_norm": True,
            "gate_activation": "silu",
            "position_bias": False,
            "time_encoding": "none",
            "attention_window": 5,
            "min_full_length": 2,
            "divisor": "row_length",
            "attention_dropout": 0.5,
        },  # fmt: skip
        False,
    ),
    "hstu_mtgrboost": (layers.HSTU, {**HSTU_SIZES, "form": "mtgrboost", "time_encoding": "power"}, True),
    "fuxi_alpha": (layers.FuXi, {**FUXI_SIZES, "ffn_multiple": 2}, True),
    "fuxi_beta": (layers.FuXi, {**FUXI_SIZES, "form": "beta", "time_encoding": "exponential"}, True),
    "fuxi_gamma": (layers.FuXi, {**FUXI_SIZES, "form": "beta", "time_encoding": "stretched"}, True),
    "sasrec": (layers.SASRec, {"num_heads": 2, "ffn_units": 6, "max_sequence_length": N, "dropout": 0.1}, False),
    "positions": (layers.PositionEmbedding, {"max_sequence_length": N, "dropout": 0.1}, False),
    "position_time": (
        layers.PositionTimeEmbedding,
        {"num_positions": N, "time_buckets": 12, "time_bucket_function": "log"},
        True,
    ),
}


def made(name, **more):
    kind, arguments, timed = LAYERS[name]
    layer = kind(**arguments, **more, name=name)

    def call(lengths, **options):
        splits = splits_of(lengths)
        x = tf.RaggedTensor.from_row_splits(tokens(lengths, 8), splits)
        if timed:
            options["timestamps"] = tf.RaggedTensor.from_row_splits(times(lengths), splits)
        return layer(x, **options)

    return layer, call


@pytest.mark.parametrize("name", LAYERS)
def test_config_round_trip_builds_the_same_layer(name):
    layer, _ = made(name)
    again = keras.layers.deserialize(json.loads(json.dumps(keras.layers.serialize(layer))))
    assert type(again) is type(layer) and again.get_config() == layer.get_config()
    assert LAYERS[name][1].items() <= layer.get_config().items()
    for one in (layer, again):
        one.build([None, None, 8])
    assert [w.shape for w in again.weights] == [w.shape for w in layer.weights] and layer.weights


@pytest.mark.parametrize("name", LAYERS)
def test_a_functional_model_can_be_saved(name, tmp_path):
    layer, _ = made(name)
    splits = splits_of(ROW_LENGTHS["mixed"])
    values = {"x": tokens(ROW_LENGTHS["mixed"], 8), "times": times(ROW_LENGTHS["mixed"])}
    inputs = {
        "x": keras.Input([None, 8], ragged=True, name="x"),
        "times": keras.Input([None], ragged=True, dtype="int64", name="times"),
    }
    out = layer(inputs["x"], timestamps=inputs["times"]) if LAYERS[name][2] else layer(inputs["x"])
    model = keras.Model(inputs, out)
    rows = {name: tf.RaggedTensor.from_row_splits(part, splits) for name, part in values.items()}
    answer = model(rows)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")(rows)
    np.testing.assert_array_equal(again.row_splits, splits)
    np.testing.assert_array_equal(again.values, answer.values)


@pytest.mark.parametrize("name", LAYERS)
def test_mixed_bfloat16_runs_near_float32(name):
    layer, call = made(name)
    expected = call(ROW_LENGTHS["mixed"]).values
    half, half_call = made(name, dtype=keras.mixed_precision.Policy("mixed_bfloat16"))
    half.build([None, None, 8])
    half.set_weights(layer.get_weights())
    with tf.GradientTape() as tape:
        out = half_call(ROW_LENGTHS["mixed"]).values
        total = tf.reduce_sum(tf.cast(out, tf.float32) ** 2)
    assert out.dtype == tf.bfloat16
    # bfloat16 keeps 8 bits: a hundredth of the largest entry is a few roundings.
    np.testing.assert_allclose(tf.cast(out, tf.float32), expected, atol=0.03 * np.abs(expected).max())
    for variable, gradient in zip(half.trainable_variables, tape.gradient(total, half.trainable_variables)):
        assert gradient.dtype == variable.dtype == tf.float32 and np.all(np.isfinite(gradient)), variable.name
        assert np.any(gradient), variable.name


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("lengths", ["all_rows_empty", "no_rows", "empty_first_and_last"])
def test_rows_without_tokens_are_ordinary(name, lengths):
    _, call = made(name)
    out = call(ROW_LENGTHS[lengths])
    np.testing.assert_array_equal(out.row_splits, splits_of(ROW_LENGTHS[lengths]))
    assert np.all(np.isfinite(out.values))


@pytest.mark.parametrize(
    "name", [name for name, (_, given, _) in LAYERS.items() if {"dropout", "attention_dropout"} & set(given)]
)
def test_dropout_works_in_training_only_and_follows_the_seed(name):
    first, call = made(name)
    lengths = ROW_LENGTHS["mixed"]
    still = call(lengths).values
    np.testing.assert_array_equal(call(lengths, training=False).values, still)
    drawn = []
    for seed in (3, 3, 4):
        keras.utils.set_random_seed(seed)
        layer, call = made(name)
        layer.build([None, None, 8])
        layer.set_weights(first.get_weights())
        drawn.append(call(lengths, training=True).values)
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.any(drawn[0] != still) and np.any(drawn[0] != drawn[2])
    graph = tf.function(lambda: call(lengths, training=True)).get_concrete_function().graph
    assert not [op.name for op in graph.get_operations() if op.type.startswith("Assign")]  # no counters: more ops


@pytest.mark.parametrize(
    "name", [name for name, (_, arguments, _) in LAYERS.items() if "num_positions" not in arguments]
)
def test_a_longer_row_and_a_tensor_are_refused(name):
    layer, call = made(name)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"longer than max_sequence_length = {N}"):
        call([2, N + 1])
    with pytest.raises(ValueError, match="x must be a RaggedTensor"):
        layer(tf.zeros([1, 2, 8]))


@pytest.mark.parametrize("name", [name for name, (*_, timed) in LAYERS.items() if timed and name != "position_time"])
def test_a_time_bias_needs_timestamps(name):
    layer, _ = made(name)
    with pytest.raises(ValueError, match=f"'{name}_bias' has a time bias and needs timestamps"):
        layer(tf.RaggedTensor.from_row_splits(tokens([3], 8), [0, 3]))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (layers.MMoE, {"num_experts": 4, "expert_units": 5, "num_tasks": 2, "top_k": 3}),
        (layers.SyncBatchNormalization, {"momentum": 0.5}),
        (layers.DotInteraction, {"self_interaction": True}),
        (layers.FeatureCross, {"projection_dim": 3}),
    ],
)
def test_keras_rebuilds_layers_of_dense_inputs(kind, given):
    layer = kind(**given)
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert type(again) is kind and given.items() <= again.get_config().items()


def test_parts_of_layers_round_trip():
    for layer in (
        BiasWeights(9, False, "stretched", 3, name="bias"),
        GatedOutput(2, "per_head", True, "sigmoid", "raw", False, 0.4, name="output"),
    ):
        again = type(layer).from_config(layer.get_config())
        assert again.get_config() == layer.get_config()


REFUSALS = [
    (layers.HSTU, {"num_heads": 0}, "num_heads must be >= 1, got 0"),
    (layers.HSTU, {"attention_window": -1}, "attention_window must be >= 0, got -1"),
    (layers.HSTU, {"global_window": 4}, "global_window = 4 needs an attention_window, got 0"),
    (layers.HSTU, {"divisor": "batch"}, r"divisor must be one of \('max_length', 'row_length', 'visible_keys'\), got"),
    (layers.HSTU, {"time_encoding": "sine"}, r"time_encoding must be one of \('none', 'buckets', .* got 'sine'"),
    (layers.HSTU, {"gate_activation": "relu"}, "gate_activation must be one of .* got 'relu'"),
    (layers.HSTU, {"attention_dropout": 1.0}, "attention_dropout must be >= 0 and < 1, got 1.0"),
    (layers.HSTU, {"group_norm": True}, 'group_norm and gate_activation belong to form "production", got form \'res'),
    (layers.HSTU, {"form": "mtgrboost", "concat": True}, 'concat belongs to the forms "research" and "production"'),
    (layers.HSTU, {"max_sequence_length": 0}, "max_sequence_length must be >= 1, got 0"),
    (layers.HSTU, {"form": "meta"}, r"form must be one of \('research', 'production', 'mtgrboost'\), got 'meta'"),
    (layers.HSTU, {"time_buckets": 146}, "time_buckets must be 1 .. 145, got 146"),
    (layers.FuXi, {"form": "gamma"}, r"form must be one of \('alpha', 'beta'\), got 'gamma'"),
    (layers.FuXi, {"time_encoding": "none"}, 'time_encoding must not be "none"'),
    (layers.FuXi, {"ffn_multiple": -1}, "ffn_multiple must be >= 0, got -1"),
    (layers.FuXi, {"value_dim": 0}, "value_dim must be >= 1, got 0"),
    (layers.SASRec, {"ffn_units": 0}, "ffn_units must be >= 1, got 0"),
    (layers.PositionEmbedding, {"max_sequence_length": 0}, "max_sequence_length must be >= 1, got 0"),
    (layers.PositionTimeEmbedding, {"num_positions": 0}, "num_positions must be >= 1, got 0"),
    (layers.PositionTimeEmbedding, {"num_positions": 3, "time_bucket_function": "exp"}, "must be one of .*'log'.* got"),
    (GatedOutput, {"norm": "other"}, "norm must be one of .* got 'other'"),
    (GatedOutput, {"gate_activation": "other"}, "gate_activation must be one of .* got 'other'"),
    (GatedOutput, {"concat": "other"}, "concat must be one of .* got 'other'"),
    (layers.MMoE, {"num_experts": 0}, "num_experts must be >= 1, got 0"),
    (layers.MMoE, {"expert_units": 0}, "expert_units must be >= 1, got 0"),
    (layers.MMoE, {"num_tasks": 0}, "num_tasks must be >= 1, got 0"),
    (layers.MMoE, {"top_k": 5}, "top_k must be 1 .. num_experts = 4, got 5"),
    (layers.MMoE, {"top_k": 0}, "top_k must be 1 .. num_experts = 4, got 0"),
]
MMOE = {"num_experts": 4, "expert_units": 5, "num_tasks": 2, "top_k": 1}


@pytest.mark.parametrize(("layer", "arguments", "words"), REFUSALS, ids=str)
def test_wrong_arguments_are_named(layer, arguments, words):
    with pytest.raises(ValueError, match=words):
        layer(**{**(MMOE if layer is layers.MMoE else {}), **arguments})


def test_bias_weights_are_float32_under_any_policy():
    layer = BiasWeights(9, dtype=keras.mixed_precision.Policy("mixed_bfloat16"))
    layer.build(None)
    assert {tf.as_dtype(weight.dtype) for weight in layer.weights} == {tf.float32}
    assert layer.compute_dtype == "float32"
