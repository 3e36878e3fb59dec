"""Rows of hub data sets, each pinned to one commit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from draftsmith.config import Source
from draftsmith.errors import DraftsmithError
from draftsmith.log import log

PREFIX = "hub:"
"""What the path of a hub data set begins with."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def parts(path: str) -> tuple[str, str | None, str | None]:
    """Id, config and split of `hub:ID[:CONFIG[:SPLIT]]`, None where there is none."""
    name, config, split = [*path.removeprefix(PREFIX).split(":", 2), "", ""][:3]
    return name, config or None, split or None


def commit(source: Source, key: str) -> str:
    """The commit that the source's revision (a branch, a tag; none: the newest) is now; asks the hub unless it is one.

    Raises :class:`DraftsmithError` naming the key where the hub does not tell.
    """
    if source.revision and _COMMIT.fullmatch(source.revision):
        return source.revision
    import huggingface_hub

    try:
        found = huggingface_hub.HfApi().dataset_info(parts(source.path)[0], revision=source.revision).sha
    except Exception as error:
        # The hub, its HTTP client and the operating system each raise their own kinds.
        raise DraftsmithError(
            f"{source.path}: the hub did not tell the commit of its revision {source.revision or '(the newest)'} "
            f"({_reason(error)}); check {key}.path, HF_TOKEN and the network, or set {key}.revision to a commit"
        ) from error
    if not found:
        raise DraftsmithError(f"{source.path}: the hub named no commit; set {key}.revision to one")
    log(f"{source.path}: revision {source.revision or 'newest'} is commit {found}; it is recorded in the report")
    return found


def rows(source: Source, key: str) -> Iterator[Any]:
    """The rows of the data set at ``source.revision``; without a split named, those of 'train' or of the only one.

    Raises :class:`DraftsmithError` when it cannot be loaded, or when what is loaded is another commit.
    """
    name, config, split = parts(source.path)
    import datasets

    try:
        loaded = datasets.load_dataset(name, config, split=split, revision=source.revision)
    except Exception as error:
        # As above, and the builders and the file system theirs.
        raise DraftsmithError(
            f"{source.path}: the data set could not be loaded (revision {source.revision or 'newest'}; {_reason(error)}); "
            f"check {key}.path as hub:ID[:CONFIG[:SPLIT]], HF_TOKEN and the network"
        ) from error
    if isinstance(loaded, dict):
        splits = sorted(loaded)
        if len(splits) > 1 and "train" not in splits:
            raise DraftsmithError(
                f"{source.path}: has the splits {', '.join(splits)}; name one in {key}.path as hub:ID:CONFIG:SPLIT"
            )
        loaded = loaded["train" if "train" in splits else splits[0]]
    _check_commit(loaded, source, key)
    yield from loaded


def _check_commit(loaded: Any, source: Source, key: str) -> None:
    # Without a network, datasets takes what it loaded last, of whatever commit, and only warns.
    files = getattr(loaded, "download_checksums", None) or {}
    commits = {found[1] for file in files if (found := re.search(r"@([0-9a-f]{40})/", str(file)))}
    if source.revision and commits - {source.revision}:
        raise DraftsmithError(
            f"{source.path}: commit {source.revision} was asked for, but what is on this machine is {', '.join(sorted(commits))}; "
            f"connect it to the network, or set {key}.revision to that"
        )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200] or 'no further text'}"
