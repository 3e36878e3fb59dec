"""The generated files say what the config model says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from draftsmith import schema
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError


@pytest.fixture
def root(repo: Path, tmp_path: Path) -> Path:
    """A copy of the generated files."""
    for name in (schema.SCHEMA, schema.README):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(repo / name, tmp_path / name)
    return tmp_path


def test_the_files_are_in_step(repo: Path) -> None:
    assert schema.stale(repo) == [], "run `make schema`"


def test_a_stale_file_is_one_sentence_and_mended_by_fix(root: Path) -> None:
    changed = root / schema.README
    changed.write_text(changed.read_text().replace("| `target.revision` |", "| `target.revisoin` |"))
    with pytest.raises(DraftsmithError) as error:
        schema.run(root, fix=False)
    assert str(error.value) == "config/README.md: out of step with workflow/draftsmith/config.py; run `make schema`"
    schema.run(root, fix=True)
    assert schema.stale(root) == []


def test_what_stands_around_the_tables_stays(root: Path) -> None:
    readme = root / schema.README
    text = "before\n\n" + readme.read_text() + "\nafter\n"
    readme.write_text(text.replace("| `name` |", "| `nam` |"))
    schema.run(root, fix=True)
    assert readme.read_text() == text


def test_a_missing_schema_is_written(root: Path) -> None:
    (root / schema.SCHEMA).unlink()
    schema.run(root, fix=True)
    assert json.loads((root / schema.SCHEMA).read_text()) == schema.json_schema()


@pytest.mark.parametrize("text", ["no marker", schema.BEGIN, schema.END, f"{schema.BEGIN}\n{schema.END}\n{schema.END}"])
def test_a_readme_without_its_markers_is_left_alone(text: str) -> None:
    with pytest.raises(ValueError, match="must each be there once"):
        schema.replace_block(text, schema.BEGIN, schema.END, "table")


@pytest.mark.parametrize(
    "row",
    [
        "| `name` | string | `demo` | Results go to results/NAME. |",
        "| `target.layers` | list of integers or unset | unset | Layer ids",
        "| `target.dtype` | `auto`, `bfloat16`, `float16`, `float32` | `auto` |",
        "| `engine.tp` | integer > 0 | `1` |",
        "| `engine.gpu_memory_utilization` | number > 0, ≤ 1 | `0.9` |",
        "| `engine.args` | mapping | `{}` |",
        '| `data.sources` | list of mappings | `[{"path": "config/demo/conversations.jsonl"}]` |',
        "| `data.sources[].path` | string | required |",
        "| `tokenize.max_length` | integer ≥ 8 | `2048` |",
        "| `train.betas` | list of 2 numbers | `[0.9, 0.95]` |",
        "| `train.learning_rate` | number > 0 | `0.0001` |",
        "| `preflight.dry_run` | boolean or unset | unset |",
    ],
)
def test_rows(row: str) -> None:
    assert f"\n{row}" in schema.key_tables()


def models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """The model and all that its fields are made of."""
    found = {model}
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= models(part)
    return found


def test_every_key_has_a_meaning_and_every_section_a_purpose() -> None:
    for model in models(Config):
        assert model.__doc__
        for name, field in model.model_fields.items():
            section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert section or (field.description and field.description.endswith(".")), f"{model.__name__}.{name}"


def test_every_key_has_a_row() -> None:
    """Found by walking the defaults, not the schema."""
    table = schema.key_tables()
    for section, keys in Config().model_dump().items():
        for key in keys if isinstance(keys, dict) else [None]:
            name = section if key is None else f"{section}.{key}"
            assert table.count(f"\n| `{name}` |") == 1, name


def test_unknown_keys_are_refused_by_the_schema_as_well() -> None:
    described = schema.json_schema()
    for node in [described, *described["$defs"].values()]:
        assert node["additionalProperties"] is False


def test_the_schema_takes_the_config_files(repo: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema.json_schema())
    for path in [*(repo / "config").glob("*.yaml"), *(repo / "config/demo").glob("*.yaml")]:
        assert not list(validator.iter_errors(yaml.safe_load(path.read_text()))), path
    assert list(validator.iter_errors({"train": {"learning_rate": 0}}))
    assert list(validator.iter_errors({"trian": {}}))
