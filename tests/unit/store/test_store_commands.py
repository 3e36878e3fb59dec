"""``draftsmith store``: tables for people, JSON for scripts, and nothing removed that was not asked for."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from batches import IDS, KEY, ROWS, WIDTH, flipped_data, of_format_1, write_batch
from typer.testing import CliRunner

from draftsmith import cli, store
from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.processes.run_mark import here
from draftsmith.store import leftovers

OTHER = store.fingerprint("another", [1], "float32")
HERE = f"{socket.gethostname()}@{here()}"


def call(*arguments: object, code: int = 0) -> str:
    """Standard output of ``draftsmith store ARGUMENTS``."""
    done = CliRunner().invoke(cli.app, ["store", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "250"})
    assert done.exit_code == code, done.output
    return done.stdout


def as_json(*arguments: object, code: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", code=code))


def refusal(*arguments: object) -> str:
    with pytest.raises(DraftsmithError) as error:
        call(*arguments)
    (sentence,) = str(error.value).splitlines()
    return sentence


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two fingerprints."""
    write_batch(tmp_path / "store" / KEY)
    write_batch(tmp_path / "store" / OTHER, key=OTHER)
    return tmp_path / "store"


def staging(folder: Path, name: str, size: int = 1000) -> Path:
    made = folder / ".staging" / name
    made.mkdir(parents=True)
    (made / "part.tmp").write_bytes(bytes(size))
    return made


