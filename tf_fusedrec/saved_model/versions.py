"""Versions of a served model: every answer comes from one, and a delta replaces it while the model is served.

A version is all dense weights and the overlays of all groups of tables (Snapshot). A request reads it once. The
traced model takes its weights from there instead of its variables, and its look-ups their changed rows. The signature
"apply_delta" makes the next version from a delta's folder, "apply_deltas" from a folder of deltas, and "version" tells
the current one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model import applying, delta
from tf_fusedrec.saved_model.served_rows import Group, Lookup, Overlay
from tf_fusedrec.saved_model.signatures import Signature
from tf_fusedrec.saved_model.state_cache import after_deltas

UPDATES = ("apply_delta", "apply_deltas", "version")  # signatures of every export
_PATH = {"path": tf.TensorSpec([], tf.string)}
_HEX_BYTES = delta.VERSION_BYTES // 2


def layout_of(tables: Mapping[str, Any], weights: Sequence[tf.Variable], traced: Mapping[str, Any]) -> str:
    """Digest of what a delta cannot change.

    Args:
      tables: {name: {"dim", "dtype"}}.
      weights: Variables of all dense weights, for their shapes and dtypes.
      traced: Traced signatures by name, for the constants that they capture.
    """
    shapes = [[weight.shape.as_list(), weight.dtype.name] for weight in weights]
    hashed = hashlib.blake2b(json.dumps([tables, shapes], sort_keys=True).encode(), digest_size=_HEX_BYTES)
    for name in sorted(traced):
        hashed.update(name.encode())
        for captured in traced[name].get_concrete_function().captured_inputs:
            if captured.dtype not in (tf.resource, tf.variant):
                hashed.update(tf.io.serialize_tensor(captured).numpy())
    return hashed.hexdigest()


def version_of(layout: str, tables: Mapping[str, tuple[np.ndarray, np.ndarray]], weights: Sequence[tf.Variable]) -> str:
    """Digest of everything that a delta can change: ids and rows <uint8>[n, bytes] by table, and dense weights."""
    hashed = hashlib.blake2b(layout.encode(), digest_size=_HEX_BYTES)
    for name in sorted(tables):
        hashed.update(applying.digest(*tables[name]).encode())
    for weight in weights:
        hashed.update(weight.numpy().tobytes())
    return hashed.hexdigest()


class _Parts(NamedTuple):
    """Tensors of a version. version: <string>[]; deltas: <int64>[], the deltas applied since the server loaded."""

    version: tf.Tensor
    deltas: tf.Tensor
    weights: list[tf.Tensor]
    overlays: list[Overlay]

    def flat(self) -> list[tf.Tensor]:
        return [self.version, self.deltas, *self.weights, *(part for overlay in self.overlays for part in overlay)]


class Versions(tf.Module):
    """The current version of a served model.

    Args:
      weights: Variables of all dense weights.
      groups: All tables, by group.
    """

    def __init__(self, weights: Sequence[tf.Variable], groups: Sequence[Group]):
        super().__init__(name="versions")
        # A function hides the variables: the module tracks them elsewhere.
        self._weights, self._groups = lambda: weights, groups
        self._version = self._layout = ""
        self._weight_specs = [tf.TensorSpec(weight.shape, weight.dtype) for weight in weights]
        specs = [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64), *self._weight_specs]
        specs += [spec for group in groups for spec in group.specs()]

        def initial() -> list[tf.Tensor]:
            values = [weight.read_value() for weight in weights]
            overlays = [group.empty() for group in groups]
            return _Parts(tf.constant(self._version), tf.constant(0, tf.int64), values, overlays).flat()

        self._snapshot = Snapshot(specs, initial)

    def _read(self) -> _Parts:
        version, deltas, *rest = self._snapshot.read()
        count, size = len(self._weight_specs), len(Overlay._fields)
        overlays = [Overlay(*rest[at : at + size]) for at in range(count, len(rest), size)]
        return _Parts(version, deltas, rest[:count], overlays)

    def answering(self, signature: Signature, lookup: Lookup) -> Signature:
        """The signature, with all weights and rows of an answer from one version."""

        def answer(inputs: dict[str, tf.Tensor]) -> Mapping[str, tf.Tensor]:
            parts = self._read()
            with _reading(self._weights(), parts.weights), lookup.over(parts.overlays), after_deltas(parts.deltas):
                return signature.function(inputs)

        return signature._replace(function=answer)

    def check(self, name: str, traced: Any) -> None:
        """Raises ValueError if a traced signature reads a weight around the version."""
        handles = {id(_variable(weight).handle): weight.name for weight in self._weights()}
        around = [handles[id(x)] for x in traced.get_concrete_function().captured_inputs if id(x) in handles]
        if around:
            raise ValueError(
                f"signature {name!r} uses the variables of weights {around}, not their values, so its answers would "
                "mix versions while a delta is applied. Remedy: read a weight by tf.convert_to_tensor in the model."
            )

    def signatures(self, version: str, layout: str) -> dict[str, Signature]:
        """Signatures for operators, of an export with these digests; see docs/serving.md."""
        self._version, self._layout = version, layout
        functions = self._apply_delta, self._apply_deltas, lambda inputs: _description(self._read())
        return {name: Signature(*of) for name, of in zip(UPDATES, zip(functions, (_PATH, _PATH, {})))}

    def _apply_delta(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        path = inputs["path"]

        def update() -> list[tf.Tensor]:
            return list(_description(self._apply(path, self._read())).values())

        return dict(zip(_DESCRIBED, self._snapshot.exclusively(update)))

    def _apply_deltas(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        folder = inputs["path"]

        def update() -> list[tf.Tensor]:
            found = tf.io.matching_files(tf.strings.join([folder, "/*/delta.json"]))
            words = ["folder ", folder, " holds no delta. Remedy: the folder that holds the folders of deltas."]
            some = tf.debugging.Assert(tf.size(found) > 0, [tf.strings.join(words)])
            with tf.control_dependencies([some]):
                paths = tf.strings.regex_replace(found, "/delta\\.json$", "")

            bases = tf.map_fn(lambda path: delta.read_header(path).base, paths)

            # Names need not sort in the order of versions, and a version may come back: each delta is applied once.
            def follows(version: tf.Tensor, applied: tf.Tensor) -> tf.Tensor:
                return tf.logical_and(tf.equal(bases, version), tf.logical_not(applied))

            def apply_next(version: tf.Tensor, applied: tf.Tensor) -> list[tf.Tensor]:
                at = tf.argmax(tf.cast(follows(version, applied), tf.int32))
                with tf.control_dependencies([version]):
                    after = self._apply(paths[at], self._read())
                return [after.version, tf.logical_or(applied, tf.equal(tf.range(tf.size(paths, tf.int64)), at))]

            version, _ = tf.while_loop(
                lambda version, applied: tf.reduce_any(follows(version, applied)),
                apply_next,
                [self._read().version, tf.zeros_like(bases, tf.bool)],
                parallel_iterations=1,
            )
            with tf.control_dependencies([version]):
                return list(_description(self._read()).values())

        return dict(zip(_DESCRIBED, self._snapshot.exclusively(update)))

    def _apply(self, path: tf.Tensor, before: _Parts) -> _Parts:
        """Makes the version after a delta, whose base must be the version `before`."""
        header = delta.read_header(path)
        words = ["delta ", path, " starts from version ", header.base, ", but the server has ", before.version]
        words.append(". Remedy: the deltas in between, or load a full export.")
        follows = tf.debugging.Assert(header.base == before.version, [tf.strings.join(words)])
        words = [
            "delta ",
            path,
            " is of another model: its tables, dense weights or constants differ. Remedy: load a full export.",
        ]
        same_model = tf.debugging.Assert(header.layout == self._layout, [tf.strings.join(words)])
        with tf.control_dependencies([follows, same_model]):
            weights, entries = delta.read(path, header, self._groups, self._weight_specs)
        overlays = [overlay.after(*of_group) for overlay, of_group in zip(before.overlays, entries)]
        after = _Parts(header.result, before.deltas + 1, weights, overlays)
        # All reads and checks come before the first request sees anything.
        with tf.control_dependencies(after.flat()):
            replaced = self._snapshot.replace(after.flat())
        with tf.control_dependencies([replaced]):
            return after._replace(version=tf.identity(after.version), deltas=tf.identity(after.deltas))


_DESCRIBED = ("version", "deltas", "changed_rows")


def _description(parts: _Parts) -> dict[str, tf.Tensor]:
    entries = [tf.size(overlay.tables, tf.int64) for overlay in parts.overlays]
    changed = tf.add_n(entries) if entries else tf.constant(0, tf.int64)
    return dict(zip(_DESCRIBED, (parts.version, parts.deltas, changed)))


def _variable(weight: tf.Variable) -> tf.Variable:
    """The variable itself. Mixed precision wraps it."""
    return getattr(weight, "_variable", weight)


@contextlib.contextmanager
def _reading(weights: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> Iterator[None]:
    """In this context reads of the variables `weights` give `values`."""
    with contextlib.ExitStack() as undo:
        for weight, value in zip(weights, values):
            of_variable = vars(_variable(weight))
            reads = {
                "_read_variable_op": lambda no_copy=False, value=value: value,
                "sparse_read": lambda indices, name=None, value=value: tf.gather(value, indices, name=name),
                "gather_nd": lambda indices, name=None, value=value: tf.gather_nd(value, indices, name=name),
            }
            of_variable.update(reads)
            for name in reads:
                undo.callback(of_variable.pop, name)
        yield


class Snapshot(tf.saved_model.experimental.TrackableResource):
    """The tensors that a delta can change.

    Args:
      specs: Shapes and dtypes of the tensors.
      initial: Function that gives the tensors of the version that is loaded. TensorFlow runs it after it has restored
        variables.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec], initial: Callable[[], Sequence[tf.Tensor]]):
        super().__init__(device="CPU")
        self._specs, self._initial = lambda: specs, initial
        self._shared_name = f"fusedrec/version/{uuid.uuid4().hex}"
        _ = self.resource_handle  # Creates the handle here, outside the functions that capture it.

    def _create_resource(self) -> tf.Tensor:
        types = {"key_dtype": tf.int64, "value_dtype": tf.variant}
        # A session runs its graph many times and needs the name to find the table.
        if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
            return tf.raw_ops.MutableHashTableV2(**types, shared_name=self._shared_name)
        return tf.raw_ops.AnonymousMutableHashTable(**types)

    def _initialize(self) -> None:
        self.replace(self._initial())

    def read(self) -> list[tf.Tensor]:
        """Returns all tensors of one version. Every call may read another version."""
        with tf.device("CPU"):
            value = tf.raw_ops.LookupTableFindV2(
                table_handle=self.resource_handle, keys=tf.constant(0, tf.int64), default_value=_empty_list(tf.variant)
            )
            return _unpacked(value, self._specs())

    def replace(self, tensors: Sequence[tf.Tensor]) -> tf.Operation:
        """Makes `tensors` the version of all later requests."""
        with tf.device("CPU"):
            return tf.raw_ops.LookupTableInsertV2(
                table_handle=self.resource_handle, keys=tf.constant(0, tf.int64), values=_packed(tensors)
            )

    def exclusively(self, update: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Runs `update` while no other update runs. Requests do not wait."""
        with tf.device("CPU"):
            mutex = tf.raw_ops.MutexV2(shared_name=self._shared_name)
            lock = tf.raw_ops.MutexLock(mutex=mutex)  # A failing step frees it, too.
            with tf.control_dependencies([lock]):
                outputs = update()
            with tf.control_dependencies(outputs):
                unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
            with tf.control_dependencies([unlocked]):
                return [tf.identity(output) for output in outputs]


def _empty_list(dtype: tf.DType) -> tf.Tensor:
    any_shape, any_size = tf.constant(-1), tf.constant(-1)
    return tf.raw_ops.EmptyTensorList(element_shape=any_shape, max_num_elements=any_size, element_dtype=dtype)


def _packed(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    lists: dict[tf.DType, tf.Tensor] = {}
    for tensor in tensors:
        before = lists.get(tensor.dtype)
        before = _empty_list(tensor.dtype) if before is None else before
        lists[tensor.dtype] = tf.raw_ops.TensorListPushBack(input_handle=before, tensor=tensor)
    value = _empty_list(tf.variant)
    for of_dtype in lists.values():
        value = tf.raw_ops.TensorListPushBack(input_handle=value, tensor=of_dtype)
    return value


def _unpacked(value: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    lists: dict[tf.DType, tf.Tensor] = {}
    taken: dict[tf.DType, int] = {}
    tensors = []
    for spec in specs:
        if spec.dtype not in lists:
            lists[spec.dtype] = _item(value, len(lists), tf.TensorSpec([], tf.variant))
        at = taken[spec.dtype] = taken.get(spec.dtype, -1) + 1
        tensors.append(_item(lists[spec.dtype], at, spec))
    return tensors


def _item(of: tf.Tensor, at: int, spec: tf.TensorSpec) -> tf.Tensor:
    shape = tf.constant([-1 if size is None else size for size in spec.shape], tf.int32)
    return tf.raw_ops.TensorListGetItem(input_handle=of, index=at, element_shape=shape, element_dtype=spec.dtype)
