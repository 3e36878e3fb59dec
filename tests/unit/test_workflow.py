"""What the Snakefile is told: settings of each stage, and one name for rule, file, command and module."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from draftsmith import cli, config, get_target
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.workflow import SECTIONS, Plan

# They take no settings: their output follows from their inputs alone.
WITHOUT_SETTINGS = {"merge_manifest", "clean_gpus", "gate"}
ANSWERS = {"regenerate", "merge_answers"}
# They look at a run, beforehand and while it goes on, and are no part of it.
VIEWS = {"estimate", "status"}


def plan(**sections: Any) -> Plan:
    return Plan(Config.model_validate(sections))


def rule_files(repo: Path) -> dict[str, str]:
    """Text of each rule's file by its name."""
    return {path.stem: path.read_text() for path in (repo / "workflow/rules").glob("*.smk") if path.stem != "common"}


def test_a_rule_its_file_its_command_and_its_module_share_one_name(repo: Path) -> None:
    files = rule_files(repo)
    every = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    # A group of commands, as `draftsmith store` is one, is no stage.
    commands = {name: command for name, command in every.items() if not hasattr(command, "commands")}
    assert set(commands) > VIEWS
    assert set(files) == set(SECTIONS) | WITHOUT_SETTINGS
    assert {name.replace("-", "_") for name in commands} - VIEWS == set(files)
    for name, text in files.items():
        assert re.findall(r"^rule (\w+):", text, re.M) == [name]
        assert re.search(rf"python -m draftsmith {name.replace('_', '-')}[ \"]", text)
        assert importlib.util.find_spec(f"draftsmith.{name}"), name


def test_every_rule_file_is_included_once_and_tells_what_it_needs(repo: Path) -> None:
    included = re.findall(r'^include: "workflow/rules/(\w+)\.smk"$', (repo / "Snakefile").read_text(), re.M)
    files = rule_files(repo)
    assert sorted(included) == sorted([*files, "common"])
    for name, text in files.items():
        assert text.startswith(f'"""{name}: '), name
        assert "\nREQUIRED INPUTS: " in text, name
        assert "\nOUTPUTS: " in text, name
        assert re.search(rf'^rule {name}:\n    """\S', text, re.M), f"{name} has no docstring"


def test_a_rule_takes_the_settings_of_its_own_stage(repo: Path) -> None:
    for name, text in rule_files(repo).items():
        assert re.findall(r'PLAN\.settings\("(\w+)"\)', text) == ([] if name in WITHOUT_SETTINGS else [name])


def known(keys: Any, values: Any) -> bool:
    """Whether ``keys``, as pydantic's ``include`` has them, are keys of ``values``."""
    return keys is True or all(
        key in values and (isinstance(keys, set) or known(keys[key], values[key])) for key in keys
    )


@pytest.mark.parametrize("stage", sorted(SECTIONS))
def test_the_settings_of_a_stage_are_keys_of_the_config(stage: str) -> None:
    assert known(SECTIONS[stage], Config().model_dump())
    assert SECTIONS[stage].get("engine", {"args"}) == {"args"}, "how the engine runs changes no result"
    assert not {"clean", "preflight"} & set(SECTIONS[stage]), "checks change no result"


def test_every_section_is_some_stages_business() -> None:
    used = {section for keys in SECTIONS.values() for section in keys}
    sections = {name for name, value in Config().model_dump().items() if isinstance(value, dict)}
    assert used == sections - {"preflight", "clean"}


@pytest.mark.parametrize("stage", sorted(SECTIONS))
def test_a_stage_reads_its_settings_back(stage: str) -> None:
    given = plan(name="trial", target={"layers": [1, 2]}, train={"learning_rate": 3e-4}, vocabulary={"size": 100})
    values = json.loads(given.settings(stage))
    assert set(values) == {"name", *SECTIONS[stage]}
    read = config.settings(given.settings(stage)).model_dump(mode="json", include=SECTIONS[stage])
    assert read == {name: value for name, value in values.items() if name != "name"}


def changed(**sections: Any) -> set[str]:
    """Stages whose params are others than the default's."""
    return {stage for stage in SECTIONS if plan(**sections).settings(stage) != plan().settings(stage)}


