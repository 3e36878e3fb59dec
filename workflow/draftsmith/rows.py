"""Reading rows.parquet, the tokenised conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    import pandas as pd


def read_rows(path: Path, columns: Sequence[str] | None = None, optional: Sequence[str] = ()) -> pd.DataFrame:
    """The named columns of rows.parquet, and of ``optional`` those that it has; token ids come as int32 numpy arrays."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if columns and optional:
            present = pq.read_schema(path).names
            columns = [*columns, *(name for name in optional if name in present)]
        return pd.read_parquet(path, columns=list(columns) if columns else None)
    except FileNotFoundError:
        raise DraftsmithError(f"{path}: no such file; run the stage tokenize first") from None
    except (pa.ArrowInvalid, pa.ArrowKeyError, KeyError, ValueError) as error:
        raise DraftsmithError(f"{path}: cannot be read as rows ({error}); run the stage tokenize again") from None


def stored_length(length: int, ends: Sequence[int]) -> int:
    """Tokens that are left of a row of ``length`` when it is cut after its last supervised token; ``ends`` are its spans'.

    A row without one is left whole.
    """
    return min(length, max((int(end) for end in ends), default=length))
