"""tokenize: conversations to token rows with supervised spans, split into train, validation and evaluation.

Rows are written as they come and read back once for the split, so that memory grows with the number of conversations
but not with their length.
"""

from __future__ import annotations

import heapq
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from draftsmith import mask_method, masking, splits, store
from draftsmith.chat import Chat
from draftsmith.config import Config, Source
from draftsmith.conversations import Conversation, DropCount, Dropped, Message, Unusable, read_conversations
from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, read_json, write_json
from draftsmith.log import log
from draftsmith.make_rows import Made, Plan, TokenRow, make_all
from draftsmith.marks import Marks

REASONS = {
    "duplicate": "the same conversation, or one of the same tokens, came before",
    "evaluation_prompt": "it asks what a conversation kept for evaluation asks",
    "split_conflict": "it asks what another conversation asks whose `split` is a different one",
    "prompt_too_long": "it is kept for evaluation, and its prompt is longer than tokenize.max_length",
}
"""Reason codes of this stage with what each means, besides those of conversations.py, masking.py and make_rows.py."""

# Nothing is wrong with these conversations, so they do not count against data.max_dropped_fraction.
_HARMLESS = ("duplicate", "evaluation_prompt", "split_conflict")
_SAMPLES = 32
# Fewer conversations are done before the first worker has imported what it needs.
_POOL_FROM = 4096
_GROUP_ROWS = 1024
_LOG_SECONDS = 10.0


def run(config: Config, *, target: Path, conversations: Path | None, rows: Path, prompts: Path, report: Path) -> None:
    """Tokenise ``conversations`` (a regenerated file; None: ``data.sources``) and write the three outputs.

    Raises :class:`DraftsmithError` when too many conversations cannot be used, when nothing or everything is
    supervised, or when a row does not fit the target's context.
    """
    described = read_json(target)
    sources = config.data.sources if conversations is None else [Source(path=str(conversations))]
    stage = _Stage(config, described, Chat.load(described, config.tokenize.template_args))
    rows.parent.mkdir(parents=True, exist_ok=True)
    # A file without a name, so that a killed run leaves nothing behind.
    with tempfile.TemporaryFile(dir=rows.parent) as spool:
        stage.gather(sources, spool)
        stage.check()
        chosen = stage.split()
        stage.write_rows(spool, chosen, rows)
    stage.write_prompts(chosen, prompts)
    figures = stage.figures()
    write_json(report, figures)
    stage.dropped.report("tokenize")
    log(
        f"tokenize: {figures['conversations']} conversations gave {figures['rows']} rows (one a {figures['row_per']}) "
        f"of {figures['tokens']} tokens, {figures['supervised']} of them supervised; "
        + ", ".join(f"{split} {count}" for split, count in figures["by_split"].items())
    )


