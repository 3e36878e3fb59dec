"""Which languages texts are in, offline: py3langid, a naive Bayes model of 139 languages over bytes (4.6 MB, 0.3 ms a text).

A text counts as one language, the likeliest; as ``und`` where the model is not sure, as with code, formulas or a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

DETECTOR = "py3langid"
UNDETERMINED = "und"
"""ISO 639's code for what cannot be told."""

# The probabilities are calibrated; below this are formulas, code and single words, and every tenth text or so is wrong.
_SURE = 0.3
# A line that so many of the texts have (and so many at least) is the template's: a header, a default system message.
_REPEATED_SHARE, _REPEATED_LEAST = 0.1, 3
_CHARACTERS = 2000


@cache
def _model() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=_SURE)


def count(texts: Iterable[str]) -> dict[str, int]:
    """Texts by ISO 639 code of their language, the most frequent first."""
    found = Counter(_model().classify(text[:_CHARACTERS])[0] for text in texts)
    return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0])))


def without_headers(texts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The texts of each split without the lines that many of them share.

    A prompt that was decoded from tokens holds the names of roles and often a system message, mostly in English; beside
    a short question in another language these would decide. A text that consists of such lines alone is left as it is.
    """
    every = [text for split in texts.values() for text in split]
    frequency = Counter(line for text in every for line in {line.strip() for line in text.splitlines()})
    most = max(_REPEATED_LEAST, _REPEATED_SHARE * len(every))
    return {split: [_own(text, frequency, most) for text in found] for split, found in texts.items()}


def _own(text: str, frequency: Mapping[str, int], most: float) -> str:
    lines = [line for line in text.splitlines() if frequency[line.strip()] < most]
    return "\n".join(lines) if any(line.strip() for line in lines) else text
