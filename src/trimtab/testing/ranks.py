"""Ranks as threads of one process, and what a test wants to know of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def run_ranks(num_ranks: int, work: Callable[[int], T]) -> list[T]:
    """`work(rank)` on a thread per rank -> results by rank. Raises the first rank's error once all have ended."""
    results: list[Any] = [None] * num_ranks
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results


class RecordedCollectives:
    """A CollectiveLog that keeps what it sees."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, tuple[int, ...]]] = []

    def record(self, operation: str, sizes: tuple[int, ...]) -> None:
        self.operations.append((operation, sizes))