@pytest.mark.parametrize(
    ("sections", "stages"),
    [
        ({"engine": {"tp": 8, "max_num_seqs": 1}}, set()),
        ({"clean": {"kill_orphans": True}, "preflight": {"dry_run": True}}, set()),
        (
            {"engine": {"args": {"quantization": "fp8"}}},
            ANSWERS | {"preflight", "dry_run", "extract_shard", "evaluate_draft"},
        ),
        ({"report": {"title": "Mine"}}, {"report"}),
        ({"vocabulary": {"size": 100}}, {"map_vocabulary"}),
        ({"train": {"initial_draft": "a"}}, {"map_vocabulary", "train_draft", "export_draft", "evaluate_draft"}),
        ({"export": {"layouts": ["hf"]}}, {"export_draft", "evaluate_draft"}),
        ({"target": {"layers": [1, 2]}}, {"preflight", "dry_run", "extract_shard"}),
        ({"evaluate": {"k": 5}}, {"evaluate_draft"}),
        ({"tokenize": {"seed": 1}}, {"tokenize"}),
        ({"regenerate": {"endpoint": "http://a/v1", "concurrency": 2, "max_tries": 1, "api_key_env": "KEY"}}, set()),
        ({"regenerate": {"unfinished": "drop"}}, ANSWERS),
        ({"regenerate": {"model": "another"}}, ANSWERS),
        ({"tokenize": {"truncate": "turn", "near_duplicates": 0.8, "max_turns": 3}}, {"tokenize"}),
        ({"data": {"seed": 1}}, ANSWERS | {"tokenize"}),
        ({"data": {"sources": [{"path": "config/demo/conversations.jsonl", "weight": 2}]}}, ANSWERS | {"tokenize"}),
        ({"tokenize": {"template_args": {"a": 1}}}, ANSWERS | {"tokenize", "preflight"}),
    ],
)
def test_a_changed_key_is_the_business_of_few(sections: dict[str, Any], stages: set[str]) -> None:
    assert changed(**sections) == stages


def test_training_settings_leave_the_states_alone() -> None:
    assert not changed(train={"learning_rate": 3e-4}) & {
        "get_target",
        "tokenize",
        "preflight",
        "dry_run",
        "extract_shard",
        "map_vocabulary",
    }
    assert "train_draft" in changed(train={"learning_rate": 3e-4})


def test_settings_do_not_depend_on_the_order_of_keys() -> None:
    first = plan(tokenize={"template_args": {"a": 1, "b": 2}})
    second = plan(tokenize={"template_args": {"b": 2, "a": 1}})
    assert first.settings("tokenize") == second.settings("tokenize")


@pytest.mark.parametrize(("engine", "gpus"), [({"device": "cpu", "tp": 2}, 0), ({"tp": 8}, 8), ({"device": "cuda"}, 1)])
def test_gpus(engine: dict[str, Any], gpus: int) -> None:
    assert plan(engine=engine).gpus == gpus


def test_sources_are_files_in_a_steady_order(tmp_path: Path) -> None:
    (tmp_path / "folder/deep").mkdir(parents=True)
    for name in ("one.jsonl", "folder/b.jsonl", "folder/deep/a.jsonl"):
        (tmp_path / name).touch()
    paths = [str(tmp_path / "one.jsonl"), str(tmp_path / "folder"), "hub:someone/something"]
    assert plan(data={"sources": [{"path": path} for path in paths]}).sources == [
        f"{tmp_path}/one.jsonl", f"{tmp_path}/folder/b.jsonl", f"{tmp_path}/folder/deep/a.jsonl"
    ]  # fmt: skip


def test_what_is_not_read_in_a_folder_is_no_source(tmp_path: Path) -> None:
    """Somebody's notes beside the data re-run nothing; every kind of file that is read does."""
    read = ["a.json", "b.jsonl", "c.jsonl.gz", "d.ndjson", "e.parquet"]
    (tmp_path / "folder.jsonl").mkdir()
    for name in (*read, "notes.txt", "README.md", "a.json.bak", ".hidden.jsonl", "jsonl", "folder.jsonl/_SUCCESS"):
        (tmp_path / name).touch()
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    assert plan(data={"sources": [{"path": str(tmp_path)}]}).sources == [f"{tmp_path}/{name}" for name in read]
    # What is named by itself is looked at, and refused by the stage that reads it.
    assert plan(data={"sources": [{"path": f"{tmp_path}/notes.txt"}]}).sources == [f"{tmp_path}/notes.txt"]


def test_a_missing_source_is_named_with_its_key() -> None:
    values = {"data": {"sources": [{"path": "hub:someone/something"}, {"path": "nowhere.jsonl"}]}}
    with pytest.raises(DraftsmithError) as error:
        Plan.of(values, ["my.yaml"])
    assert str(error.value) == "nowhere.jsonl: no such file or folder; correct the config key data.sources.1.path"


@pytest.mark.parametrize("source", ["/models/nowhere", "./nowhere", "models/of/mine", "~no_such_user_here/x"])
def test_a_target_folder_that_is_not_there_is_told_of_before_anything_runs(source: str) -> None:
    with pytest.raises(
        DraftsmithError, match=rf"^{Path(source)}: no such folder; target\.source \({re.escape(source)}\) must"
    ):
        Plan.of({"target": {"source": source}, "data": {"sources": [{"path": "hub:a/b"}]}}, ["my.yaml"])


