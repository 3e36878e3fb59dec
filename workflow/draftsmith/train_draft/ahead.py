"""Packs that are read from the store while the GPU works on the ones before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

# Packs in flight. Threads, not processes: packs of hundreds of megabytes would fill a container's /dev/shm, and copying out of a
# mapped file, checksums and conversion all release the interpreter.
THREADS = 4


class Ahead:
    """Reads items of an iterator of tasks with several threads, and gives them in the iterator's order."""

    def __init__(self, read: Callable[[Sequence[int]], Any], threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
        self._read, self._depth = read, threads

    def submit(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Begin to read a pack of these rows; as a DataLoader's collate_fn."""
        return {"pack": self._pool.submit(self._read, numbers)}

    def ordered(self, begun: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The packs of ``begun`` once they are read; an error in a thread is raised where its pack would come."""
        waiting = deque(islice(begun, self._depth))
        while waiting:
            batch = waiting.popleft()
            waiting.extend(islice(begun, 1))
            yield {"pack": batch["pack"].result()}

    def close(self) -> None:
        """Begin nothing more; what is being read ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