def gone() -> int:
    """Id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# ---- verify ----


def test_verify_of_a_sound_store(folder: Path) -> None:
    assert call("verify", folder).endswith("every file is sound\n")
    assert as_json("verify", folder)["sound"] is True


def test_verify_names_what_is_damaged_and_the_mend(folder: Path) -> None:
    (path,) = (folder / KEY).glob("*.safetensors")
    flipped_data(path)
    told = call("verify", folder, code=1)
    assert f"damaged: {path}: the states of row {IDS[2]} do not have their checksum\n" in told
    assert told.endswith("moves damaged files aside and computes their rows again, and no others\n")
    found = as_json("verify", folder, code=1)
    assert {each["fingerprint"]: list(each["damaged"]) for each in found["fingerprints"]} == {
        KEY: [path.name],
        OTHER: [],
    }


def test_verify_of_a_manifest(folder: Path, tmp_path: Path) -> None:
    (path,) = (folder / KEY).glob("*.safetensors")
    write_json(
        tmp_path / "manifest.json",
        {
            "store": str(folder / KEY),
            "fingerprint": KEY,
            "rows": {row: [path.name, place] for place, row in enumerate(IDS)},
        },
    )
    told = call("verify", folder, "--manifest", tmp_path / "manifest.json")
    assert told.endswith("all 3 rows of the manifest are there, and every file is sound\n")
    path.unlink()
    assert as_json("verify", folder, "--manifest", tmp_path / "manifest.json", code=1)["missing"] == IDS
    assert "3 of 3 rows of the manifest are missing" in call(
        "verify", folder, "--manifest", tmp_path / "manifest.json", code=1
    )


def test_a_manifest_knows_its_store(folder: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"store": str(folder / KEY), "fingerprint": KEY, "rows": {}})
    assert as_json("verify", "--manifest", tmp_path / "manifest.json")["store"] == str(folder)
    (tmp_path / "another" / OTHER).mkdir(parents=True)
    assert refusal("verify", tmp_path / "another", "--manifest", tmp_path / "manifest.json") == (
        f"{tmp_path}/manifest.json: is of the store {folder}, not of {tmp_path}/another; name that one, or none"
    )


def test_another_file_is_not_taken_for_a_manifest(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("name: mine\n")
    for command in ("verify", "clean"):
        assert refusal(command, folder, "--manifest", tmp_path / "my.yaml") == (
            f"{tmp_path}/my.yaml: is no manifest; name results/NAME/extract/manifest.json"
        )


@pytest.mark.parametrize(
    "content", ["[]", '"x"', '{"store": 1, "fingerprint": "a"}', '{"store": "s", "fingerprint": ["a"]}']
)
def test_a_manifest_with_values_of_other_kinds(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content)
    for command in ("verify", "clean"):
        assert refusal(command, folder, "--manifest", tmp_path / "m.json") == (
            f"{tmp_path}/m.json: is no manifest; name results/NAME/extract/manifest.json"
        )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "is no manifest; name results/NAME/extract/manifest.json"),
        ([], "is no manifest; name results/NAME/extract/manifest.json"),
        ({"r": 1}, "the place of row r is 1 and should be a file and a number; run merge_manifest again"),
        (
            {"r": ["a", "0"]},
            "the place of row r is ['a', '0'] and should be a file and a number; run merge_manifest again",
        ),
        ({"r": ["a"]}, "the place of row r is ['a'] and should be a file and a number; run merge_manifest again"),
    ],
)
def test_a_manifest_with_rows_of_another_kind(folder: Path, tmp_path: Path, rows: Any, said: str) -> None:
    write_json(tmp_path / "m.json", {"store": str(folder / KEY), "fingerprint": KEY, "rows": rows})
    assert refusal("verify", folder, "--manifest", tmp_path / "m.json") == f"{tmp_path}/m.json: {said}"


def test_the_store_is_the_configs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(f"extract: {{store: {folder}}}\n")
    assert as_json("stats", "--config", tmp_path / "my.yaml")["store"] == str(folder)


@pytest.mark.parametrize("command", ["verify", "stats", "clean"])
def test_a_folder_that_is_no_store(tmp_path: Path, command: str) -> None:
    assert refusal(command, tmp_path) == (
        f"{tmp_path}: is no store, as no folder in it is named after a fingerprint; name that of extract.store"
    )
    assert refusal(command, tmp_path / "none") == f"{tmp_path}/none: no such folder; name that of extract.store"


# ---- stats ----


def test_stats(folder: Path) -> None:
    second = write_batch(folder / KEY, [ROWS[1], [11, 12]], vllm="0.32")
    os.utime(second, (time.time(), 4e9))
    store.Journal(folder / KEY).add(second)
    staging(folder / KEY, f"1-of-2-{HERE}-{gone()}")
    flipped_data(second_damaged := write_batch(folder / KEY, [[13]]))
    store.trusted(folder / KEY, KEY, [store.row_id([13])])
    (folder / KEY / "ab.safetensors").write_text("notes")
    (folder / KEY / ".ledger").mkdir()
    write_json(folder / KEY / ".ledger" / "1.json", [{"type": "A"}, {"type": "B"}])
    found = {each["fingerprint"]: each for each in as_json("stats", folder)["fingerprints"]}
    assert set(found) == {KEY, OTHER}
    mine = found[KEY]
    files = [path for path in (folder / KEY).glob("*.safetensors") if path.name != "ab.safetensors"]
    size = sum(path.stat().st_size for path in files)
    expected = {
        "formats": [2], "target": "target", "layers": [1, 2, 5], "dtype": "float32", "storage": "plain", "hidden_size": WIDTH,
        "files": 2, "rows": 4, "duplicates": 1, "tokens": 7 + 6, "bytes": size, "bytes_per_token": round(size / 13, 1),
        # Four states of six numbers of four bytes.
        "formula": 4 * 6 * 4, "newest": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(4e9)), "vllm": ["0", "0.32"],
        "verified": 1, "ledger": 2,
    }  # fmt: skip
    assert {name: mine[name] for name in expected} == expected
    assert [item["bytes"] for item in mine["staging"]] == [1000]
    assert [Path(item["path"]).name for item in mine["damaged"]] == [second_damaged.name]
    assert list(mine["unreadable"]) == ["ab.safetensors"]
    told = call("stats", folder)
    assert "the states of row" in told
    assert "1 of them in two files or more" in told


def test_stats_of_float8(folder: Path) -> None:
    key = store.fingerprint("target", [1, 2, 5], "float32", storage="fp8")
    write_batch(folder / key, storage="fp8", key=key)
    (mine,) = [each for each in as_json("stats", folder)["fingerprints"] if each["fingerprint"] == key]
    assert (mine["storage"], mine["formula"]) == ("fp8", 4 * (6 + 4))
    assert "float8 with scales, read as float32" in call("stats", folder)


def test_verify_says_what_it_could_not_read(folder: Path) -> None:
    (path,) = (folder / OTHER).glob("*.safetensors")
    of_format_1(path)
    assert call("verify", folder).endswith("every file is sound; 1 of another format version were not verified\n")


def test_stats_knows_stores_of_former_versions(folder: Path) -> None:
    (path,) = (folder / OTHER).glob("*.safetensors")
    of_format_1(path)
    (old,) = [each for each in as_json("stats", folder)["fingerprints"] if each["fingerprint"] == OTHER]
    assert (old["formats"], old["rows"], old["tokens"], old["unreadable"]) == ([1], 3, 7, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [("lengths", ["a"]), ("lengths", 3), ("rows", [1]), ("layers", "x"), ("hidden_size", "wide"), ("target", [])],
)
def test_stats_of_a_foreign_file_that_says_nonsense(folder: Path, key: str, value: Any) -> None:
    (path,) = (folder / OTHER).glob("*.safetensors")
    written = json.dumps({"format": 1, "rows": ["r"], "lengths": [1], key: value})
    head = json.dumps({"__metadata__": {"draftsmith": written}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    (other,) = [each for each in as_json("stats", folder)["fingerprints"] if each["fingerprint"] == OTHER]
    assert list(other["unreadable"]) == [path.name]
    assert other["unreadable"][path.name].startswith(f"{path}: is no readable batch file (its {key}")
    assert other["files"] == 0


def test_stats_of_a_precision_that_is_unknown(folder: Path) -> None:
    (path,) = (folder / OTHER).glob("*.safetensors")
    written = json.dumps({"format": 9, "rows": ["r"], "lengths": [1], "dtype": "int3", "hidden_size": 6})
    head = json.dumps({"__metadata__": {"draftsmith": written}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    (other,) = [each for each in as_json("stats", folder)["fingerprints"] if each["fingerprint"] == OTHER]
    assert (other["dtype"], other["formula"], other["tokens"]) == ("int3", None, 1)


@pytest.mark.parametrize("command", ["stats", "clean"])
def test_an_extraction_that_is_running_removes_what_was_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Its staging folder goes when it ends, its files when they are published; a damaged one comes before its reason."""
    made = staging(folder / KEY, f"1-of-2-{HERE}-{os.getpid()}")
    part = folder / KEY / ".staging" / "plan.json"
    part.write_text("{}")
    (folder / KEY / ".damaged").mkdir()
    (folder / KEY / ".damaged" / "ab.safetensors").write_text("x")
    owner = leftovers._owner

    def gone_by_now(path: Path) -> tuple[bool, str]:
        found = owner(path)
        shutil.rmtree(made, ignore_errors=True)
        part.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(leftovers, "_owner", gone_by_now)
    told = call(command, folder)
    assert made.name not in told
    assert part.name not in told
    assert "the reason is not noted" in told


