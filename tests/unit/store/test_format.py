"""The bytes of a batch file, its name, and what changes the fingerprint."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from batches import IDS, KEY, LAYERS, ROWS, WIDTH, contents, states, write_batch
from safetensors import safe_open

from draftsmith import store
from draftsmith.store import BatchHeader
from draftsmith.store import format as store_format

EVERY = [(torch.float32, "plain"), (torch.bfloat16, "plain"), (torch.float16, "plain"), (torch.bfloat16, "fp8"), (torch.float32, "fp8")]  # fmt: skip


@pytest.mark.parametrize(("dtype", "storage"), EVERY)
def test_any_safetensors_reader_reads_it(tmp_path: Path, dtype: torch.dtype, storage: store.Storage) -> None:
    expected = contents(ROWS, dtype, storage)
    with safe_open(write_batch(tmp_path, dtype=dtype, storage=storage), "pt") as file:
        assert set(file.keys()) == set(expected)
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
        header = BatchHeader.model_validate_json(file.metadata()["draftsmith"])
    assert (header.layers, header.final, header.storage) == (LAYERS, "post-norm", storage)
    assert (header.rows, header.lengths, header.tokens) == (IDS, [1, 4, 2], 7)


@pytest.mark.parametrize(("dtype", "storage"), EVERY)
def test_tensors_are_aligned_and_leave_no_gap(tmp_path: Path, dtype: torch.dtype, storage: store.Storage) -> None:
    path = write_batch(tmp_path, dtype=dtype, storage=storage)
    _, places = store.read_header(path)
    number = 1 if storage == "fp8" else dtype.itemsize
    expected = {"aux": 7 * 3 * 6 * number, "final": 7 * 6 * number, "token_ids": 7 * 4, "offsets": 4 * 8}
    if storage == "fp8":
        expected |= {"aux_scale": 7 * 3 * 4, "final_scale": 7 * 4}
    assert {name: size for name, (_, size) in places.items()} == expected
    spans = sorted(places.values())
    assert spans[0][0] % 64 == 0
    assert all(at + size == following for (at, size), (following, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] == path.stat().st_size
    for name, (at, _) in places.items():
        width = {"offsets": 8, "token_ids": 4, "aux_scale": 4, "final_scale": 4}.get(name, number)
        assert at % width == 0, name


# ---- sizes and names ----


@pytest.mark.parametrize(
    ("dtype", "storage", "expected"),
    [
        ("bfloat16", "target", 57344),
        ("bfloat16", "bf16", 57344),
        # 4 x (7168 + 4): one byte a number, and four for the scale of each state.
        ("bfloat16", "fp8", 28688),
        ("float32", "target", 114688),
        ("float32", "bf16", 57344),
        ("float32", "fp8", 28688),
    ],
)
def test_bytes_per_token_of_kimi(dtype: str, storage: str, expected: int) -> None:
    """Three layers and the final state of width 7168."""
    assert store.bytes_per_token(3, 7168, dtype, storage) == expected


@pytest.mark.parametrize(("dtype", "storage"), EVERY)
def test_a_file_is_as_large_as_the_formula_says(tmp_path: Path, dtype: torch.dtype, storage: store.Storage) -> None:
    rows = [list(range(500)), list(range(7))]
    path = write_batch(tmp_path, rows, dtype, storage)
    _, places = store.read_header(path)
    ids_and_offsets = 4 * 507 + 8 * 3
    each = store.bytes_per_token(
        len(LAYERS), WIDTH, str(dtype).removeprefix("torch."), "fp8" if storage == "fp8" else "target"
    )
    assert sum(size for _, size in places.values()) == 507 * each + ids_and_offsets


def test_identities_by_hand() -> None:
    """Worked out with sha256sum from the bytes 01 00 00 00 02 00 00 00."""
    assert store.row_id([1, 2]) == "34fb5c825de7ca4aea6e712f19d439c1"
    assert store.row_id([1, 2]) != store.row_id([2, 1])


def test_the_name_follows_from_the_rows_in_their_order() -> None:
    assert store.batch_name(IDS) == store.batch_name(list(IDS))
    names = {store.batch_name(rows) for rows in (IDS, IDS[::-1], IDS[:2], [*IDS, "0" * 32])}
    assert len(names) == 4


@pytest.mark.parametrize(
    ("config", "header"),
    [
        (("target", "float32"), ("float32", "plain")),
        (("bf16", "float32"), ("bfloat16", "plain")),
        (("bf16", "bfloat16"), ("bfloat16", "plain")),
        (("fp8", "bfloat16"), ("bfloat16", "fp8")),
    ],
)
def test_what_is_stored_for_a_key_of_the_config(config: tuple[str, str], header: tuple[str, str]) -> None:
    assert store.stored_as(*config) == header


# ---- what recomputes everything: the fingerprint ----


@pytest.mark.parametrize(
    "other",
    [
        {"target": "another"},
        {"layers": [1, 2, 6]},
        {"layers": [1, 2]},
        {"dtype": "bfloat16"},
        {"storage": "bf16"},
        {"storage": "fp8"},
        {"engine_args": {"quantization": "fp8"}},
    ],
)
def test_all_that_changes_the_bytes_changes_the_fingerprint(other: dict[str, object]) -> None:
    given = {"target": "target", "layers": LAYERS, "dtype": "float32"}
    assert store.fingerprint(**given) == KEY  # type: ignore[arg-type]
    assert store.fingerprint(**given | other) != KEY  # type: ignore[arg-type]


def test_the_format_version_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_format, "FORMAT_VERSION", store.FORMAT_VERSION + 1)
    assert store.fingerprint("target", LAYERS, "float32") != KEY


def test_what_changes_no_byte_leaves_the_fingerprint_as_it_is() -> None:
    """bfloat16 states are stored as they are by either word for it, and no arguments are no arguments."""
    one = store.fingerprint("target", LAYERS, "bfloat16", {}, "target")
    assert store.fingerprint("target", tuple(LAYERS), "bfloat16", None, "bf16") == one


def test_states_of_a_row_do_not_depend_on_its_batch() -> None:
    """Of the helper that the other tests lean on."""
    together, alone = states(ROWS, torch.float32)[0], states(ROWS[1:2], torch.float32)[0]
    assert torch.equal(together[1:5], alone)
