"""Every way in which vLLM's scheduler cuts and mixes rows: states are those of the row alone.

Alone means: by the same stage, one request at a time, its whole row in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny
from draftsmith import merge_manifest, store, vllm_compat
from draftsmith.files import read_json
from draftsmith.rows import read_rows
from draftsmith.train_draft.dataset import usable_rows
from extraction import extract, reader, relative, rows_of, settings, worst_error

Rows = list[list[int]]
POSITIONS = 1024
# A margin of two: the token that ends a prompt, and one more that vLLM's speculative decoding wants to be there.
LONGEST = POSITIONS - 2
PREFIX = rows_of([200], seed=20)[0]
# Of 32 tokens; Gemma's layers with a window have some of their own.
BLOCKS = {"llama": 24, "gemma3_text": 130}
ROWS: dict[str, Rows] = {
    "mixed": rows_of([300, 5, 600, 17, 450, 64, 65, 128], seed=21),
    "crowded": rows_of([300, 290, 310, 280, 305, 295, 315, 285], seed=22),
    "one token": [[token] for token in range(3, 203)],
    "longest": rows_of([LONGEST, 9, LONGEST], seed=23),
    "prefix": [PREFIX + tail for tail in rows_of([1, 2, 40, 33, 64, 65, 100, 56] * 3, seed=24)] + [PREFIX],
}


@pytest.fixture(scope="session", params=["llama", "gemma3_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read natively, and by hooks; the second has layers with a sliding window."""
    vllm_compat.model_class({"llama": ["LlamaForCausalLM"], "gemma3_text": ["Gemma3ForCausalLM"]}[request.param])
    return tiny.model(
        tmp_path_factory.mktemp("models") / request.param, request.param, max_position_embeddings=POSITIONS
    )


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The manifest of all rows, each alone in its step."""
    folder = tmp_path_factory.mktemp("alone")
    rows = [row for some in ROWS.values() for row in some]
    config = settings(folder, engine={"max_num_batched_tokens": POSITIONS, "max_num_seqs": 1})
    manifest = extract(folder, model, rows, config=config)
    assert manifest["figures"]["writer"]["steps"] == len(rows), "a step held a part of a row, or more than one"
    return manifest


def compared(folder: Path, model: Path, alone: dict[str, Any], rows: Rows, **engine: Any) -> dict[str, Any]:
    """Extract ``rows`` with settings of the engine and compare with what each gives alone; gives the figures."""
    manifest = extract(folder, model, rows, config=settings(folder, engine=engine))
    assert list(manifest["rows"]) == [store.row_id(row) for row in rows]
    assert worst_difference(manifest, alone, rows) <= 1e-5
    return dict(manifest["figures"])


def worst_difference(one: dict[str, Any], other: dict[str, Any], rows: Sequence[Sequence[int]]) -> float:
    """The largest relative difference of any state of any row between two manifests."""
    first, second, worst = reader(one), reader(other), 0.0
    for row in rows:
        a, b = first.row(store.row_id(row)), second.row(store.row_id(row))
        assert a.token_ids.tolist() == b.token_ids.tolist() == list(row)
        worst = max(
            worst,
            relative(a.final, b.final),
            *(relative(x, y) for x, y in zip(a.aux.unbind(1), b.aux.unbind(1), strict=True)),
        )
    return worst


def test_chunked_prefill(tmp_path: Path, model: Path, alone: dict[str, Any]) -> None:
    figures = compared(tmp_path, model, alone, ROWS["mixed"], max_num_batched_tokens=48)
    tokens = sum(len(row) for row in ROWS["mixed"])
    assert figures["writer"]["steps"] == -(-tokens // 48), "steps are full, so that chunks begin and end anywhere"


def test_forced_preemption(tmp_path: Path, model: Path, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prefills go on at once, and the KV cache holds about two of them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counting(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    small = {"num_gpu_blocks_override": BLOCKS[model.name], "block_size": 32, "long_prefill_token_threshold": 16}
    figures = compared(tmp_path, model, alone, ROWS["crowded"], max_num_batched_tokens=128, args=small)
    assert preempted, "the scheduler took no row out"
    assert 0 < figures["writer"]["restarts"] <= len(preempted)


def test_many_rows_of_one_token(tmp_path: Path, model: Path, alone: dict[str, Any]) -> None:
    figures = compared(tmp_path, model, alone, ROWS["one token"], max_num_seqs=64)
    assert figures["writer"]["steps"] < len(ROWS["one token"]) / 10


@pytest.mark.parametrize("tokens", [100, 2 * POSITIONS])
def test_rows_of_the_longest_allowed_length(tmp_path: Path, model: Path, alone: dict[str, Any], tokens: int) -> None:
    compared(tmp_path, model, alone, ROWS["longest"], max_num_batched_tokens=tokens)


@pytest.mark.parametrize("args", [{}, {"enable_prefix_caching": True}])
def test_a_long_common_prefix(tmp_path: Path, model: Path, alone: dict[str, Any], args: dict[str, Any]) -> None:
    """Were the prefix cached, its states would never be seen; the switch is not the user's."""
    figures = compared(tmp_path, model, alone, ROWS["prefix"], max_num_batched_tokens=256, args=args)
    assert figures["tokens"] == sum(len(row) for row in ROWS["prefix"])


