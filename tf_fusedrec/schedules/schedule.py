"""Schedules: records that say which batch each stage of a training step works on while batch t computes.

Functions here import TensorFlow where they need it, so that settings can be read before it is loaded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from tf_fusedrec._tf_compat import tf

LARGEST_LEAD = 4  # NestPipe's five stages work on five batches


class Stages(NamedTuple):
    """Distances in batches from batch t, which computes, to the batch of each stage; 0 as under Sync."""

    micro_batches: int = 0  # M parts of batch t compute one after another on frozen tables; 0: Keras' step of the batch
    read: int = 0  # t + read is read from the data set
    send_ids: int = 0  # ids of t + send_ids go to their owners
    look_ahead: int = 0  # 1: rows of t + 1 are read at the owner, and refreshed in their own step
    return_rows: int = 0  # 1: rows of t + 1 are looked up and returned; they lack one update
    update: int = 0  # 1: gradients of t - 1 are sent and make their update

    @property
    def pieces(self) -> int:
        """Parts of a batch that compute one after another."""
        return max(1, self.micro_batches)

    @property
    def lead(self) -> int:
        """Batches that are read before the first one computes."""
        return max(1, self.read)

    @property
    def staleness(self) -> int:
        """Updates that the rows of a batch lack."""
        return self.return_rows

    @property
    def lookups_per_update(self) -> int:
        """Steps that look up before the first of them updates. Tables keep the rows of these steps where they are."""
        return 1 + self.staleness


class Schedule:
    """A record that lays out training steps in time. It keeps no state, so models may share one.

    A preset overrides `stages` only. A schedule of your own overrides `train_step`, or `start` and `step`, and `drain`
    where updates wait; its `stages` says how many batches are read ahead. `register` gives it a name for saved models.

    Examples:
      >>> @fr.schedules.register("my_package>read_two_ahead")
      ... class ReadTwoAhead(fr.schedules.Schedule):
      ...     stages = fr.schedules.Stages(read=2, send_ids=1)
      >>> ReadTwoAhead().stages.lead
      2
    """

    @property
    def stages(self) -> Stages:
        """The batch of each stage; a constant of the record."""
        return Stages()

    def check(self, model: Any) -> None:
        """Checks that the tables of a model can be trained under this schedule. Called when a model gets the schedule.

        A subclassed model may not have made its layers by then, so `compile` checks it again.

        Raises:
          ValueError: the tables cannot be trained under it.
        """
        from tf_fusedrec.embedding import embeddings_of

        if self.stages.send_ids or self.stages.micro_batches:
            for embedding in embeddings_of(model):
                embedding.internals.check_deferrable(self.stages.lookups_per_update)

    def train_step(self, model: Any, data: Any) -> dict[str, tf.Tensor]:
        """One training step of one batch, traced once per signature of the batch; collective.

        Args:
          model: The PipelinedModel.
          data: A batch as `model.fit` gives it: x, (x, y) or (x, y, sample_weight).

        Returns:
          The logs, as keras.Model.train_step.

        Raises:
          ValueError: the model cannot be trained under this schedule.
        """
        from tf_fusedrec.schedules import micro_batches
        from tf_fusedrec.schedules.uneven_batches import keras_train_step

        if self.stages.micro_batches:
            return micro_batches.train_step(model, data, self.stages.micro_batches)
        return keras_train_step(model, data)

    def start(self, model: Any, batches: Sequence[Any]) -> Any:
        """Begins the work on the first batches of an iterator. Traced, collective.

        Args:
          model: The PipelinedModel.
          batches: The first `stages.lead` batches.

        Returns:
          The state for the first `step`: any structure of tensors and constants.
        """
        from tf_fusedrec.schedules import staged_step

        return staged_step.start(self.stages, model, batches)

    def step(self, model: Any, batches: Sequence[Any], state: Any) -> tuple[dict[str, tf.Tensor], Any]:
        """Trains batches[0], and works on coming batches while it computes. Traced, collective.

        Trains by `model.train_step`, which a subclass of the model may override.

        Args:
          model: The PipelinedModel.
          batches: `stages.lead` + 1 batches. The first one computes. Empty batches follow the last one of the data.
          state: The state that the step before, or `start`, returned.

        Returns:
          The logs, and the state for the next step, made of the same tensors every time.
        """
        from tf_fusedrec.schedules import staged_step

        return staged_step.step(self.stages, model, batches, state)

    def drain(self, model: Any, state: Any) -> Any:
        """Makes the updates that wait in `state`. Returns the state for the next step. Traced, collective.

        Called before evaluation, saves and checkpoints, and at the end of fit.
        """
        from tf_fusedrec.schedules import staged_step

        return staged_step.drain(state)

    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor, JSON-able: by default the fields of the dataclass."""
        return dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}


