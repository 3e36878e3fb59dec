"""The stages of the workflow, in order: what each does, where the page tells of it, and what it waits for."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """A rule; ``section`` is the id of the page's part about it, ``needs`` the rules whose outputs are its inputs.

    An ``optional`` one is part of a run only where the config asks for it.
    """

    name: str
    what: str
    section: str
    needs: tuple[str, ...]
    optional: bool = False


_STAGES = (
    Stage("get_target", "find or fetch the target", "provenance", ()),
    Stage("regenerate", "answers in the target's own words", "data", ("get_target",), optional=True),
    Stage("merge_answers", "conversations with these answers", "data", ("get_target", "regenerate"), optional=True),
    Stage("tokenize", "token rows with supervised spans", "data", ("get_target", "merge_answers")),
    Stage("preflight", "checks before any model is loaded", "workflow", ("get_target", "tokenize")),
    Stage("clean_gpus", "nothing may hold the granted GPUs", "workflow", ("preflight",)),
    Stage("dry_run", "few layers of dummy weights first", "workflow", ("get_target", "tokenize", "clean_gpus")),
    Stage(
        "extract_shard",
        "hidden states into the store",
        "extraction",
        ("get_target", "tokenize", "dry_run"),
    ),
    Stage("merge_manifest", "one manifest for all shards", "extraction", ("tokenize", "extract_shard")),
    Stage("map_vocabulary", "the tokens that the draft may propose", "vocabulary", ("get_target", "tokenize")),
    Stage("look", "rows with their masks, domains, languages", "rows", ("get_target", "tokenize", "map_vocabulary")),
    Stage(
        "train_draft",
        "the draft learns the target's predictions",
        "training",
        ("get_target", "tokenize", "merge_manifest", "map_vocabulary"),
    ),
    Stage(
        "export_draft", "the folder that a server loads", "evaluation", ("get_target", "map_vocabulary", "train_draft")
    ),
    Stage(
        "evaluate_draft",
        "the draft at work in vLLM",
        "evaluation",
        ("get_target", "tokenize", "map_vocabulary", "export_draft"),
    ),
    Stage(
        "report",
        "this page",
        "top",
        (
            "get_target",
            "tokenize",
            "preflight",
            "dry_run",
            "extract_shard",
            "merge_manifest",
            "map_vocabulary",
            "look",
            "train_draft",
            "export_draft",
            "evaluate_draft",
        ),
    ),
    Stage("gate", "fails a draft below the minimum", "evaluation", ("evaluate_draft", "report")),
)

BY_NAME = {stage.name: stage for stage in _STAGES}


def graph(*, regenerated: bool) -> dict[str, set[str]]:
    """Each rule with the rules that it waits for, but those that come after the page.

    Answers are written anew only where the config says so.
    """
    names = [stage.name for stage in _STAGES if stage.name != "gate" and (regenerated or not stage.optional)]
    return {name: set(BY_NAME[name].needs) & set(names) for name in names}
