"""fuse(model): many TFRA layers of one model become few groups, which cost three all2alls a step each."""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Collection, Sequence
from typing import Any

from tf_fusedrec._tf_compat import converted_as_here, keras, tf
from tf_fusedrec.ops.xla import outside_clusters
from tf_fusedrec.tables.tfra import de, default_partition_fn
from tf_fusedrec.tfra.asking import ids_of_calls
from tf_fusedrec.tfra.even import fit_evenly
from tf_fusedrec.tfra.layer import FusedEmbedding
from tf_fusedrec.tfra.lookup import Wanted


class FusedGroup(FusedEmbedding):
    """What several layers share after fuse(): one variable, one shadow, one slot variable per optimizer slot.

    Attributes:
      layers: their names, sorted; keys are merged (tables/keys.py), so ids must be >= 0 and below 2^id_bits.
    """

    def __init__(self, names: Sequence[str], **arguments: Any):
        self._names = tuple(names)
        super().__init__(**arguments)

    @property
    def layers(self) -> list[str]:
        return list(self._names)


def fuse(model: keras.Model, *, leave: Collection[str] = ()) -> list[FusedGroup]:
    """Fuses the FusedEmbedding layers of a model, behind its back: the model's code stays as it is.

    Layers that were constructed alike, but for name and init_capacity, become one group: their ids travel together,
    their rows live in one table and are trained as one variable (`model.trainable_variables` has the group's). Call it
    when the layers exist and before the first training step; rows that they hold move along. Losses stay what they
    were. In a tf.function (so in fit, evaluate and predict) all lookups of one call of the model are one exchange;
    a layer may be called several times, and a lookup whose ids depend on other rows or on random numbers goes alone.

    The group's tables are files under the group's name; those of single layers have upstream's names. A layer's rows:
    `layer.export()`. Restrict policies rank the rows of the whole group, and an optimizer's clipnorm is of the whole
    group's gradient, which is one variable's.

    Args:
      model: built or not; its layers may be anywhere inside.
      leave: names of layers that stay alone.

    Returns:
      The groups, of two layers or more. Every rank makes the same.

    Raises:
      ValueError: the model has no such layer, was fused before, or has trained; two layers of one name; a name in
        `leave` that is none; a layer with a partitioner, a KV creator, or keys that a group cannot have.
    """
    found = {id(m): m for m in model.submodules if isinstance(m, FusedEmbedding)}
    layers = sorted(found.values(), key=lambda layer: layer.name)
    _check(model, layers, leave)
    together: dict[Any, list[FusedEmbedding]] = {}
    for layer in layers:
        if layer.name not in leave:
            _check_fusable(layer)
            together.setdefault(_spec(layer), []).append(layer)
    groups = [_make_group(members) for members in together.values() if len(members) > 1]
    _look_up_ahead(model, [layer for layer in layers if layer.name not in leave])
    fit_evenly(model)
    return groups


def _check(model: keras.Model, layers: Sequence[FusedEmbedding], leave: Collection[str]) -> None:
    names = [layer.name for layer in layers]
    if not layers:
        raise ValueError(
            f"model {model.name!r} has no tf_fusedrec.tfra.FusedEmbedding. Construct its embeddings with it, in the "
            "place of HvdAllToAllEmbedding, and keep them in attributes of the model."
        )
    if any(isinstance(layer, FusedGroup) for layer in layers) or hasattr(model.call, "looks_up_ahead"):
        raise ValueError(f"model {model.name!r} was fused before. Call fuse once.")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"layers of model {model.name!r} must have different names, got {repeated} more than once.")
    unknown = sorted(set(leave) - set(names))
    if unknown:
        raise ValueError(f"leave must name layers of model {model.name!r}, got {unknown}. Its layers: {names}.")
    trained = [layer.name for layer in layers if layer.optimizer_vars]
    if trained:
        raise ValueError(
            f"layers {trained} of model {model.name!r} have optimizer slots already. Call fuse before the first "
            "training step; to go on from a checkpoint, restore it into the fused model."
        )


