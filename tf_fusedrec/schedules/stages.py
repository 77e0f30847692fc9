"""The lookups of one batch, for schedules that run their stages at other times than the batch's compute.

    planned = plan(model, [batch])           which lookups the batch makes
    routed = route(requests(planned))        ids to their owners, in one all-to-all; reads no table
    contexts = fetch(routed)                 rows at the owner, as they are now
    found = bring(contexts)                   rows to the ranks that asked
    with supplying(planned, found): ...      the training step takes these rows
    apply_gradients(...)                     gradients to the owners, one update

route, look_ahead, fetch and apply_gradients are functions of embedding/lookup.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import FusedEmbedding, SuppliedRows, lookup
from tf_fusedrec.embedding.group_lookup import Context, LookupRequest
from tf_fusedrec.schedules.calls import EmbeddingCall, required_embeddings
from tf_fusedrec.schedules.micro_batch import WHOLE, MicroBatch


class Planned(NamedTuple):
    """One call and its lookups by group. Groups of other models' tables have none: their rows are looked up in the
    call."""

    embedding: FusedEmbedding
    groups: list[list[LookupRequest]]


Found = tuple[tf.Tensor, Context]  # rows [G, D] of one lookup, and the context that their gradients need


def plan(model: Any, pieces: Sequence[Any], *, steps_ahead: int = 0, before_update: int = 1) -> list[Planned]:
    """The lookups that a batch will make; layers that are frozen make none. The same for every batch but for tensors.

    Args:
      model: The PipelinedModel.
      pieces: Micro-batches, or the whole batch alone, as `data` of train_step.
      steps_ahead: See PipelinedModel.steps_ahead.
      before_update: Steps whose lookups come before the update of the first.

    Raises:
      ValueError: the model does not say which lookups it makes, or its tables cannot be looked up so.
    """
    for embedding in required_embeddings(model):
        embedding.check_deferrable(before_update)
    planned = []
    for number, piece in enumerate(pieces):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(piece)
        with model.working_on(MicroBatch(number, WHOLE.share), steps_ahead):
            planned += [_planned(call) for call in model.embedding_inputs(x) if call.embedding.trainable]
    return planned


def _planned(call: EmbeddingCall) -> Planned:
    groups = call.embedding.requests(call.inputs, call.weights, call.mask, training=True)
    return Planned(call.embedding, [[one for one in group if one.training] for group in groups])


def requests(planned: Sequence[Planned]) -> list[LookupRequest]:
    """All lookups of a plan, in the order in which every stage returns them."""
    return [one for call in planned for group in call.groups for one in group]


def bring(contexts: Sequence[Context]) -> list[Found]:
    """Sends rows to the ranks that asked for them. No exchange waits for another one to arrive."""
    return list(zip(lookup.bring(contexts), contexts))


@contextlib.contextmanager
def supplying(planned: Sequence[Planned], found: Sequence[Found]) -> Iterator[None]:
    """The training calls inside take these rows, in the order of the plan, and train them."""
    left = iter(found)
    by_embedding: dict[int, tuple[FusedEmbedding, list[SuppliedRows]]] = {}
    for call in planned:
        rows = [[next(left) for _ in group] or None for group in call.groups]
        by_embedding.setdefault(id(call.embedding), (call.embedding, []))[1].append(rows)
    with contextlib.ExitStack() as stack:
        for embedding, rows_of_calls in by_embedding.values():
            stack.enter_context(embedding.supplied_with(rows_of_calls))
        yield
