"""The lookups of one batch, for schedules that run their stages at other times than the batch's compute.

    planned = plan(model, [batch])               which lookups the batch makes
    routed = route(*waves(planned))              ids to their owners, in one all-to-all; reads no table
    contexts = fetch(routed)                     rows at the owner, as they are now
    found = bring(*by_micro_batch(planned, contexts))  rows to the ranks that asked, in the order of micro-batches
    with supplying(planned, found):              the training step takes these rows,
        with deferring(model, gradients): ...    and collects their gradients
    apply_gradients(gradients)                   gradients to the owners, one update

route, look_ahead, fetch, bring and apply_gradients are functions of embedding/lookup.py. A training call flattens its
inputs again. The plan may be a step old, and the gradient of feature weights needs the weights of the call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.embedding.features import placing_ids
from tf_fusedrec.embedding.lookup import Found, RowGradients, look_up
from tf_fusedrec.embedding.routed_ids import Context, LookupRequest
from tf_fusedrec.schedules.calls import features_ahead, required_embeddings
from tf_fusedrec.schedules.micro_batch import WHOLE, MicroBatch

T = TypeVar("T")


class Planned(NamedTuple):
    """One call and the training lookups of each of its groups. Groups of other models' tables have none."""

    micro_batch: int
    embedding: FusedEmbedding
    groups: list[list[LookupRequest]]


def plan(model: Any, pieces: Sequence[Any], *, steps_ahead: int = 0, before_update: int = 1) -> list[Planned]:
    """The lookups that a batch will make. All batches have the same plan, but for tensors. Frozen layers are left out.

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
            for embedding, features in features_ahead(model, x):
                groups = embedding.requests_of(features, training=True)
                planned.append(Planned(number, embedding, [_training(group) for group in groups]))
    return planned


def _training(requests: Sequence[LookupRequest]) -> list[LookupRequest]:
    return [request for request in requests if request.training]


def requests(planned: Sequence[Planned]) -> list[LookupRequest]:
    """All lookups of a plan, in the order in which every stage returns them."""
    return [request for call in planned for group in call.groups for request in group]


def waves(planned: Sequence[Planned]) -> list[list[LookupRequest]]:
    """The lookups of a plan, in one list for each micro-batch."""
    return by_micro_batch(planned, requests(planned))


def by_micro_batch(planned: Sequence[Planned], of_lookups: Sequence[T]) -> list[list[T]]:
    """The items of a plan's lookups, such as contexts, in one list for each micro-batch."""
    left = iter(of_lookups)
    calls = itertools.groupby(planned, key=lambda call: call.micro_batch)
    return [[next(left) for _ in requests(list(of_piece))] for _, of_piece in calls]


@contextlib.contextmanager
def supplying(planned: Sequence[Planned], found: Sequence[Found]) -> Iterator[None]:
    """The training calls inside take these rows, in the order of the plan, instead of looking rows up.

    Raises:
      ValueError: another number of training calls came, or a call had other features.
      InvalidArgumentError: at run time, a call had another number of ids.
    """
    left = iter(found)
    supplies: dict[int, _Supply] = {}
    for call in planned:
        supply = supplies.setdefault(id(call.embedding), _Supply(call.embedding))
        rows = [[next(left) for _ in group] for group in call.groups]
        if any(rows):
            supply.calls.append(rows)
    with contextlib.ExitStack() as stack:
        for supply in supplies.values():
            stack.enter_context(supply.embedding.replacing(look_up=supply))
        yield
    for supply in supplies.values():
        if supply.calls:
            raise ValueError(
                f"{len(supply.calls)} calls of {supply.embedding.name!r} were looked up ahead and never came in the "
                "training step. Remedy: embedding_inputs of the model must give the calls that a training step makes."
            )


def contexts_to_come(model: Any) -> list[Context]:
    """Inside `supplying`: contexts of the rows that no call has taken yet. Outside: none."""
    supplies = [embedding.call_steps.look_up for embedding in required_embeddings(model)]
    calls = [call for supply in supplies if isinstance(supply, _Supply) for call in supply.calls]
    return [one.context for call in calls for group in call for one in group]


class _Supply:
    """Replaces the lookups of a layer's training calls by rows that a schedule has found."""

    def __init__(self, embedding: FusedEmbedding):
        self.embedding = embedding
        self.calls: list[
            list[list[Found]]
        ] = []  # by coming call, group and request; groups that do not train are empty

    def __call__(self, groups: Sequence[Sequence[LookupRequest]]) -> list[list[Found]]:
        wanted = [len(_training(group)) for group in groups]
        if not any(wanted):
            return look_up(groups)
        if not self.calls or [len(group) for group in self.calls[0]] != wanted:
            raise ValueError(
                f"{self.embedding.name!r} was called with other features, or more often in a training step, than was "
                "looked up ahead. Remedy: embedding_inputs of the model must give the calls that a training step makes."
            )
        supplied = self.calls.pop(0)
        others = iter(look_up([group for group, found in zip(groups, supplied) if not found]))
        return [
            [self._checked(*pair) for pair in zip(group, found)] if found else next(others)
            for group, found in zip(groups, supplied)
        ]

    def _checked(self, request: LookupRequest, found: Found) -> Found:
        """`found`, after a check that its rows belong to the ids of the request."""
        message = (
            f"{self.embedding.name!r} was called with other ids in a training step than were looked up ahead. Remedy: "
            "embedding_inputs of the model must give the calls that a training step makes, with the same ids. Ids that "
            "depend on the number of the step take it as step + steps_ahead."
        )
        ids, ahead = [feature.ids for feature in request.features], found.context.routed.fused.ids
        same = tf.debugging.assert_equal(tf.add_n([tf.size(one) for one in ids]), tf.size(ahead), message)
        # Nothing waits for this comparison, because its result must reach the host.
        with placing_ids([request.lookup.table]), tf.control_dependencies([] if same is None else [same]):
            tf.debugging.Assert(tf.reduce_all(tf.equal(tf.concat(ids, 0), ahead)), [message])
        return _behind(same, found)


@contextlib.contextmanager
def deferring(model: Any, gradients: list[RowGradients], gate: Any = None) -> Iterator[None]:
    """Calls inside collect the gradients of their rows instead of training, and hand rows on behind a gate.

    Args:
      model: The PipelinedModel.
      gradients: Collects the gradients, for apply_gradients.
      gate: An op or tensor that runs before rows are handed on. Lookups and exchanges do not wait for it.

    Raises:
      ValueError: the loss is scaled, so the gradients would lose their scale while they wait.
    """
    if isinstance(getattr(model, "optimizer", None), keras.mixed_precision.LossScaleOptimizer):
        raise ValueError(
            f"gradients of {model.name!r} wait under this schedule, and the scale of the loss would be lost. Remedy: "
            "schedule='sync' or DualBuffer, or the policy mixed_bfloat16."
        )

    def collect(_: Sequence[LookupRequest], of_group: Sequence[RowGradients]) -> tf.Tensor:
        gradients.extend(of_group)
        return tf.zeros([])

    with contextlib.ExitStack() as stack:
        for embedding in required_embeddings(model):

            def gated(groups: Any, look_up: Any = embedding.call_steps.look_up) -> list[list[Found]]:
                return [[_behind(gate, one) for one in group] for group in look_up(groups)]

            stack.enter_context(embedding.replacing(look_up=gated, train=collect))
        yield


def _behind(gate: Any, found: Found) -> Found:
    """`found`, whose rows are handed on behind an op or tensor; None: at once."""
    with tf.control_dependencies([] if gate is None else [gate]):
        return found._replace(rows=tf.identity(found.rows))
