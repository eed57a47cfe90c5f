"""Quantized tensors at the edge of a compiled region: in, out, as a Parameter, made and decoded
inside; no breaks.
"""

from __future__ import annotations

import torch
import torch._functorch.config
import torch._inductor.utils
from compile_helpers import GENERAL_SHAPE, Compiled, assert_same, backends, ordinary
from formats import BY_NAME, FormatCase, formats, usages
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import qtensor


@backends
@formats
@usages
def test_subclass_goes_in_and_values_come_out(case, backend, rowwise, columnwise):
    t = case.quantize(ordinary(GENERAL_SHAPE), rowwise=rowwise, columnwise=columnwise)

    def region(t):
        return t.dequantize(), t.dequantize(torch.bfloat16), t[3, 5], qtensor.dequantize(t)

    compiled = Compiled(region, backend)
    got = compiled(t)
    assert_same(got, region(t))
    assert all(type(value) is Tensor for value in got)
    compiled.check_graphs(1)


@backends
@formats
@usages
def test_subclass_comes_out(case, backend, rowwise, columnwise):
    q = case.quantizer(rowwise=rowwise, columnwise=columnwise)
    x = ordinary(GENERAL_SHAPE, torch.bfloat16)
    compiled = Compiled(lambda x, state: q.quantize(x, **state), backend)
    got = compiled(x, case.call())
    assert_same(got, q.quantize(x, **case.call()))
    assert type(got) is q.tensor_cls
    assert got.dtype == torch.bfloat16
    assert not got.requires_grad
    # What comes out is as good as one made in eager mode: it decodes, copies and enters the next
    # region.
    assert_same(got.clone().dequantize(), q.quantize(x, **case.call()).dequantize())
    compiled.check_graphs(1)
    assert_same(Compiled(lambda t: t.dequantize(), backend)(got), got.dequantize())


@backends
@formats
@usages
def test_subclass_passes_through(case, backend, rowwise, columnwise):
    t = case.quantize(ordinary(GENERAL_SHAPE), rowwise=rowwise, columnwise=columnwise)
    compiled = Compiled(lambda t, x: (t, {"twice": [t, x * 2]}), backend)
    x = torch.ones(3)
    got = compiled(t, x)
    assert_same(got, (t, {"twice": [t, x * 2]}))
    compiled.check_graphs(1)


@backends
@formats
@usages
def test_made_and_decoded_inside(case, backend, rowwise, columnwise):
    """The tensor never leaves; the quantizer is made inside too, from a format's name and from
    another quantizer.
    """
    name, column = case.name, {"rowwise": rowwise, "columnwise": columnwise}

    def region(x, state):
        first = qtensor.quantize(x, name, **column, **state)
        q = qtensor.quantizer(name).with_usage(**column)
        second = q(first.dequantize() * 2, **state)
        return second.dequantize() + 1, second

    x = ordinary(GENERAL_SHAPE)
    compiled = Compiled(region, backend)
    assert_same(compiled(x, case.call()), region(x, case.call()))
    compiled.check_graphs(1)


class Projection(nn.Module):
    """A product with a quantized Parameter, in the layout that the Parameter's usages allow."""

    def __init__(self, weight: Tensor, transposed: bool):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.transposed = transposed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.matmul(x, self.weight)
        if self.transposed:
            product = nn.functional.linear(x, self.weight)
        return product, self.weight.dequantize()


@backends
@formats
@usages
def test_as_a_parameter(case, backend, rowwise, columnwise):
    q = case.quantizer(rowwise=rowwise, columnwise=columnwise)
    weight = q.quantize(ordinary((72, 72), seed=1), **case.call())
    module = Projection(weight, transposed=False)
    if rowwise or case.name == "fp8":
        module = Projection(weight, transposed=True)
    if not columnwise and not q.spec.transpose_shares_bytes:
        # An (K, N) operand is read along its columns, which rowwise data do not serve.
        module.forward = lambda x: (
            nn.functional.linear(x, module.weight),
            module.weight.dequantize(),
        )
    x = ordinary(GENERAL_SHAPE)
    want = module(x)
    assert isinstance(module.weight, nn.Parameter)
    assert type(module.weight) is q.tensor_cls or isinstance(module.weight, q.tensor_cls)
    compiled = Compiled(module, backend)
    assert_same(compiled(x), want)
    compiled.check_graphs(1)
    # Another Parameter of the same kind takes the same graph; its values are read, not baked in.
    other = q.quantize(ordinary((72, 72), seed=2), **case.call())
    with torch.no_grad():
        module.weight.copy_(other)
    changed = compiled(x)
    assert_same(changed[1], other.dequantize())
    assert not torch.equal(changed[0], want[0])
    compiled.check_graphs(1)


