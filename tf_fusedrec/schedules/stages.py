"""The stages of all lookups of one batch, for schedules that run them in different steps.

route   ids to their owners                     reads no table
fetch   rows at the owner, as they are now
bring   rows to who asked, answered to the calls of the training step by `answering`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

from tf_fusedrec.embedding import Answer, FusedEmbedding
from tf_fusedrec.features import FlatFeature
from tf_fusedrec.lookup import Context, GroupLookup, Routed
from tf_fusedrec.ops import RowsAhead
from tf_fusedrec.schedules.calls import EmbeddingCall


class Planned(NamedTuple):
    """One call, and its groups; None for one whose tables are not this model's own: it is looked up as ever."""

    embedding: FusedEmbedding
    groups: list[tuple[GroupLookup, list[FlatFeature]] | None]


# Of one batch: by call, by group.
Routes = Sequence[Sequence[Optional[Routed]]]
RowsByCall = Sequence[Sequence[Optional[RowsAhead]]]
Contexts = Sequence[Sequence[Optional[Context]]]


def plan(calls: Sequence[EmbeddingCall]) -> list[Planned]:
    """Sorts the inputs of calls by group; calls of frozen layers are left out.

    What it answers is the same for every batch but for the tensors in it.
    """

    def groups(call: EmbeddingCall) -> list[tuple[GroupLookup, list[FlatFeature]] | None]:
        grouped = call.embedding.grouped(call.inputs, call.weights or {})
        return [None if lookup.group.external else (lookup, mine) for lookup, mine in grouped]

    return [Planned(call.embedding, groups(call)) for call in calls if call.embedding.trainable]


def route(planned: Sequence[Planned]) -> Routes:
    """Sends the ids of all calls to their owners."""

    def of_call(call: Planned) -> list[Routed | None]:
        number = call.embedding.next_call()
        return [group and group[0].route(group[1], call=number) for group in call.groups]

    return [of_call(call) for call in planned]


def look_ahead(planned: Sequence[Planned], routes: Routes) -> RowsByCall:
    """Reads rows at the owner that `fetch` will want, and changes nothing. Native tables only."""
    return [
        [group and routed and group[0].look_ahead(routed) for group, routed in zip(call.groups, of_call)]
        for call, of_call in zip(planned, routes)
    ]


def fetch(planned: Sequence[Planned], routes: Routes, ahead: RowsByCall | None = None) -> Contexts:
    """Looks rows up where they are, for training. `planned` may be that of another batch: it says which tables."""

    def one(group: Any, routed: Routed | None, seen: RowsAhead | None) -> Context | None:
        return group and routed and group[0].fetch(routed, training=True, ahead=seen)

    seen = ahead or [[None] * len(of_call) for of_call in routes]
    return [
        [one(*of_group) for of_group in zip(call.groups, of_call, seen_of_call)]
        for call, of_call, seen_of_call in zip(planned, routes, seen)
    ]


def bring(planned: Sequence[Planned], contexts: Contexts) -> list[Answer]:
    """Sends rows to the ranks that asked for them."""
    return [
        [group and context and (group[0].bring(context), context) for group, context in zip(call.groups, of_call)]
        for call, of_call in zip(planned, contexts)
    ]


@contextlib.contextmanager
def answering(planned: Sequence[Planned], answers: Sequence[Answer]) -> Iterator[None]:
    """The training calls inside are answered these rows, in the order of the plan, and train them."""
    by_embedding: dict[int, tuple[FusedEmbedding, list[Answer]]] = {}
    for call, answer in zip(planned, answers):
        by_embedding.setdefault(id(call.embedding), (call.embedding, []))[1].append(answer)
    with contextlib.ExitStack() as stack:
        for embedding, of_embedding in by_embedding.values():
            stack.enter_context(embedding.answering(of_embedding))
        yield
