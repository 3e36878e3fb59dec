"""The figures of benchmarks/storage.py, where they can be worked out by hand."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from batches import KEY, ROWS, of_format_1, states, write_batch

from draftsmith.errors import DraftsmithError


@pytest.fixture(scope="module")
def storage(request: pytest.FixtureRequest) -> ModuleType:
    """The script as a module."""
    path = Path(__file__).resolve().parents[3] / "benchmarks/storage.py"
    spec = importlib.util.spec_from_file_location("storage_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("old", [False, True])
def test_all_rows_of_a_store_of_any_format(tmp_path: Path, storage: ModuleType, old: bool) -> None:
    path = write_batch(tmp_path / KEY)
    if old:
        of_format_1(path)
    header, aux, final = storage.sample(tmp_path / KEY, 7, random.Random(0))
    assert (header["layers"], aux.shape, final.shape) == ([1, 2, 5], (7, 3, 6), (7, 6))
    assert aux.flatten().sort().values.tolist() == states(ROWS, torch.float32)[0].flatten().sort().values.tolist()


def test_states_that_are_float8_already(tmp_path: Path, storage: ModuleType) -> None:
    write_batch(tmp_path / KEY, storage="fp8")
    with pytest.raises(DraftsmithError, match="its states are float8 already"):
        storage.sample(tmp_path / KEY, 7, random.Random(0))


def test_error_by_hand(storage: ModuleType) -> None:
    """(3, 4) for (3, 5): 1 / 5 of the norm of (3, 4); the other is exact."""
    found = storage.error(torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.tensor([[3.0, 5.0], [1.0, 1.0]]))
    assert found == {"mean": 0.1, "max": 0.2}


def test_words_by_hand(storage: ModuleType) -> None:
    """Probabilities 3/4 and 1/4 for 1/4 and 3/4: KL is (3/4 - 1/4) ln 3, half of the probability moves, the likeliest token is another."""
    head, final = torch.eye(2), torch.tensor([[3.0, 1.0]]).log()
    found = storage.words(head, final, torch.tensor([[1.0, 3.0]]).log())
    assert found == {"kl_mean": 0.549, "kl_max": 0.549, "moved": 0.5, "same_token": 0.0}
    assert storage.words(head, final, final) == {"kl_mean": 0.0, "kl_max": 0.0, "moved": 0.0, "same_token": 1.0}
