"""The store: batch files of hidden states that are complete or absent.

:mod:`~draftsmith.store.format` says what a file holds (:mod:`~draftsmith.store.head` reads how it begins,
:mod:`~draftsmith.store.float8` makes small numbers of it), :mod:`~draftsmith.store.verification` whether it still does,
:mod:`~draftsmith.store.index` finds what a folder holds, and :mod:`~draftsmith.store.reader` gives rows to training.
"""

from draftsmith.store.float8 import dequantise, quantise
from draftsmith.store.format import (
    AGAIN,
    FORMAT_VERSION,
    SUFFIX,
    BatchHeader,
    DamagedFile,
    OtherFormat,
    Storage,
    StoreError,
    UnreadableFile,
    batch_name,
    buffer,
    bytes_per_token,
    checksum,
    fingerprint,
    layout,
    row_id,
    row_parts,
    shapes,
    stored_as,
    tensors,
)
from draftsmith.store.head import check_belongs, read_header
from draftsmith.store.index import StoreIndex, scan, trusted
from draftsmith.store.reader import BatchFile, Row, StoreReader, open_batch
from draftsmith.store.verification import Journal

__all__ = [
    "AGAIN",
    "FORMAT_VERSION",
    "SUFFIX",
    "BatchFile",
    "BatchHeader",
    "DamagedFile",
    "Journal",
    "OtherFormat",
    "Row",
    "Storage",
    "StoreError",
    "StoreIndex",
    "StoreReader",
    "UnreadableFile",
    "batch_name",
    "buffer",
    "bytes_per_token",
    "check_belongs",
    "checksum",
    "dequantise",
    "fingerprint",
    "layout",
    "open_batch",
    "quantise",
    "read_header",
    "row_id",
    "row_parts",
    "scan",
    "shapes",
    "stored_as",
    "tensors",
    "trusted",
]
