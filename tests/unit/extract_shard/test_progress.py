"""What vLLM says of its load reaches the terminal, when its output goes to a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from draftsmith.extract_shard import progress
from draftsmith.extract_shard.progress import LoadPhases, Progress, phase


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "(Worker_TP0 pid=1240) INFO 11-29 22:15:55 [cuda.py:482] Using FLASH_ATTN_MLA attention backend out of potential backends: ['FLASH_ATTN_MLA'].",
            "Using FLASH_ATTN_MLA attention backend out of potential backends: ['FLASH_ATTN_MLA'].",
        ),
        (
            "Loading safetensors checkpoint shards:  50% Completed | 32/64 [02:10<02:10,  4.08s/it]",
            "Loading safetensors checkpoint shards:  50% Completed | 32/64 [02:10<02:10,  4.08s/it]",
        ),
        (
            "(Worker_TP0 pid=1240) INFO 11-29 22:15:56 [gpu_model_runner.py:5347] Model loading took 8.39 GiB memory and 0.408753 seconds",
            "Model loading took 8.39 GiB memory and 0.408753 seconds",
        ),
        (
            "(EngineCore pid=1229) INFO 11-29 22:16:13 [kv_cache_utils.py:2177] GPU KV cache size: 919,516 tokens",
            "GPU KV cache size: 919,516 tokens",
        ),
        ("INFO 11-29 22:15:51 [vllm.py:1392] Cudagraph is disabled under eager mode", None),
        ("Traceback (most recent call last):", None),
        ("", None),
    ],
)
def test_lines_that_tell_of_the_load(line: str, shown: str | None) -> None:
    assert phase(line) == shown


def test_lines_in_the_log_are_shown_on_the_terminal_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open(tmp_path / "log", "wb", buffering=0)  # noqa: SIM115
    log.write(b"Loading weights took 1 seconds\n")
    terminal = os.open(tmp_path / "terminal", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setenv("DRAFTSMITH_CONSOLE", str(terminal))
    with LoadPhases(log.fileno(), interval=0.01):
        log.write(b"Loading safetensors checkpoint shards:  50% Completed | 1/2 [0\rLoading saf")
        time.sleep(0.1)
        log.write(b"etensors checkpoint shards: 100% Completed | 2/2 [1\nLoading weights took 9.50 seconds\n")
        log.write(b"Loading weights took 9.50 seconds\nsomething else\n")
    log.close()
    os.close(terminal)
    shown = [line.split(" vLLM: ")[1] for line in (tmp_path / "terminal").read_text().splitlines()]
    assert shown == [
        "Loading safetensors checkpoint shards:  50% Completed | 1/2 [0",
        "Loading safetensors checkpoint shards: 100% Completed | 2/2 [1",
        "Loading weights took 9.50 seconds",
    ]


class _Publisher:
    batches, bytes, failed = 3, 2_500_000, {}


def test_the_load_is_no_part_of_the_rate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """20 minutes of load, then 1000 tokens/s for a minute and 500 for the next: what is left goes by the last minute."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    made = Progress()
    now[0] = 1200.0
    made.show(_Publisher())
    made.expect(2000, 200_000)
    for second in range(120):
        now[0] += 1
        for _ in range(10 if second < 60 else 5):
            made.add(100)
        made.show(_Publisher())
    lines = [line for line in capfd.readouterr().err.splitlines() if "tokens/s" in line]
    assert len(lines) == 12
    assert lines[0].endswith("extract: 100/2000 rows, 1,000 tokens/s, 3 batches (2.5 MB) written, about 3 min left")
    assert lines[-1].endswith("extract: 900/2000 rows, 500 tokens/s, 3 batches (2.5 MB) written, about 3 min left")


def test_nothing_is_read_back_where_the_output_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("DRAFTSMITH_CONSOLE", str(write))
    with LoadPhases(write) as phases:
        assert not phases.is_alive()
    os.close(read)
    os.close(write)
