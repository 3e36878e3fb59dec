"""Conversations that say nearly the same: of each lot, one is kept.

Two conversations are as similar as the sets of runs of five words in them are (Jaccard similarity: the share of all their
runs that both have). MinHash (Broder, 'On the resemblance and containment of documents', 1997) estimates it: of 128
random orders of all runs, the share in which both have the same first one; the standard error of that is at most 0.044.
System messages and tool definitions do not count: whole data sets share them.

Which is kept does not depend on the order of files: conversations are gone through by their split (what is wished to be
evaluated first, then what is to validate) and then by content hash, and each one that is similar to one kept before is
left out.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftsmith.conversations import Conversation
from draftsmith.conversations.tokenised import Tokenised

PERMUTATIONS = 128
"""Numbers of a signature, which has 4 bytes each."""

# Words of a run, or tokens where there are no words.
_RUN = 5
# Scripts without spaces between words, kana and Han: each character counts as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")
# Of the pairs that are just similar enough, this share is found.
_RECALL = 0.99


# What is wished to be in the evaluation is not given up for what is trained on.
_PREFERRED = {"evaluation": 0, "validation": 1}


class Near(NamedTuple):
    """The conversation that another is similar to, by number, and the estimated similarity."""

    kept: int
    similarity: float


class Compared(NamedTuple):
    """A conversation that is compared with others: its number, keys, place, source, its rows and the split it wishes."""

    number: int
    content_key: str
    prompt_key: str
    where: str
    source_index: int
    rows: int
    split: str | None


class NearDuplicates:
    """Gathers signatures, of half a kilobyte each, and then tells which conversations to leave out."""

    def __init__(self) -> None:
        self._compared: list[Compared] = []
        self._signatures = bytearray()

    def add(self, number: int, given: Conversation | Tokenised, made: bytes, rows: int) -> None:
        """Add a conversation with its signature ``made`` and its number of rows."""
        keys = given.content_key(), given.prompt_key()
        self._compared.append(Compared(number, *keys, given.where, given.source_index, rows, given.split))
        self._signatures += made

    def find(self, threshold: float) -> Iterator[tuple[Compared, Compared, float]]:
        """Each conversation to leave out, the one that is kept instead, and how similar they are."""
        known = self._compared
        signatures = np.frombuffer(self._signatures, dtype="<u4").reshape(-1, PERMUTATIONS)
        order = sorted(
            range(len(known)), key=lambda place: (_PREFERRED.get(known[place].split or "", 2), known[place].content_key)
        )
        for place, near in find(signatures, order, threshold).items():
            yield known[place], known[near.kept], near.similarity


def signature(given: Conversation | Tokenised) -> bytes:
    """The MinHash of a conversation: 128 little-endian uint32, which depend on its content alone."""
    sketch = _empty_sketch().copy()
    sketch.update_batch(list(_runs(given)))
    return bytes(sketch.hashvalues.astype("<u4").tobytes())


@cache
def _empty_sketch() -> Any:
    import xxhash
    from datasketch import MinHash

    return MinHash(PERMUTATIONS, seed=1, hashfunc=xxhash.xxh32_intdigest, scheme="affine32")


def _runs(given: Conversation | Tokenised) -> set[bytes]:
    if isinstance(given, Tokenised):
        units: list[bytes] = [token.to_bytes(4, "little") for token in given.ids]
    else:
        text = "\n".join(_texts(given))
        # Signs alone, such as '?!', are one word.
        units = [word.encode() for word in _WORD.findall(text.lower())] or [text.encode()]
    return {b" ".join(units[start : start + _RUN]) for start in range(max(len(units) - _RUN + 1, 1))}


def _texts(given: Conversation) -> Iterable[str]:
    for message in given.messages:
        if message["role"] not in ("system", "developer"):
            yield message.get("reasoning_content", "")
            yield message["content"]
            for call in message.get("tool_calls", []):
                yield json.dumps(call["function"], ensure_ascii=False, sort_keys=True)


def find(signatures: NDArray[np.uint32], order: Sequence[int], threshold: float) -> dict[int, Near]:
    """The conversations to leave out, each with the one that it is similar to.

    Args:
        signatures: uint32 [N, 128], as :func:`signature` has them.
        order: the N numbers in the order of preference.
        threshold: the similarity from which on two are near duplicates, 0.5 to 1.
    """
    buckets = _shared_buckets(signatures, threshold)
    kept_in: dict[tuple[int, int], list[int]] = defaultdict(list)
    found: dict[int, Near] = {}
    alone = buckets.max(axis=1) < 0
    for number in order:
        if alone[number]:
            continue
        keys = [(band, int(bucket)) for band, bucket in enumerate(buckets[number]) if bucket >= 0]
        candidates = sorted({kept for key in keys for kept in kept_in.get(key, ())})
        if candidates:
            similar = np.equal(signatures[candidates], signatures[number]).mean(axis=1)
            best = int(similar.argmax())
            if similar[best] >= threshold:
                found[number] = Near(candidates[best], float(similar[best]))
                continue
        for key in keys:
            kept_in[key].append(number)
    return found


def _shared_buckets(signatures: NDArray[np.uint32], threshold: float) -> NDArray[np.int32]:
    """For each conversation and band the bucket that it shares with others, or -1: int32 [N, bands].

    Banding (Leskovec, Rajaraman and Ullman, 'Mining of Massive Datasets', section 3.4): signatures are cut into bands of
    as many numbers as leave similar ones a good chance to agree in at least one whole band.
    """
    rows = max(rows for rows in range(1, PERMUTATIONS + 1) if _chance(threshold, rows) >= _RECALL)
    bands = PERMUTATIONS // rows
    shared = np.full((len(signatures), bands), -1, dtype=np.int32)
    # Odd factors, so that every number of a band changes the sum; two bands that only seem equal are compared anyway.
    factors = np.random.default_rng(0).integers(1, 1 << 63, rows, dtype=np.uint64) | np.uint64(1)
    for band in range(bands):
        columns = signatures[:, band * rows : (band + 1) * rows].astype(np.uint64)
        _, bucket, counts = np.unique((columns * factors).sum(axis=1), return_inverse=True, return_counts=True)
        shared[:, band] = np.where(counts[bucket] > 1, bucket, -1)
    return shared


def _chance(similarity: float, rows: int) -> float:
    """Chance that two of this similarity agree in at least one band of so many rows."""
    return float(1 - (1 - similarity**rows) ** (PERMUTATIONS // rows))
