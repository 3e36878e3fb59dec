"""What is written about the config, made of the config model: the JSON schema and the tables of config/README.md.

``python -m draftsmith.schema`` fails when a file is out of step with the model, ``--fix`` writes it anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.errors import DraftsmithError

ROOT = Path(__file__).parents[2]
SCHEMA = Path("workflow/schemas/config.schema.json")
README = Path("config/README.md")
BEGIN = "<!-- keys: begin; made by `make schema`, not by hand -->"
END = "<!-- keys: end -->"

Node = dict[str, Any]


def json_schema() -> Node:
    """JSON Schema (draft 2020-12) of a config file, as editors and validators read it."""
    schema = Config.model_json_schema()
    for section in schema["properties"].values():
        # A section's own keys say their defaults; here they would stand a second time.
        if "$ref" in section:
            section.pop("default", None)
    for node in [schema, *schema["$defs"].values()]:
        for key in node["properties"].values():
            # Titles are the keys again, capitalised.
            key.pop("title", None)
            entry = key.get("items", {}).get("$ref")
            if entry:
                known = schema["$defs"][entry.rsplit("/", 1)[1]]["properties"]
                # Likewise what an entry of a list has by default.
                key["default"] = [
                    {name: value for name, value in given.items() if value != known[name].get("default")}
                    for given in key["default"]
                ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Draftsmith config"}


def _rows(schema: Node, node: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    """Every key below ``node`` with its dotted name, and those of list entries as ``list[].key``."""
    for name, key in node["properties"].items():
        if "$ref" in key:
            continue
        yield prefix + name, key
        entry = key.get("items", {}).get("$ref")
        if entry:
            yield from _rows(schema, schema["$defs"][entry.rsplit("/", 1)[1]], f"{prefix}{name}[].")


def _kind(key: Node) -> str:
    """The type of a key in words, with its range."""
    if "anyOf" in key:
        options = [_kind(option) for option in key["anyOf"] if option.get("type") != "null"]
        return " or ".join([*options, "unset"])
    if "enum" in key:
        return ", ".join(f"`{value}`" for value in key["enum"])
    kind = key["type"]
    if kind == "array":
        if "prefixItems" in key:
            return f"list of {len(key['prefixItems'])} {_kind(key['prefixItems'][0])}s"
        return "list of mappings" if "$ref" in key["items"] else f"list of {_kind(key['items'])}s"
    if kind == "object":
        return "mapping"
    low, high = key.get("minimum"), key.get("maximum")
    above = key.get("exclusiveMinimum")
    bounds = [f"> {above:g}"] if above is not None else []
    bounds += [f"≥ {low:g}"] if low is not None else []
    bounds += [f"≤ {high:g}"] if high is not None else []
    return " ".join([kind, ", ".join(bounds)]).strip()


def _default(key: Node) -> str:
    """The default as one writes it in YAML."""
    if "default" not in key:
        return "required"
    value = key["default"]
    if value is None:
        return "unset"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def key_tables() -> str:
    """Markdown: a heading, the meaning and a table of keys for each section."""
    schema = json_schema()
    parts: list[str] = []

    def table(keys: Iterator[tuple[str, Node]]) -> None:
        parts.append("| key | type | default | meaning |\n| --- | --- | --- | --- |")
        for name, key in keys:
            cells = [f"`{name}`", _kind(key), _default(key), key["description"]]
            parts[-1] += "\n| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    table(_rows(schema, schema, ""))
    for name, key in schema["properties"].items():
        if "$ref" in key:
            section = schema["$defs"][key["$ref"].rsplit("/", 1)[1]]
            parts.append(f"### {name}")
            parts.append(section["description"])
            table(_rows(schema, section, f"{name}."))
    return "\n\n".join(parts)


def replace_block(text: str, begin: str, end: str, block: str) -> str:
    """``text`` with what stands between the lines ``begin`` and ``end`` replaced by ``block``.

    Raises :class:`ValueError` unless each marker is there once.
    """
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended or begin in rest or end in after:
        raise ValueError(f"the markers {begin} and {end} must each be there once")
    return f"{before}{begin}\n\n{block.strip()}\n\n{end}{after}"


def texts(root: Path) -> dict[Path, str]:
    """What the generated files under ``root`` should hold."""
    readme = (root / README).read_text()
    return {
        SCHEMA: json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
        README: replace_block(readme, BEGIN, END, key_tables()),
    }


def stale(root: Path) -> list[Path]:
    """Generated files under ``root`` that are missing or out of step with the config model."""
    return [
        path for path, text in texts(root).items() if not (root / path).is_file() or (root / path).read_text() != text
    ]


def run(root: Path, *, fix: bool) -> None:
    """Check the generated files, or write those that are out of step.

    Raises :class:`DraftsmithError` when one is and ``fix`` was not asked for.
    """
    wrong = stale(root)
    if wrong and not fix:
        names = " and ".join(str(path) for path in wrong)
        raise DraftsmithError(f"{names}: out of step with workflow/draftsmith/config.py; run `make schema`")
    for path in wrong:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(texts(root)[path])
        print(f"written: {path}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.schema", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="write the files that are out of step")
    try:
        run(ROOT, fix=parser.parse_args().fix)
    except DraftsmithError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
