"""FakeTensorMode and the meta device: everything that allocates is a shape function, symbolic sizes
included.
"""

from __future__ import annotations

import pytest
import torch
from compile_helpers import ordinary, seeded
from formats import DTYPES, FormatCase, formats, usages
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch

import qtensor
from tests.quantizers.test_proto import layout_of

SHAPES = [(), (7,), (33, 72), (0, 16), (5, 1, 40), (2, 1, 3, 40)]
SEED = torch.tensor([3])


def shape_layout(t) -> list[tuple]:
    """As ``layout_of`` without the device."""
    return [entry[:3] for entry in layout_of(t)]


@formats
@usages
def test_quantize_and_decode_fakes(case: FormatCase, rowwise: bool, columnwise: bool):
    """Each option: the fake result's buffers are fakes with the real ones' layout, and no data is
    touched.
    """
    for options in case.each_option():
        q = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        for shape in SHAPES:
            x = ordinary(shape, torch.bfloat16)
            real = q.quantize(x, **case.call(), **seeded(q, SEED))
            with FakeTensorMode(allow_non_fake_inputs=False) as mode:
                fake_x = mode.from_tensor(x)
                state = {
                    k: mode.from_tensor(v) for k, v in {**case.call(), **seeded(q, SEED)}.items()
                }
                fake = q.quantize(fake_x, **state)
                values = fake.dequantize(torch.float32)
            assert type(fake) is q.tensor_cls
            assert all(isinstance(b, FakeTensor) for b in fake.buffers())
            assert layout_of(fake) == layout_of(real)
            assert fake.__tensor_flatten__()[1] == real.__tensor_flatten__()[1]
            assert isinstance(values, FakeTensor)
            assert (values.shape, values.dtype) == (x.shape, torch.float32)


@formats
def test_alloc_tensors_gives_fakes(case: FormatCase):
    """T35."""
    for options in case.each_option():
        q = case.quantizer(columnwise=True, **options)
        with FakeTensorMode():
            made = q.alloc_tensors((33, 72))
            empty = q.make_empty((33, 72), dtype=torch.float16)
        assert all(isinstance(b, FakeTensor) for b in (*made.values(), *empty.buffers()))
        assert {n: (tuple(b.shape), b.dtype) for n, b in made.items()} == q._describe_buffers((
            33,
            72,
        ))


@formats
def test_symbolic_sizes_flow_through(case: FormatCase):
    """No guard is put on a symbolic batch, for any option and usage; expressions give the right
    sizes.
    """
    for options in case.each_option():
        q = case.quantizer(columnwise=True, **options)
        x = ordinary((300, 72))
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        dynamic = torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
            dynamic_sizes=[
                torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC,
                torch.fx.experimental.symbolic_shapes.DimDynamic.STATIC,
            ]
        )
        fake_x = mode.from_tensor(
            x, symbolic_context=dynamic, source=torch._dynamo.source.ConstantSource("x")
        )
        assert isinstance(fake_x.shape[0], torch.SymInt)
        with mode:
            state = {k: mode.from_tensor(v) for k, v in {**case.call(), **seeded(q, SEED)}.items()}
            t = q.quantize(fake_x, **state)
            again = q.make_empty(fake_x.shape)
            values = t.dequantize()
        real = q.quantize(x, **case.call(), **seeded(q, SEED))
        for made in (t, again):
            sizes = [
                tuple(int(n.node.hint) if isinstance(n, torch.SymInt) else n for n in b.shape)
                for b in made.buffers()
            ]
            assert sizes == [tuple(b.shape) for b in real.buffers()]
        assert isinstance(values.shape[0], torch.SymInt)
        repr(t)
        assert not env.guards
        bounds = env.var_to_range[fake_x.shape[0].node.expr]
        assert bounds.lower <= 2
        assert bounds.upper > 10**9


@formats
def test_repr_of_fakes(case: FormatCase):
    """A fake or meta tensor prints as a real one does, without values."""
    q = case.quantizer(columnwise=True)
    real = q.quantize(ordinary((33, 72)), **case.call())
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        text = repr(fake)
    values = repr(real)[len(text) - 1 :]
    assert values.startswith(", values=[")
    assert text == repr(real).replace(values, ")") == str(real.to("meta"))
    assert q.canonical in text
    assert len(text) < 200


