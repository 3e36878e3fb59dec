"""vLLM's counters of speculative decoding, and the figures that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NAMES = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass
class Counts:
    """Drafts proposed, draft tokens in them, tokens accepted, and accepted at each position."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, metrics: Iterable[Any]) -> Counts:
        """The counters as ``LLM.get_metrics()`` gives them: totals since the process began."""
        counts = cls()
        for metric in metrics:
            if metric.name in _NAMES:
                name = _NAMES[metric.name]
                setattr(counts, name, getattr(counts, name) + int(metric.value))
            elif metric.name == _PER_POSITION:
                counts.per_position = [int(value) for value in metric.values]
        return counts

    def since(self, before: Counts) -> Counts:
        """What was counted after ``before``."""
        earlier = before.per_position or [0] * len(self.per_position)
        return Counts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            [now - then for now, then in zip(self.per_position, earlier, strict=True)],
        )

    @classmethod
    def of(cls, parts: Iterable[Mapping[str, Any]]) -> Counts:
        """Sum of the counts of several domains."""
        total = cls()
        for part in parts:
            total.drafts += part["drafts"]
            total.draft_tokens += part["draft_tokens"]
            total.accepted += part["accepted"]
            positions = part["per_position"]
            total.per_position = [
                a + b for a, b in zip(total.per_position or [0] * len(positions), positions, strict=True)
            ]
        return total

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts; 1 where nothing was drafted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    def figures(self) -> dict[str, Any]:
        """The counts, the acceptance length, and the share of drafts that were accepted up to each position."""
        return {
            "acceptance_length": round(self.acceptance_length, 4),
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted": self.accepted,
            "per_position": [round(count / self.drafts, 4) if self.drafts else 0.0 for count in self.per_position],
        }
