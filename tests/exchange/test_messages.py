"""Joined messages arrive as if each had travelled alone."""

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.exchange import routing

RANKS = 3


def _messages(random, segments):
    """Returns blocks [counts | ids] to each rank as lists, by lookup and source rank. Some have no ids."""

    def block(count):
        counts = random.integers(0, 4, count) * random.integers(0, 2)
        return [*counts.tolist(), *random.integers(-9, 9, counts.sum()).tolist()]

    return [[[block(count) for _ in range(RANKS)] for _ in range(RANKS)] for count in segments]


def _sent(blocks, padding):
    """Returns the blocks of one source in the form of ops.rank_partition: a padded message and its splits."""
    message = [*sum(blocks, []), *[7] * padding]
    return tf.constant(message, tf.int64), tf.constant([len(block) for block in blocks])


@pytest.mark.parametrize("segments", [(2,), (1, 1), (2, 1, 3), (1, 4, 1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_joined_messages_are_split_again(segments, seed):
    sent = _messages(np.random.default_rng(seed), segments)
    joined = []
    for source in range(RANKS):
        message, splits = routing.join_messages([_sent(of_lookup[source], padding=source) for of_lookup in sent])
        assert len(message) % 256 == 0 or len(segments) == 1  # few sizes
        ends = np.cumsum(splits)
        joined.append([message.numpy()[end - size : end] for size, end in zip(splits.numpy(), ends)])
    for rank in range(RANKS):
        arrived = [blocks[rank] for blocks in joined]
        splits = tf.constant([len(block) for block in arrived], tf.int32)
        parts = routing.split_messages(tf.constant(np.concatenate(arrived), tf.int64), splits, segments)
        assert len(parts) == len(segments)
        for of_lookup, (message, entries) in zip(sent, parts):
            wanted = [of_lookup[source][rank] for source in range(RANKS)]
            assert entries.numpy().tolist() == [len(block) for block in wanted]
            assert message.numpy().tolist() == sum(wanted, [])