@pytest.mark.parametrize("wanted", [True, False])
def test_asynchronous_scheduling(tmp_path: Path, model: Path, alone: dict[str, Any], wanted: bool) -> None:
    """On a CPU vLLM leaves it off whatever is asked for; tests/gpu has both."""
    figures = compared(tmp_path, model, alone, ROWS["mixed"], args={"async_scheduling": wanted})
    assert figures["async_scheduling"] is False


def test_identical_rows_are_computed_once_for_all_shards(tmp_path: Path, model: Path, alone: dict[str, Any]) -> None:
    """The copies of a row lie in packs of different shards; it has one entry in one manifest, and training finds both."""
    distinct = ROWS["mixed"]
    rows = [*distinct, distinct[0], distinct[2], distinct[0]]
    config = settings(tmp_path, extract={"batch_tokens": 512})
    parts = [extract(tmp_path, model, rows, config=config, shard=f"{place}-of-2") for place in (1, 2)]
    assert sum(len(part["rows"]) for part in parts) == len(distinct)
    assert sum(part["figures"]["tokens"] for part in parts) == sum(len(row) for row in distinct)
    shards = [tmp_path / f"{place}-of-2.json" for place in (1, 2)]
    merge_manifest.run(rows=tmp_path / "rows.parquet", shards=shards, manifest=tmp_path / "manifest.json")
    merged = read_json(tmp_path / "manifest.json")
    assert list(merged["rows"]) == [store.row_id(row) for row in distinct]
    assert worst_difference(merged, alone, rows) <= 1e-5
    table = read_rows(tmp_path / "rows.parquet", ["row_id", "length"])
    table = table.assign(split="train", span_starts=[[0]] * len(rows), span_ends=[[len(row)] for row in rows])
    found = usable_rows(table, "train", merged, tmp_path)
    assert [row.row_id for row in found] == [store.row_id(row) for row in rows]


def test_rope_factors_do_not_follow_the_longest_row(tmp_path: Path) -> None:
    """vLLM chooses LongRoPE's factors by the length it is told, which the longest row of the shard must not decide."""
    model = tiny.model(tmp_path / "phi3", "phi3")
    vllm_compat.model_class(["Phi3ForCausalLM"])
    short, long = rows_of([60, 400], seed=25)
    beside = extract(tmp_path / "beside", model, [short, long])
    apart = extract(tmp_path / "apart", model, [short])
    assert worst_difference(beside, apart, [short]) <= 1e-5
    # Transformers takes the long factors for a row that is longer than 256 tokens.
    assert worst_error(tiny.reference(model), beside, [long]) <= 1e-5
