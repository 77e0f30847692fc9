"""Versions of a served model: every answer is from one version, and a delta replaces it while the model is served.

A version is all dense weights and the overlays of all groups of tables. A request reads it once (Snapshot). The traced
model takes its weights and changed rows from there instead of its variables. The signature "apply_delta" makes the next
version from a delta's folder, "apply_deltas" from a folder of deltas, and "version" reports the current one.
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


def layout_of(
    tables: Mapping[str, Any], weights: Sequence[tf.Variable], traced: Mapping[str, Any], assets: Mapping[str, str]
) -> str:
    """Digest of what a delta cannot change: forms of tables and dense weights, constants of signatures, and assets."""
    shapes = [[weight.shape.as_list(), weight.dtype.name] for weight in weights]
    hashed = hashlib.blake2b(json.dumps([tables, shapes], sort_keys=True).encode(), digest_size=_HEX_BYTES)
    for name in sorted(traced):
        hashed.update(name.encode())
        for captured in traced[name].get_concrete_function().captured_inputs:
            if captured.dtype not in (tf.resource, tf.variant):
                hashed.update(tf.io.serialize_tensor(captured).numpy())
    for name in sorted(assets):
        hashed.update(f"{name}\n{assets[name]}".encode())
    return hashed.hexdigest()


def version_of(layout: str, tables: Mapping[str, tuple[np.ndarray, np.ndarray]], weights: Sequence[tf.Variable]) -> str:
    """Digest of everything that a delta can change: ids and rows <uint8>[n, bytes] by table, and dense weights."""
    hashed = hashlib.blake2b(layout.encode(), digest_size=_HEX_BYTES)
    for name in sorted(tables):
        hashed.update(applying.digest(*tables[name]).encode())
    for weight in weights:
        hashed.update(weight.numpy().tobytes())
    return hashed.hexdigest()


class _Version(NamedTuple):
    version: tf.Tensor  # <string>[]
    deltas: tf.Tensor  # <int64>[], deltas applied since the server loaded the model
    weights: list[tf.Tensor]
    overlays: list[Overlay]

    def flat(self) -> list[tf.Tensor]:
        return [self.version, self.deltas, *self.weights, *(part for overlay in self.overlays for part in overlay)]

    def description(self) -> dict[str, tf.Tensor]:
        """Outputs of the signatures for operators."""
        entries = [tf.size(overlay.tables, tf.int64) for overlay in self.overlays]
        changed = tf.add_n(entries) if entries else tf.constant(0, tf.int64)
        return {"version": self.version, "deltas": self.deltas, "changed_rows": changed}


class Versions(tf.Module):
    """The current version of a served model, of all dense weights and tables."""

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
            return _Version(tf.constant(self._version), tf.constant(0, tf.int64), values, overlays).flat()

        self._snapshot = Snapshot(specs, initial)

    def _read(self) -> _Version:
        version, deltas, *tensors = self._snapshot.read()
        count, size = len(self._weight_specs), len(Overlay._fields)
        overlays = [Overlay(*tensors[at : at + size]) for at in range(count, len(tensors), size)]
        return _Version(version, deltas, tensors[:count], overlays)

    def answering(self, signature: Signature, lookup: Lookup) -> Signature:
        """The signature, with all weights and rows of an answer from one version."""

        def answer(inputs: dict[str, tf.Tensor]) -> Mapping[str, tf.Tensor]:
            current = self._read()
            weights = _reading(self._weights(), current.weights)
            with weights, lookup.over(current.overlays), after_deltas(current.deltas):
                return signature.function(inputs)

        return signature._replace(function=answer)

    def check(self, name: str, traced: Any) -> None:
        """Raises ValueError if a traced signature reads a weight from its variable, past the version."""
        handles = {id(_unwrapped(weight).handle): weight.name for weight in self._weights()}
        past = [handles[id(x)] for x in traced.get_concrete_function().captured_inputs if id(x) in handles]
        if past:
            raise ValueError(
                f"signature {name!r} uses the variables of weights {past}, not their values, so its answers would "
                "mix versions while a delta is applied. Read a weight by tf.convert_to_tensor in the model."
            )

    def signatures(self, version: str, layout: str) -> dict[str, Signature]:
        """Signatures for operators, of an export with these digests; see docs/serving.md."""
        self._version, self._layout = version, layout

        def apply_delta(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return self._snapshot.exclusively(lambda: self._apply(inputs["path"], self._read()).description())

        functions = apply_delta, self._apply_deltas, lambda inputs: self._read().description()
        return {name: Signature(*of) for name, of in zip(UPDATES, zip(functions, (_PATH, _PATH, {})))}

    def _apply_deltas(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        folder = inputs["path"]

        def update() -> dict[str, tf.Tensor]:
            files = tf.io.matching_files(tf.strings.join([folder, "/*/delta.json"]))
            words = ["folder ", folder, " holds no delta. Use the folder that holds the folders of deltas."]
            exist = tf.debugging.Assert(tf.size(files) > 0, [tf.strings.join(words)])
            with tf.control_dependencies([exist]):
                paths = tf.strings.regex_replace(files, "/delta\\.json$", "")

            bases = tf.map_fn(lambda path: delta.read_header(path).base, paths)

            # Names need not sort in the order of versions, and a version may recur: each delta is applied once.
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
                return self._read().description()

        return self._snapshot.exclusively(update)

    def _apply(self, path: tf.Tensor, before: _Version) -> _Version:
        """Makes the version after a delta with the base version `before`."""
        header = delta.read_header(path)
        words = ["delta ", path, " starts from version ", header.base, ", but the server has ", before.version]
        words.append(". Use the deltas in between, or load a full export.")
        follows = tf.debugging.Assert(header.base == before.version, [tf.strings.join(words)])
        words = ["delta ", path]
        words.append(" is of another model: its tables, dense weights or constants differ. Load a full export.")
        same_model = tf.debugging.Assert(header.layout == self._layout, [tf.strings.join(words)])
        with tf.control_dependencies([follows, same_model]):
            weights, entries = delta.read_server_changes(path, header, self._groups, self._weight_specs)
        overlays = [overlay.after(*changes) for overlay, changes in zip(before.overlays, entries)]
        after = _Version(header.result, before.deltas + 1, weights, overlays)
        # All reads and checks come before the first request sees anything.
        with tf.control_dependencies(after.flat()):
            replaced = self._snapshot.replace(after.flat())
        with tf.control_dependencies([replaced]):
            return after._replace(version=tf.identity(after.version), deltas=tf.identity(after.deltas))


def _unwrapped(weight: tf.Variable) -> tf.Variable:
    """The variable inside the wrapper of mixed precision."""
    return getattr(weight, "_variable", weight)


@contextlib.contextmanager
def _reading(weights: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> Iterator[None]:
    """In this context reads of the variables `weights` give `values`."""
    with contextlib.ExitStack() as undo:
        for weight, value in zip(weights, values):
            attributes = vars(_unwrapped(weight))
            reads = {
                "_read_variable_op": lambda no_copy=False, value=value: value,
                "sparse_read": lambda indices, name=None, value=value: tf.gather(value, indices, name=name),
                "gather_nd": lambda indices, name=None, value=value: tf.gather_nd(value, indices, name=name),
            }
            attributes.update(reads)
            for name in reads:
                undo.callback(attributes.pop, name)
        yield


class Snapshot(tf.saved_model.experimental.TrackableResource):
    """All tensors of a served version in one value, so that requests read and updates replace them at once.

    The value is a list of lists of tensors, one list per dtype, in the only entry of a TensorFlow hash table. A request
    looks the entry up once. The lists share the memory of their tensors, so neither the lookup nor the replacement
    copies weights or rows. A version's tensors live until the last request that read them ends. No other resource of
    stock TensorFlow can store lists and dies with the last function that uses it.

    TensorFlow calls `initial`, which gives the tensors of the loaded version, after it has restored variables.
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
        """All tensors of one version. Every call may read a different version."""
        with tf.device("CPU"):
            value = tf.raw_ops.LookupTableFindV2(
                table_handle=self.resource_handle, keys=tf.constant(0, tf.int64), default_value=_empty_list(tf.variant)
            )
            lists: dict[tf.DType, tf.Tensor] = {}
            read: dict[tf.DType, int] = {}
            tensors = []
            for spec in self._specs():
                if spec.dtype not in lists:
                    lists[spec.dtype] = _item(value, len(lists), tf.TensorSpec([], tf.variant))
                at = read[spec.dtype] = read.get(spec.dtype, -1) + 1
                tensors.append(_item(lists[spec.dtype], at, spec))
            return tensors

    def replace(self, tensors: Sequence[tf.Tensor]) -> tf.Operation:
        """Makes `tensors` the version of all later requests."""
        with tf.device("CPU"):
            lists: dict[tf.DType, tf.Tensor] = {}
            for tensor in tensors:
                before = lists.get(tensor.dtype)
                before = _empty_list(tensor.dtype) if before is None else before
                lists[tensor.dtype] = tf.raw_ops.TensorListPushBack(input_handle=before, tensor=tensor)
            value = _empty_list(tf.variant)
            for same_dtype in lists.values():
                value = tf.raw_ops.TensorListPushBack(input_handle=value, tensor=same_dtype)
            return tf.raw_ops.LookupTableInsertV2(
                table_handle=self.resource_handle, keys=tf.constant(0, tf.int64), values=value
            )

    def exclusively(self, update: Callable[[], dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Runs `update` while no other update runs. Requests do not wait."""
        with tf.device("CPU"):
            mutex = tf.raw_ops.MutexV2(shared_name=self._shared_name)
            lock = tf.raw_ops.MutexLock(mutex=mutex)  # A failing step frees it, too.
            with tf.control_dependencies([lock]):
                outputs = update()
            with tf.control_dependencies([*outputs.values()]):
                unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
            with tf.control_dependencies([unlocked]):
                return {name: tf.identity(output) for name, output in outputs.items()}


def _empty_list(dtype: tf.DType) -> tf.Tensor:
    any_shape, any_size = tf.constant(-1), tf.constant(-1)
    return tf.raw_ops.EmptyTensorList(element_shape=any_shape, max_num_elements=any_size, element_dtype=dtype)


def _item(items: tf.Tensor, at: int, spec: tf.TensorSpec) -> tf.Tensor:
    shape = tf.constant([-1 if size is None else size for size in spec.shape], tf.int32)
    return tf.raw_ops.TensorListGetItem(input_handle=items, index=at, element_shape=shape, element_dtype=spec.dtype)