_Class = TypeVar("_Class", bound=type[Schedule])
_schedules: dict[str, type[Schedule]] = {}


def register(name: str) -> Callable[[_Class], _Class]:
    """Decorator of a Schedule class: configurations and saved models name its schedules so.

    A program that loads such a model registers the class first, under the same name. Registration of another class
    with the same module and name replaces the first one, so that a notebook cell may run twice.

    Args:
      name: Any string. tf_fusedrec's own schedules have names without a ">"; "my_package>name" cannot clash with them.

    Raises:
      TypeError: the decorated object is no Schedule class.
      ValueError: another class has this name.
    """

    def add(schedule: _Class) -> _Class:
        if not (isinstance(schedule, type) and issubclass(schedule, Schedule)):
            raise TypeError(f"register({name!r}) got {schedule!r}, and takes a subclass of schedules.Schedule.")
        registered = _schedules.get(name, schedule)
        if (registered.__module__, registered.__qualname__) != (schedule.__module__, schedule.__qualname__):
            raise ValueError(
                f"register got the name {name!r} for {schedule.__qualname__}, and {registered.__module__}."
                f"{registered.__qualname__} has it. Use another name, such as 'my_package>{name}'."
            )
        _schedules[name] = schedule
        return schedule

    return add


def serialize(schedule: Schedule) -> dict[str, Any]:
    """The registered name of a schedule, and its get_config(). JSON-able.

    Raises:
      ValueError: its class is not registered.
    """
    for name, registered in _schedules.items():
        if registered is type(schedule):
            return {"name": name, "config": schedule.get_config()}
    raise ValueError(
        f"schedule {schedule!r} cannot be saved, because its class {type(schedule).__qualname__} is not registered. "
        "Use the decorator @tf_fusedrec.schedules.register('my_package>my_schedule') for the class."
    )


def get(identifier: Schedule | str | Mapping[str, Any]) -> Schedule:
    """The schedule of a record, a name, or the result of `serialize`.

    Args:
      identifier: A name may have whole numbers as arguments in parentheses: "sync", "nested(8, lead=3)".

    Raises:
      ValueError: no class is registered under the name, or it does not take the arguments.
    """
    if isinstance(identifier, Schedule):
        return identifier
    positional: list[int] = []
    named: Mapping[str, Any] = {}
    if isinstance(identifier, Mapping):
        name, named = identifier["name"], identifier["config"]
    else:
        name, positional, named = _parsed(identifier)
    if name not in _schedules:
        raise ValueError(
            f"schedule must be a record of tf_fusedrec.schedules or one of the registered names {sorted(_schedules)}, "
            f"got {identifier!r}. Use @tf_fusedrec.schedules.register for a class of your own, and import its module "
            "before a model is loaded."
        )
    try:
        return _schedules[name](*positional, **named)
    except TypeError as error:  # a missing or an unexpected argument
        raise ValueError(f"schedule {identifier!r} does not have the arguments of its record: {error}.") from error


def _parsed(text: Any) -> tuple[str, list[int], dict[str, int]]:
    """The name, positional and named arguments of a text such as "nested(8, lead=3)"; no name for any other value."""
    match = re.fullmatch(r"([^()]+)(?:\(([^()]+)\))?", text) if isinstance(text, str) else None
    if match is None:
        return "", [], {}
    parts = match[2].split(",") if match[2] else []
    arguments = [re.fullmatch(r"\s*(?:(\w+)\s*=\s*)?(\d+)\s*", part) for part in parts]
    if None in arguments:
        return "", [], {}
    numbers = [(argument[1], int(argument[2])) for argument in arguments if argument is not None]
    positional = [number for keyword, number in numbers if keyword is None]
    return match[1], positional, {keyword: number for keyword, number in numbers if keyword is not None}


