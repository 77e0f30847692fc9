"""The themed tables of docs/benchmarks.md, as format strings over benchmarks/results (figures.py). One module each."""

from tools.docs.figure_tables import (
    embedding_tables,
    models,
    schedules_and_batches,
    sequences_and_serving,
    training_step,
)

THEMES = tuple(
    module.THEME for module in (training_step, embedding_tables, schedules_and_batches, sequences_and_serving, models)
)
