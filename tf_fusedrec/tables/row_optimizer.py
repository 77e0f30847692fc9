"""Runs any stock optimizer on rows whose number changes every step.

Optimizers make their slots (momenta, accumulators) once, in the shape of the trained variable. Here the variable holds
the rows of one step, so it and its slots have the shape [None, D]. The table keeps their values between steps. The
optimizer makes its slots for one row once, which shows the first values of a slot.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf


class RowOptimizer:
    """An optimizer, the variable of a step's rows, and its slots.

    Args:
      optimizer: A Keras optimizer, which is copied without its state, or a TF1 optimizer, which is used itself.
      dim: D.
      dtype: dtype of rows and slots.
      name: Name of the variables.

    Raises:
      ValueError: the optimizer's family is unknown, or it averages rows over time (use_ema).
    """

    def __init__(self, optimizer: Any, dim: int, dtype: tf.DType, name: str):
        self._dim, self._dtype, self._name = dim, dtype, name
        self._rows = self._variable("rows")
        self._slots: dict[str, tf.Variable] = {}
        self._starts: list[np.ndarray] = []
        self.optimizer = self._adopt(optimizer)

    @property
    def slot_names(self) -> list[str]:
        """Names of the slots in the order of their columns."""
        return list(self._slots)

    @property
    def start(self) -> np.ndarray:
        """The values [k * D] of the k slots of a new row."""
        return np.concatenate(self._starts) if self._starts else np.zeros([0], self._dtype.as_numpy_dtype)

    def train(self, rows: tf.Tensor, slots: tf.Tensor, grads: tf.Tensor) -> tf.Tensor:
        """One step of the optimizer.

        Args:
          rows, grads: [W, D]. Each row comes once, so dense gradients save the search for duplicates.
          slots: [W, k * D].

        Returns:
          [W, (1 + k) * D], rows and slots after the step.
        """
        variables = [self._rows, *self._slots.values()]
        parts = [rows, *(tf.split(slots, len(self._slots), axis=1) if self._slots else [])]
        with tf.control_dependencies([v.assign(part, read_value=False) for v, part in zip(variables, parts)]):
            done = self.optimizer.apply_gradients([(tf.identity(grads), self._rows)])
        # In a graph the step is an op to wait for; in eager mode it is over.
        with tf.control_dependencies([] if done is None or tf.executing_eagerly() else [done]):
            return tf.concat([v.read_value() for v in variables], axis=1)

    def _variable(self, role: str) -> tf.Variable:
        nothing = tf.zeros([0, self._dim], self._dtype)
        return tf.Variable(nothing, shape=[None, self._dim], trainable=False, name=f"{self._name}/{role}")

    def _slot(self, slot_name: str, start: Any) -> tf.Variable:
        """Returns the slot of this name, and makes it at the first call. `start` [1, D] holds a new row's values."""
        if slot_name not in self._slots:
            self._starts.append(np.reshape(np.asarray(start, self._dtype.as_numpy_dtype), [self._dim]))
            self._slots[slot_name] = self._variable(slot_name)
        return self._slots[slot_name]

    def _adopt(self, optimizer: Any) -> Any:
        """Returns an optimizer that keeps its slots here."""
        if isinstance(optimizer, keras.optimizers.legacy.Optimizer):
            return self._adopt_legacy(type(optimizer).from_config(optimizer.get_config()))
        if isinstance(optimizer, keras.optimizers.Optimizer):
            if getattr(optimizer, "use_ema", False):
                raise ValueError(
                    f"TableConfig.optimizer {type(optimizer).__name__} must not use_ema: an average of rows that come "
                    "and go is not kept. Use use_ema=False."
                )
            return self._adopt_new(type(optimizer).from_config(optimizer.get_config()))
        if isinstance(optimizer, tf.compat.v1.train.Optimizer):
            return self._adopt_tf1(optimizer)
        raise ValueError(
            f"TableConfig.optimizer must be a tf_keras or TF1 optimizer, got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}. Keras 3 optimizers do not train tf_keras models; use keras.optimizers of "
            "tf_fusedrec."
        )

    def _adopt_legacy(self, optimizer: Any) -> Any:
        def add_slot(_, var, slot_name, initializer="zeros", shape=None):
            make = keras.initializers.get(initializer) if isinstance(initializer, str) else initializer
            return self._slot(slot_name, make(shape=[1, self._dim], dtype=self._dtype))

        optimizer.add_slot = types.MethodType(add_slot, optimizer)
        optimizer.get_slot = types.MethodType(lambda _, var, slot_name: self._slots[slot_name], optimizer)
        optimizer._create_all_weights([self._rows])  # a traced step cannot make variables
        return optimizer

    def _adopt_new(self, optimizer: Any) -> Any:
        def add_variable_from_reference(_, model_variable, variable_name, shape=None, initial_value=None):
            zeros = tf.zeros([1, self._dim], self._dtype)
            return self._slot(variable_name, zeros if initial_value is None else initial_value)

        optimizer.add_variable_from_reference = types.MethodType(add_variable_from_reference, optimizer)
        # The optimizer is built for one row, whose shape is known. Then the rows take the place of that variable.
        optimizer.build([self._one_row()])
        optimizer._index_dict[optimizer._var_key(self._rows)] = 0
        return optimizer

    def _adopt_tf1(self, optimizer: Any) -> Any:
        def zeros_slot(_, var, slot_name, op_name):
            return self._slot(slot_name, tf.zeros([1, self._dim], self._dtype))

        def slot_from_value(_, var, val, slot_name, op_name):
            return self._slot(slot_name, val)

        def slot_from_initializer(_, var, initializer, shape, dtype, slot_name, op_name):
            return self._slot(slot_name, initializer([1, self._dim], dtype))

        optimizer._zeros_slot = types.MethodType(zeros_slot, optimizer)
        optimizer._get_or_make_slot = types.MethodType(slot_from_value, optimizer)
        optimizer._get_or_make_slot_with_initializer = types.MethodType(slot_from_initializer, optimizer)
        optimizer.get_slot = types.MethodType(lambda _, var, slot_name: self._slots[slot_name], optimizer)
        optimizer._create_slots([self._one_row()])
        optimizer._create_slots = lambda var_list: None  # every step would make slots again, of unknown shape
        return optimizer

    def _one_row(self) -> tf.Variable:
        return tf.Variable(tf.zeros([1, self._dim], self._dtype), trainable=False)