@formats
def test_nominal_dtype_and_rank_survive(case: FormatCase):
    for shape in ((), (7,), (2, 3, 40), (2, 1, 3, 40), (4, 0)):
        for dtype in (torch.float32, torch.float16):
            x = torch.randn(shape).to(dtype)
            q = case.quantizer(columnwise=True)
            t = q.quantize(x, **case.call())
            compiled = Compiled(lambda t, x, s: (t, q.quantize(x, **s), t.dequantize()))  # noqa: B023
            got = compiled(t, x, case.call())
            assert_same(got, (t, t, t.dequantize()))
            assert got[0].shape == x.shape
            assert got[1].dtype == got[2].dtype == dtype
            compiled.check_graphs(1)


@formats
def test_a_graph_break_does_no_harm(case: FormatCase):
    """Not asked for in one piece: 2 frames around the break, 1 for a quantized input or output."""
    q = case.quantizer(columnwise=True)
    x = ordinary(GENERAL_SHAPE)
    t = q.quantize(x, **case.call())

    def broken(x, state):
        t = q.quantize(x, **state)
        torch._dynamo.graph_break()
        return t.dequantize() + 1

    for function, args, frames in (
        (broken, (x, case.call()), 2),
        (lambda t: t.dequantize(), (t,), 1),
        (lambda x, state: q.quantize(x, **state), (x, case.call()), 1),
    ):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, backend=counter)
        assert_same(compiled(*args), function(*args))
        assert counter.frame_count == frames


@formats
def test_eager_state_is_untouched(case: FormatCase):
    """Neither the input, nor its buffers, nor the quantizer change by passing through a compiled
    region.
    """
    q = case.quantizer(columnwise=True)
    t = q.quantize(ordinary(GENERAL_SHAPE), **case.call())
    buffers, copies = t.buffers(), [b.clone() for b in t.buffers()]
    rowwise = q.with_usage(columnwise=False)

    def region(t, state):
        return t.dequantize() * 3, q.with_usage(columnwise=False).quantize(t.dequantize(), **state)

    compiled = Compiled(region)
    _, other = compiled(t, case.call())
    assert all(a is b for a, b in zip(t.buffers(), buffers, strict=True))
    assert_same(t.buffers(), copies)
    assert t.quantizer == q
    assert q.columnwise
    assert other.quantizer == rowwise
    compiled.check_graphs(1)


def test_the_cache_on_disk_tells_tensors_apart():
    """AOTAutograd's cache: an equal tensor hits, another quantizer or dtype misses; the results are
    always its own.
    """

    def region(t):
        # An op of ours alone: inductor need not compile C++.
        return t.dequantize()

    x = ordinary(GENERAL_SHAPE)
    mxfp8, nvfp4 = BY_NAME["mxfp8"], BY_NAME["nvfp4"]
    kinds = [mxfp8.quantize(x), mxfp8.quantize(x, columnwise=True), mxfp8.quantize(x.half())]
    kinds += [mxfp8.quantize(x, dtype="e5m2"), nvfp4.quantize(x), nvfp4.quantize(x, e4m3_max=256.0)]
    # Of one quantizer: another shape, and that shape as a part of another tensor.
    kinds += [mxfp8.quantize(x[:32]), mxfp8.quantize(x)[:32]]
    config = torch._functorch.config.patch(enable_autograd_cache=True)
    with config, torch._inductor.utils.fresh_cache():
        seen = []
        for t in (*kinds, *kinds):
            compiled = Compiled(region, "inductor")
            # The counting backend is no cacheable one, so inductor itself is asked.
            compiled.function = torch.compile(region, fullgraph=True)
            assert_same(compiled(t), region(t))
            seen.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert seen == [0] * len(kinds) + [1] * len(kinds)


@formats
def test_the_cache_key_names_the_version(case: FormatCase):
    """A graph lowered by another version of the library is not this one's."""
    t = case.quantize(ordinary(GENERAL_SHAPE))
    key = t._stable_hash_for_caching()
    assert qtensor.__version__ in key
    assert t.quantizer.canonical in key
