"""One step of pipelining: the next item is made while the last one is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields `items`, each made by a thread while the one before it is used; so two are in memory."""
    end: Any = object()
    with ThreadPoolExecutor(max_workers=1) as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield item