class _Stage:
    """One run: what has been counted, and what the split needs to know of each conversation."""

    def __init__(self, config: Config, target: dict[str, Any], chat: Chat) -> None:
        self.config, self.target, self.chat = config, target, chat
        self.method: masking.Method = "prefix"
        self.marks = Marks()
        self.dropped = DropCount()
        self.lost_rows: Counter[str] = Counter()
        self.total = self.by_turn = self.straddled = self.spooled = self.spooled_supervised = 0
        self.groups: dict[str, splits.Group] = {}
        self.candidates: dict[str, Conversation] = {}
        self.queues: dict[str, list[tuple[float, str]]] = {}
        self.seen_rows: set[bytes] = set()
        self.special: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.by_split: Counter[str] = Counter(train=0, validation=0, evaluation=0)
        self.by_domain: dict[str, Counter[str]] = {}
        self.histogram: Counter[int] = Counter()

    def gather(self, sources: Sequence[Source], spool: IO[bytes]) -> None:
        """Read and mask everything, and write the rows to ``spool``."""
        import pyarrow.parquet as pq

        usable = self._usable(read_conversations(sources))
        head = list(islice(usable, _POOL_FROM))
        samples = [given for given in head if any(message["role"] == "assistant" for message in given.messages)][
            :_SAMPLES
        ]
        if samples:
            self.method, self.marks = mask_method.choose(self.chat, samples, self.config.tokenize.mask)
        plan = Plan(self.target, self.config.tokenize, self.method, self.marks)
        begun = shown = time.monotonic()
        records: list[dict[str, Any]] = []
        with pq.ParquetWriter(spool, _schema("prompt_key", "cut"), compression="zstd") as writer:
            for conversation, made in make_all(chain(head, usable), plan, self.chat, pool=len(head) == _POOL_FROM):
                records += self._take(conversation, made)
                if len(records) >= _GROUP_ROWS:
                    _write(writer, records)
                    records = []
                if (now := time.monotonic()) - shown > _LOG_SECONDS:
                    shown = now
                    log(f"tokenize: {self.total} conversations read, {self.spooled / (now - begun):,.0f} tokens/s")
            _write(writer, records)

    def _usable(self, given: Iterable[Conversation | Dropped]) -> Iterator[Conversation]:
        """Conversations that are in shape and new; the others are counted."""
        seen: set[bytes] = set()
        for conversation in given:
            self.total += 1
            if isinstance(conversation, Dropped):
                self.dropped.add(conversation.where, conversation.reason, conversation.detail)
                continue
            key = bytes.fromhex(conversation.content_key())
            if key in seen:
                self._drop(conversation, "duplicate")
                continue
            seen.add(key)
            group = self.groups.setdefault(conversation.prompt_key(), splits.Group(conversation.domain))
            if conversation.split and group.wished and conversation.split != group.wished:
                self._drop(conversation, "split_conflict", f"{conversation.split} and {group.wished}")
                continue
            group.wished = group.wished or conversation.split
            yield conversation

    def _drop(self, conversation: Conversation, reason: str, detail: str = "") -> None:
        self.dropped.add(f"{conversation.source}, {conversation.conversation_id}", reason, detail)

    def _take(self, conversation: Conversation, made: Made) -> list[dict[str, Any]]:
        """The records of a conversation's new rows; it is counted, and may become an evaluation prompt."""
        key = conversation.prompt_key()
        group = self.groups[key]
        # To be asked, a conversation needs no answer.
        only_asked = conversation.split == "evaluation" and made.reason in ("no_answer", "too_long", "too_short")
        if made.reason and not only_asked:
            self._drop(conversation, made.reason, made.detail)
            return []
        records = []
        for row in made.rows:
            identity = store.row_id(row.ids)
            if bytes.fromhex(identity) in self.seen_rows:
                made.lost["duplicate"] += 1
                continue
            self.seen_rows.add(bytes.fromhex(identity))
            records.append(self._record(conversation, key, identity, row))
        if made.rows and not records:
            self._drop(conversation, "duplicate", "of the same tokens as others")
            return []
        self.lost_rows += made.lost
        self.by_turn += made.by_turn
        self.straddled += made.straddled
        group.conversations += 1
        group.rows += len(records)
        if key not in self.candidates:
            self._consider(key, group, conversation, made.prompt_tokens)
        return records

    def _consider(self, key: str, group: splits.Group, conversation: Conversation, length: int) -> None:
        """Remember a conversation that may be asked in the evaluation, if it is among its domain's first by hash."""
        if conversation.split == "evaluation":
            self.candidates[key] = conversation
            return
        wanted = self.config.tokenize.evaluation_per_domain
        if group.wished or not wanted or length > self.config.tokenize.max_length:
            return
        queue = self.queues.setdefault(group.domain, [])
        self.candidates[key], group.eligible = conversation, True
        heapq.heappush(queue, (-splits.share(self.config.tokenize.seed, "evaluation", key), key))
        # A few more than are needed, as some may turn out to have a split of their own.
        if len(queue) > 4 * wanted:
            _, last = heapq.heappop(queue)
            if not self.groups[last].wished:
                self.groups[last].eligible = False
                del self.candidates[last]

    def _record(self, conversation: Conversation, key: str, identity: str, row: TokenRow) -> dict[str, Any]:
        supervised = sum(end - start for start, end in row.spans)
        self.spooled += len(row.ids)
        self.spooled_supervised += supervised
        for start, end in row.spans:
            self.special.update(self.chat.special.intersection(row.ids[start:end]))
        return {
            "row_id": identity,
            "conversation_id": conversation.conversation_id,
            "source": conversation.source,
            "domain": conversation.domain,
            "input_ids": row.ids,
            "span_starts": [start for start, _ in row.spans],
            "span_ends": [end for _, end in row.spans],
            "length": len(row.ids),
            "supervised": supervised,
            "prompt_key": key,
            "cut": row.cut,
        }

    def check(self) -> None:
        """Raise :class:`DraftsmithError` when too much was left out, or when nothing or everything is supervised."""
        self.dropped.check(self.total, self.config.data.max_dropped_fraction, _HARMLESS)
        if not self.spooled_supervised:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.counts.most_common())
            raise DraftsmithError(
                f"no token of {self.total} conversations is supervised, so there is nothing to learn (left out: "
                f"{reasons or 'none'}); do they have assistant messages (if not, set regenerate.enabled), and does the chat "
                "template write them?"
            )
        if self.spooled_supervised == self.spooled:
            raise DraftsmithError(
                f"every token of {self.total} conversations is supervised, prompts and headers too; set tokenize.mask to "
                f"another way of finding answers than {self.method}"
            )

    def split(self) -> dict[str, str]:
        """The split of each prompt key."""
        settings = self.config.tokenize
        chosen = splits.assign(
            self.groups,
            per_domain=settings.evaluation_per_domain,
            fraction=settings.validation_fraction,
            seed=settings.seed,
        )
        for key, group in self.groups.items():
            for _ in range(group.conversations - 1 if chosen.get(key) == "evaluation" else 0):
                asked = self.candidates.get(key)
                self.dropped.add(
                    f"{group.domain}, asking as {asked.conversation_id if asked else key}", "evaluation_prompt"
                )
        return chosen

    def write_rows(self, spool: IO[bytes], chosen: dict[str, str], rows: Path) -> None:
        """Write the spooled rows that train or validate to ``rows``."""
        import pyarrow.parquet as pq

        longest = 0
        with (
            atomic_path(rows) as temporary,
            pq.ParquetWriter(temporary, _schema("split"), compression="zstd") as writer,
        ):
            for batch in pq.ParquetFile(spool).iter_batches(batch_size=_GROUP_ROWS):
                records = []
                for record in batch.to_pylist():
                    split = chosen[record.pop("prompt_key")]
                    if split == "evaluation":
                        continue
                    self.counts.update(
                        rows=1, tokens=record["length"], supervised=record["supervised"], truncated=record.pop("cut")
                    )
                    self.counts[f"{split}_tokens"] += record["length"]
                    self.by_split[split] += 1
                    self._domain(record["domain"])[split] += 1
                    # Powers of two: a row of 100 tokens counts under 128.
                    self.histogram[1 << (record["length"] - 1).bit_length()] += 1
                    longest = max(longest, record["length"])
                    records.append(record | {"split": split})
                _write(writer, records)
            if not self.by_split["train"]:
                raise DraftsmithError(
                    f"none of {self.total} conversations is left to train on; give more, or lower "
                    "tokenize.evaluation_per_domain and tokenize.validation_fraction"
                )
            room = self.target.get("max_positions")
            # The engine samples one token behind a row, and vLLM keeps one more place.
            if room and longest + 2 > room:
                raise DraftsmithError(
                    f"the longest row has {longest} tokens, but the target's context is {room}; set tokenize.max_length "
                    f"to {room - 2} or less"
                )

    def _domain(self, domain: str) -> Counter[str]:
        return self.by_domain.setdefault(domain, Counter(train=0, validation=0, evaluation=0))

    def write_prompts(self, chosen: dict[str, str], prompts: Path) -> None:
        """Write the evaluation prompts that fit to ``prompts``."""
        masker = masking.Masker(self.chat, self.method, self.marks)
        lines = []
        for key in sorted(key for key, split in chosen.items() if split == "evaluation" and key in self.candidates):
            conversation = self.candidates[key]
            try:
                messages = _asked(conversation.messages)
                ids = masker.prompt_ids(messages, conversation.tools)
                if len(ids) > self.config.tokenize.max_length:
                    raise Unusable("prompt_too_long", f"{len(ids)} tokens")
            except Unusable as unusable:
                self._drop(conversation, unusable.reason, unusable.detail)
                continue
            self.by_split["evaluation"] += 1
            self._domain(conversation.domain)["evaluation"] += 1
            lines.append({
                "prompt_id": key,
                "conversation_id": conversation.conversation_id,
                "domain": conversation.domain,
                "messages": messages,
                **({"tools": conversation.tools} if conversation.tools else {}),
                "prompt_token_ids": ids,
            })  # fmt: skip
        lines.sort(key=lambda line: (str(line["domain"]), str(line["prompt_id"])))
        with atomic_path(prompts) as temporary:
            temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def figures(self) -> dict[str, Any]:
        """The content of tokenize.json."""
        kept = self.chat.end_ids | self.marks.ends | self.chat.template_ids() | self.special
        return {
            "conversations": self.total,
            **{name: self.counts[name] for name in ("rows", "tokens", "supervised", "truncated")},
            "tokens_by_split": {split: self.counts[f"{split}_tokens"] for split in ("train", "validation")},
            "by_split": dict(self.by_split),
            "by_domain": {domain: dict(counts) for domain, counts in sorted(self.by_domain.items())},
            "dropped": dict(self.dropped.counts.most_common()),
            "dropped_examples": self.dropped.examples,
            "dropped_rows": dict(self.lost_rows.most_common()),
            "length_histogram": [[upper, count] for upper, count in sorted(self.histogram.items())],
            "mask_method": self.method,
            "row_per": "turn" if self.by_turn else "conversation",
            "conversations_by_turn": self.by_turn,
            "straddled_answers": self.straddled,
            "template_sha256": self.chat.template_sha256,
            "special_ids_kept": sorted(token for token in kept if token < self.target["vocab_size"]),
        }


def _asked(messages: Sequence[Message]) -> list[Message]:
    """What is asked: everything before the last answer, or all of it where nobody has answered yet."""
    try:
        return list(messages[: masking.answer_indices(messages)[-1]])
    except Unusable:
        if messages[-1]["role"] == "assistant":
            raise
        return list(messages)


def _schema(*more: str) -> Any:
    """Columns of rows.parquet, with ``split`` in it, or of the spool."""
    import pyarrow as pa

    texts = [
        "row_id",
        "conversation_id",
        "source",
        "domain",
        *(name for name in more if name in ("split", "prompt_key")),
    ]
    return pa.schema([
        *((name, pa.string()) for name in texts),
        *((name, pa.list_(pa.int32())) for name in ("input_ids", "span_starts", "span_ends")),
        *((name, pa.int32()) for name in ("length", "supervised")),
        *((name, pa.bool_()) for name in more if name == "cut"),
    ])  # fmt: skip


def _write(writer: Any, records: list[dict[str, Any]]) -> None:
    """One row group."""
    import pyarrow as pa

    if records:
        writer.write_table(pa.Table.from_pylist(records, schema=writer.schema))