@register("sync")
@dataclasses.dataclass(frozen=True)
class Sync(Schedule):
    """The training step of keras.Model on whole batches. Other schedules are compared to it.

    Ids, rows, compute, gradients and update run one after another.

    Examples:
      >>> schedules = [fr.schedules.Sync(), fr.schedules.FrozenWindow(4), fr.schedules.DualBuffer()]
      >>> schedules += [fr.schedules.Nested(4), fr.schedules.SemiAsync(), fr.schedules.Pipelined(6)]
      >>> [schedule.stages.staleness for schedule in schedules]
      [0, 0, 0, 0, 1, 1]
    """


@register("frozen_window")
@dataclasses.dataclass(frozen=True)
class FrozenWindow(Schedule):
    """Cuts every batch by sample into micro-batches. Rows and dense weights change once.

    A row changes when its last gradient of the batch is at the owner, before dense weights do. So a step that fails may
    have trained some of its rows.

    The result equals gradient accumulation over the same micro-batches bit for bit where no owner sends sums of bags
    (`ops.partial_sums`), and the whole batch but for the rounding of sums in another order. Rows and gradients travel
    once, however many micro-batches have their id. On several ranks, a rank sums gradients of a row over its
    micro-batches in their order. It sends the sum with the last of them. The owner adds the sums that arrive with one
    micro-batch, in the order of ranks, and then adds these totals in the order of micro-batches.

    A table looks up the ids of all micro-batches at once. Its clock, admission, frequencies and evictions therefore
    follow the whole batch. Layers that look across samples see one micro-batch: batch normalization, in-batch
    negatives.

    A step costs 2 M all-to-alls of rows and gradients per group, and one of ids. Ops that depend on rows wait for the
    micro-batch before them. Dense layers that read no rows may run at any time. The model is traced M times.
    `model.embedding_inputs` gives the lookups of a batch. Nothing is all-reduced between a forward and a backward pass.
    Dense gradients are all-reduced once, in the last backward pass.

    A batch of fewer than M samples has micro-batches without samples, which change nothing (uneven_batches.py).
    The loss must depend on the rows of every micro-batch or of none.

    Args:
      micro_batches: M >= 1; 1 leaves the batch whole. The largest micro-batch has about 1 / (M - 1) of the samples,
        from M = 8 on 1 / (M - 2.5), see `cut`.

    Raises:
      ValueError: M is no int >= 1. When the model gets the schedule: backend "tfra". In a training step: M above the
        batch size, where that is known when the step is traced; a model without FusedEmbedding or with
        unknown lookups; a loss with reduction "sum".
    """

    micro_batches: int = 4

    def __post_init__(self) -> None:
        _check_micro_batches(self.micro_batches)

    @property
    def stages(self) -> Stages:
        return Stages(self.micro_batches)


@register("dual_buffer")
@dataclasses.dataclass(frozen=True)
class DualBuffer(Schedule):
    """Hides the input, deduplication, routing and table lookups of coming batches under the compute.

    The result equals Sync bit for bit, in rows, slots, counters and evictions. `model.embedding_inputs` gives the
    lookups of a batch. A user's own loop that calls `model.train_step` has no batch ahead, and hides nothing.
    `model.make_train_function()` returns a step that takes an iterator.

    With lead 1 the three stages of a coming batch run one after another inside one step. With lead 2 ids and look-ahead
    work on different batches side by side, and with lead 3 all three do. NestPipe's fifth stage copies a batch to the
    device: lead 4 reads one batch more.

    Memory: `lead` batches of input; the routed ids of min(lead, 2) batches, 8 bytes for each unique id at its owner;
    one buffer of rows, for any lead.

    Args:
      lead: Number of batches that are read before the first one computes, 1 to 4. Data may have fewer batches.

    Raises:
      ValueError: another lead; in fit: a model without FusedEmbedding, with backend "tfra", or with unknown
        lookups.
    """

    lead: int = 1

    def __post_init__(self) -> None:
        _check_lead(self.lead)

    @property
    def stages(self) -> Stages:
        return Stages(read=self.lead, send_ids=min(self.lead, 2), look_ahead=1)


