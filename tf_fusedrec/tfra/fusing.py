"""fuse(model) merges a model's TFRA layers into few groups. Each group costs three all-to-alls a step.

All ids of a step travel in one exchange, so they must be known before the model's layers are called. The model is
traced twice. The first trace goes into a scratch graph: each layer records its ids and returns a stand-in for its rows.
The operations that compute the ids are then copied into the step's graph. Nothing else of the first trace runs: no
update, no random number, no loss. Grappler merges the operations that both traces share.
"""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tf_fusedrec._tf_compat import converted_as_here, keras, outside_clusters, tf
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.ops.ancestors import ancestors, copied, scratch_graph, stateful
from tf_fusedrec.tfra import native_files
from tf_fusedrec.tfra.fused_layer import STAND_IN, FusedTfraEmbedding
from tf_fusedrec.tfra.native_rows import NativeRows
from tf_fusedrec.tfra.row_lookup import LookupIds
from tf_fusedrec.tfra.tfra_library import de, default_partition_fn
from tf_fusedrec.tfra.uneven_data import stop_fit_at_shortest


class FusedGroup(FusedTfraEmbedding):
    """The layer that several layers share after fuse(): one variable, one shadow, one slot variable per slot.

    Its keys merge an id with the number of its layer (MergedBits), so ids must be in [0, 2^id_bits), or are cut to
    their lowest id_bits bits (hashed_ids of fuse).

    Attributes:
      layers: Names of the member layers, sorted.
    """

    def __init__(self, names: Sequence[str], hashed_ids: bool = False, **arguments: Any):
        self._names = tuple(names)
        super().__init__(**arguments)
        self.hvd_variable.hashed_ids = hashed_ids
        self.built = True  # The group is never called, and Keras warns of layers that are not built when it saves.

    @property
    def layers(self) -> list[str]:
        return list(self._names)


def fuse(
    model: keras.Model,
    *,
    leave: Collection[str] = (),
    hashed_ids: bool = False,
    tables: str = "tfra",
    optimizer: Any = None,
    max_rows_per_rank: Mapping[str, int] | None = None,
) -> list[FusedGroup] | list[FusedEmbedding]:
    """Fuses the FusedTfraEmbedding layers of a model. The model's code and its losses stay unchanged.

    Layers that differ only in the arguments name and init_capacity become one group. Their ids travel in one exchange,
    and their rows are in one table that is trained as one variable (see `model.trainable_variables`). Call fuse when
    the layers exist and before the first training step. The layers' rows move into the group.

    Inside a tf.function, and so in fit, evaluate and predict, all lookups of one model call share one exchange. A
    layer may be called several times. Ids that depend on other rows or on random numbers travel separately.

    A group's table files carry the group's name. Files of single layers keep upstream's names. `layer.export()` gives
    the rows of one layer. A group is one variable. A restrict policy ranks the rows of the whole group, and an
    optimizer's clipnorm applies to the whole group's gradient.

    With tables="native", rows and slots are in native tables, one per layer, and a step takes far less time. The
    model's optimizer trains the dense weights and gives the tables its rule, its learning rate and its step number. Ids
    are any int64. Files have the layers' names. fr.export and fr.checkpoint work.

    Args:
      model: Keras model, built or not, with the layers at any depth.
      leave: Names of layers that stay outside any group.
      hashed_ids: True if ids may be 64-bit hashes, such as those of fr.hash_strings. A group of m layers then takes the
        lowest 63 - ceil(log2(m + 1)) bits of each id, which layer.export() returns as the id. Two of n hashes of a
        layer fall together with odds of about n^2 / 2^62 in a group of 2 or 3 layers. False refuses larger and negative
        ids in the first step. Native tables keep all bits.
      tables: "tfra" or "native".
      optimizer: The optimizer of a custom loop, with tables="native". None takes the optimizer of model.compile.
      max_rows_per_rank: Number of rows of each layer with a restrict policy, by name, with tables="native". Such a
        table evicts the least recently (TimestampRestrictPolicy) or least frequently looked up rows.

    Returns:
      The groups of two or more layers, equal on every rank. With tables="native", the FusedEmbedding of all layers.

    Raises:
      ValueError: The model has no such layer, was fused before, or has trained. Or two layers share a name, `leave`
        names an unknown layer, or a layer's partitioner, KV creator or key dtype does not suit a group. With
        tables="native", native tables lack the optimizer's rule or an argument of a layer.

    Examples:
      >>> de = fr.tfra.dynamic_embedding
      >>> new = de.keras.layers.HvdAllToAllEmbedding
      >>> user, city = (new(embedding_size=4, name=name) for name in ("users", "cities"))
      >>> isinstance(user, fr.tfra.FusedTfraEmbedding)
      True
      >>> ids = {name: keras.Input([], dtype=tf.int64, name=name) for name in ("user", "city")}
      >>> towers = keras.Model(ids, keras.layers.Dense(1)(user(ids["user"]) + city(ids["city"])))
      >>> [group.layers for group in fr.tfra.fuse(towers)]
      [['cities', 'users']]
    """
    by_id = {id(m): m for m in model.submodules if isinstance(m, FusedTfraEmbedding)}
    layers = sorted(by_id.values(), key=lambda layer: layer.name)
    _check(model, layers, leave)
    if tables not in ("tfra", "native"):
        raise ValueError(f"tables is {tables!r}, must be 'tfra' or 'native'.")
    if tables == "tfra" and (optimizer is not None or max_rows_per_rank):
        raise ValueError("optimizer and max_rows_per_rank need native tables. Use fuse(model, tables='native', ...).")
    layers = [layer for layer in layers if layer.name not in leave]
    for layer in layers:
        _check_fusable(layer)
    groups: list[Any] = []
    if tables == "native" and layers:
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        rows = NativeRows(model, layers, _group_name(layers), optimizer, max_rows_per_rank or {})
        native_files.read_rows_with_weights(model, rows)
        groups = [rows.embedding]
    elif layers:
        by_spec: dict[Any, list[FusedTfraEmbedding]] = {}
        for layer in layers:
            by_spec.setdefault(_spec(layer), []).append(layer)
        groups = [_make_group(members, hashed_ids) for members in by_spec.values() if len(members) > 1]
    _look_up_ahead(model, layers)
    stop_fit_at_shortest(model)
    return groups


