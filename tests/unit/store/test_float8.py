"""Float8 with a scale for each state: how near it is, and that nothing broken looks sound."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith import store


def test_quantise_by_hand() -> None:
    """The largest becomes 448; 100 / 448 of it is 100, which e4m3 has as 96 or 104 (steps of 8 between 64 and 128)."""
    values, scale = store.quantise(torch.tensor([[448.0, 100.0, -3.0, 0.0]]))
    assert scale.tolist() == [1.0]
    assert values.float().tolist() == [[448.0, 96.0, -3.0, 0.0]]
    assert store.dequantise(values, scale, torch.float32).tolist() == [[448.0, 96.0, -3.0, 0.0]]


def test_each_state_of_a_token_has_a_scale_of_its_own() -> None:
    states = torch.tensor([[[1.0, 2.0], [1000.0, -4000.0]]])
    values, scale = store.quantise(states)
    assert values.shape == (1, 2, 2)
    torch.testing.assert_close(scale, torch.tensor([[2.0, 4000.0]]) / 448)
    torch.testing.assert_close(store.dequantise(values, scale, torch.float32), states, rtol=2**-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_that_of_three_bits(dtype: torch.dtype) -> None:
    """Rounded to nearest with three bits after the point, a number is off by 1/17 of itself at most; numbers below 2**-15 of the
    largest, which have fewer bits, by half of e4m3's smallest step, 2**-10 of 1/448 of the largest.
    """
    states = torch.randn(200, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    back = store.dequantise(*store.quantise(states), torch.float32)
    error = (back - states.float()).abs()
    largest = states.float().abs().amax(-1, keepdim=True)
    bound = torch.maximum(states.float().abs() / 17, largest * 2**-10 / 448)
    assert (error <= bound * (1 + 1e-6)).all()
    relative = (back - states.float()).norm() / states.float().norm()
    assert 0.02 < relative < 0.03


def test_massive_outliers_leave_the_others_their_three_bits() -> None:
    """Residual streams have single numbers of thousands: beside 3000, what is 1 becomes 0.149, still a normal e4m3 number."""
    states = torch.randn(64, 7168, generator=torch.Generator().manual_seed(1))
    states[:, 17] = 3000.0
    back = store.dequantise(*store.quantise(states), torch.float32)
    assert torch.equal(back[:, 17], states[:, 17])
    others = torch.arange(7168) != 17
    assert 0.02 < (back - states)[:, others].norm() / states[:, others].norm() < 0.03
    normal = states.abs() >= 3000 / 448 * 2**-6
    assert normal[:, others].float().mean() > 0.9
    assert ((back - states).abs()[normal] <= states.abs()[normal] / 17 * (1 + 1e-6)).all()


def test_a_state_of_zeros_stays_one() -> None:
    values, scale = store.quantise(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    assert scale.tolist() == [0.0, pytest.approx(1 / 448)]
    assert store.dequantise(values, scale, torch.float32).tolist() == [[0.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(broken: float, dtype: torch.dtype) -> None:
    values, scale = store.quantise(torch.tensor([[1.0, broken, 2.0], [1.0, 2.0, 3.0]], dtype=dtype))
    assert not math.isfinite(scale[0])
    back = store.dequantise(values, scale, dtype)
    assert not torch.isfinite(back[0]).all()
    assert torch.isfinite(back[1]).all()


def test_the_smallest_numbers_do_not_turn_into_infinities() -> None:
    tiny = torch.full((1, 8), 1e-44)
    assert torch.isfinite(store.dequantise(*store.quantise(tiny), torch.float32)).all()