@register("nested")
@dataclasses.dataclass(frozen=True)
class Nested(Schedule):
    """FrozenWindow's micro-batches. Their ids are routed and their rows read while earlier batches compute.

    The result equals FrozenWindow(micro_batches) bit for bit. The remarks there on micro-batches apply here. Lookups
    hide under the batch before, exchanges under micro-batches (NestPipe).

    Args:
      micro_batches: M >= 1.
      lead: As for DualBuffer.

    Raises:
      ValueError: as FrozenWindow and DualBuffer.
    """

    micro_batches: int = 4
    lead: int = 1

    def __post_init__(self) -> None:
        _check_micro_batches(self.micro_batches)
        _check_lead(self.lead)

    @property
    def stages(self) -> Stages:
        return DualBuffer(self.lead).stages._replace(micro_batches=self.micro_batches)


@register("semi_async")
@dataclasses.dataclass(frozen=True)
class SemiAsync(Schedule):
    """All exchanges of rows and gradients run under the dense compute of another batch. The staleness is one step.

    While batch t computes, gradients of batch t-1 travel and update the tables; then ids and rows of batch t+1 travel.
    So rows of every batch but the first lack exactly the update of the batch before, for any optimizer. The update
    itself changes the newest rows. Dense weights are trained synchronously. TurboGR's appendix C has the convergence.
    The difference is small for ids that are seldom in two batches one after another.

    Waiting gradients are applied before evaluation, predictions, saves and checkpoints, and at the end of fit. A user's
    own loop calls `model.drain()`. A run that resumes from a checkpoint looks up its first batch again, with no update
    missing. Outside of fit and make_train_function, as in train_on_batch, steps are steps of Sync.

    Raises:
      ValueError: in fit, a model without FusedEmbedding, with backend "tfra", or with unknown lookups (see
        PipelinedModel.embedding_inputs), or with host_rows on a GPU.
    """

    @property
    def stages(self) -> Stages:
        return Stages(read=1, send_ids=1, return_rows=1, update=1)


_DEPTHS = {
    1: Stages(),
    2: Stages(read=1),
    3: Stages(read=2, send_ids=1),
    4: Stages(read=3, send_ids=2, return_rows=1),
    5: Stages(read=3, send_ids=2, return_rows=1, update=1),
    6: Stages(read=4, send_ids=3, return_rows=1, update=1),
}


@register("pipelined")
@dataclasses.dataclass(frozen=True)
class Pipelined(Schedule):
    """A step in six stages with up to six batches in flight (TurboGR, section 4.2.3, appendix D).

    While batch t computes (dense forward, backward, update), the other stages work on

        depth   input   ids: unique, all-to-all   rows: lookup, all-to-all   gradients: all-to-all, update   staleness
        1       t       t                         t                          t                               0
        2       t+1     t                         t                          t                               0
        3       t+2     t+1                       t                          t                               0
        4       t+3     t+2                       t+1                        t                               1
        5       t+3     t+2                       t+1                        t-1                             1
        6       t+4     t+3                       t+1                        t-1                             1

    A step ends when all its stages end. At depth 6, ids have a whole step to arrive in: the stage "wait for unique".
    Depths 1 to 3 equal Sync bit for bit; depth 3 is MTGRBoost's copy, dispatch and compute. From depth 4 on, rows of
    every batch but the first lack the table update of the batch before, as under SemiAsync. Dense weights are always
    the newest.

    SemiAsync describes the gradients that wait between steps, and the refused tables, from depth 4 on.

    Args:
      depth: Number of batches in flight, 1 to 6.

    Raises:
      ValueError: another depth; in fit, as SemiAsync.
    """

    depth: int = 6

    def __post_init__(self) -> None:
        _check_int("depth", self.depth, 1, max(_DEPTHS))

    @property
    def stages(self) -> Stages:
        return _DEPTHS[self.depth]


def _check_micro_batches(micro_batches: Any) -> None:
    _check_int("micro_batches", micro_batches, 1)


def _check_lead(lead: Any) -> None:
    remedy = " Use 1 for one batch ahead, 3 if a batch is slow to read, route and look up."
    _check_int("lead", lead, 1, LARGEST_LEAD, remedy)


def _check_int(name: str, value: Any, least: int, most: int | None = None, remedy: str = "") -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < least or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an int {bounds}, got {value!r}.{remedy}")
