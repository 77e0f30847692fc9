"""A group: tables of one spec, stored, exchanged and trained together (FusedRec, eq. 1), with their rows on this rank.

    spec = (dim, dtype, optimizer, initializer)

Limits belong to a table, not to the spec: each table of a group keeps its own. K groups make at most
2K + 1 all-to-alls in a training step, however many tables they have. A layer makes its groups once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Container, Sequence

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.embedding.features import FlatFeature
from tf_fusedrec.embedding.left_out import LeftOut
from tf_fusedrec.embedding.replicas import Replica
from tf_fusedrec.exchange import gradient_sync, routing
from tf_fusedrec.exchange.routing import Outgoing, Route
from tf_fusedrec.exchange.topology import RankLayout, Topology
from tf_fusedrec.optimizers.rules import Rule
from tf_fusedrec.tables import NativeTable, Table, external_table, places
from tf_fusedrec.tables.table import backend_table


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """How a FusedEmbedding looks up and trains, the same for all of its groups. FusedEmbedding documents the fields."""

    seed: int = 0
    gradient_op: str = "average"
    backend: str = "native"
    accumulate_steps: int = 1
    topology: Topology = Topology()
    wire_dtype: str | None = None
    key_encoding: str = "bits"
    init_capacity_per_rank: int = 1 << 16

    def __post_init__(self) -> None:
        allowed = {"gradient_op": ("average", "sum"), "backend": ("native", "tfra"),
                   "wire_dtype": ("bfloat16", "float16", None)}  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {values}, got {getattr(self, name)!r}.")
        if not isinstance(self.topology, Topology):
            raise ValueError(
                f"topology must be a Topology or None, got {self.topology!r}. Use fr.Topology(groups=...)."
            )
        if not isinstance(self.accumulate_steps, int) or self.accumulate_steps < 1:
            raise ValueError(f"accumulate_steps must be an int >= 1, got {self.accumulate_steps!r}.")
        if self.backend != "native":
            if self.accumulate_steps > 1:
                raise ValueError(f"accumulate_steps {self.accumulate_steps} needs backend='native'.")
            if self.topology.groups > 1:
                raise ValueError(f"{self.topology} needs backend='native', and it has {self.backend!r}.")

    def check_tables(self, tables: Sequence[TableConfig]) -> None:
        """Raises ValueError if the backend lacks an option of a table, and ImportError if it is not installed."""
        for table in tables:
            self.topology.check_table(table)
        for table in tables if self.backend != "native" else ():
            if table.options:
                raise ValueError(f"table {table.name!r} has {[*table.options]}, which need backend='native'.")
            if isinstance(table.optimizer, Rule):
                raise ValueError(
                    f"table {table.name!r} has optimizers.{type(table.optimizer).__name__} of tf_fusedrec, which needs "
                    "backend='native'. Backend 'tfra' takes a tf_keras or TF1 optimizer, such as keras.optimizers.Adam."
                )
        if self.backend != "native":
            backend_table(self.backend)


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """The tables of one spec and their features."""

    name: str  # from the spec: adding a table of another spec renames nothing
    tables: tuple[TableConfig, ...]  # sorted by name; table s is segment s
    features: tuple[FeatureConfig, ...]  # sorted by segment, inside a segment in the user's order
    segments: tuple[int, ...]  # segment of each feature

    @functools.cached_property
    def external(self) -> bool:
        """True if the rows belong to another model. They are never trained and never saved."""
        return self.tables[0].external is not None

    @functools.cached_property
    def trains(self) -> bool:
        """True if training changes the rows."""
        return self.tables[0].trainable and not self.external


class TableGroup:
    """The tables of one group with their rows on this rank."""

    def __init__(self, layer_name: str, config: GroupConfig, options: LayerOptions, layout: RankLayout):
        self.prefix = f"{layer_name}.{config.name}"  # of collectives' names, the same on all ranks
        self.config, self.layout = config, layout
        # True if the micro-batches of a batch share rows. It would save nothing where nothing travels.
        self.shares_rows = layout.group.size > 1 or layout.shares_gradients
        self.dtype = tf.as_dtype(config.tables[0].dtype)
        self.output_dtype = {f.name: f.output_dtype or self.dtype.name for f in config.features}  # by feature
        # The output dtypes of the group's features, the table's own dtype first.
        dtypes = set(self.output_dtype.values())
        self.output_dtypes = sorted(dtypes, key=lambda dtype: (dtype != self.dtype.name, dtype))
        self.wire = None if options.wire_dtype is None else tf.as_dtype(options.wire_dtype)
        self.table = self._make_table(f"{layer_name}/{config.name}", options)
        # True if ids that nothing pools stay on this rank with their rows and gradients, duplicates included: the table
        # removes them. To remove them first would save bytes on no network, and cost two more passes over the rows.
        self.keeps_duplicates = not self.shares_rows and self.table.takes_duplicates
        # True if owners can return sums of rows. It is the same on all ranks, whatever the ids of a call. Tables on a
        # device have no op for it. The requesting rank divides the sum of a mean, which may be above float16's largest.
        pools = any(feature.combiner is not None for feature in config.features)
        narrow = "float16" in (self.dtype.name, options.wire_dtype, *self.output_dtypes)
        on_host = isinstance(self.table, NativeTable) and self.table.place is places.CPU
        self.pools = pools and on_host and not narrow
        # True if they do, outside of windows. Groups that share gradients sum by id.
        self.sends_sums = self.pools and layout.group.size > 1 and not layout.shares_gradients
        # The context of ops on ids, which run in host memory if the ids of this group travel there.
        to_host = functools.partial(tf.device, "/CPU:0")
        self.id_device: Callable[[], contextlib.AbstractContextManager] = (
            to_host if self.table.ids_on_host else contextlib.nullcontext
        )
        # A gradient of a lookup before the last update would overwrite it with old rows.
        self.updates = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{layer_name}/{config.name}/updates")
        # <int64>[3] of training lookups that leave their rank: requested ids, sent ids, bytes of ids, rows and
        # gradients to other ranks.
        self.traffic = tf.Variable(
            [0, 0, 0], dtype=tf.int64, trainable=False, name=f"{layer_name}/{config.name}/traffic"
        )
        self._layer_name, self.partition = layer_name, self.table.partition
        self._segment_of = {f.name: segment for f, segment in zip(config.features, config.segments)}
        self._gradient_scale = 1.0 / layout.loss_ranks.size if options.gradient_op == "average" else 1.0
        self._replica = None
        if layout.averages and isinstance(self.table, NativeTable) and not config.external:
            self._replica = Replica(self.table, layout, f"{self.prefix}.average")
        features = {
            table.name: [f.name for f, segment in zip(config.features, config.segments) if segment == s]
            for s, table in enumerate(config.tables)
        }
        ranks = [f"rank {r}" for r in layout.group.members]
        sums = ["the sum over groups"] * layout.replicas.size
        self._left_out = LeftOut(self.table.left_out, features, sums if layout.shares_gradients else ranks)

    def _make_table(self, name: str, options: LayerOptions) -> Table:
        tables, layout = self.config.tables, self.layout
        if self.config.external:
            return external_table(name, tables, layout.group.index, layout.group.size)
        if options.backend == "native":
            return NativeTable(
                name,
                tables,
                seed=options.seed,
                accumulate_steps=options.accumulate_steps,
                average=options.gradient_op == "average",
                averaged=layout.averages,
                moment_scale=layout.topology.scale_of_moments,
            )
        if len(self.output_dtypes) > 1:
            raise ValueError(
                f"tables {[table.name for table in tables]} of backend 'tfra' got the output dtypes "
                f"{self.output_dtypes}. Use one output_dtype for all features of a group, or backend='native'."
            )
        return backend_table(options.backend)(
            name,
            tables,
            key_encoding=options.key_encoding,
            seed=options.seed,
            init_capacity=options.init_capacity_per_rank,
        )

    # Ids.

    def fuse(self, features: Sequence[FlatFeature]) -> ops.FusedIds:
        """The ids of features as one flat tensor, grouped by table."""
        with self.id_device():
            return ops.fuse_ids(
                [feature.ids for feature in features],
                {f: feature.row_splits for f, feature in enumerate(features) if feature.row_splits is not None},
                segments=[self._segment_of[feature.config.name] for feature in features],
                num_segments=len(self.config.tables),
                feature_names=[feature.config.name for feature in features],
                bag_sizes=[feature.bag_size for feature in features],
                combiners=[feature.config.combiner or "sum" for feature in features],
            )

    # At the owner.

    def look_ahead(self, routes: Sequence[Route]) -> ops.RowsAhead:
        """Reads the rows that `look_up` will return."""
        with self.id_device():
            request = routing.join_sources([route.request for route in routes])
        if self.table.prefetches and routes[0].shared is not None:  # rows of other groups' ids
            with self.id_device():
                trained = routing.join_sources([route.trained for route in routes])
            self.table.prefetch(trained)
        return self.table.look_ahead(request)

    def look_up(
        self, routes: Sequence[Route], ahead: ops.RowsAhead | None, *, training: bool, lookups_per_update: int
    ) -> list[ops.TableRows]:
        """One lookup of the table for all routes of a step.

        A training lookup is one tick of the table's clock. It counts each id once, ages each row by one, and decides
        which rows are inserted and evicted. A step that looks up in parts (micro-batches, output dtypes, calls) must
        count and decide like a step with one lookup, so its parts are sources of one message.
        """
        with self.id_device():
            request = routing.join_sources([route.request for route in routes])
        # Rows of the first micro-batch leave before the lookup, because the first compute waits for them.
        first = {
            i: self.table.read(route.request, lookups_per_update=lookups_per_update)
            for i, route in enumerate(routes)
            if route.piece is not None and route.piece.number == 0 and route.shared is None
        }
        # Rows that were read ahead, or for several lookups at once, are summed later.
        sums = routes[0].sums.of_rows if len(routes) == 1 and routes[0].sums is not None and ahead is None else None
        if not training:
            answer = ops.TableRows(self.table.read(request), None, None)
        elif routes[0].shared is None:
            answer = self.table.lookup(request, ahead, sums=sums, lookups_per_update=lookups_per_update)
            if sums is not None:
                return [answer]
        else:  # two ops, because rows of this group leave before the ids of all groups have arrived
            rows = self.table.read(request, ahead, lookups_per_update=lookups_per_update)
            trained = routing.join_sources([route.trained for route in routes])
            looked_up = self.table.lookup(trained, with_rows=False, lookups_per_update=lookups_per_update)
            answer = looked_up._replace(rows=rows)
        parts = routing.split_answer(answer, routes, len(self.config.tables))
        for i, rows in first.items():
            parts[i] = parts[i]._replace(rows=rows)
        return [
            part if route.sums is None else part._replace(rows=routing.partial_sums(part.rows, route.sums.of_rows))
            for route, part in zip(routes, parts)
        ]

    def update(
        self,
        parts: Sequence[tuple[Route, ops.TableRows, tf.Tensor]],
        *,
        updates_seen: Sequence[tf.Tensor],
        staleness: int,
    ) -> None:
        """One update of the tables by the sum of all parts. Collective only where replicas are averaged.

        Args:
          parts: The route, the answer and the received gradients of each lookup.
          updates_seen: <int64>[] of each lookup.
          staleness: See Step.update.
        """
        checks = [check for seen in updates_seen for check in self._not_updated_since(seen, staleness)]
        gradients = [grads for _, _, grads in parts]
        begun = self._replica.begin() if self._replica is not None else None
        trained = [
            (answer, grads, None if route.sums is None else route.sums.of_rows) for route, answer, grads in parts
        ]
        in_window = all(route.piece is not None for route, _, _ in parts)
        left_out = self.table.update(trained, self._gradient_scale, checks, as_they_come=in_window)
        # Counters wait for all gradients, so that a step that finds no more data counts nothing.
        with tf.control_dependencies([*checks, *gradients]):
            if left_out is not None:
                for (route, _, grads), numbers, inverse in zip(parts, left_out.numbers, left_out.inverses):

                    def note(route=route, grads=grads, numbers=numbers, inverse=inverse) -> tf.Operation | None:
                        if route.sums is not None:
                            grads = routing.row_gradients(grads, route.sums.of_rows, inverse)
                        return self._left_out.note(*route.trained, inverse, grads, numbers, left_out.update)

                    tf.cond(tf.size(numbers) > 0, note, tf.no_op)  # an update without such rows costs no work
            self.updates.assign_add(1)
            if self._replica is not None:
                self._replica.note_update([route.request for route, _, _ in parts], begun)

    def _not_updated_since(self, updates_seen: tf.Tensor, staleness: int) -> list[tf.Operation]:
        message = (
            f"FusedEmbedding {self._layer_name!r} was trained twice from lookups of the same step (group "
            f"{self.config.name}, tables {self.table.names}): the second update would overwrite the first with old "
            "rows. Take one gradient of one loss. A call inside a tf.function of its own, a tf.cond or a "
            "tf.while_loop makes its own update: make all calls of a step outside of them."
        )
        once = tf.debugging.Assert(self.updates.read_value() <= updates_seen + staleness, [message])
        return [once] if once is not None else []

    def prefetch(self, features: Sequence[FlatFeature], *, call: int) -> None:
        """Tells the owners of ids which rows a coming lookup will request. Collective where rows may be on disk."""
        if not self.table.prefetches:
            return
        with self.id_device():
            fused, name, segments = self.fuse(features), f"{self.prefix}.{call}.prefetch", len(self.config.tables)
            unique = ops.segment_unique(fused.ids, fused.segment_splits)
            outgoing = [Outgoing(name, unique, self.partition, segments)]
            routes = routing.send_ids(outgoing, self.layout)
            if self.layout.shares_gradients:
                routes = gradient_sync.share_ids(outgoing, routes, self.layout)
        self.table.prefetch(routes[0].trained)

    def synchronize(self) -> None:
        """Makes replicas equal where they train apart. Collective there."""
        if self._replica is not None:
            self._replica.average()


def group_tables(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> tuple[GroupConfig, ...]:
    """Fuses tables of equal spec into groups, in the order of their first table's name: the same on all ranks.

    Raises ValueError, see check_names.
    """
    check_names(tables, features)
    _check_optimizers(tables)
    by_spec: dict[tuple, list[TableConfig]] = {}
    for table in sorted(tables, key=lambda t: t.name):
        by_spec.setdefault(_spec(table), []).append(table)
    groups: list[GroupConfig] = []
    for members in by_spec.values():
        segment_of = {table.name: s for s, table in enumerate(members)}
        mine = sorted((f for f in features if f.table_name in segment_of), key=lambda f: segment_of[f.table_name])
        groups.append(
            GroupConfig(
                name=_group_name(members[0], {group.name for group in groups}),
                tables=tuple(members),
                features=tuple(mine),
                segments=tuple(segment_of[f.table_name] for f in mine),
            )
        )
    return tuple(groups)


def _optimizer_spec(optimizer: object, shared: bool) -> str:
    """A text that is equal for optimizers that train alike. A TF1 optimizer equals itself only."""
    if isinstance(optimizer, Rule):
        return repr(optimizer.to_dict())
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not hasattr(optimizer, "get_config"):
        return kind if shared else f"{kind}@{id(optimizer)}"
    config = {name: value for name, value in optimizer.get_config().items() if name != "name"}  # Keras 3 numbers names
    return f"{kind}{json.dumps(config, sort_keys=True, default=str)}"


def _spec(table: TableConfig, shared: bool = False) -> tuple:
    """The spec that tables of one group share. With `shared`, the part of it that is equal on all ranks."""
    if table.external is not None:  # external tables share a group, whatever their checkpoints
        return (table.dim, table.dtype, "external")
    # A group sums amounts over its tables, so the spec has only whether there is one.
    schema = ops.table_schema()
    options = {path: value for path, value in table.options.items() if schema[path]["scope"] == "group"}
    values = {"unknown": table.unknown != "initial", **options, "frozen": not table.trainable}
    if shared:
        values["tier.folder"] = bool(table.tier.folder)
    hot = ["tier.hot_rows_per_rank"] if table.tier.hot_rows_per_rank else []
    others = (*[(name, value) for name, value in values.items() if value], table.tier.memory_budget_per_rank > 0, *hot)
    return (table.dim, table.dtype, table.initializer, _optimizer_spec(table.optimizer, shared), others)


def _group_name(table: TableConfig, taken: Container[str]) -> str:
    """A name from the spec that all ranks share, because collectives carry it."""
    digest = hashlib.blake2b(repr(_spec(table, shared=True)[2:]).encode(), digest_size=3).hexdigest()
    kind = "external" if table.external is not None else type(table.optimizer).__name__.lower()
    name = f"{kind}-{table.dtype}-{table.dim}-{digest}"
    return next(n for n in itertools.chain([name], (f"{name}-{k}" for k in itertools.count(1))) if n not in taken)


def check_names(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> None:
    """Raises ValueError if names repeat, a feature names an unknown table, or no feature names a table."""
    for kind, names in (("tables", [t.name for t in tables]), ("features", [f.name for f in features])):
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            remedy = " Features that share a table must hold the same TableConfig object." if kind == "tables" else ""
            raise ValueError(f"Names of {kind} must be unique, got {repeated} more than once.{remedy}")
        if not names and not (kind == "tables" and features):
            raise ValueError(f"{kind} must hold at least one config, got none.")
    known = {t.name for t in tables}
    for feature in features:
        if feature.table_name not in known:
            raise ValueError(
                f"FeatureConfig.table must name one of the tables {sorted(known)}, got {feature.table!r} for feature "
                f"{feature.name!r}. Add the TableConfig or correct the name."
            )
    unused = sorted(known - {f.table_name for f in features})
    if unused:
        raise ValueError(f"Every table must be used by a feature, got no feature for {unused}. Remove the tables.")


def _check_optimizers(tables: Sequence[TableConfig]) -> None:
    """Refuses a TF1 optimizer in two groups, because it has one state for all its variables."""
    first: dict[int, TableConfig] = {}
    for table in tables:
        if table.optimizer is None or isinstance(table.optimizer, Rule) or hasattr(table.optimizer, "get_config"):
            continue
        other = first.setdefault(id(table.optimizer), table)
        if _spec(other) != _spec(table):
            raise ValueError(
                f"{type(table.optimizer).__name__} of table {other.name!r} also serves table {table.name!r}, which is "
                "in another group. Give each group a TF1 optimizer of its own, or use Keras optimizers."
            )
