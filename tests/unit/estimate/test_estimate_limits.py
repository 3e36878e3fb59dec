"""Against what there is: disk, quota, the limits of jobs and of partitions."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith.estimate import disk, jobs, slurm
from draftsmith.estimate.model import Time

_DRY_RUN = """
[Mon Nov 30 01:03:12 2026]
rule extract_shard:
    input: results/x/target.json
    log: logs/x/extract_shard/1-of-2.log
    jobid: 7
    wildcards: scatteritem=1-of-2
    resources: tmpdir=<TBD>, gpu=8, mem_mb=200000, mem=200 GB, mem_mib=190735, runtime=720, slurm_partition=h200, nodes=1
[Mon Nov 30 01:03:12 2026]
rule extract_shard:
    wildcards: scatteritem=2-of-2
    resources: tmpdir=<TBD>, gpu=8, mem_mb=200000, mem=200 GB, mem_mib=190735, runtime=720, slurm_partition=h200, nodes=1
rule tokenize:
    resources: tmpdir=<TBD>, mem_mb=8000, runtime=120, slurm_partition=cpu
localrule all:
    resources: tmpdir=/tmp
"""
_SINFO = """#!/bin/sh
case "$*" in
*%P*) echo h200; echo cpu;;
*h200*) echo '12:00:00|1031000+|gpu:h200:8(S:0-1),nvme:1'; echo '12:00:00|515000|gpu:h200:4';;
*cpu*) echo '1-00:00:00|64000|(null)';;
esac
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def time(stage: str, seconds: float) -> Time:
    return Time(stage=stage, rate=1.0, seconds=seconds, source="", formula="")


def test_resources_by_rule() -> None:
    asked = jobs.parse(_DRY_RUN)
    assert asked.shards == 2
    assert [asked.number("extract_shard", name) for name in ("gpu", "mem_mb", "runtime")] == [8, 200_000, 720]
    assert asked.number("extract_shard", "tmpdir") is None
    assert asked.number("nothing", "runtime") is None


def test_needs_against_what_the_jobs_ask_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    times = [time("extract_shard", 13 * 3600), time("tokenize", 3 * 3600)]
    found = {check.name: check for check in slurm.checks(times, {"extract_shard": int(190e9)}, jobs.parse(_DRY_RUN))}
    # 780 minutes of 720: a retry goes on where it was ended. 180 of 120: a tokenisation begins anew.
    assert found["extract_shard: time"].status == "warn"
    assert "780 minutes are needed, 720 are asked for" in found["extract_shard: time"].detail
    assert found["tokenize: time"].status == "fail"
    assert "--set-resources tokenize:runtime=234" in found["tokenize: time"].detail
    assert found["extract_shard: memory"].status == "warn"
    too_much = slurm.checks([], {"extract_shard": int(210e9)}, jobs.parse(_DRY_RUN))
    assert [check.status for check in too_much] == ["fail"]
    assert "--set-resources extract_shard:mem_mb=262500" in too_much[0].detail


def test_what_the_jobs_ask_for_against_their_partitions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path, "sinfo", _SINFO)
    program(tmp_path, "sbatch", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm.here()
    assert slurm.partition("h200") == slurm.Partition(720, 1_031_000, 8)
    assert slurm.partition("cpu") == slurm.Partition(1440, 64_000, 0)
    assert slurm.checks([], {}, jobs.parse(_DRY_RUN)) == []
    more = (
        _DRY_RUN.replace("runtime=720", "runtime=1440")
        .replace("gpu=8", "gpu=16")
        .replace("slurm_partition=cpu", "slurm_partition=gone")
    )
    told = [(check.name, check.status, check.detail) for check in slurm.checks([], {}, jobs.parse(more))]
    assert ("extract_shard: partition", "fail", "1,440 minutes are asked for, the partition h200 allows 720") in told
    assert (
        "extract_shard: partition",
        "fail",
        "16 GPUs on one node are asked for, no node of the partition h200 has more than 8",
    ) in told
    assert [(name, status) for name, status, _ in told[2:]] == [("partition gone", "unknown")]
    # Sixteen on two nodes are eight on each, as a training on several nodes asks for them.
    spread = _DRY_RUN.replace("gpu=8", "gpu=16").replace("nodes=1", "nodes=2")
    assert slurm.checks([], {}, jobs.parse(spread)) == []


def test_without_slurm_only_the_machines_memory_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not slurm.here()
    local = jobs.parse(_DRY_RUN.replace("slurm_partition=", "partition="))
    found = slurm.checks([time("tokenize", 1e6)], {"extract_shard": 1000, "train_draft": 10**15}, local)
    assert [(check.name, check.status) for check in found] == [
        ("extract_shard: memory", "ok"),
        ("train_draft: memory", "fail"),
    ]


def test_a_dry_run_that_fails_is_no_error(tmp_path: Path) -> None:
    asked = jobs.DryRun(str(tmp_path / "no-profile"), tmp_path / "none.yaml").asked()
    assert asked.why.startswith("snakemake -n failed: ")
    assert [(check.name, check.status) for check in slurm.checks([], {}, asked)] == [("limits of the jobs", "unknown")]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30", 30), ("30:30", 30.5), ("02:00:00", 120), ("1-00:00:00", 1440), ("2-12", 3600), ("1-01:30", 1530), ("infinite", None), ("n/a", None)],
)  # fmt: skip
def test_slurms_way_to_write_times(text: str, minutes: float | None) -> None:
    assert slurm.minutes(text) == minutes


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:8", 8), ("gpu:h200:8(S:0-1)", 8), ("gpu:a:2(S:0,1),gpu:b:2", 4), ("lustre:1", 0), ("(null)", 0), ("gpu", 1)],
)
def test_slurms_way_to_write_gpus(gres: str, count: int) -> None:
    assert slurm._gpus(gres) == count


