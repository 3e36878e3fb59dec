"""A batch file's bytes, put together by hand after :func:`draftsmith.store.layout`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from draftsmith import store


def batch_bytes(header: store.BatchHeader, tensors: Mapping[str, Tensor]) -> bytes:
    """The file of ``header`` with ``tensors`` by their names in the store."""
    head, places = store.layout(header)
    content = bytearray(max(at + size for at, size in places.values()))
    content[: len(head)] = head
    for name, (at, size) in places.items():
        assert tensors[name].nbytes == size, name
        content[at : at + size] = bytes(store.buffer(tensors[name]))
    return bytes(content)