def test_a_target_that_cannot_be_looked_at_yet_is_left_to_its_rule(tmp_path: Path) -> None:
    """A hub id and a package may be at hand only where the rule runs; a folder without a checkpoint is none anywhere."""
    data: dict[str, Any] = {"sources": [{"path": "hub:a/b"}]}
    for source in ("moonshotai/Kimi-K2.5", "gpt2", "package:not_there"):
        Plan.of({"target": {"source": source}, "data": data}, ["my.yaml"])
    with pytest.raises(DraftsmithError, match=r"holds no config\.json; target\.source"):
        Plan.of({"target": {"source": str(tmp_path)}, "data": data}, ["my.yaml"])


def test_the_home_of_nobody_is_a_path_that_is_not_there(tmp_path: Path) -> None:
    """Where a shell would leave it as it is, no traceback of pathlib comes."""
    nobody = "~no_such_user_here/x"
    with pytest.raises(
        DraftsmithError, match=r"^~no_such_user_here/x: no such file or folder; .*data\.sources\.0\.path"
    ):
        Plan.of({"data": {"sources": [{"path": nobody}]}}, ["my.yaml"])
    made = plan(target={"source": nobody})
    assert made.target_files == []
    with pytest.raises(DraftsmithError, match=r"/~no_such_user_here/x: no such folder; target\.source"):
        get_target.run(made.config, cache=tmp_path, target=tmp_path / "target.json")


def test_a_fault_names_the_file_given_last() -> None:
    with pytest.raises(DraftsmithError, match=r"^my\.yaml: trian is no known key"):
        Plan.of({"trian": 1}, ["config/config.yaml", "my.yaml"])
    with pytest.raises(DraftsmithError, match=r"^the config: trian is no known key"):
        Plan.of({"trian": 1}, [])


def test_a_draft_to_go_on_from_is_looked_for_at_once_and_its_files_are_known(tmp_path: Path) -> None:
    given = plan(train={"initial_draft": str(tmp_path)})
    with pytest.raises(DraftsmithError, match=r"correct the config key train\.initial_draft"):
        given.check_sources()
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text("{}")
    given.check_sources()
    assert given.initial_draft_files == [str(tmp_path / "config.json"), str(tmp_path / "model.safetensors")]
    assert plan().initial_draft_files == []


def test_a_draft_that_the_run_itself_writes_is_none_to_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way it is written; another run's is one."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / "results" / name / "draft").mkdir(parents=True)
        (tmp_path / "results" / name / "draft/config.json").write_text("{}")
    for path in ("results/mine/draft", "results/../results/mine/draft", str(tmp_path / "results/mine/draft")):
        with pytest.raises(DraftsmithError, match="lies in results/mine, which this run writes; give this run another"):
            plan(name="mine", data={"sources": [{"path": "hub:a/b"}]}, train={"initial_draft": path}).check_sources()
    plan(
        name="mine", data={"sources": [{"path": "hub:a/b"}]}, train={"initial_draft": "results/other/draft"}
    ).check_sources()


def test_braces_in_a_path_are_told_of_with_their_key(tmp_path: Path) -> None:
    """Snakemake would end with a wildcard that no rule has; spaces and letters of any kind are no matter."""
    for name in ("an {old} one", "häßlich 1"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors", "rows.jsonl"):
            (tmp_path / name / file).write_text("{}")
    sound, braced = str(tmp_path / "häßlich 1"), str(tmp_path / "an {old} one")
    given: dict[str, Any] = {
        "data": {"sources": [{"path": f"{sound}/rows.jsonl"}]}, "target": {"source": sound}, "train": {"initial_draft": sound},
    }  # fmt: skip
    plan(**given).check_sources()
    others: dict[str, dict[str, Any]] = {
        "data.sources": {"data": {"sources": [{"path": f"{braced}/rows.jsonl"}]}},
        "target.source": {"target": {"source": braced}},
        "train.initial_draft": {"train": {"initial_draft": braced}},
    }
    for key, other in others.items():
        with pytest.raises(
            DraftsmithError, match=rf"takes braces in a path for a wildcard; .* correct the config key {key}$"
        ):
            plan(**given | other).check_sources()


def test_the_home_of_nobody_is_a_folder_that_is_not_there() -> None:
    values = {"data": {"sources": [{"path": "hub:a/b"}]}, "train": {"initial_draft": "~nobody-of-this-name/draft"}}
    with pytest.raises(DraftsmithError, match=r"^~nobody-of-this-name/draft: no folder of a draft"):
        Plan.of(values, [])
