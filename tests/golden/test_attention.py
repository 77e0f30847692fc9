"""The attention ops give the bits that tests/golden/attention.json has of one of the tile engines."""

from tests.golden import hashes
from tests.golden.attention import digests


def test_outputs_and_gradients_have_the_recorded_bits():
    found = digests()
    differing = {
        engine: [name for name, want in recorded.items() if found[name] != want]
        for engine, recorded in hashes.read("attention").items()
    }
    assert min(map(len, differing.values())) == 0, f"cases with other bits, by engine: {differing}"
