"""What makes rows other rows, and what does not."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import chats
from draftsmith.chat import Chat
from draftsmith.config import Tokenize
from draftsmith.conversations import Conversation
from draftsmith.tokenize import packed_rows, row_identity
from draftsmith.tokenize.make_rows import Plan
from draftsmith.tokenize.mask_method import choose
from draftsmith.tokenize.row_identity import MODULES, fingerprint, key

# Modules that those of MODULES import, and that have no say in what rows become: what they do is in the conversation's key,
# in the settings, or in words alone.
NO_SAY = {"config", "conversations.dropped", "conversations.reading", "conversations.sources", "conversations.tokenised", "errors", "files", "log"}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chats.fast(chats.CHATML).save_pretrained(tmp_path)
    return tmp_path


def plan_of(folder: Path, samples: list[Conversation] | None = None, **settings: Any) -> tuple[Plan, Chat]:
    target = {"path": str(folder), "trust_remote_code": False, "vocab_size": 320, "fingerprint": "mine"}
    tokenize = Tokenize(**settings)
    chat = Chat.load(target, tokenize.template_args)
    method, marks = choose(chat, samples or [chats.talk("hi", "A")], tokenize.mask)
    return Plan(target, tokenize, method, marks), chat


def of(folder: Path, samples: list[Conversation] | None = None, **settings: Any) -> str:
    return fingerprint(*plan_of(folder, samples, **settings))


def test_the_same_twice(folder: Path) -> None:
    assert of(folder) == of(folder)
    assert len(of(folder)) == 32


def test_other_samples_are_no_other_rows(folder: Path) -> None:
    """As when a row is put on top of the file."""
    assert of(folder, [chats.talk("new", "B", "more", "C"), chats.talk("hi", "A")]) == of(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"validation_fraction": 0.5}, {"evaluation_per_domain": 1}, {"seed": 3}, {"mask": "prefix"},
    ],
)  # fmt: skip
def test_what_becomes_of_rows_later_matters_not(folder: Path, settings: dict[str, Any]) -> None:
    assert of(folder, **settings) == of(folder)


def test_of_near_duplicates_it_matters_whether_there_are_signatures(folder: Path) -> None:
    assert of(folder, near_duplicates=0.8) == of(folder, near_duplicates=0.9) != of(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 100}, {"truncate": "turn"}, {"min_tokens": 2}, {"min_supervised_tokens": 1}, {"max_turns": 2},
        {"template_args": {"thinking": True}}, {"mask": "token_scan"},
    ],
)  # fmt: skip
def test_settings_that_change_rows(folder: Path, settings: dict[str, Any]) -> None:
    assert of(folder, **settings) != of(folder)


def test_the_targets_files(folder: Path) -> None:
    before = of(folder)
    (folder / "README.md").write_text("A card is no tokenizer.")
    (folder / "model.safetensors").write_bytes(b"weights are none")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert of(folder) == before
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("im_end|>\n", "im_end|>"))
    changed = of(folder)
    (folder / "tokenization_own.py").write_text("")
    assert len({before, changed, of(folder)}) == 3


def test_marks_vocabulary_and_date(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, chat = plan_of(folder)
    others = {
        fingerprint(plan, chat),
        fingerprint(replace(plan, marks=replace(plan.marks, ends=frozenset({5}))), chat),
        fingerprint(replace(plan, target=plan.target | {"vocab_size": 300}), chat),
    }
    assert len(others) == 3
    assert fingerprint(replace(plan, target=plan.target | {"fingerprint": "another's weights"}), chat) in others
    monkeypatch.setattr(row_identity.time, "strftime", lambda _: "another day")
    assert fingerprint(plan, chat) in others
    chat.template = "{{ strftime_now('%d') }}" + chat.template
    today = fingerprint(plan, chat)
    monkeypatch.setattr(row_identity.time, "strftime", lambda _: "the day after")
    assert fingerprint(plan, chat) != today


def test_other_code_and_other_fields(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, chat = plan_of(folder)
    before = fingerprint(plan, chat)
    with monkeypatch.context() as patch:
        patch.setattr(packed_rows, "FIELDS", (*packed_rows.FIELDS, "new"))
        assert fingerprint(plan, chat) != before
    with monkeypatch.context() as patch:
        patch.setattr(row_identity, "_version", lambda _: "9.9")
        assert fingerprint(plan, chat) != before
    with monkeypatch.context() as patch:
        patch.setattr(row_identity, "MODULES", MODULES[1:])
        assert fingerprint(plan, chat) != before


def _module(name: str) -> Path | None:
    """File of a module of the package."""
    spec = importlib.util.find_spec(f"draftsmith.{name}")
    return Path(spec.origin) if spec and spec.origin else None


def _imported(node: ast.ImportFrom) -> set[str]:
    """Modules of the package that a line imports from, without the package's own name."""
    inner = (node.module or "").partition(".")[2]
    names = {f"{inner}.{alias.name}".lstrip(".") for alias in node.names}
    try:
        modules = {each for each in names if _module(each)}
    except ModuleNotFoundError:
        # Names of a module that is no package.
        modules = set()
    return modules or {inner}


def test_every_module_that_makes_rows_is_in_the_fingerprint() -> None:
    """What they import is in it too, or is known to have no say."""
    imported: set[str] = set()
    for module in MODULES:
        path = _module(module)
        assert path is not None, module
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "draftsmith":
                imported |= _imported(node)
    assert imported <= {*MODULES, *NO_SAY}
    assert {"tokenize.masking", "chat", "tokenize.lengths"} <= set(MODULES)


def test_a_conversations_key_is_its_content() -> None:
    one = chats.talk("hi", "A", name="a")
    assert key(one, "mine") == key(
        replace(one, conversation_id="b", domain="x", source="y", split="train", repeats=3), "mine"
    )
    others = [
        chats.talk("hi", "B"), chats.talk("hi", "A", system="s"), replace(one, tools=[{"type": "function"}]),
        chats.talk("hi", "t >> A"), chats.talk("hi", "A", "hi", "A"),
    ]  # fmt: skip
    assert len({key(other, "mine") for other in (one, *others)}) == 6
    assert len(key(one, "mine")) == 16


def test_what_this_target_wrote_is_part_of_the_key() -> None:
    """Its token ids are kept to the token; another target's are not looked at."""
    plain = chats.talk("hi", "A")
    mine = replace(plain, generated={"fingerprint": "mine", "token_ids": [[5]]})
    again = replace(plain, generated={"fingerprint": "mine", "token_ids": [[6]]})
    others = replace(plain, generated={"fingerprint": "other", "token_ids": [[7]]})
    assert len({key(one, "mine") for one in (plain, mine, again)}) == 3
    assert key(others, "mine") == key(plain, "mine")
