"""Why an acceptance length may be near 1: each known cause is looked for, and named only where it is found."""

from __future__ import annotations

from draftsmith.evaluate_draft import faults
from draftsmith.evaluate_draft.counts import Counts
from draftsmith.evaluate_draft.faults import Served
from draftsmith.evaluate_draft.template import template

# Below this the draft is as good as absent.
NEAR_ONE = 1.05


def likely_causes(served: Served, counts: Counts, minimum: float = 1.0) -> list[str]:
    """Sentences about what is wrong with the draft, the likeliest first.

    Empty when the acceptance length is neither near 1 nor below ``minimum``; nothing is read then.
    """
    near_one = counts.acceptance_length <= NEAR_ONE
    if not near_one and counts.acceptance_length >= minimum:
        return []
    causes = [cause for check in (*faults.CHECKS, template) for cause in check(served)]
    if counts.drafts == 0:
        return ["vLLM drafted nothing at all: the speculative_config was not applied", *causes]
    return causes + (_training(served) if near_one else [])


def _training(served: Served) -> list[str]:
    simulated = served.trained.get("simulated_acceptance_length")
    if simulated is None:
        return []
    if simulated > NEAR_ONE + 0.15:
        return [
            f"served otherwise than trained: on validation rows the draft reached a simulated {simulated:.2f}; compare the chat template, "
            "the norm flags and the layer ids of training and serving"
        ]
    return [
        f"the draft has learnt little: {simulated:.2f} is also its simulated acceptance length; train on more answers of the target, or longer"
    ]