def _check(model: keras.Model, layers: Sequence[FusedTfraEmbedding], leave: Collection[str]) -> None:
    names = [layer.name for layer in layers]
    if not layers:
        raise ValueError(
            f"model {model.name!r} has no tf_fusedrec.tfra.FusedTfraEmbedding. Use this layer instead of "
            "HvdAllToAllEmbedding, and keep the layers in attributes of the model."
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
            "training step. To continue from a checkpoint, restore it into the fused model."
        )


def _check_fusable(layer: FusedTfraEmbedding) -> None:
    params, remedy = layer.params, f"Or leave it alone: fuse(model, leave=[{layer.name!r}])."
    if params.partition_fn is not default_partition_fn:
        raise ValueError(
            f"layer {layer.name!r} has a partitioner of its own, {params.partition_fn!r}, which would get the group's "
            f"merged keys instead of ids. Use TFRA's default partition function. {remedy}"
        )
    if type(params.kv_creator) is not de.CuckooHashTableCreator:
        raise ValueError(
            f"layer {layer.name!r} has the KV creator {type(params.kv_creator).__name__}; a group's table is a "
            f"CuckooHashTable. Use de.CuckooHashTableCreator. {remedy}"
        )
    if tf.as_dtype(params.key_dtype) != tf.int64:
        raise ValueError(
            f"layer {layer.name!r} has keys of {tf.as_dtype(params.key_dtype).name}; a group's are int64. Use "
            f"key_dtype=tf.int64. {remedy}"
        )


def _spec(layer: FusedTfraEmbedding) -> tuple:
    """Returns a value that is equal for layers of one group: all arguments but name and capacity, as plain values."""
    arguments = dict(layer.member.arguments)
    for name in ("name", "init_capacity", "initializer", "kv_creator"):
        arguments.pop(name, None)
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


def _group_name(members: Sequence[FusedTfraEmbedding]) -> str:
    digest = hashlib.blake2b("/".join(layer.name for layer in members).encode(), digest_size=4).hexdigest()
    return f"fused_{len(members)}_layers_{digest}"


def _make_group(members: Sequence[FusedTfraEmbedding], hashed_ids: bool) -> FusedGroup:
    names = [layer.name for layer in members]
    first = members[0]
    arguments = dict(first.member.arguments)
    arguments["init_capacity"] = sum(layer.params.init_size for layer in members)
    arguments["kv_creator"] = first.params.kv_creator
    arguments["name"] = _group_name(members)
    group = FusedGroup(
        names, hashed_ids, with_unique=first.with_unique, mpi_size=first.hvd_variable._mpi_size, **arguments
    )
    for segment, layer in enumerate(members):
        layer.join(group, segment)
    first.fused_group = group  # Keras and TensorFlow find the group's variables through this attribute.
    return group


