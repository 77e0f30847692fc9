"""The checks of tests/cuda with libfusedrec_cuda.so on a GPU, and under compute-sanitizer. PyTorch, no TensorFlow.

Every check runs in a separate process. `python -m tests.gpu.session` runs them without pytest.
"""

import pytest

from tests.gpu import session

pytestmark = pytest.mark.skipif(session.lacking() is not None, reason=f"no test on a GPU: {session.lacking()}")


@pytest.mark.parametrize("op", session.OPS)
def test_kernels_agree_with_their_oracles(op):
    done = session.check(op)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tool", session.TOOLS)
@pytest.mark.parametrize("op", session.OPS)
def test_the_sanitizer_finds_nothing(op, tool):
    if session.sanitizer() is None:
        pytest.skip("compute-sanitizer of the CUDA toolkit is not on PATH")
    done = session.check(op, tool)
    assert done.returncode == 0, done.stdout + done.stderr
