"""sasrec.py: a model of two blocks against reference results, the loop oracle, causality, refusals."""

import numpy as np
import pytest

from tests.layers.cases import ROW_LENGTHS, oracle_file, ragged, splits_of
from tests.oracles.sasrec import sasrec_block_oracle
from tf_fusedrec import losses
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import PositionEmbedding, SASRec


def set_weights(block, arrays, number):
    """Returns the weights of block `number` in the file, which stores them as [out, in] with q, k and v in one."""
    own = {
        name.split(f"layers__{number}__")[1]: array for name, array in arrays.items() if f"layers__{number}__" in name
    }
    columns = own["out_proj__bias"].shape[0]
    kernel, bias = own["in_proj_weight"].T, own["in_proj_bias"]
    block.query.set_weights([kernel[:, :columns], bias[:columns]])
    block.key_value.set_weights([kernel[:, columns:], bias[columns:]])
    block.attention_output.set_weights([own["out_proj__weight"].T, own["out_proj__bias"]])
    block.ffn_hidden.set_weights([own["_conv1d__0__weight"][:, :, 0].T, own["_conv1d__0__bias"]])
    block.ffn_output.set_weights([own["_conv1d__3__weight"][:, :, 0].T, own["_conv1d__3__bias"]])


def test_a_tiny_model_equals_the_reference_forward_and_backward():
    arrays, settings = oracle_file("model_tiny_sasrec")
    lengths, dim = arrays["lengths"].astype(np.int64), settings["dim"]
    own = {name[3:]: array for name, array in arrays.items() if name.startswith("p__")}
    items = tf.Variable(own["_embedding_module___item_emb__weight"])
    positions = PositionEmbedding(own["_input_features_preproc___pos_emb__weight"].shape[0])
    positions.build([None, None, dim])
    positions.positions.assign(own["_input_features_preproc___pos_emb__weight"])
    blocks = [SASRec(settings["heads"], dim, 12) for _ in range(settings["blocks"])]
    for number, block in enumerate(blocks):
        block.build([None, None, dim])
        set_weights(block, own, number)
    inputs, wanted = (np.concatenate([row[b : b + n] for row, n in zip(arrays["ids"], lengths)]) for b in (0, 1))
    with tf.GradientTape() as tape:
        rows = tf.RaggedTensor.from_row_splits(tf.gather(items, inputs), splits_of(lengths))
        x = positions(rows)
        for block in blocks:
            x = block(x)
        given = x.values, tf.gather(items, wanted), items, tf.constant(wanted), tf.range(items.shape[0])
        chosen = tf.constant(arrays["negatives"])
        loss = tf.reduce_mean(losses.sampled_softmax(*given, settings["temperature"], chosen=chosen))
    expected = np.concatenate([row[:n] for row, n in zip(arrays["seq_embeddings"], lengths)])
    unit = x.values / tf.norm(x.values, axis=-1, keepdims=True)
    np.testing.assert_allclose(unit, expected, atol=2e-6)  # float32, two blocks
    assert float(loss) == pytest.approx(float(arrays["loss"]), rel=1e-5)
    gradients = tape.gradient(loss, [items, positions.positions, blocks[0].ffn_hidden.kernel])
    names = ("_embedding_module___item_emb__weight", "_input_features_preproc___pos_emb__weight")
    for gradient, name in zip(gradients, names):
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), arrays[f"g__{name}"], atol=1e-4)
    hidden = arrays["g__forward_layers__0___conv1d__0__weight"][:, :, 0].T
    np.testing.assert_allclose(gradients[2], hidden, atol=1e-4)


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
def test_against_the_loop_oracle(lengths):
    layer, x = SASRec(2, 6, 30), ragged(lengths, 8)
    out = layer(x)
    key, value = np.split(layer.key_value.kernel.numpy(), 2, axis=1)
    zeros = np.zeros(8)
    weights = {
        "query": (layer.query.kernel.numpy(), zeros),
        "key": (key, zeros),
        "value": (value, zeros),
        "output": (layer.attention_output.kernel.numpy(), zeros),
        "hidden": (layer.ffn_hidden.kernel.numpy(), np.zeros(6)),
        "ffn": (layer.ffn_output.kernel.numpy(), zeros),
    }
    expected = sasrec_block_oracle(x.values.numpy().astype(np.float64), splits_of(lengths), weights, 2)
    np.testing.assert_allclose(out.values, expected, atol=1e-5)  # float32 sums of 8 terms, normalised twice


def test_flops_by_hand():
    flops = SASRec(2, 6, 30).forward_flops(tf.constant([0, 3, 3, 7], tf.int64), 8)
    assert float(flops) == 2 * (7 * (4 * 64 + 2 * 8 * 6) + (6 + 10) * 2 * 8)


def test_heads_that_do_not_divide_the_columns_are_refused():
    with pytest.raises(ValueError, match="num_heads must divide the columns of x, got 3 heads for 8"):
        SASRec(3)(ragged([2], 8))
