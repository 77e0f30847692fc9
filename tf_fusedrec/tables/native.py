"""Step 5 of 7 (docs/concepts.md): stores and trains rows in this project's own table (custom_ops/hash_table).

A training lookup is one op. It makes keys of (table, id), removes duplicates over sources, finds or inserts rows, and
returns them in the order received. Its handles save the update a second search.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence

import numpy as np

from tf_fusedrec import ops, optimizers
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import LIMIT_FIELDS, NATIVE_FIELDS, SUMMED_FIELDS, TableConfig
from tf_fusedrec.files.hash_order import table_seed
from tf_fusedrec.tables import places
from tf_fusedrec.tables.native_contents import NativeContents
from tf_fusedrec.tables.table import Answer, InferenceRows, LeftOutRows


class NativeTable(NativeContents):
    """The tables of one group in one HashTable resource.

    Args:
      name: Name of the resource, for messages.
      tables: Tables of equal spec, each with limits of its own. Table s is segment s.
      seed: Seed of the initial rows.
      accumulate_steps: Number of steps whose gradients make one update (MTGRBoost, section 5.2).
      average: True if an update takes the mean over those steps; else their sum.
      lookups_per_update: Number of steps whose lookups may come before the update of the first of them.
      averaged: True if replicas of this table train apart and are averaged from time to time.
      moment_scale: moment_scale of the optimizer, unless its record has one other than 1.

    Raises:
      ValueError: the place does not have one of the options, or averaged tables do not.
    """

    owner = "hash_range"
    id_bits = 64  # any int64 is an id
    can_defer = True
    can_look_ahead = True
    splits_answers = True

    def __init__(
        self,
        name: str,
        tables: Sequence[TableConfig],
        *,
        seed: int,
        accumulate_steps: int = 1,
        average: bool = True,
        lookups_per_update: int = 1,
        averaged: bool = False,
        moment_scale: float = 1.0,
    ):
        rule = optimizers.resolve(tables[0].optimizer).with_moment_scale(moment_scale)
        super().__init__(tables, rule)
        places.check(
            self.place,
            tables,
            accumulate_steps=accumulate_steps,
            lookups_per_update=lookups_per_update,
            averaged=averaged,
        )
        spec = tables[0]
        self.optimizer = optimizers.Trainer(rule, name=name)
        self._accumulate_steps = accumulate_steps
        self._average = average
        self._waiting = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{name}/waiting")
        # The other native fields of a TableConfig have the names and values of the op's attributes.
        options = {name: getattr(spec, name) for name in NATIVE_FIELDS if name not in ("storage_dtype", *LIMIT_FIELDS)}
        options["storage"] = "float32" if self._storage == "mixed" else self._storage
        for name in LIMIT_FIELDS:
            values = [getattr(table, name) for table in tables]
            options[f"segment_{name}"] = [value or "none" for value in values] if name == "eviction" else values
        for name in SUMMED_FIELDS:
            options[name] = sum(getattr(table, name) for table in tables)
        self._seeds = [table_seed(seed, table.name) for table in tables]
        self._handle = ops.hash_table(
            shared_name=f"fusedrec/{name}/{uuid.uuid4().hex}",
            dim=spec.dim,
            seeds=self._seeds,
            segment_names=self.names,
            rule=rule.rule,
            hyperparameters=rule.hyperparameters,
            distribution=spec.initializer.distribution,
            a=spec.initializer.a,
            b=spec.initializer.b,
            unknown=spec.unknown,
            window=lookups_per_update,
            averaged=averaged,
            **options,
        )
        # Rows of a lookup that is several steps old may move only if lookups_per_update covers those steps.
        leave = any(table.eviction or table.ttl for table in tables)
        self.moves_rows = bool(leave or spec.hot_after or spec.memory_budget)
        self.can_prefetch = spec.memory_budget > 0
        self.ids_on_host = self.place.ids_on_host
        weakref.finalize(self, ops.table_destroy, self._handle)

    @property
    def most_lookups_per_update(self) -> int | None:  # type: ignore[override]
        return self.place.lookups_per_update

    def lookup(self, message: tf.Tensor, splits: tf.Tensor, *, training: bool) -> Answer:
        if training and self.ids_on_host:  # a look-ahead takes ids where they are; a lookup would copy them back
            return self.refresh(message, splits, self.look_ahead(message, splits))
        if training:
            return ops.table_lookup(self._handle, message, splits, dim=self._dim, dtype=self._dtype)
        return InferenceRows(ops.table_read(self._handle, message, splits, dim=self._dim, dtype=self._dtype))

    def look_ahead(self, message: tf.Tensor, splits: tf.Tensor) -> ops.RowsAhead:
        if self.place is places.DEVICE:  # it reads nothing ahead, and its ids are on the device
            return ops.RowsAhead.none(self._dim, self._dtype)
        return ops.table_look_ahead(self._handle, message, splits, dim=self._dim, dtype=self._dtype)

    def refresh(self, message: tf.Tensor, splits: tf.Tensor, rows_ahead: ops.RowsAhead) -> Answer:
        return ops.table_lookup(self._handle, message, splits, rows_ahead, dim=self._dim)

    def lookup_shared(
        self,
        message: tf.Tensor,
        splits: tf.Tensor,
        trained: tuple[tf.Tensor, tf.Tensor],
        rows_ahead: ops.RowsAhead | None,
    ) -> ops.TableRows:
        form = {"dim": self._dim, "dtype": self._dtype}
        rows = ops.table_read(self._handle, message, splits, rows_ahead, as_training=True, **form)
        return ops.table_lookup(self._handle, *trained, with_rows=False, **form)._replace(rows=rows)

    def prefetch(self, message: tf.Tensor, splits: tf.Tensor) -> None:
        ops.table_prefetch(self._handle, message, splits)

    def apply_gradients(
        self, parts: Sequence[tuple[ops.TableRows, tf.Tensor]], scale: float, checks: Sequence[tf.Operation] = ()
    ) -> LeftOutRows:
        update = self.optimizer.iterations.read_value() + 1
        inverses, gradients = [found.inverse for found, _ in parts], [grads for _, grads in parts]
        if self._accumulate_steps == 1 and len(parts) == 1:
            with tf.control_dependencies([*checks, *gradients]):
                rate, step = self.optimizer.current()
                left_out = [
                    ops.table_apply_gradients(self._handle, *parts[0], scale=scale, learning_rate=rate, step=step)
                ]
                self.optimizer.count()
            return LeftOutRows(left_out, inverses, update)
        share = scale / self._accumulate_steps if self._average else scale
        # Gradients are summed when they arrive. TensorFlow runs checks in program order, so these come behind checks of
        # the last micro-batch. Only the update waits for them. If it is not made, the next step drops the sums. Sums
        # that hold gradients of earlier steps are not dropped: such a step adds all of its gradients or none.
        drops = self._accumulate_steps == 1
        with tf.control_dependencies([] if drops else [*checks, *gradients]):
            left_out = [
                ops.table_accumulate_gradients(self._handle, *part, scale=share, begin=drops and i == 0)
                for i, part in enumerate(parts)
            ]
        with tf.control_dependencies([*checks, *left_out]):
            if drops:
                self._update()
            else:
                waiting = self._waiting.assign_add(1)
                tf.cond(tf.equal(waiting, self._accumulate_steps), self._update, lambda: None)
        return LeftOutRows(left_out, inverses, update)

    def _update(self) -> None:
        rate, step = self.optimizer.current()
        ops.table_apply_accumulated(self._handle, learning_rate=rate, step=step)
        self.optimizer.count()
        self._waiting.assign(0)

    # Methods for replicas.py, which averages tables.

    def note_trained(self, message: tf.Tensor, splits: tf.Tensor) -> None:
        """Notes that rows of the ids of a lookup have been trained."""
        ops.table_note_trained(self._handle, message, splits)

    def updates_make_a_multiple_of(self, steps: int) -> tf.Tensor:
        """<bool>[], whether the last call made the n-th update, for a multiple n of `steps`."""
        return tf.equal(self._waiting, 0) & tf.equal(self.optimizer.iterations % steps, 0)

    def take_unsynced(self) -> ops.Unsynced:
        """The changes of this replica since the last call."""
        return ops.table_take_unsynced(self._handle)

    def read_numbers(self, ids: tf.Tensor, segment_splits: tf.Tensor) -> tf.Tensor:
        """Rows and slots of ids, as ops.table_read_numbers."""
        return ops.table_read_numbers(self._handle, ids, segment_splits)

    @property
    def second_moments(self) -> np.ndarray:
        """<bool>[k], True at numbers that are second moments which decay, Adam's v. They are never negative."""
        slots = ["row", *self._rule.wide_slots]
        wide = np.repeat([slot == "v" for slot in slots], self._dim)
        return np.concatenate([wide, np.zeros(len(self._rule.scalar_slots), bool)])

    def merge(self, **what: tf.Tensor) -> None:
        """Gives this replica the merged rows, as ops.table_merge."""
        ops.table_merge(self._handle, **what, step=self.optimizer.iterations.read_value())

    def clear(self) -> None:
        super().clear()
        self._waiting.assign(0)
