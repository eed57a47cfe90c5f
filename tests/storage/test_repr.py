"""repr says class, shape, dtype, quantizer and first values; it never raises and stays short."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from formats import FormatCase, assert_same_tensor, formats, layouts, rand, snapshot, usages
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 400


class NoOps(TorchDispatchMode):
    """Any op at all is an access to data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"repr called {func}")


@layouts
@usages
def test_repr_calls_no_op_that_a_mode_sees(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    q = case.quantize(rand(33, 130), rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    for t in (q, bare, nn.Parameter(q), q.clone().requires_grad_()):
        with NoOps():
            texts = [repr(t), str(t), f"{t}", f"{[t]}", f"{ {'w': t} }"]
        assert texts[0] == texts[1] == texts[2]
        for part in ("Tensor", "(33, 130)", "torch.float32", q.quantizer.canonical):
            assert part in texts[0]
        assert all(len(text) < LIMIT for text in texts)
    assert_same_tensor(q, before)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (0, 64), (2, 3, 4, 5)], ids=str)
@formats
def test_repr_of_every_shape(case: FormatCase, shape: tuple[int, ...]) -> None:
    text = repr(case.quantize(torch.ones(shape)))
    assert len(text) < LIMIT
    assert f"shape={shape}" in text or f"shape=({', '.join(map(str, shape))})" in text


@formats
def test_repr_on_meta_fake_and_symbolic(case: FormatCase) -> None:
    assert "(33, 130)" in repr(case.quantize(rand(33, 130)).to("meta"))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        q = case.quantizer().make_empty((33, 130), dtype=torch.bfloat16)
        assert "torch.bfloat16" in repr(q)
        unbacked = mode.shape_env.create_unbacked_symint()
        symbolic = case.quantizer().make_empty((unbacked, 64), dtype=torch.float32)
        before = len(mode.shape_env.deferred_runtime_asserts)
        assert "64)" in repr(symbolic)
        assert len(mode.shape_env.deferred_runtime_asserts) == before


@formats
def test_repr_of_containers(case: FormatCase) -> None:
    q = case.quantize(rand(8, 64))
    module = nn.Linear(64, 8)
    module.weight = nn.Parameter(q)
    assert "Linear" in repr(module)
    assert q.quantizer.canonical in repr(module.state_dict())
    assert q.quantizer.canonical in repr(list(module.named_parameters()))
    assert len(repr(q.quantizer)) < 2 * LIMIT
    assert repr(nn.ParameterList([module.weight]))


def shown(q: Any) -> list[float]:
    found = re.search(r", values=\[([^]]*)\]\)$", repr(q))
    return [] if found is None else [float(word) for word in found[1].split(", ") if word != "..."]


@layouts
@usages
def test_repr_shows_the_first_values(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    for shape in ((33, 130), (300, 130), (2, 3, 40), (5,), ()):
        q = case.quantize(rand(*shape), rowwise=rowwise, columnwise=columnwise, **options)
        wanted = q.dequantize().flatten()[:6]
        assert shown(q) == [float(f"{value:.4g}") for value in wanted.tolist()]
        assert ("...]" in repr(q)) == (q.numel() > 6)
        bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
        assert shown(bare) == shown(q)


@formats
def test_repr_without_values(case: FormatCase) -> None:
    """A device is not waited for, and memory that is gone is not read."""
    q = case.quantize(rand(8, 64))
    assert shown(q)
    assert shown(q.to("meta")) == []
    q.buffers()[0].untyped_storage().resize_(0)
    assert shown(q) == []
    with FakeTensorMode():
        assert shown(case.quantizer().make_empty((33, 130))) == []
