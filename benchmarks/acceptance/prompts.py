"""Prompts for benchmarks/acceptance, made of facts at hand: Python's own library, the cities of its time zones, Unicode's pictures.

    python benchmarks/acceptance/prompts.py FOLDER --train 6000 --held-out 20

FOLDER/train.jsonl has the prompts of eight domains in equal parts, FOLDER/held-out.jsonl ``--held-out`` of each, kept for the
evaluation. A thing that a held-out prompt asks about (a function, a city, an animal, a pair of numbers) is in no training
prompt. The same Python makes the same prompts.
"""

from __future__ import annotations

import hashlib
import html.entities
import http
import importlib
import inspect
import json
import random
import unicodedata
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

# One thing in this many is asked about in held-out prompts only.
HELD_OUT = 12
MODULES = (
    "argparse array ast base64 bisect calendar collections configparser contextlib copy csv ctypes dataclasses datetime decimal difflib "
    "dis email.message enum fileinput fnmatch fractions functools gc getpass glob graphlib gzip hashlib heapq hmac html "
    "http.client inspect io ipaddress itertools json keyword linecache locale logging lzma math mimetypes numbers operator os os.path "
    "pathlib pickle pkgutil platform plistlib pprint queue random re sched secrets select shelve shlex shutil signal socket sqlite3 "
    "ssl stat statistics string struct subprocess sys sysconfig tarfile tempfile textwrap threading time timeit token tokenize trace "
    "traceback types typing unicodedata unittest urllib.parse urllib.request uuid warnings wave weakref zipfile zlib"
)
Asked = Callable[[str, random.Random], str]


def functions() -> list[str]:
    """Public functions and classes of Python's library, as ``module.name``."""
    found = set()
    for name in MODULES.split():
        module = importlib.import_module(name)
        for member, value in vars(module).items():
            if member.startswith("_") or not (inspect.isroutine(value) or inspect.isclass(value)):
                continue
            if (getattr(value, "__module__", None) or "").split(".")[0].lstrip("_") == name.split(".")[0]:
                found.add(f"{name}.{member}")
    return sorted(found)


def described() -> list[str]:
    """First paragraphs of the documentation in Python's library that are a text of their own."""
    found = set()
    for name in MODULES.split():
        module = importlib.import_module(name)
        for value in [module, *vars(module).values()]:
            text = (
                inspect.getdoc(value) if inspect.isroutine(value) or inspect.isclass(value) or value is module else None
            )
            for paragraph in (text or "").split("\n\n"):
                line = " ".join(paragraph.split())
                if 120 <= len(line) <= 500 and line[0].isupper() and line.endswith(".") and ">>>" not in line:
                    found.add(line)
    return sorted(found)


def cities() -> list[str]:
    """Cities that name a time zone."""
    zones = (zone.split("/") for zone in zoneinfo.available_timezones() if zone.count("/") == 1)
    wanted = {"Africa", "America", "Asia", "Atlantic", "Australia", "Europe", "Indian", "Pacific"}
    return sorted({name.replace("_", " ") for area, name in zones if area in wanted})


def pictures() -> list[str]:
    """Animals, plants, food and objects that Unicode has a picture of."""
    names = (
        unicodedata.name(chr(code), "")
        for code in [*range(0x1F300, 0x1F650), *range(0x1F680, 0x1F700), *range(0x1F900, 0x1FA00)]
    )
    unfit = (
        "FACE",
        "SIGN",
        "SYMBOL",
        "HAND",
        "BUTTON",
        "CLOCK",
        "ARROW",
        "SQUARE",
        "CIRCLE",
        "MARK",
        "FINGER",
        "EMOJI",
    )
    fit = {name.lower() for name in names if name and name.count(" ") <= 1 and not any(word in name for word in unfit)}
    return sorted(f"an {name}" if name[0] in "aeiou" else f"a {name}" for name in fit)


def web() -> list[str]:
    """Statuses of HTTP, errors of Python, signs of HTML."""
    statuses = [f"HTTP status {status.value} ({status.phrase})" for status in http.HTTPStatus]
    errors = [
        f"Python's {name}" for name, value in vars(importlib.import_module("builtins")).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    ]  # fmt: skip
    signs = [f"the HTML entity &{name}" for name in html.entities.html5 if name.endswith(";") and len(name) > 4]
    return sorted({*statuses, *errors, *sorted(signs)[::4]})