def _look_up_ahead(model: keras.Model, layers: Sequence[FusedTfraEmbedding]) -> None:
    """Wraps model.call: a traced call exchanges the ids of all its lookups before it begins."""
    original = model.call
    # The Python function of a tf.function `call` is traced, because ids inside a nested graph cannot be discovered.
    plain = getattr(original, "python_function", original)

    def call(_: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return original(*args, **kwargs)
        run = converted_as_here(plain)
        if keras.src.engine.base_layer_utils.call_context().saving:
            return run(*args, **kwargs)  # Keras traces each layer of a SavedModel as a separate function.
        calls = discover_ids(layers, lambda: run(*args, **kwargs))
        model._clear_losses()  # The discovery trace added losses of tensors that are never computed.
        with outside_clusters(f"Model {model.name!r}"):
            _look_up(calls)
        try:
            answer = run(*args, **kwargs)
            unused = [layer.name for layer in layers if layer.member.prefetched]
        finally:
            for layer in layers:
                layer.member.prefetched = []
        if unused:
            raise RuntimeError(
                f"model {model.name!r} called layers {unused} less often than in its first trace. A fused model "
                "must make the same lookups in every trace. Make them unconditionally in Python, or leave these "
                f"layers alone: fuse(model, leave={unused})."
            )
        return answer

    call.looks_up_ahead = True  # type: ignore[attr-defined]
    # Keras reads the signature of `call` and drops `self`, so the wrapper keeps the original signature.
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(plain).parameters.values()
    call.__signature__ = inspect.Signature([self_parameter, *parameters])  # type: ignore[attr-defined]
    model.call = types.MethodType(call, model)


def _look_up(calls: Sequence[tuple[FusedTfraEmbedding, tf.Tensor | None]]) -> None:
    """Looks up all known ids, group by group, and queues each call's rows in its layer (None: unknown ids)."""
    rows: dict[int, tf.Tensor] = {}
    owners = {id(layer.owner): layer.owner for layer, _ in calls}
    for owner in owners.values():
        numbers = [n for n, (layer, ids) in enumerate(calls) if layer.owner is owner and ids is not None]
        if numbers:
            lookups = [LookupIds(calls[n][0].member.segment, calls[n][1]) for n in numbers]
            rows.update(zip(numbers, owner.hvd_variable.rows(lookups)))
    for n, (layer, _) in enumerate(calls):
        layer.member.prefetched.append(rows.get(n))


def discover_ids(
    layers: Sequence[FusedTfraEmbedding], call: Callable[[], Any]
) -> list[tuple[FusedTfraEmbedding, tf.Tensor | None]]:
    """Returns (layer, ids <key dtype>[n]) for every layer call that `call()` makes, grouped by layer.

    The ids belong to the graph being traced. They are None where they depend on another layer's rows or on random
    numbers, because the first trace does not compute these.
    """
    scratch = scratch_graph("which_ids")
    for layer in layers:
        layer.member.recorded = []
    try:
        with scratch.as_default():
            call()
        calls = [(layer, ids) for layer in layers for ids in layer.member.recorded or []]
    finally:
        for layer in layers:
            layer.member.recorded = None
    for layer, ids in calls:
        if ids.graph is not scratch:
            raise ValueError(
                f"Layer {layer.name!r} is called inside a tf.function, a tf.cond or a loop inside the model's call. "
                "A fused layer must be called in the model's own graph. Call it outside of these, or leave it alone: "
                f"fuse(model, leave=[{layer.name!r}])."
            )
    known = [_is_known(scratch, ids) for _, ids in calls]
    copies = iter(copied(scratch, [ids for (_, ids), is_known in zip(calls, known) if is_known], "fused_ids"))
    return [(layer, next(copies) if is_known else None) for (layer, _), is_known in zip(calls, known)]


def _is_known(scratch: Any, ids: tf.Tensor) -> bool:
    operations = ancestors(scratch, [ids])
    stands_in = any(op.name.rsplit("/", 1)[-1].startswith(STAND_IN) for op in operations)
    return not stands_in and not any(stateful(scratch, operations))
