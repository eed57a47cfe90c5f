"""Optimizers that round FP8 and MX parameters at random: ``qtensor.optim.round_parameters_``."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from formats import assert_same_bytes, assert_same_tensor, rand
from torch import Tensor, nn

import qtensor
from qtensor.optim import round_parameters_, seed_rounding_

FORMATS: dict[str, tuple[str, dict[str, Any], int]] = {
    "fp8": ("fp8", {"force_pow_2_scales": True}, 3),
    "fp8 e5m2": ("fp8", {"force_pow_2_scales": True, "dtype": "e5m2"}, 2),
    "fp8_rowwise": ("fp8_rowwise", {"force_pow_2_scales": True}, 3),
    "fp8_blockwise": ("fp8_blockwise", {}, 3),
    "mxfp8": ("mxfp8", {"columnwise": True}, 3),
    "mxfp6": ("mxfp6", {}, 3),
    "mxfp4": ("mxfp4", {}, 1),
}
"""Format, options and mantissa bits of the element."""
OPTIMIZERS: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
OPTIMIZERS["AdamW"] = lambda p, **k: torch.optim.AdamW(p, weight_decay=0.0, **k)
formats = pytest.mark.parametrize("name", FORMATS)


def quantized(name: str, values: Tensor) -> Any:
    fmt, options, _ = FORMATS[name]
    return qtensor.quantizer(fmt, **options)(values)


def oracle(values: Tensor, mantissa_bits: int, noise: Tensor) -> Tensor:
    """Round up where the share of the way to the next value and the noise exceed 1; float64."""
    x = values.double().numpy()
    magnitude = np.abs(x)
    exponent = np.floor(np.log2(np.where(magnitude == 0, 1, magnitude)))
    space = 2.0 ** (exponent - mantissa_bits)
    below = np.floor(magnitude / space)
    cut = 2 ** (23 - mantissa_bits)
    up = (magnitude / space - below) * cut + noise.double().numpy() >= cut
    return torch.from_numpy(np.copysign((below + up) * space, x)).float()


@pytest.mark.parametrize("foreach", [False, True, None], ids=["loop", "foreach", "fused"])
@formats
def test_a_step_of_sgd_is_that_of_the_oracle(name: str, foreach: bool | None) -> None:
    """Every byte: the decoded values minus the gradient, rounded with the numbers of torch's
    generator, then quantized.
    """
    parameter = nn.Parameter(quantized(name, rand(64, 128)))
    start, grad = parameter.detach().clone(), rand(64, 128, seed=1)
    options = {"fused": True} if foreach is None else {"foreach": foreach}
    optimizer = torch.optim.SGD([parameter], lr=1.0, **options)
    round_parameters_(optimizer)
    parameter.grad = grad.clone()
    torch.manual_seed(3)
    optimizer.step()
    torch.manual_seed(3)
    bits = FORMATS[name][2]
    noise = torch.randint(0, 2 ** (23 - bits), (64, 128), dtype=torch.int32)
    want = quantized(name, oracle(start.dequantize() - grad, bits, noise))
    assert_same_tensor(parameter.detach(), want)
    assert not torch.equal(
        want.dequantize(), quantized(name, start.dequantize() - grad).dequantize()
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@formats
def test_small_steps_move_the_mean(name: str, kind: str) -> None:
    """Four steps of a sixteenth of a space: to nearest they are lost, at random they arrive.

    Values from 0.5 to 1 have the space s = 2^-m / 2, and smaller values smaller ones. A write of a
    value that is a share q of a space away from its neighbour has the variance q (1 - q) s^2. Each
    value is on the grid before, so that q s is the step d, and the variance of four writes is below
    4 d s; five deviations of the mean. Adam's steps are lr, but for its eps: 1e-8 of the gradient.
    All values stay in the normal range: from 0.75 it takes E2M1 five moves to leave it.
    """
    bits = FORMATS[name][2]
    step, moved = 2.0**-bits / 32, {}
    for at_random in (False, True):
        start = torch.rand(64, 128, generator=torch.Generator().manual_seed(0)) * 0.1875 + 0.75
        start[:, ::16] = 1.0  # fixes the scales, together with gradients of 0
        parameter = nn.Parameter(quantized(name, start))
        first, grad = parameter.detach().dequantize(), torch.ones(64, 128)
        grad[:, ::16] = 0
        optimizer = OPTIMIZERS[kind]([parameter], lr=step)
        if at_random:
            round_parameters_(optimizer, seed=0)
        for _ in range(4):
            parameter.grad = grad.clone()
            optimizer.step()
        moved[at_random] = (first - parameter.detach().dequantize())[grad == 1].mean().item()
    deviation = math.sqrt(4 * step * 2.0**-bits / 2 / int(grad.sum()))
    assert moved[False] == 0
    assert abs(moved[True] - 4 * step) < 5 * deviation + 1e-6


def run(seed: int | None, global_seed: int, steps: range, start: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(global_seed)
    weight, state = start or (quantized("mxfp8", rand(16, 64)), None)
    parameter = nn.Parameter(copy.deepcopy(weight))
    optimizer = torch.optim.AdamW([parameter], lr=0.01, fused=True)
    round_parameters_(optimizer, seed=seed)
    if state is not None:
        optimizer.load_state_dict(state)
    for number in steps:
        parameter.grad = rand(16, 64, seed=number)
        optimizer.step()
    return parameter.detach(), copy.deepcopy(optimizer.state_dict())


def test_steps_follow_from_their_seed() -> None:
    """Whatever state torch's generator has, and after a resume."""
    whole, _ = run(5, 1, range(4))
    assert_same_tensor(run(5, 2, range(4))[0], whole)
    assert_same_tensor(run(5, 4, range(2, 4), run(5, 3, range(2)))[0], whole)
    assert not torch.equal(run(6, 1, range(4))[0].dequantize(), whole.dequantize())
    assert_same_tensor(run(None, 7, range(4))[0], run(None, 7, range(4))[0])


