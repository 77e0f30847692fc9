"""Extends the machine of machine.py by exports of its checkpoints and deltas of these exports."""

from __future__ import annotations

import functools
import pathlib
import shutil
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import tf_fusedrec as fr
from tests.soak.killed import killed_at
from tests.soak.machine import IDS, Machine, segments
from tests.soak.power_loss import Crashed
from tests.soak.ranks import SEED, TABLES, initial, table_config
from tf_fusedrec import checkpoint, keras, tf
from tf_fusedrec.checkpoint.loading import read_tables

Rows = dict[str, dict[int, np.ndarray]]  # by table and id


class Export(NamedTuple):
    """A folder, its expected rows, and the kind of its operations."""

    folder: pathlib.Path
    rows: Rows
    ops: str


@functools.cache
def served_model() -> tuple[keras.Model, Any]:
    """Returns a model that looks up rows of ids, and its embedding. The rows come from checkpoints."""
    tables = [table_config(name, momentum=0.0, tier_folder="") for name in TABLES]
    embedding = fr.FusedEmbedding([fr.FeatureConfig(name, name) for name in TABLES], tables, seed=SEED)
    inputs = {name: keras.Input([], dtype=tf.int64, name=name) for name in TABLES}
    rows = embedding(inputs)
    return keras.Model(inputs, keras.layers.Concatenate()([rows[name] for name in TABLES])), embedding


class ExportMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.exports: list[Export] = []
        self.deltas: list[tuple[Export, Export]] = []  # (delta, base) pairs.

    def _fill(self) -> Rows:
        """Loads the checkpoint's rows into the served model and returns the expected rows."""
        _, embedding = served_model()
        for group in embedding.internals.groups:
            group.table.clear()
        for name, table in read_tables(self.directory).items():
            checkpoint.warm_start(embedding, name, table.ids, table.rows)
        number, oracles = self.saved
        return {
            name: {i: row.numbers for oracle in oracles for i, row in oracle.rows[s].items()}
            for s, name in enumerate(TABLES)
        }

    def _new_folder(self) -> pathlib.Path:
        return self.home / f"export-{sum(self.executed.values())}-{len(self.exports)}-{len(self.deltas)}"

    @precondition(lambda self: self.saved is not None)
    @rule(ops=st.sampled_from(["stock", "ours"]))
    def export(self, ops: str) -> None:
        self.count(f"export {ops}")
        made = Export(self._new_folder(), self._fill(), ops)
        fr.export(served_model()[0], made.folder, ops)
        self._check(made)
        self.exports.append(made)

    @precondition(lambda self: self.exports)
    @rule(which=st.integers(0, 9))
    def export_a_delta(self, which: int) -> None:
        self.count("export a delta")
        base = self.exports[which % len(self.exports)]
        made = Export(self._new_folder(), self._fill(), base.ops)
        fr.export(served_model()[0], made.folder, base.ops, base=base.folder)
        self.deltas.append((made, base))

    @precondition(lambda self: self.deltas)
    @rule(which=st.integers(0, 9), killed=st.one_of(st.none(), st.integers(0, 40)))
    def apply_a_delta(self, which: int, killed: Any) -> None:
        """A server that dies in the middle leaves the whole result or none, and can start again."""
        self.count("apply a delta" if killed is None else "apply a delta and die")
        delta, base = self.deltas[which % len(self.deltas)]
        made = Export(self._new_folder(), delta.rows, base.ops)
        try:
            with killed_at(self.home, 1 << 30 if killed is None else killed):
                fr.apply_delta(base.folder, delta.folder, made.folder)
        except Crashed:
            if not made.folder.exists():
                fr.apply_delta(base.folder, delta.folder, made.folder)
        self._check(made)
        self.exports.append(made)

    @precondition(lambda self: len(self.exports) > 2)
    @rule(segment=segments)
    def forget_an_export(self, segment: int) -> None:
        """Removes an old folder, after which its deltas are useless."""
        self.count("forget an export")
        gone = self.exports.pop(segment)
        self.deltas = [(delta, base) for delta, base in self.deltas if base is not gone]
        shutil.rmtree(gone.folder)

    @staticmethod
    def _check(made: Export) -> None:
        """Looks up every possible id in a freshly started server."""
        loaded = tf.saved_model.load(str(made.folder))
        serve = loaded.signatures["serving_default"]
        (answer,) = serve(**{name: tf.constant(IDS, tf.int64) for name in TABLES}).values()
        want = [
            np.concatenate([made.rows[name].get(i, initial((segment, i))) for segment, name in enumerate(TABLES)])
            for i in IDS
        ]
        np.testing.assert_array_equal(answer, want)
