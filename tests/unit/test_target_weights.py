"""Single tensors of a checkpoint whose files were harmed after it was described."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.target_weights import embedding_weight, head_weight


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    embedding = torch.arange(6.0).reshape(3, 2)
    save_file({"model.embed_tokens.weight": embedding, "lm_head.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    assert torch.equal(head_weight(tmp_path), embedding)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def _stub(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:3])


def _page(file: Path) -> None:
    file.write_text("<html>no such page</html>")


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("harm", [_cut, _stub, _page, Path.unlink])
def test_harmed_weights_are_one_sentence(harm: Callable[[Path], Any], indexed: bool, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"model.embed_tokens.weight": torch.ones(3, 2)}, file)
    if indexed:
        write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"model.embed_tokens.weight": file.name}})
    harm(file)
    with pytest.raises(
        DraftsmithError, match=rf"^{tmp_path}[^\n]*(copy or fetch the file again|found no tensor)[^\n]*$"
    ):
        embedding_weight(tmp_path)