def _check_fusable(layer: FusedEmbedding) -> None:
    params, remedy = layer.params, f"Or leave it alone: fuse(model, leave=[{layer.name!r}])."
    if params.partition_fn is not default_partition_fn:
        raise ValueError(
            f"layer {layer.name!r} has a partitioner of its own, {params.partition_fn!r}; keys of a group are merged "
            f"keys, which it does not know. Use TFRA's default partition function. {remedy}"
        )
    if type(params.kv_creator) is not de.CuckooHashTableCreator:
        raise ValueError(
            f"layer {layer.name!r} has the KV creator {type(params.kv_creator).__name__}; a group is kept in one "
            f"CuckooHashTable. Use de.CuckooHashTableCreator. {remedy}"
        )
    if tf.as_dtype(params.key_dtype) != tf.int64:
        raise ValueError(
            f"layer {layer.name!r} has keys of {tf.as_dtype(params.key_dtype).name}; a group's are int64. Use "
            f"key_dtype=tf.int64. {remedy}"
        )


def _spec(layer: FusedEmbedding) -> tuple:
    """Equal for layers that can be one: all arguments but name and capacity, by value where they have one."""
    arguments = dict(layer.member.arguments)
    for own in ("name", "init_capacity", "initializer", "kv_creator"):
        arguments.pop(own, None)
    initializer = layer.params.initializer
    if isinstance(initializer, keras.initializers.Initializer):
        drawn = f"{type(initializer).__qualname__}{sorted(initializer.get_config().items(), key=str)}"
    else:
        drawn = repr(layer.member.arguments.get("initializer"))
    saver = layer.params.kv_creator.saver
    saved = (
        (type(saver).__name__, sorted(vars(getattr(saver, "config", None) or object).items(), key=str)) if saver else ()
    )
    return (
        layer.embedding_size, layer.hvd_variable._mpi_size, layer.with_unique, drawn, str(saved),
        str(sorted(arguments.items())),
    )  # fmt: skip


def _make_group(members: Sequence[FusedEmbedding]) -> FusedGroup:
    names = [layer.name for layer in members]
    first = members[0]
    digest = hashlib.blake2b("/".join(names).encode(), digest_size=4).hexdigest()
    arguments = dict(first.member.arguments)
    arguments["init_capacity"] = sum(layer.params.init_size for layer in members)
    arguments["kv_creator"] = first.params.kv_creator
    arguments["name"] = f"fused_{len(members)}_layers_{digest}"
    group = FusedGroup(
        names, with_unique=first.with_unique, mpi_size=first.hvd_variable._mpi_size, **arguments
    )  # fmt: skip
    for segment, layer in enumerate(members):
        layer.join(group, segment)
    first.fused_group = group  # an attribute, by which Keras and TensorFlow find its variables
    return group


def _look_up_ahead(model: keras.Model, layers: Sequence[FusedEmbedding]) -> None:
    """Makes a traced call of the model exchange the ids of all its lookups before it begins."""
    original = model.call
    # A `call` that is a tf.function is traced into the step's graph: ids inside another graph could not be known.
    plain = getattr(original, "python_function", original)

    def call(_: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return original(*args, **kwargs)
        run = converted_as_here(plain)
        if keras.src.engine.base_layer_utils.call_context().saving:
            return run(*args, **kwargs)  # Keras traces every layer of a SavedModel as a function of its own
        asked = ids_of_calls(layers, lambda: run(*args, **kwargs))
        model._clear_losses()  # of the trace that only asked
        with outside_clusters(f"Model {model.name!r}"):
            _serve(asked)
        try:
            answer = run(*args, **kwargs)
            left = [layer.name for layer in layers if layer.member.served]
        finally:
            for layer in layers:
                layer.member.served = []
        if left:
            raise RuntimeError(
                f"model {model.name!r} called layers {left} less often than when it was traced first. A fused model "
                "must make the same lookups whenever it is traced."
            )
        return answer

    call.looks_up_ahead = True  # type: ignore[attr-defined]
    # A method of the same signature: Keras reads it, and takes self away.
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(plain).parameters.values()
    call.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    model.call = types.MethodType(call, model)


def _serve(asked: Sequence[tuple[FusedEmbedding, tf.Tensor | None]]) -> None:
    """Looks up what can be known, group by group, and lays the rows out for the calls to come."""
    rows: dict[int, tf.Tensor] = {}
    owners = {id(layer.owner): layer.owner for layer, _ in asked}
    for owner in owners.values():
        mine = [n for n, (layer, ids) in enumerate(asked) if layer.owner is owner and ids is not None]
        if mine:
            wanted = [Wanted(asked[n][0].member.segment, asked[n][1]) for n in mine]
            rows.update(zip(mine, owner.hvd_variable.rows(wanted)))
    for n, (layer, _) in enumerate(asked):
        layer.member.served.append(rows.get(n))
