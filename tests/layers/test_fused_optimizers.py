"""Fused and foreach optimizers step quantized parameters: decode, update once, write back in
place.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from formats import BY_NAME, FormatCase, assert_same_bytes, assert_same_tensor, formats, rand
from torch import nn

STEPS = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.5},
    "Adam": {"lr": 0.5, "amsgrad": True, "weight_decay": 0.1},
    "SGD": {"lr": 0.5, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.5},
}


def _step(optimizer: Any, pairs: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    for parameter, grad in pairs:
        parameter.grad = grad.clone()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@formats
def test_fused_is_torchs_step_and_one_rounding(case: FormatCase, name: str) -> None:
    """Each step equals the fused step on the decoded values, quantized by the parameter's
    quantizer.
    """
    quantized = nn.Parameter(case.quantize(rand(8, 64)))
    plain = nn.Parameter(quantized.dequantize().detach())
    beside, beside_plain = (nn.Parameter(rand(5, seed=3)) for _ in range(2))
    pointers = [b.data_ptr() for b in quantized.buffers()]
    make = getattr(torch.optim, name)
    ours = make([quantized, beside], fused=True, **OPTIMIZERS[name])
    theirs = make([plain, beside_plain], fused=True, **OPTIMIZERS[name])
    for seed in range(STEPS):
        grad, version = rand(8, 64, seed=seed + 10), quantized._version
        _step(ours, [(quantized, grad), (beside, rand(5, seed=seed))])
        _step(theirs, [(plain, grad), (beside_plain, rand(5, seed=seed))])
        want = quantized.detach().clone().quantize_(plain.detach())
        assert_same_tensor(quantized.detach(), want)
        assert quantized._version > version
        with torch.no_grad():
            plain.copy_(want.dequantize())
    assert_same_bytes(beside.detach(), beside_plain.detach())
    assert [b.data_ptr() for b in quantized.buffers()] == pointers


@pytest.mark.parametrize("name", OPTIMIZERS)
@formats
def test_foreach_equals_the_loop(case: FormatCase, name: str) -> None:
    """Both run the same elementwise ops, each of which writes back through the quantizer."""
    loop, foreach = (nn.Parameter(case.quantize(rand(8, 64))) for _ in range(2))
    make = getattr(torch.optim, name)
    optimizers = [
        make([p], foreach=flag, fused=False, **OPTIMIZERS[name])
        for p, flag in ((loop, False), (foreach, True))
    ]
    for seed in range(STEPS):
        grad = rand(8, 64, seed=seed + 10)
        for optimizer, parameter in zip(optimizers, (loop, foreach), strict=True):
            _step(optimizer, [(parameter, grad)])
    assert_same_tensor(foreach.detach(), loop.detach())
    assert not torch.equal(loop, case.quantize(rand(8, 64)))


def test_a_checkpoint_of_the_optimizer_resumes() -> None:
    parameter = nn.Parameter(BY_NAME["mxfp8"].quantize(rand(8, 64)))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    _step(optimizer, [(parameter, rand(8, 64, seed=1))])
    resumed = copy.deepcopy(parameter)
    other = torch.optim.AdamW([resumed], fused=True)
    other.load_state_dict(optimizer.state_dict())
    for p, o in ((parameter, optimizer), (resumed, other)):
        _step(o, [(p, rand(8, 64, seed=2))])
    assert_same_tensor(resumed.detach(), parameter.detach())


def test_compiled_step() -> None:
    parameters = [nn.Parameter(BY_NAME["mxfp8"].quantize(rand(8, 64))) for _ in range(2)]
    optimizers = [torch.optim.AdamW([p], fused=True) for p in parameters]
    compiled = torch.compile(optimizers[1].step, backend="aot_eager")
    for seed in range(STEPS):
        for parameter in parameters:
            parameter.grad = rand(8, 64, seed=seed)
        optimizers[0].step()
        compiled()
    assert_same_tensor(parameters[1].detach(), parameters[0].detach())
