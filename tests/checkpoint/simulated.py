"""Saves and loads of several ranks in one process, by the functions of tf_fusedrec.checkpoint that take a rank's
number.
"""

from tf_fusedrec.checkpoint import loading, saving
from tf_fusedrec.files import saves

DENSE = {"dense.index": b"", "dense.data-00000-of-00001": b""}  # no test reads these files


def save(directory, tables, *, full=None, since=None, extra=None):
    """Saves simulated ranks; tables[r] is rank r's backend, or its list of backends. Returns the save's name."""
    tables = [table if isinstance(table, list) else [table] for table in tables]
    clocks = since or {}
    plan = saving.make_plan(directory, len(tables), full, clocks)
    for rank, of_rank in enumerate(tables):
        saving.write_shard(directory, plan, saving.copy_tables(of_rank, plan, rank), rank)
    saving.commit(directory, plan, DENSE, extra, timeout_s=5)
    return plan.save


def load(directory, tables, *, partial=False):
    """Loads into the backends of simulated ranks. Returns the readers of each rank."""
    tables = [table if isinstance(table, list) else [table] for table in tables]
    described = saves.read_manifest(directory)["tables"]
    read = []
    for rank, of_rank in enumerate(tables):
        opened = loading.open_tables(directory, described, of_rank, rank, len(tables), partial)
        loading.restore(opened, of_rank)
        read.append([table.reader for table in opened])
    return read