def test_hooks_end() -> None:
    """After a step, and after ``remove()``, writes are to nearest again."""
    parameter = nn.Parameter(quantized("mxfp8", rand(16, 64)))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    hooks = round_parameters_(optimizer, seed=0)
    values = rand(16, 64, seed=2)
    parameter.grad = torch.zeros(16, 64)
    optimizer.step()
    with torch.no_grad():
        parameter.copy_(values)
    assert_same_tensor(parameter.detach(), quantized("mxfp8", values))
    hooks.remove()
    parameter.grad = rand(16, 64, seed=3)
    before = parameter.detach().dequantize()
    optimizer.step()
    assert_same_tensor(parameter.detach(), quantized("mxfp8", before - parameter.grad))


def test_a_format_with_an_option_of_its_own_draws_once() -> None:
    """NVFP4 rounds at random itself, and plain parameters are not rounded."""
    q = qtensor.quantize(
        rand(16, 64), "nvfp4", stochastic_rounding=True, generator=torch.tensor([1])
    )
    results = []
    for both in (False, True):
        parameters = [nn.Parameter(q.clone()), nn.Parameter(rand(4, 4))]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        round_parameters_(optimizer, seed=2) if both else seed_rounding_(optimizer, 2)
        for p in parameters:
            p.grad = rand(*p.shape, seed=5)
        optimizer.step()
        results.append([p.detach() for p in parameters])
    assert_same_tensor(results[1][0], results[0][0])
    assert_same_bytes(results[1][1], results[0][1])


@pytest.mark.parametrize(
    ("fmt", "options"),
    [("fp8", {}), ("nvfp4", {}), ("fp8_blockwise", {"force_pow_2_scales": False})],
)
def test_scales_that_are_not_powers_of_two(fmt: str, options: dict[str, Any]) -> None:
    plain = nn.Parameter(rand(4))
    other = nn.Parameter(qtensor.quantizer(fmt, **options)(rand(16, 128)))
    wanted = rf"powers of two; got {fmt}.*parameter 1 of group 0\. Use force_pow_2_scales=True"
    with pytest.raises(qtensor.QTensorError, match=wanted):
        round_parameters_(torch.optim.SGD([plain, other], lr=0.1))
    optimizer = torch.optim.SGD([plain], lr=0.1)
    round_parameters_(optimizer)
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(qtensor.QTensorError, match="parameter 0 of group 1"):
        optimizer.step()


def test_what_is_not_an_optimizer() -> None:
    with pytest.raises(qtensor.ArgumentTypeError, match=r"torch\.optim\.Optimizer; got list"):
        round_parameters_([])  # type: ignore[arg-type]
