"""What the rows of a conversation depend on: the conversation's own key, and a fingerprint of all the rest."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import Any

import xxhash

from draftsmith.chat import Chat
from draftsmith.conversations import Conversation
from draftsmith.tokenize import packed_rows
from draftsmith.tokenize.make_rows import Plan

_FORMAT = 1
# Settings of the stage that only say what becomes of rows once they are made; `mask` has led to the method.
_NO_MATTER = {"evaluation_per_domain", "mask", "near_duplicates", "seed", "validation_fraction"}
MODULES = (
    "chat", "chat.as_served", "chat.steady_template", "chat.template_tree", "conversations", "tokenize.lengths", "tokenize.make_rows", "tokenize.marks",
    "tokenize.masking", "tokenize.near_duplicates", "tokenize.packed_rows", "tokenize.row_identity",
)  # fmt: skip
"""Modules of the package whose code makes rows of a conversation: rows that other code has made are not taken."""
_LIBRARIES = ("datasketch", "jinja2", "sentencepiece", "tiktoken", "tokenizers", "transformers")
_TOKENIZER_FILES = ("*.jinja", "*.json", "*.model", "*.py", "*.tiktoken", "*.txt", "additional_chat_templates/*.jinja")


def key(conversation: Conversation, target: str) -> bytes:
    """Identity (16 bytes) of all of ``conversation`` that its rows depend on; ``target`` is the target's fingerprint.

    That is its messages and tools, and what the stage regenerate noted if it was this target that wrote the answers.
    """
    noted = conversation.generated or {}
    content = conversation.content_key()
    if noted.get("fingerprint") == target:
        content = hashlib.sha256(f"{content} {json.dumps(noted, sort_keys=True)}".encode()).hexdigest()
    return bytes.fromhex(content[:32])


def fingerprint(plan: Plan, chat: Chat) -> str:
    """Identity of all else: 32 hex digits over tokenizer and template, settings, the way of finding answers, and code.

    Of the samples that the way was chosen on nothing remains but the way, so that other samples make no other rows.
    """
    settings = plan.settings.model_dump(mode="json", exclude=_NO_MATTER)
    values: dict[str, Any] = {
        "format": _FORMAT,
        "fields": packed_rows.FIELDS,
        "code": {name: _digest(_code(name)) for name in MODULES},
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "tokenizer": _tokenizer(Path(plan.target["path"])),
        "template": chat.template_sha256,
        "vocabulary": plan.target["vocab_size"],
        "settings": settings | {"signatures": plan.settings.near_duplicates is not None},
        "method": plan.method,
        "marks": {
            name: sorted(mark) if isinstance(mark, frozenset) else mark for name, mark in asdict(plan.marks).items()
        },
        # Such a template may write the date into a row.
        "date": time.strftime("%F") if "strftime_now" in chat.template else None,
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def _code(name: str) -> bytes:
    """Source of a module of the package."""
    spec = util.find_spec(f"draftsmith.{name}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_bytes()


def _tokenizer(folder: Path) -> dict[str, str]:
    """Digests of the files that a tokenizer may be made of; an index of weights is none."""
    files = {path for kind in _TOKENIZER_FILES for path in folder.glob(kind) if path.is_file()}
    return {str(path.relative_to(folder)): _digest(path.read_bytes()) for path in files if ".index." not in path.name}


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