def test_room_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1_000_000_000) if path == tmp_path else None)
    # The folder is not there yet: its parent's disk is meant.
    for need, status in ((500_000_000, "ok"), (900_000_000, "warn"), (1_100_000_000, "fail")):
        checks = disk.room("store", tmp_path / "not" / "yet", need, 10)
        assert [(check.name, check.status) for check in checks] == [("store: disk", status)]
    assert str(tmp_path) in checks[0].detail
    many = disk.room("store", tmp_path, 1, 1 << 62)
    assert [check.name for check in many if check.status == "fail"] in (["store: files"], [])


def test_folders_of_one_disk_need_it_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1_000_000_000))
    (tmp_path / "other").mkdir()
    needs = [disk.Need("store", tmp_path / "store", 600_000_000, 3), disk.Need("work", tmp_path / "work", 500_000_000)]
    (check,) = disk.rooms(needs)
    assert (check.name, check.status) == ("store, work: disk", "fail")
    assert check.detail.startswith("1.1 GB are needed, 1.0 GB are free")
    real = os.stat
    monkeypatch.setattr(
        os,
        "stat",
        lambda path, **more: SimpleNamespace(st_dev=7) if str(path).endswith("other") else real(path, **more),
    )
    apart = disk.rooms([needs[0], disk.Need("work", tmp_path / "other", 500_000_000)])
    assert [(check.name, check.status) for check in apart] == [("store: disk", "ok"), ("work: disk", "ok")]


def test_a_quota_is_read_from_what_quota_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "_mount", lambda folder: ("nas:/home", "nfs"))
    text = (
        "Disk quotas for user someone (uid 1000):\\n     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace\\n"
        "      /dev/sda1     100    1000    2000       0       1       0       0       0\\n"
        "      nas:/home  90000000* 100000000 120000000  0  5  0  0  0\\n"
    )
    program(tmp_path, "quota", f"#!/bin/sh\nprintf '{text}'\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = disk.quota_of(tmp_path)
    # Blocks are KiB, and the soft limit is the lower one.
    assert found == disk.Quota(left=10_000_000 * 1024, limit=100_000_000 * 1024, program="quota")
    checks = {check.name: check.status for check in disk.room("store", tmp_path, 11 * 10**9)}
    assert checks["store: quota"] == "fail"
    program(tmp_path, "quota", "#!/bin/sh\necho 'nas:/home none'\n")
    assert disk.quota_of(tmp_path) is None


def test_a_lustre_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "_mount", lambda folder: ("10.0.0.1@tcp:/scratch", "lustre"))
    program(tmp_path, "lfs", "#!/bin/sh\necho '     /scratch  5000  0  20000  -  1  0  0  -'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    # No soft limit: the hard one counts.
    assert disk.quota_of(tmp_path) == disk.Quota(left=15_000 * 1024, limit=20_000 * 1024, program="lfs quota")
    program(tmp_path, "lfs", "#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(disk, "_SECONDS", 0.2)
    assert disk.quota_of(tmp_path) is None