# ---- clean ----


def test_clean_shows_and_removes_nothing(folder: Path) -> None:
    dead = staging(folder / KEY, f"1-of-1-{HERE}-{gone()}")
    before = sorted(folder.rglob("*"))
    for asked in (
        [],
        ["--staging"],
        ["--damaged"],
        ["--keep", KEY],
        ["--keep", KEY, "--others"],
        ["--fingerprint", OTHER],
    ):
        told = call("clean", folder, *asked)
        assert "nothing was removed" in told
        assert dead.name in told
    assert sorted(folder.rglob("*")) == before


def test_clean_removes_the_staging_of_the_dead_alone(folder: Path) -> None:
    alive = staging(folder / KEY, f"1-of-2-{HERE}-{os.getpid()}")
    elsewhere = staging(folder / KEY, f"1-of-2-another-host-{gone()}")
    unknown = staging(folder / KEY, "notes")
    container = staging(folder / KEY, f"1-of-2-{socket.gethostname()}@0123abcd-{gone()}")
    dead = staging(folder / OTHER, f"2-of-2-{HERE}-{gone()}")
    found = as_json("clean", folder, "--staging", "--yes")
    assert {item["path"]: (item["removable"], item["removed"], item["bytes"]) for item in found["items"]} == {
        str(alive): (False, False, 1000),
        str(elsewhere): (False, False, 1000),
        str(unknown): (False, False, 1000),
        str(container): (False, False, 1000),
        str(dead): (True, True, 1000),
    }
    assert [path.exists() for path in (alive, elsewhere, unknown, container, dead)] == [True] * 4 + [False]
    assert len(list(folder.rglob("*.safetensors"))) == 2


def test_clean_removes_damaged_files(folder: Path) -> None:
    (path,) = (folder / KEY).glob("*.safetensors")
    flipped_data(path)
    store.trusted(folder / KEY, KEY, IDS)
    assert len(list((folder / KEY / ".damaged").iterdir())) == 2
    assert "1 removed" in call("clean", folder, "--damaged", "--yes")
    assert list((folder / KEY / ".damaged").iterdir()) == []
    assert (folder / OTHER).exists()


def test_clean_removes_what_no_manifest_names(folder: Path, tmp_path: Path) -> None:
    third = "0" * 16
    write_batch(folder / third, key=third)
    write_json(tmp_path / "manifest.json", {"store": str(folder / KEY), "fingerprint": KEY})
    call("clean", folder, "--others", "--manifest", tmp_path / "manifest.json", "--keep", third, "--yes")
    assert sorted(path.name for path in folder.iterdir()) == sorted([KEY, third])


def test_clean_removes_a_named_fingerprint(folder: Path) -> None:
    call("clean", folder, "--fingerprint", OTHER, "--yes")
    assert [path.name for path in folder.iterdir()] == [KEY]


