"""The identity of a prepared data set, for the folders of jobs that other runs and machines shall find again."""

from __future__ import annotations

import functools
import hashlib
import pathlib


@functools.cache
def content_of(folder: pathlib.Path) -> str:
    """Returns sixteen hexadecimal digits of a hash over all files of the folder: their paths in it and their bytes.

    The folder's own name holds the time of the raw files (models.prepare), which a copy of the data does not keep.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]
