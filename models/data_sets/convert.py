"""Command line: converts a raw data set to a folder in our Parquet layout, or makes a synthetic one.

    python -m tf_fusedrec.models.data_sets.convert movielens           --input ml-1m --output data/ml-1m
    python -m tf_fusedrec.models.data_sets.convert sequences           --input sequences.txt --output data/sequences
    python -m tf_fusedrec.models.data_sets.convert kuairand            --input log.csv.gz --output data/kuairand
    python -m tf_fusedrec.models.data_sets.convert movielens_ranking   --input ml-1m --output data/ml-1m-ranking
    python -m tf_fusedrec.models.data_sets.convert synthetic-ranking   --output data/ranking --users 2000
    python -m tf_fusedrec.models.data_sets.convert synthetic-retrieval --output data/retrieval

A converter refuses flags that it does not take.
"""

import sys
from collections.abc import Callable

from absl import flags

from tf_fusedrec.models.data_sets.interactions import convert_sequences
from tf_fusedrec.models.data_sets.kuairand import convert_kuairand
from tf_fusedrec.models.data_sets.layouts import DatasetInfo
from tf_fusedrec.models.data_sets.movielens import convert_movielens, convert_movielens_ranking
from tf_fusedrec.models.data_sets.synthetic import write_synthetic_ranking, write_synthetic_retrieval

_SIZES = ("users", "items", "clusters", "mean_history", "seed")
# converter -> (function, its flags passed as positional arguments, its flags passed as keywords)
CONVERTERS: dict[str, tuple[Callable[..., DatasetInfo], tuple[str, ...], tuple[str, ...]]] = {
    "movielens": (convert_movielens, ("input", "output"), ("held_out",)),
    "sequences": (convert_sequences, ("input", "output"), ("held_out",)),
    "kuairand": (convert_kuairand, ("input", "output"), ("test_fraction", "split")),
    "movielens_ranking": (convert_movielens_ranking, ("input", "output"), ("held_out",)),
    "synthetic-ranking": (write_synthetic_ranking, ("output",), (*_SIZES, "exposures")),
    "synthetic-retrieval": (write_synthetic_retrieval, ("output",), (*_SIZES, "held_out")),
}


def convert(argv: list[str]) -> None:
    """Runs the command line argv (argv[0] is the program) and prints a line about the new data set, or the help.

    Raises:
      ValueError: the converter is unknown; a flag is missing or belongs to another converter; the data are refused.
    """
    known = _flags()
    try:
        positional = known(argv)[1:]
    except flags.Error as error:
        raise ValueError(f"{error}. Run with --help to see the flags.") from error
    if known.help:
        print(f"{__doc__}\n{known.get_help()}")
        return
    if len(positional) != 1 or positional[0] not in CONVERTERS:
        raise ValueError(f"name one converter of {', '.join(CONVERTERS)}, got {positional}.")
    function, required, optional = CONVERTERS[positional[0]]
    set_flags = {name: known[name].value for name in known if known[name].present}
    for name in required:
        if not set_flags.get(name):
            raise ValueError(f"{positional[0]} needs --{name}.")
    for name in set_flags:
        if name not in required + optional:
            raise ValueError(f"--{name} is not a flag of {positional[0]}; it takes {', '.join(required + optional)}.")
    places = [set_flags.pop(name) for name in required]
    info = function(*places, **set_flags)
    print(f"{known.output}: {info.task}, {info.users} users, {info.items} items, from {info.source}")


def _flags() -> flags.FlagValues:
    """Separate flags, so that importing this module adds none to another program's flags. None means not given."""
    known = flags.FlagValues()
    flags.DEFINE_string("input", None, "Folder or file of the raw data set.", flag_values=known)
    flags.DEFINE_string("output", None, "Folder to make; must be new or empty.", flag_values=known)
    flags.DEFINE_float("test_fraction", None, "Latest share of the log that is test (0.2).", flag_values=known)
    flags.DEFINE_string("split", None, "KuaiRand: time or user (time).", flag_values=known)
    flags.DEFINE_string("held_out", None, "Held-out parts: test, validation or both (test).", flag_values=known)
    flags.DEFINE_integer("users", None, "Users to make (2000).", flag_values=known)
    flags.DEFINE_integer("items", None, "Items to make (1000).", flag_values=known)
    flags.DEFINE_integer("clusters", None, "Clusters of items (ranking 20, retrieval 50).", flag_values=known)
    flags.DEFINE_integer("mean_history", None, "Mean interactions of a history (40).", flag_values=known)
    flags.DEFINE_integer("exposures", None, "Exposures per user and split (10).", flag_values=known)
    flags.DEFINE_integer("seed", None, "Seed of the generator (0).", flag_values=known)
    flags.DEFINE_boolean("help", False, "Show this text.", flag_values=known)
    return known


def main() -> None:
    """Entry point: errors become one line and exit code 1."""
    try:
        convert(sys.argv)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
