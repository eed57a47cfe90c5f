"""What users do to quantized tensors, inside a compiled region: views, matmuls, in-place ops,
state, random rounding.
"""

from __future__ import annotations

import pytest
import torch
from compile_helpers import (
    INDUCTOR_FORMATS,
    Compiled,
    adversarial,
    assert_same,
    backends,
    ordinary,
)
from formats import BY_NAME, FORMATS, FormatCase, formats
from torch.nn import functional

import qtensor

each_backend = pytest.mark.parametrize(
    ("case", "backend"),
    [(case, "aot_eager") for case in FORMATS]
    + [(BY_NAME[name], "inductor") for name in INDUCTOR_FORMATS],
    ids=lambda v: v if isinstance(v, str) else v.name,
)


@each_backend
def test_views_of_an_input(case: FormatCase, backend: str):
    """Exact views stay quantized, inside the region and where they leave it."""
    t = case.quantize(ordinary((256, 256), torch.bfloat16))

    def region(t):
        top, bottom = t.chunk(2, 0)
        left = t[:, : t.shape[1] // 2]
        parts = t.split(128, 0)
        return {
            "rows": (t[128:], top, bottom, t.narrow(0, 0, 128)),
            "columns": (left, left.dequantize()),
            "t": (t.t(), t.transpose(0, 1).dequantize(), t.t().t(), t.mT),
            "shape": (t.view(2, 128, 256), t.reshape(256, 1, 256), t.unsqueeze(0).squeeze(0)),
            "same": (t.detach(), t.clone(), t.contiguous(), torch.clone(t).dequantize()),
            "cat": (torch.cat([top, bottom]), torch.cat(parts).dequantize()),
            "select": t.view(2, 128, 256)[1],
        }

    compiled = Compiled(region, backend)
    assert_same(compiled(t), region(t))
    compiled.check_graphs(1)


@each_backend
def test_views_of_a_tensor_made_inside(case: FormatCase, backend: str):
    q = case.quantizer()

    def region(x, state):
        t = q.quantize(x, **state)
        top, bottom = torch.chunk(t, 2)
        return (
            t[128:],
            top.dequantize() + bottom.dequantize(),
            t.t(),
            torch.cat([top, bottom]),
            t.clone(),
        )

    x = ordinary((256, 256))
    compiled = Compiled(region, backend)
    assert_same(compiled(x, case.call()), region(x, case.call()))
    compiled.check_graphs(1)


@each_backend
def test_transposes_with_both_usages(case: FormatCase, backend: str):
    """Each option: what a transpose carries crosses the boundary both ways and enters products."""
    tensors = [case.quantize(ordinary((48, 72)), columnwise=True, **o) for o in case.each_option()]
    turned = [t.t() for t in tensors]

    def region(tensors, turned, x):
        made = [(t.t(), t.t().dequantize(), t.t().t()) for t in tensors]
        taken = [(t, t.dequantize(), functional.linear(x, t), t.t()) for t in turned]
        return made, taken

    x = ordinary((5, 48), seed=4)
    compiled = Compiled(region, backend)
    assert_same(compiled(tensors, turned, x), region(tensors, turned, x))
    compiled.check_graphs(1)


@each_backend
def test_nominal_dtype_changes(case: FormatCase, backend: str):
    t = case.quantize(ordinary((33, 72)), columnwise=True)

    def region(t):
        narrow = t.to(torch.bfloat16)
        return narrow, narrow.dequantize(), t.half(), t.float(), t.to(torch.float32), t.bfloat16()

    compiled = Compiled(region, backend)
    got = compiled(t)
    assert_same(got, region(t))
    assert isinstance(got[0], qtensor.QuantizedTensor)
    assert got[0].dtype == torch.bfloat16
    assert_same(got[0].buffers(), t.buffers())
    compiled.check_graphs(1)


@each_backend
def test_products(case: FormatCase, backend: str):
    """Weight-only and both quantized, on either side, with a bias; inputs 2-D and 3-D; bytes as in
    eager.
    """
    q = case.quantizer(columnwise=True)
    weight = q.quantize(ordinary((64, 96), seed=1), **case.call())

    def region(x, weight, bias, state):
        flat = x.flatten(0, 1)
        t = q.quantize(flat, **state)
        return (
            functional.linear(x, weight, bias),
            functional.linear(t, weight),
            functional.linear(t, weight, bias),
            torch.mm(flat[:, :64], weight),
            torch.matmul(weight, flat.t()),
            torch.addmm(bias, t, weight.t()),
            t @ weight.t(),
            qtensor.gemm(weight, weight, "NT", dtype=torch.float32),
        )

    x, bias = ordinary((3, 11, 96)), torch.linspace(-1, 1, 64)
    compiled = Compiled(region, backend)
    assert_same(compiled(x, weight, bias, case.call()), region(x, weight, bias, case.call()))
    compiled.check_graphs(1)


@formats
def test_gemm_of_tensors_made_inside(case: FormatCase):
    """The public ``gemm`` takes what the region itself has quantized, in all three layouts."""
    q = case.quantizer(columnwise=True)

    def region(x, state):
        t = q.quantize(x, **state)
        return tuple(
            qtensor.gemm(t, t, layout, dtype=torch.float32) for layout in ("TN", "NN", "NT")
        )

    x = ordinary((64, 64))
    compiled = Compiled(region)
    assert_same(compiled(x, case.call()), region(x, case.call()))
    compiled.check_graphs(1)


@each_backend
def test_batched_product_and_embedding(case: FormatCase, backend: str):
    q = case.quantizer(columnwise=True)
    experts = q.quantize(ordinary((4, 32, 48), seed=2), **case.call())
    table = case.quantize(ordinary((50, 64), seed=3))

    def region(x, experts, table, index):
        return (
            torch.bmm(x, experts),
            functional.embedding(index, table),
            functional.embedding(index, table) * 2,
        )

    args = (ordinary((4, 5, 32)), experts, table, torch.tensor([[3, 49], [0, 3]]))
    compiled = Compiled(region, backend)
    assert_same(compiled(*args), region(*args))
    compiled.check_graphs(1)


@each_backend
def test_in_place_on_an_input(case: FormatCase, backend: str):
    """The caller's tensor changes, in its own buffers, to the bytes that eager mode writes."""
    q = case.quantizer(columnwise=True)

    def fresh():
        return [q.quantize(ordinary((33, 72), seed=i), **case.call()) for i in range(4)]

    def region(a, b, c, d, x):
        a.add_(x)
        b.copy_(x)
        c.copy_(d)
        d.mul_(2.0).add_(1.0)
        return a.dequantize(), c.dequantize(), d.dequantize()

    x = ordinary((33, 72), seed=9)
    compiled = Compiled(region, backend)
    ours, theirs = fresh(), fresh()
    buffers = [t.buffers() for t in ours]
    got, want = compiled(*ours, x), region(*theirs, x)
    assert_same(got, want)
    assert_same(ours, theirs)
    assert all(
        m is n
        for t, kept in zip(ours, buffers, strict=True)
        for m, n in zip(t.buffers(), kept, strict=True)
    )
    compiled.check_graphs(1)


@each_backend
def test_writes_through_a_view(case: FormatCase, backend: str):
    """Quantized with the same shared factor, with another, and plain: the rest of the tensor stays
    as it is.
    """
    x = ordinary((256, 256), seed=1)
    sources = {
        "quantized": case.quantize(ordinary((128, 256), seed=2)),
        "equal factors": case.quantize(x[128:].flip(0))
        if case.name != "nvfp4"
        else case.quantize(x)[:128].clone(),
        "plain": ordinary((128, 256), seed=3),
    }
    for source in sources.values():
        ours, theirs = case.quantize(x), case.quantize(x)

        def region(t, source):
            t[128:].copy_(source)
            return t.dequantize()

        compiled = Compiled(region, backend)
        assert_same(compiled(ours, source), region(theirs, source))
        assert_same(ours, theirs)
        assert_same(ours.dequantize()[:128], case.quantize(x).dequantize()[:128])
        compiled.check_graphs(1)


@each_backend
@pytest.mark.parametrize("flag", [None, 0.0, 1.0])
def test_out_and_noop_flag(case: FormatCase, backend: str, flag: float | None):
    """A tensor given as ``out``; the flag is data, so both values take one graph."""
    q = case.quantizer(columnwise=True)
    old, new = ordinary((33, 72), seed=1), ordinary((33, 72), seed=2)

    def region(x, out, flag, state):
        q.quantize(x, out=out, noop_flag=flag, **state)
        return out.dequantize()

    compiled = Compiled(region, backend)
    for value in (flag,) if flag is None else (flag, 1 - flag):
        noop = None if value is None else torch.tensor([value])
        ours, theirs = (q.quantize(old, **case.call()) for _ in range(2))
        assert_same(compiled(new, ours, noop, case.call()), region(new, theirs, noop, case.call()))
        assert_same(ours, theirs)
        assert_same(ours, q.quantize(old if value else new, **case.call()))
    compiled.check_graphs(1)


@backends
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_delayed_scaling(backend: str, dtype: str):
    """Scale and history go in as tensors, the amax comes out; three steps in one graph, state in
    place and out of place.
    """
    q = qtensor.Float8Quantizer(dtype=dtype, columnwise=True)

    def step(x, history, scale):
        t, amax = q.quantize_with_amax(x, scale=scale)
        qtensor.record_amax_(history, amax)
        new_history, new_scale = qtensor.delayed_scaling_update(history, scale, dtype=dtype)
        recent = qtensor.delayed_scaling_update(
            history, scale, algorithm="most_recent", margin=2, dtype=dtype
        )
        return t, t.dequantize(), amax, new_history, new_scale, recent

    compiled = Compiled(step, backend)
    ours, theirs = (qtensor.delayed_scaling_state(4, 1) for _ in range(2))
    for i in range(6):
        x = ordinary((33, 72), seed=i) * 2.0 ** (3 * i)
        x = torch.zeros_like(x) if i == 3 else x
        got, want = compiled(x, *ours), step(x, *theirs)
        assert_same(got, want)
        assert_same(ours, theirs)
        assert_same(got[2], x.abs().max().reshape(1))
        ours, theirs = got[3:5], want[3:5]
    assert ours[1].item() not in (0.0, 1.0)
    compiled.check_graphs(1)


STOCHASTIC = [{}, {"with_rht": True}, {"with_2d_quantization": True}]


@backends
@pytest.mark.parametrize("options", STOCHASTIC, ids=lambda o: "".join(o) or "1d")
def test_stochastic_rounding_with_a_seed_tensor(backend: str, options: dict):
    q = qtensor.NVFP4Quantizer(stochastic_rounding=True, columnwise=True, **options)
    x, bad = ordinary((33, 72)), adversarial((33, 72), torch.bfloat16)

    def region(x, bad, seed):
        return q.quantize(x, generator=seed), q.quantize(bad, generator=seed).dequantize()

    compiled = Compiled(region, backend)
    results = []
    for seed in (0, 1, 2**62 + 3, -5, 1):
        given = torch.tensor([seed])
        results.append(compiled(x, bad, given))
        assert_same(results[-1], region(x, bad, given))
    assert_same(results[1], results[4])
    assert not torch.equal(results[0][0]._rowwise_data, results[1][0]._rowwise_data)
    compiled.check_graphs(1)


@backends
def test_stochastic_rounding_with_the_default_generator(backend: str):
    """The same draws as in eager mode after the same ``manual_seed``, in order, and the generator
    moves as far.
    """
    q = qtensor.NVFP4Quantizer(stochastic_rounding=True, columnwise=True)
    x = ordinary((33, 72))

    def region(x):
        return q.quantize(x), q.quantize(x), q.quantize(x).dequantize()

    compiled = Compiled(region, backend)
    draws = []
    for _ in range(2):
        torch.manual_seed(1234)
        draws.append([compiled(x), compiled(x), torch.rand(1)])
    torch.manual_seed(1234)
    eager = [region(x), region(x), torch.rand(1)]
    assert_same(draws[0], eager)
    assert_same(draws[1], eager)
    first, second, _ = eager[0]
    assert not torch.equal(first._rowwise_data, second._rowwise_data)
    compiled.check_graphs(1)


@formats
def test_bare_storages_live_inside(case: FormatCase):
    """A storage that is no tensor is built, read and left behind inside a region."""
    q = case.quantizer(columnwise=True)
    x = ordinary((33, 72))
    buffers = q.quantize(x, **case.call()).buffers()

    def region(buffers, x):
        bare = q.assemble(buffers, x.shape, x.dtype, bare=True)
        return bare.dequantize(), [b.clone() for b in bare.buffers()], bare.shape[0] * 2

    compiled = Compiled(region)
    assert_same(compiled(buffers, x), region(buffers, x))
    compiled.check_graphs(1)


@formats
def test_requantizing_what_is_quantized(case: FormatCase):
    """A tensor that holds what is asked for answers with its own buffers; otherwise its values are
    quantized.
    """
    q, other = case.quantizer(columnwise=True), case.quantizer()

    def region(t, state):
        return q.quantize(t, **state), other.quantize(t, **state).dequantize()

    t = q.quantize(ordinary((33, 72)), **case.call())
    compiled = Compiled(region)
    assert_same(compiled(t, case.call()), region(t, case.call()))
    compiled.check_graphs(1)
