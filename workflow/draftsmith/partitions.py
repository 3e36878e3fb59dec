"""Which partitions a Slurm profile's jobs go to: the profile has names for sites that give none, and says nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_RULES, _OF_OTHERS = "DRAFTSMITH_GPU_PARTITION", "DRAFTSMITH_CPU_PARTITION"
_KEY = "slurm_partition"


def told(
    default: Mapping[str, Any] | None, of_rules: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]
) -> str:
    """A line with the partitions and the variables that name them; empty where no job is given one.

    ``default`` and ``of_rules`` are Snakemake's default-resources and set-resources, as plain values or as its own objects.
    """
    rules = list(dict.fromkeys(str(_raw(resources[_KEY])) for resources in of_rules.values() if _KEY in resources))
    others = str(_raw(default[_KEY])) if default and _KEY in default else ""
    if not rules:
        # The variables are the profile's.
        return f"draftsmith: Slurm partition: {others} for all jobs" if others else ""
    parts = [f"{', '.join(rules)} for GPU jobs{_source(_OF_RULES, rules, environment)}"]
    if others:
        parts.append(f"{others} for all others{_source(_OF_OTHERS, [others], environment)}")
    return f"draftsmith: Slurm partitions: {', '.join(parts)}"


def _raw(resource: Any) -> Any:
    """What was written in the profile or on the command line, which Snakemake keeps beside what it makes of it."""
    return getattr(resource, "raw", resource)


def _source(variable: str, names: list[str], environment: Mapping[str, str]) -> str:
    if variable not in environment:
        return f" ({variable} is not set)"
    # A command line's own resources take the place of the profile's.
    return f" (by {variable})" if names == [environment[variable]] else ""