def pairs() -> list[str]:
    """Pairs of numbers."""
    return [f"{first} {second}" for first in range(12, 97) for second in range(3, 40)]


def sums(pair: str, chance: random.Random) -> str:
    """A small word problem."""
    first, second = pair.split()
    name, thing = (
        chance.choice(["Ana", "Ben", "Chloe", "Dev", "Eva"]),
        chance.choice(["apples", "stickers", "books", "coins", "cards"]),
    )
    return chance.choice(
        [
            f"{name} has {first} {thing} and gives away {second}. How many are left? Show each step.",
            f"What is {first} plus {second}? Then double the result.",
            f"A shop sells {thing} at {second} coins each. How much do {first} of them cost?",
            f"Write {first} and {second} in words, and say which is larger and by how much.",
            f"{name} saves {second} coins every week. After how many weeks does {name} have at least {first}?",
        ]
    )


def asked(*forms: str) -> Asked:
    """One of the ``forms``, in which {} is the thing."""
    return lambda thing, chance: chance.choice(forms).replace("{}", thing)


DOMAINS: dict[str, tuple[Callable[[], list[str]], Asked]] = {
    "code": (functions, asked("What does {} do in Python? Give a short example.", "Write a small Python function that uses {} and explain it.", "When would I use {} in a Python program?")),
    "summary": (described, asked("Summarise this text in one sentence: {}", "Rewrite this so that a beginner understands it: {}", "What is the main point of the following text? {}")),
    "travel": (cities, asked("What should a visitor see in {}?", "Write a short postcard from {}.", "Plan one relaxed day in {}.", "Tell me three facts about {}.")),
    "story": (pictures, asked("Write a short story about {} that gets lost.", "Write a poem of four lines about {}.", "Write a dialogue between a child and {}.")),
    "lists": (pictures, asked("List five things that come to mind about {}.", "List three advantages and three disadvantages of {}.", "Give me five names for a shop that has {} as its sign.")),
    "web": (web, asked("Explain {} to a new colleague.", "What is {} and when does one meet it?", "A user reports {}. What could be the cause?")),
    "sums": (pairs, sums),
    "letters": (cities, asked("Write a short email to a hotel in {} asking for a quiet room.", "Write a polite letter that declines an invitation to {}.", "Write an announcement of a concert in {}.", "Write a friendly message to a colleague who moves to {}.")),
}  # fmt: skip


def held_out(thing: str) -> bool:
    """Whether a thing is kept for the evaluation; the same in each domain, so that no city is in one and not the other."""
    return hashlib.sha256(thing.encode()).digest()[0] % HELD_OUT == 0


def prompts(domain: str, kept: bool, count: int) -> Iterator[str]:
    """``count`` different prompts of a domain about things that are kept for the evaluation, or about the others."""
    listed, ask = DOMAINS[domain]
    things = [thing for thing in listed() if held_out(thing) == kept]
    if not things:
        # As where Python finds no time zones, which a slim system leaves out.
        raise SystemExit(f"{domain}: this Python knows of no {listed.__name__}; for cities, install the package tzdata")
    chance = random.Random(f"{domain} {kept}")
    seen: set[str] = set()
    for _ in range(200 * count):
        if len(seen) == count:
            return
        text = ask(chance.choice(things), chance)
        if text not in seen:
            seen.add(text)
            yield text
    raise SystemExit(f"{domain}: there are only {len(seen)} prompts of {count}; ask for fewer")


def main(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Folder for the two files.")],
    train: Annotated[int, typer.Option(min=len(DOMAINS), help="Prompts to train on, of all domains together.")] = 6000,
    held: Annotated[int, typer.Option("--held-out", min=1, help="Prompts of each domain for the evaluation.")] = 20,
) -> None:
    """Write both files, or none."""
    texts: dict[str, list[str]] = {}
    for name, kept, count in (("train", False, train // len(DOMAINS)), ("held-out", True, held)):
        lines = [
            {"id": f"{name}-{domain}-{number}", "domain": domain, "prompt": text} | ({"split": "evaluation"} if kept else {})
            for domain in DOMAINS for number, text in enumerate(prompts(domain, kept, count))
        ]  # fmt: skip
        texts[f"{name}.jsonl"] = [json.dumps(line) + "\n" for line in lines]
    folder.mkdir(parents=True, exist_ok=True)
    for file, written in texts.items():
        (folder / file).write_text("".join(written))
        print(f"{folder / file}: {len(written)} prompts")


if __name__ == "__main__":
    typer.run(main)
