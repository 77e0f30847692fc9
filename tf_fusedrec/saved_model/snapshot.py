"""All tensors of a served version in one value, so that requests read and updates replace them at once.

The value is a list of lists of tensors, one list per dtype, in the only entry of a TensorFlow hash table. A request
looks the entry up once. The lists share the memory of their tensors, so neither the look-up nor the replacement copies
weights or rows. A version's tensors live until the last request that read them ends. Only this resource of stock
TensorFlow holds lists and dies with the last function that uses it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from tf_fusedrec._tf_compat import tf


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
