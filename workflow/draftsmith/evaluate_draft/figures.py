"""The figures of evaluate.json, from what the servings have counted.

Acceptance length = 1 + accepted / drafts, from vLLM's raw counters: a step of speculative decoding yields the accepted
draft tokens and one token of the target's own (as the EAGLE papers' tau). Acceptance at position i = accepted at i / drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.evaluate_draft.counts import Counts


def served(
    plain: Mapping[str, Any], draft: Mapping[str, Any], questions: Sequence[Mapping[str, Any]], k: int
) -> dict[str, Any]:
    """Figures of the answers with a draft, over all and by domain, beside those without, at the same temperature.

    ``plain`` and ``draft`` are results of a serving, their answers in the order of ``questions``. Only greedy answers are
    compared: sampled ones differ although their distribution is the same.
    """
    greedy = draft["temperature"] == 0
    differing = [
        question["prompt_id"]
        for question, one, other in zip(questions, plain["outputs"], draft["outputs"], strict=True)
        if greedy and one != other
    ]
    return {
        "k": k,
        "temperature": draft["temperature"],
        "prompts": len(questions),
        **Counts.of(draft["domains"].values()).figures(),
        "per_domain": {
            name: {"prompts": counts["prompts"], **Counts.of([counts]).figures()}
            for name, counts in draft["domains"].items()
        },
        **speeds(plain, draft),
        "outputs_equal": not differing if greedy else None,
        "differing": differing,
    }


def speeds(plain: Mapping[str, Any], draft: Mapping[str, Any]) -> dict[str, Any]:
    """Generated tokens per second without and with the draft, the second divided by the first, and whether one job took both."""
    rates = {"plain": plain["tokens_per_second"], "draft": draft["tokens_per_second"]}
    return {
        "tokens_per_second": rates,
        "speedup": round(rates["draft"] / rates["plain"], 3),
        "one_job": plain.get("job") == draft.get("job"),
    }


def at_once(requests: int, plain: Mapping[str, Any], draft: Mapping[str, Any]) -> dict[str, Any]:
    """Speeds at ``requests`` in flight, with the raw windows that they were measured in."""
    return {
        "requests": requests,
        **speeds(plain, draft),
        "windows": {"plain": plain["windows"], "draft": draft["windows"]},
    }


def in_words(result: Mapping[str, Any]) -> list[str]:
    """What the log says of a finished evaluation, a line each."""
    untrained, rates = result["untrained"], result["tokens_per_second"]
    beside = "" if untrained is None else f", untrained draft {untrained['acceptance_length']:.2f}"
    lines = [
        f"acceptance length: {result['acceptance_length']:.2f} (k = {result['k']}, {result['prompts']} held-out prompts{beside}); "
        f"{rates['plain']} tokens/s without, {rates['draft']} with the draft"
    ]
    lines += [
        f"k = {each['k']}, temperature {each['temperature']:g}: acceptance length {each['acceptance_length']:.2f}, "
        f"{each['speedup']:.2f} times as fast as without the draft"
        for each in result["sweep"]
    ]
    lines += [
        f"{each['requests']} requests in flight: {each['tokens_per_second']['plain']} tokens/s without, "
        f"{each['tokens_per_second']['draft']} with the draft ({each['speedup']:.2f} times)"
        for each in result["concurrency"]
    ]
    lines += doubts(result)
    for each in result["sweep"] or [result]:
        if differing := each["differing"]:
            lines.append(
                f"k = {each['k']}: {len(differing)} of {each['prompts']} answers differ from plain greedy decoding: {', '.join(differing[:8])}"
            )
    return lines


def doubts(result: Mapping[str, Any]) -> list[str]:
    """Why the speed-up of evaluate.json may be none of the draft's, a sentence each."""
    speedup, length = result.get("speedup"), result.get("acceptance_length")
    said = []
    if speedup and length and speedup > length:
        said.append(
            f"a speed-up of {speedup:.2f} with an acceptance length of {length:.2f} is not the draft's: the machine was busier while the target was served alone"
        )
    if result.get("one_job") is False:
        said.append(
            "the target was served alone in an earlier job than with the draft: the speed-up holds only if the machine was as quiet then"
        )
    return said
