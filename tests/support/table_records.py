"""The records of a group of tables (custom_ops/hash_table/options.h) from the short names that oracles have, too."""

PATHS = {
    "distribution": "initializer", "a": "initializer.a", "b": "initializer.b", "unknown": "unknown",
    "storage": "storage.dtype", "stochastic_rounding": "storage.stochastic_rounding", "hot_after": "storage.hot_after",
    "memory_budget": "tier.memory_budget_per_rank", "tier_folder": "tier.folder", "host_rows": "tier.host_rows",
    "hot_rows": "tier.hot_rows_per_rank", "record_tombstones": "record_tombstones",
    "averaged": "averaged", "names": "name", "max_rows": "limits.max_rows_per_rank",
    "max_candidates": "limits.max_candidates_per_rank",
    **{name: f"limits.{name}" for name in ("eviction", "ttl", "admission_count", "frequency_decay_steps")},
}  # fmt: skip
_SUMS = ("memory_budget", "hot_rows")


def records_of(dim, seeds, **options):
    """Returns a record for each seed. An option is one value for all tables, of a sum the first one's, or a list."""
    if options.get("hot_after") and options.get("storage", "float32") == "float32":
        options["storage"] = "mixed"
    records = []
    for s, seed in enumerate(seeds):
        record = {"dim": dim, "seed": int(seed)}
        for name, value in options.items():
            if isinstance(value, list):
                record[PATHS.get(name, name)] = value[s]
            elif s == 0 or name not in _SUMS:
                record[PATHS.get(name, name)] = value
        records.append(record)
    return records


def rule_record(rule, parameters):
    """Returns the options of a rule, from its parameters in the order of custom_ops/hash_table/rules."""
    from tf_fusedrec import ops

    names = ops.table_schema()["rule"]["parameters"][rule]
    return {"rule": rule, **{f"rule.{name}": number for name, number in zip(names, parameters, strict=True)}}


def arguments_of(*, shared_name, dim, seeds, rule, hyperparameters, anonymous=False, **options):
    """Returns the arguments of ops.hash_table."""
    tables = records_of(dim, seeds, **options, **rule_record(rule, hyperparameters))
    return {"shared_name": shared_name, "tables": tables, "anonymous": anonymous}
