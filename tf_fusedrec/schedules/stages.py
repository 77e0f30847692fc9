"""The stages of all lookups of one batch, for schedules that run them at other times than its compute.

route   ids to their owners, in one all2all     reads no table
fetch   rows at the owner, as they are now
bring   rows to who asked, answered to the calls of the training step by `answering`

A lookup here is that of one lane of a group (GroupLookup.lanes) in one call of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import Answer, FusedEmbedding, batch_lookup
from tf_fusedrec.embedding.batch_lookup import LaneCall
from tf_fusedrec.embedding.group_lookup import Context, Routed
from tf_fusedrec.ops import RowsAhead
from tf_fusedrec.schedules.calls import EmbeddingCall, embeddings_of
from tf_fusedrec.schedules.micro_batch import WHOLE, MicroBatch


class Planned(NamedTuple):
    """One call, and its lookups by group: none of tables that are not this model's own, which are looked up as ever."""

    embedding: FusedEmbedding
    groups: list[list[LaneCall]]


Answered = tuple[tf.Tensor, Context]  # rows [G, D] of one lookup, and what their gradients need


def plan(model: Any, pieces: Sequence[Any], *, steps_ahead: int = 0, before_update: int = 1) -> list[Planned]:
    """Which lookups a batch in these pieces will make, by group; those of frozen layers are left out.

    What it answers is the same for every batch but for the tensors in it.

    Args:
      pieces: micro-batches, or the whole batch alone, as `data` of train_step.
      steps_ahead: see PipelinedModel.steps_ahead.
      before_update: steps whose lookups come before the update of the first.

    Raises:
      ValueError: lookups cannot be told; tables cannot take them.
    """
    for embedding in embeddings_of(model):
        embedding.check_deferrable(before_update)
    planned = []
    for number, piece in enumerate(pieces):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(piece)
        with model.working_on(MicroBatch(number, WHOLE.share), steps_ahead):
            planned += [_by_group(call) for call in model.embedding_inputs(x) if call.embedding.trainable]
    return planned


def _by_group(call: EmbeddingCall) -> Planned:
    number = call.embedding.next_call()
    grouped = call.embedding.grouped(call.inputs, call.weights or {}, call.mask or {})
    return Planned(
        call.embedding,
        [
            [] if group.group.external else [LaneCall(group, *lane, number, True) for lane in group.lanes(mine)]
            for group, mine in grouped
        ],
    )


def lookups(planned: Sequence[Planned]) -> list[LaneCall]:
    """All lookups of a plan in the order in which the stages answer them."""
    return [lane for call in planned for lanes in call.groups for lane in lanes]


def route(planned: Sequence[Planned]) -> list[Routed]:
    """Sends the ids of all calls to their owners."""
    return batch_lookup.route(lookups(planned))


def look_ahead(planned: Sequence[Planned], routes: Sequence[Routed]) -> list[RowsAhead]:
    """Reads rows at the owner that `fetch` will want, and changes nothing. Native tables only."""
    return batch_lookup.look_ahead(lookups(planned), routes)


def fetch(
    planned: Sequence[Planned], routes: Sequence[Routed], ahead: Sequence[RowsAhead] | None = None
) -> list[Context]:
    """Looks rows up where they are, for training. `planned` may be that of another batch: it says which tables."""
    return batch_lookup.fetch(lookups(planned), routes, ahead)


def bring(planned: Sequence[Planned], contexts: Sequence[Context]) -> list[Answered]:
    """Sends rows to the ranks that asked for them: no exchange waits for another to arrive.

    A table gives the rows of its lookups in the order of the plan, so their exchanges begin in that order, and Horovod
    runs them one after another as they came.
    """
    return [(lane.lookup.bring(context), context) for lane, context in zip(lookups(planned), contexts)]


@contextlib.contextmanager
def answering(planned: Sequence[Planned], answers: Sequence[Answered]) -> Iterator[None]:
    """The training calls inside are answered these rows, in the order of the plan, and train them."""
    left = iter(answers)
    by_embedding: dict[int, tuple[FusedEmbedding, list[Answer]]] = {}
    for call in planned:
        of_call = [[next(left) for _ in lanes] or None for lanes in call.groups]
        by_embedding.setdefault(id(call.embedding), (call.embedding, []))[1].append(of_call)
    with contextlib.ExitStack() as stack:
        for embedding, of_embedding in by_embedding.values():
            stack.enter_context(embedding.answering(of_embedding))
        yield