def test_clean_of_the_folder_of_one_fingerprint_names_its_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"is the folder of one fingerprint; to remove it, name the store, {folder}"
    assert refusal("clean", folder / KEY, "--fingerprint", KEY, "--yes") == f"{folder / KEY}: {said}"
    monkeypatch.chdir(folder / KEY)
    assert refusal("clean", ".", "--fingerprint", KEY, "--yes") == f"{folder / KEY}: {said}"
    assert "nothing was removed" in call("clean", ".", "--fingerprint", KEY)
    assert len(list((folder / KEY).glob("*.safetensors"))) == 1
    # What lies in it may go.
    staging(folder / KEY, f"1-of-1-{HERE}-{gone()}")
    assert "1 removed" in call("clean", folder / KEY, "--staging", "--yes")


def test_clean_where_nothing_can_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [staging(folder / KEY, f"{place}-of-2-{HERE}-{gone()}").name for place in (1, 2)]

    def refuse(path: str, *_: object, **__: object) -> None:
        if names[1] in str(path) or path == "part.tmp":
            raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rmdir", refuse)
    assert refusal("clean", folder, "--staging", "--yes") == (
        f"{folder}/{KEY}/.staging/{names[0]}: cannot be removed as a whole (Read-only file system), and 2 of 2 are still to go, "
        f"{names[0]}, {names[1]}; make the store writable, and run the same command again"
    )


def test_what_goes_while_it_is_removed_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = staging(folder / KEY, f"1-of-2-{HERE}-{gone()}")
    listed = os.scandir

    def late(path: Any) -> Any:
        found = listed(path)
        (made / "part.tmp").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "scandir", late)
    assert "1 removed" in call("clean", folder, "--staging", "--yes")
    assert not made.exists()


@pytest.mark.parametrize("owner", ["alive", "elsewhere"])
def test_a_fingerprint_that_is_being_written_stays(folder: Path, owner: str) -> None:
    name = f"1-of-1-{HERE}-{os.getpid()}" if owner == "alive" else "1-of-1-another-7"
    staging(folder / OTHER, name)
    assert refusal("clean", folder, "--fingerprint", OTHER, "--yes").startswith(f"{folder / OTHER}: stays, as ")
    call("clean", folder, "--others", "--keep", KEY, "--yes")
    assert (folder / OTHER / ".staging" / name).exists()
    assert len(list((folder / OTHER).glob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--yes"], "say what to remove"),
        (["--others", "--yes"], "say what stays"),
        (["--fingerprint", "../../home", "--yes"], "holds no fingerprint ../../home"),
        (["--fingerprint", "ffffffffffffffff", "--yes"], "holds no fingerprint ffffffffffffffff"),
        (["--others", "--keep", "ffffffffffffffff", "--yes"], "holds no fingerprint ffffffffffffffff"),
        (["--fingerprint", KEY, "--keep", KEY, "--yes"], "is also to be kept"),
    ],
)
def test_what_clean_does_not_do(folder: Path, arguments: list[str], said: str) -> None:
    before = sorted(folder.rglob("*"))
    assert said in refusal("clean", folder, *arguments)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("kind", ["fingerprint", "staging", "damaged"])
def test_clean_follows_no_link_out_of_the_store(folder: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    name = f"1-of-1-{HERE}-{gone()}"
    (outside / name).mkdir(parents=True)
    (outside / "x.safetensors").write_text("mine")
    asked: list[object] = [f"--{kind}"]
    if kind == "fingerprint":
        (folder / ("0" * 16)).symlink_to(outside)
        asked.append("0" * 16)
    else:
        (folder / KEY / f".{kind}").symlink_to(outside)
    assert "link" in refusal("clean", folder, *asked, "--yes")
    assert (outside / "x.safetensors").read_text() == "mine"
    assert (outside / name).exists()


# ---- as programs ----


def test_help_of_the_store_loads_nothing_heavy() -> None:
    program = (
        "import sys, draftsmith.cli\n"
        "try: draftsmith.cli.app(['store', 'stats', '--help'])\n"
        "except SystemExit: pass\n"
        "print('loaded:', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "transformers", "pandas", "numpy"} & set(done.stdout.split("loaded:")[1].split())


def test_json_is_all_that_is_on_standard_output(folder: Path) -> None:
    command = [sys.executable, "-m", "draftsmith", "store", "verify", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["files"] == 2
    none = subprocess.run([*command[:-2], str(folder.parent), "--json"], capture_output=True, text=True)
    assert (none.returncode, none.stdout) == (1, "")
    assert len(none.stderr.splitlines()) == 1
