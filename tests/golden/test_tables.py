"""Tables in host memory give the bits of tests/golden/tables.json; tests/cuda runs its programs on emulated tables."""

from tests.golden import tables


def test_random_programs_have_the_recorded_bits():
    assert not tables.differing(range(tables.PROGRAMS))
