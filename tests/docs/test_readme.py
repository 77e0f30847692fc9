"""The README's first program runs and prints what the README says."""

import contextlib
import io
import pathlib
import re

README = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_program_prints_what_is_written_below_it():
    program, output = re.search(r"```python\n(.*?)```\s+```text\n(.*?)```", README, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {})
    assert printed.getvalue() == output
    assert len(program.splitlines()) <= 15


def test_it_is_read_in_a_few_minutes():
    assert len(README.splitlines()) <= 120


def test_every_file_it_names_exists():
    root = pathlib.Path(__file__).resolve().parents[2]
    for name in re.findall(r"`((?:tf_fusedrec|custom_ops|models|configs|tests|benchmarks)/[\w./]*)`", README):
        assert (root / name).exists(), name
