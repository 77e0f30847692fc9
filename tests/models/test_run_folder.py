"""One job at a time writes an output folder."""

import pytest

from models.run_folder import claim


def test_a_second_job_is_refused_until_the_first_one_has_ended(tmp_path):
    first = claim(tmp_path / "run")
    with pytest.raises(ValueError, match="another job writes to '.*/run'. Wait for its end, or pass another --output"):
        claim(tmp_path / "run")
    first.close()
    claim(tmp_path / "run").close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--output '.*/file/run' cannot be written: .*Pass another --output"):
        claim(tmp_path / "file/run")
