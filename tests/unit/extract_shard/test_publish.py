"""A final state must give the engine's own token by the checkpoint's head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import publish
from draftsmith.extract_shard.publish import HeadCheck

VOCABULARY, WIDTH = 20_000, 32
HEAD = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
FINALS = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
SAMPLED = (FINALS @ HEAD.T).argmax(-1).tolist()


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> HeadCheck:
    monkeypatch.setattr(publish, "head_weight", lambda folder: HEAD)
    return HeadCheck(Path("target"), "float32")


@pytest.mark.parametrize("whole", [True, False])
def test_right_states_pass(check: HeadCheck, whole: bool) -> None:
    assert check.disagreements(FINALS, SAMPLED, whole) == [None] * 50


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("wrong", [FINALS.roll(1, 0), torch.full_like(FINALS, float("nan"))])
def test_states_of_other_rows_or_without_a_value_fail(check: HeadCheck, wrong: torch.Tensor, whole: bool) -> None:
    reasons = check.disagreements(wrong, SAMPLED, whole)
    assert all(reason is not None for reason in reasons)


@pytest.mark.parametrize("whole", [True, False])
def test_a_wrong_norm_fails_within_a_few_batches(check: HeadCheck, whole: bool) -> None:
    """Some states still have their largest logit at the same token; with one row a batch it is found at once all the same."""
    reasons = check.disagreements(FINALS * torch.linspace(-1, 2, WIDTH), SAMPLED, whole)
    assert sum(reason is not None for reason in reasons) >= 30


def test_the_sentence_tells_both_tokens(check: HeadCheck) -> None:
    (reason,) = check.disagreements(FINALS[:1], [SAMPLED[1]])
    assert reason is not None
    assert reason.startswith(
        f"lm_head of the stored final state gives token {SAMPLED[0]}, the engine sampled {SAMPLED[1]} ("
    )


@pytest.mark.parametrize("whole", [True, False])
def test_a_token_beyond_the_head_is_told(check: HeadCheck, whole: bool) -> None:
    assert check.disagreements(FINALS[:1], [VOCABULARY], whole) == [
        "the engine sampled token 20000, the head has 20000"
    ]


@pytest.mark.parametrize(("precision", "passes"), [("float32", False), ("bfloat16", True), ("fp8", True)])
def test_a_tie_within_the_precision_passes(monkeypatch: pytest.MonkeyPatch, precision: str, passes: bool) -> None:
    """The second best token is 1 % lower: in bfloat16 the engine may have seen it above the best."""
    head = torch.zeros(4, 2)
    head[0, 0], head[1, 0] = 100.0, 99.0
    monkeypatch.setattr(publish, "head_weight", lambda folder: head)
    (reason,) = HeadCheck(Path("target"), precision).disagreements(torch.tensor([[1.0, 0.0]]), [1])
    assert (reason is None) is passes


def test_without_a_readable_head_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def missing(folder: Path) -> torch.Tensor:
        raise DraftsmithError("no lm_head")

    monkeypatch.setattr(publish, "head_weight", missing)
    check = HeadCheck(Path("target"), "float32")
    assert check.disagreements(FINALS, SAMPLED) == [None] * 50
    assert "are not compared with the states: no lm_head" in capfd.readouterr().err
