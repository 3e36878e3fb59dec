"""The line about Slurm's partitions, from what Snakemake says of its resources."""

from __future__ import annotations

from typing import Any

import pytest
from snakemake.resources import Resource

from draftsmith import partitions

GPU = {"preflight": {"slurm_partition": "gpu", "nodes": 1}, "train_draft": {"slurm_partition": "gpu"}}


@pytest.mark.parametrize(
    ("default", "of_rules", "expected"),
    [
        (None, {}, ""),
        ({"mem_mb": 8000}, {"train_draft": {"nodes": 2}}, ""),
        # Without the profile's resources its variables say nothing.
        ({"slurm_partition": "x"}, {}, "draftsmith: Slurm partition: x for all jobs"),
        (
            {"slurm_partition": "big"},
            GPU,
            # One on a command line instead of the variable's.
            "draftsmith: Slurm partitions: gpu for GPU jobs (DRAFTSMITH_GPU_PARTITION is not set), big for all others",
        ),
        (
            {"slurm_partition": "cpu"},
            GPU | {"evaluate_draft": {"slurm_partition": "small"}},
            "draftsmith: Slurm partitions: gpu, small for GPU jobs (DRAFTSMITH_GPU_PARTITION is not set), "
            "cpu for all others (by DRAFTSMITH_CPU_PARTITION)",
        ),
    ],
)
def test_partitions_are_named_with_their_variables(
    default: dict[str, Any] | None, of_rules: dict[str, dict[str, Any]], expected: str
) -> None:
    assert partitions.told(default, of_rules, {"DRAFTSMITH_CPU_PARTITION": "cpu"}) == expected


def test_a_resource_of_snakemake_is_told_as_it_was_written() -> None:
    """Its value is a function until a job asks for it."""
    written = Resource("slurm_partition", lambda wildcards: "h200", raw="h200")
    assert partitions.told({"slurm_partition": written}, {}, {}) == "draftsmith: Slurm partition: h200 for all jobs"
