"""The checks of tests/cuda with libfusedrec_cuda.so on a GPU, and under compute-sanitizer. PyTorch, no TensorFlow.

Every check runs in a separate process. `python -m tests.gpu.session` runs them without pytest.
"""

import pytest

from tests.gpu import session, steps

pytestmark = pytest.mark.skipif(session.lacking() is not None, reason=f"no test on a GPU: {session.lacking()}")


def assert_passes(step, folder):
    record = steps.run_step(step, folder, "test", step.limit_s)
    assert record["state"] == steps.PASSED, record["output"]


@pytest.mark.parametrize("op", session.OPS)
def test_kernels_agree_with_their_oracles(op, tmp_path):
    assert_passes(session.check(op), tmp_path)


@pytest.mark.parametrize("tool", session.TOOLS)
@pytest.mark.parametrize("op", session.OPS)
def test_the_sanitizer_finds_nothing(op, tool, tmp_path):
    if session.sanitizer() is None:
        pytest.skip("compute-sanitizer of the CUDA toolkit is not on PATH")
    assert_passes(session.check(op, tool), tmp_path)
