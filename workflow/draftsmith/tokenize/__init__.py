"""tokenize: conversations to token rows with supervised spans, split into train, validation and evaluation.

Rows are written as they come and read back once for the split, so that memory grows with the number of conversations
but not with their length.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

from draftsmith import progress_file, store
from draftsmith.chat import Chat
from draftsmith.config import Config, Source
from draftsmith.conversations import Conversation, splits
from draftsmith.conversations.dropped import NOT_SAMPLED, DropCount, Dropped
from draftsmith.conversations.reading import Given, Reader
from draftsmith.conversations.tokenised import Tokenised
from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, read_json, write_json
from draftsmith.log import log
from draftsmith.tokenize import mask_method, masking, row_figures, row_files, row_identity
from draftsmith.tokenize.evaluation_prompts import Candidates
from draftsmith.tokenize.lengths import TokenRow
from draftsmith.tokenize.make_rows import Made, Plan
from draftsmith.tokenize.marks import Marks
from draftsmith.tokenize.mask_extremes import MaskExtremes
from draftsmith.tokenize.near_duplicates import NearDuplicates
from draftsmith.tokenize.row_cache import RowCache
from draftsmith.tokenize.row_figures import RowFigures
from draftsmith.tokenize.row_pool import Figures, make_all
from draftsmith.tokenize.served_sample import ServedSample
from draftsmith.tokenize.spool import Spool, small_columns, with_columns

REASONS = {
    NOT_SAMPLED: "the weight of its source is below 1, and it is not of the share that is kept",
    "duplicate": "the same conversation, or one of the same tokens, came before",
    "near_duplicate": "it shares at least tokenize.near_duplicates of its runs of words with a conversation that is kept",
    "evaluation_prompt": "it asks what a conversation kept for evaluation asks",
    "split_conflict": "it asks what another conversation asks whose `split` is a different one",
}
"""Reason codes of this stage with what each means, besides those of the modules that read conversations and make rows."""

# Nothing is wrong with these conversations, so they do not count against data.max_dropped_fraction.
_HARMLESS = (*row_figures.DUPLICATES, *row_figures.SAME_PROMPT)
# To be asked, a conversation needs no answer.
_ASKED_ANYWAY = ("no_answer", "too_long", "over_max_length", "too_few_tokens", "too_short", "too_many_turns")
_SAMPLES = 32
# Conversations that are read ahead of the samples' choice.
_HEAD = 1024
_LOG_SECONDS = 10.0


def run(
    config: Config,
    *,
    target: Path,
    conversations: Path | None,
    rows: Path,
    prompts: Path,
    report: Path,
    workdir: Path | None = None,
) -> None:
    """Tokenise ``conversations`` (a regenerated file; None: ``data.sources``) and write the three outputs.

    What conversations were made into is kept in ``workdir``, so that another run makes only those that are new.

    Raises :class:`DraftsmithError` when too many conversations cannot be used, when nothing or everything is
    supervised, or when a row does not fit the target's context.
    """
    described = read_json(target)
    data = config.data
    if conversations is not None:
        # Weights have had their say when the answers were written.
        data = data.model_copy(update={"sources": [Source(path=str(conversations))]})
    stage = _Stage(config, described, Chat.load(described, config.tokenize.template_args), workdir)
    rows.parent.mkdir(parents=True, exist_ok=True)
    # A file without a name, so that a killed run leaves nothing behind.
    with tempfile.TemporaryFile(dir=rows.parent) as file:
        spool = Spool(file, row_files.schema(spool=True))
        stage.gather(Reader(data), spool)
        stage.leave_out_near_duplicates()
        stage.check()
        chosen = stage.split()
        stage.write_rows(spool, chosen, rows)
    stage.write_prompts(chosen, prompts)
    figures = stage.figures()
    write_json(report, figures)
    stage.dropped.report("tokenize")
    log(
        f"tokenize: {figures['conversations']} conversations gave {figures['rows']} rows (one a {figures['row_per']}, "
        f"{figures['truncated']} of them cut at tokenize.max_length) "
        f"of {figures['tokens']} tokens, {figures['supervised']} of them supervised and {figures['tokens_saved']} saved against "
        f"a row for each answer; {figures['made']} conversations were "
        f"made, {figures['reused']} taken from earlier runs; "
        + ", ".join(f"{split} {count}" for split, count in figures["by_split"].items())
    )


class _Stage:
    """One run: what has been counted, and what the split needs to know of each conversation."""

    def __init__(self, config: Config, target: dict[str, Any], chat: Chat, workdir: Path | None) -> None:
        self.config, self.target, self.chat, self.workdir = config, target, chat, workdir
        self.work = Figures()
        self.sources: Reader
        # None where all rows are given as tokens, so that no answer has to be found.
        self.method: masking.Method | None = None
        self.marks = Marks()
        self.dropped = DropCount()
        self.lost_rows: Counter[str] = Counter()
        self.total = self.by_turn = self.straddled = self.spooled = self.spooled_supervised = 0
        self.groups: dict[str, splits.Group] = {}
        self.candidates = Candidates(config.tokenize, self.groups)
        self.answers = 0
        self.seen_rows: set[bytes] = set()
        self.special: set[int] = set()
        self.taken = 0
        self.near = NearDuplicates()
        self.left_out: set[int] = set()
        self.written = RowFigures()
        self.extremes = MaskExtremes()
        self.sample = ServedSample()

    def gather(self, sources: Reader, spool: Spool) -> None:
        """Read and mask everything, and write the rows to ``spool``."""
        self.sources = sources
        usable = self._usable(sources)
        head = list(islice(usable, _HEAD))
        samples = _samples(head)
        if not samples and len(head) == _HEAD:
            # Behind many rows of tokens there may still be messages.
            samples = _samples(sources.again())
        if samples:
            self.method, self.marks = mask_method.choose(self.chat, samples, self.config.tokenize.mask)
        plan = Plan(self.target, self.config.tokenize, self.method or "prefix", self.marks)
        begun = shown = time.monotonic()
        with self._cache(plan) as cache:
            for conversation, made in make_all(chain(head, usable), plan, self.chat, cache, self.work):
                for record in self._take(conversation, made):
                    spool.add(record)
                if (now := time.monotonic()) - shown > _LOG_SECONDS:
                    shown = now
                    log(f"tokenize: {self.total} conversations read, {self.spooled / (now - begun):,.0f} tokens/s")
                    progress_file.report(
                        self.total,
                        unit="conversations",
                        tokens=self.spooled,
                        tokens_per_second=self.spooled / (now - begun),
                    )
        spool.close()

    def _cache(self, plan: Plan) -> AbstractContextManager[RowCache | None]:
        """What earlier runs made by the same plan; None where nothing is kept."""
        if self.workdir is None:
            return nullcontext()
        return RowCache(self.workdir / row_identity.fingerprint(plan, self.chat))

    def _usable(self, given: Iterable[Given | Dropped]) -> Iterator[Given]:
        """Conversations that are in shape and new; the others are counted."""
        seen: set[bytes] = set()
        for conversation in given:
            self.total += 1
            if isinstance(conversation, Dropped):
                self._drop(conversation, conversation.reason, conversation.detail)
                if conversation.reason != NOT_SAMPLED:
                    self.extremes.lose(conversation.source_index, None, conversation.where, conversation.reason)
                continue
            key = bytes.fromhex(conversation.content_key())
            if key in seen:
                self._drop(conversation, "duplicate")
                continue
            seen.add(key)
            new = splits.Group(conversation.domain, source=conversation.source_index)
            group = self.groups.setdefault(conversation.prompt_key(), new)
            if conversation.split and group.wished and conversation.split != group.wished:
                self._drop(conversation, "split_conflict", f"{conversation.split} and {group.wished}")
                continue
            group.wished = group.wished or conversation.split
            yield conversation

    def _drop(self, conversation: Given | Dropped, reason: str, detail: str = "") -> None:
        self.dropped.add(conversation.where, reason, detail, conversation.source_index)

    def _take(self, conversation: Given, made: Made) -> list[dict[str, Any]]:
        """The records of a conversation's new rows; it is counted, and may become an evaluation prompt."""
        key = conversation.prompt_key()
        group = self.groups[key]
        only_asked = conversation.split == "evaluation" and made.reason in _ASKED_ANYWAY
        if made.reason and not only_asked:
            self._drop(conversation, made.reason, made.detail)
            self.extremes.lose(conversation.source_index, conversation.domain, conversation.where, made.reason)
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
        if isinstance(conversation, Conversation) and records and len(records) == len(made.rows):
            self.sample.add(conversation, made.rows, [record["row_id"] for record in records])
        self.lost_rows += made.lost
        self.by_turn += made.by_turn
        self.straddled += made.straddled
        self.special.update(made.special)
        group.count(conversation.source_index, len(records))
        self.candidates.consider(key, conversation, made.prompt_tokens)
        if made.signature:
            self.near.add(self.taken, conversation, made.signature, len(records))
        self.taken += 1
        return records

    def _record(self, conversation: Given, key: str, identity: str, row: TokenRow) -> dict[str, Any]:
        supervised = sum(end - start for start, end in row.spans)
        self.answers += len(row.spans)
        self.spooled += len(row.ids)
        self.spooled_supervised += supervised
        self.extremes.add(conversation.source_index, conversation.domain, conversation.where, len(row.ids), supervised)
        # A row for each answer would end with it; rows that were given as tokens would have been one in any case.
        by_turn = len(row.ids) if isinstance(conversation, Tokenised) else sum(end for _, end in row.spans)
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
            "repeats": conversation.repeats,
            "prompt_key": key,
            "number": self.taken,
            "source_index": conversation.source_index,
            "saved": by_turn - len(row.ids),
            "cut": row.cut,
        }

    def leave_out_near_duplicates(self) -> None:
        """Of conversations that are nearly the same keep one; the others are counted, and their rows stay in the spool."""
        threshold = self.config.tokenize.near_duplicates
        if threshold is None:
            return
        for left, kept, similarity in self.near.find(threshold):
            alike = f"{similarity:.2f} of {kept.where}"
            self.dropped.add(left.where, "near_duplicate", alike, left.source_index)
            self.left_out.add(left.number)
            group = self.groups[left.prompt_key]
            group.count(left.source_index, left.rows, -1)
            self.candidates.forget(left.prompt_key, left.content_key)
            if not group.conversations:
                del self.groups[left.prompt_key]

    def check(self) -> None:
        """Raise :class:`DraftsmithError` when too much was left out, or when nothing or everything is supervised."""
        self.dropped.check(self.total, self.config.data.max_dropped_fraction, _HARMLESS)
        if not self.spooled_supervised:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.counts.most_common())
            raise DraftsmithError(
                f"no token of {self.total} conversations is supervised, so there is nothing to learn (left out: "
                f"{reasons or 'none'}); {_mend(self.dropped.counts)}"
            )
        if self.spooled_supervised == self.spooled:
            raise DraftsmithError(
                f"every token of {self.total} conversations is supervised, prompts and headers too; set tokenize.mask to "
                f"another way of finding answers than {self.method}"
            )
        self.extremes.check([figures.path for figures in self.sources.figures])
        if 2 * self.straddled > self.answers:
            log(
                f"tokenize: warning: in {self.straddled} of {self.answers} answers the first characters share a token with the "
                "header before them and are not learnt; does the chat template's header end in a space or a letter?"
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
            if chosen.get(key) != "evaluation":
                continue
            asked = self.candidates.get(key)
            others = group.by_source() - Counter([asked.source_index] if asked else [])
            for source in others.elements():
                self.dropped.add(f"asking as {asked.where if asked else key}", "evaluation_prompt", source=source)
        return chosen

    def write_rows(self, spool: Spool, chosen: dict[str, str], rows: Path) -> None:
        """Write the spooled rows that train or validate to ``rows``."""
        import pyarrow.parquet as pq

        written, schema = self.written, row_files.schema()
        with atomic_path(rows) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for batch in spool.batches():
                records: list[dict[str, Any] | None] = []
                for record in small_columns(batch):
                    split = None if record["number"] in self.left_out else chosen[record["prompt_key"]]
                    if split in (None, "evaluation"):
                        records.append(None)
                        continue
                    if split == "validation":
                        record["repeats"] = 1
                    written.add_row(record, split)
                    records.append(record | {"split": split})
                if any(records):
                    writer.write_batch(with_columns(batch, records, schema))
            if not written.by_split["train"]:
                wished = Counter(group.wished for group in self.groups.values() if group.wished)
                told = f" (`split` says so of {sum(wished.values())} of them)" if wished else ""
                raise DraftsmithError(
                    f"none of {self.total} conversations is left to train on{told}; give more, or lower "
                    "tokenize.evaluation_per_domain and tokenize.validation_fraction"
                )
            room = self.target.get("max_positions")
            # The engine samples one token behind a row, and vLLM keeps one more place.
            if room and written.longest + 2 > room:
                raise DraftsmithError(
                    f"the longest row has {written.longest} tokens, but the target's context is {room}; set "
                    f"tokenize.max_length to {room - 2} or less"
                )

    def write_prompts(self, chosen: dict[str, str], prompts: Path) -> None:
        """Write the evaluation prompts that fit to ``prompts``."""
        masker = masking.Masker(self.chat, self.method or "prefix", self.marks)
        for given, left_out in self.candidates.write(chosen, masker, prompts):
            if left_out is None:
                self.written.add_prompt(given.domain, given.source_index)
            else:
                self._drop(given, left_out.reason, left_out.detail)

    def figures(self) -> dict[str, Any]:
        """The content of tokenize.json."""
        kept = self.chat.end_ids | self.marks.ends | self.chat.template_ids() | self.special
        return {
            "conversations": self.total,
            "reused": self.work.reused,
            "made": self.work.made,
            "sources": self.written.sources(self.sources.figures, self.dropped.by_source),
            **self.written.as_json(),
            "dropped": dict(self.dropped.counts.most_common()),
            "dropped_examples": self.dropped.examples,
            "dropped_rows": dict(self.lost_rows.most_common()),
            "mask_method": self.method or "given",
            "row_per": "turn" if self.by_turn else "conversation",
            "conversations_by_turn": self.by_turn,
            "straddled_answers": self.straddled,
            "evaluation_per_domain": self.config.tokenize.evaluation_per_domain,
            "whole_rows_supervised": self.extremes.whole_rows,
            "template_sha256": self.chat.template_sha256,
            "served_sample": self.sample.chosen(),
            "special_ids_kept": sorted(token for token in kept if token < self.target["vocab_size"]),
        }


def _samples(given: Iterable[Given | Dropped]) -> list[Conversation]:
    """The first conversations that have an answer, to try the ways of finding answers on."""
    messages = (one for one in given if isinstance(one, Conversation))
    answered = (one for one in messages if any(message["role"] == "assistant" for message in one.messages))
    return list(islice(answered, _SAMPLES))


def _mend(reasons: Counter[str]) -> str:
    """What to do where nothing is left, by what most conversations were left out for."""
    most = reasons.most_common(1)[0][0] if reasons else ""
    return {
        "no_answer": "set regenerate.enabled: true to let the target write the answers",
        "too_long": "raise tokenize.max_length, or set tokenize.truncate: cut",
        "too_short": "lower tokenize.min_tokens or tokenize.min_supervised_tokens",
        "too_many_turns": "raise tokenize.max_turns",
        "not_sampled": "raise data.sources[].weight",
    }.get(most, "do they have assistant messages, and does the chat template write them?")