@formats
def test_fake_of_a_real_tensor(case: FormatCase):
    """``from_tensor`` fakes every buffer and keeps class and context; ops on it give fakes."""
    t = case.quantize(ordinary((256, 256)))
    real = [t[128:], t.t(), t.clone(), t.view(2, 128, 256), torch.cat([t, t])]
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(t)
        results = [
            fake[128:],
            fake.t(),
            fake.clone(),
            fake.view(2, 128, 256),
            torch.cat([fake, fake]),
        ]
        product = functional.linear(mode.from_tensor(torch.randn(5, 256)), fake)
    for a, b in zip([fake, *results], [t, *real], strict=True):
        assert type(a) is type(b)
        assert all(isinstance(x, FakeTensor) for x in a.buffers())
        assert layout_of(a) == layout_of(b)
        assert a.__tensor_flatten__()[1] == b.__tensor_flatten__()[1]
    assert isinstance(product, FakeTensor)
    assert product.shape == (5, 256)
    with no_dispatch():
        assert all(not isinstance(b, FakeTensor) for b in t.buffers())


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
def test_meta_device(case: FormatCase, dtype: torch.dtype):
    """Meta in, meta out, same layout; products and decoding too."""
    for options in case.each_option():
        q = case.quantizer(columnwise=True, **options)
        for shape in SHAPES:
            x = torch.empty(shape, dtype=dtype, device="meta")
            state = {k: v.to("meta") for k, v in {**case.call(), **seeded(q, SEED)}.items()}
            t = q.quantize(x, **state)
            real = q.quantize(ordinary(shape, dtype), **case.call(), **seeded(q, SEED))
            assert t.device.type == "meta"
            assert all(b.is_meta for b in t.buffers())
            assert shape_layout(t) == shape_layout(real)
            assert t.__tensor_flatten__()[1] == real.__tensor_flatten__()[1]
            moved = real.to("meta")
            assert shape_layout(moved) == shape_layout(real)
            values = t.dequantize()
            assert values.is_meta
            assert (values.shape, values.dtype) == (shape, dtype)
    weight = case.quantize(torch.empty(48, 72, dtype=dtype, device="meta"), columnwise=True)
    product = functional.linear(torch.empty(5, 72, dtype=dtype, device="meta"), weight)
    assert product.is_meta
    assert product.shape == (5, 48)


@formats
def test_concatenation_on_meta(case: FormatCase):
    """The factors that parts share have no bytes to compare on the meta device."""
    parts = [case.quantize(torch.empty(128, 128, device="meta")) for _ in range(2)]
    whole = torch.cat(parts)
    assert type(whole) is type(parts[0])
    assert whole.shape == (256, 128)
    assert all(b.is_meta for b in whole.buffers())


@formats
def test_random_rounding_on_meta(case: FormatCase):
    """A seed is drawn for a meta tensor without a generator of that device."""
    q = case.quantizer()
    if case.name == "nvfp4":
        q = case.quantizer(stochastic_rounding=True)
    x = torch.empty(33, 72, device="meta")
    state = {k: v.to("meta") for k, v in case.call().items()}
    before = torch.get_rng_state()
    t = q.quantize(x, **state)
    assert t.device.type == "meta"
    assert torch.equal(torch.get_rng_state(), before)


@formats
def test_update_quantized_on_fakes(case: FormatCase):
    """In place on fakes and meta: nothing to write, nothing raised, the result is the
    destination.
    """
    q = case.quantizer(columnwise=True)
    real = q.quantize(ordinary((33, 72)), **case.call())
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        flag = mode.from_tensor(torch.ones(1))
        state = {k: mode.from_tensor(v) for k, v in case.call().items()}
        assert (
            q.quantize(mode.from_tensor(ordinary((33, 72))), out=fake, noop_flag=flag, **state)
            is fake
        )
        with pytest.raises(qtensor.QTensorError, match="shapes must be equal"):
            q.quantize(mode.from_tensor(ordinary((3, 72))), out=fake, **state)
    meta = real.to("meta")
    state = {k: v.to("meta") for k, v in case.call().items()}
    assert q.quantize(torch.empty(33, 72, device="meta"), out=meta, **state) is meta
