"""Prefetching of one item: a thread makes the next item while the caller uses the current one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """Yields `items` in order. A thread makes the next item meanwhile, so two items are in memory."""
    end: Any = object()
    with ThreadPoolExecutor(max_workers=1) as thread:
        next_item = thread.submit(next, items, end)
        while (item := next_item.result()) is not end:
            next_item = thread.submit(next, items, end)
            yield item
