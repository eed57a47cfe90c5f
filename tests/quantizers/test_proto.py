"""TensorProto and the data-free primitives describe exactly what the quantizer makes."""

from __future__ import annotations

import pytest
import torch
from compile_helpers import Compiled, assert_same, ordinary
from formats import DTYPES, FORMATS, FormatCase, formats, usages
from hypothesis import example, given, settings
from hypothesis import strategies as st

import qtensor
from qtensor import TensorProto, to_tensor_proto

SHAPES = [
    (),
    (1,),
    (7,),
    (33, 72),
    (128, 128),
    (1, 1),
    (0, 16),
    (16, 0),
    (5, 1, 40),
    (2, 3, 33),
    (2, 1, 3, 40),
]


def layout_of(t) -> list[tuple]:
    """Name, shape, dtype, device of each buffer in slot order."""
    names, _ = t.__tensor_flatten__()
    return [
        (n, tuple(b.shape), b.dtype, b.device.type) for n, b in ((n, getattr(t, n)) for n in names)
    ]


def check_layout(q: qtensor.Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every data-free description against the real output."""
    state = {"scale": torch.ones(1)} if q.needs_scale else {}
    real = q.quantize(torch.randn(shape).to(dtype), **state)
    names, context = real.__tensor_flatten__()
    wanted = layout_of(real)

    described = q._describe_buffers(shape)
    assert list(described) == names
    assert [(n, s, d, "cpu") for n, (s, d) in described.items()] == wanted
    assert q.create_metadata(shape, dtype=dtype) == context
    allocated = q.alloc_tensors(shape)
    assert [(n, tuple(b.shape), b.dtype, "cpu") for n, b in allocated.items()] == wanted
    assert [b.stride() for b in allocated.values()] == [b.stride() for b in real.buffers()]

    proto = TensorProto(shape, dtype, q)
    assert proto.inner_names() == names
    assert proto.create_metadata() == context
    inner = proto.create_inner_tensors()
    assert [(tuple(b.shape), b.dtype) for b in inner] == [w[1:3] for w in wanted]
    empty = proto.create_tensor()
    assert type(empty) is type(real)
    assert layout_of(empty) == wanted
    assert empty.__tensor_flatten__()[1] == context
    assert (empty.shape, empty.dtype, empty.stride()) == (real.shape, dtype, real.stride())
    assert layout_of(q.make_empty(shape, dtype=dtype)) == wanted
    metadata = q._storage_metadata(dtype)
    assert metadata["cls"] is type(real)
    assert metadata["nontensor_kwargs"] == {"dtype": dtype, "quantizer": q}

    # The way back: from the real tensor, from its bare storage, and filled, it is the real tensor.
    for source in (real, q.assemble(real.buffers(), shape, dtype, bare=True)):
        back = to_tensor_proto(source)
        assert (tuple(back.shape), back.dtype, back.quantizer) == (shape, dtype, q)
        assert back.inner_names() == names
        assert layout_of(back.create_tensor()) == wanted
    assert_same(proto.assemble(real.buffers()), real)


def every_quantizer() -> list[qtensor.Quantizer]:
    """All combinations of options and usages of all formats."""
    return [
        case.quantizer(rowwise=row, columnwise=column, **options)
        for case in FORMATS
        for options in case.every_option()
        for row, column in ((True, False), (False, True), (True, True))
    ]


EVERY = every_quantizer()
TRANSPOSED = sorted({q.transposed() for q in EVERY} - set(EVERY), key=lambda q: q.canonical)
"""What transposes carry: options that only a transpose sets (the side of a rotation, which data to
decode).
"""


@st.composite
def shapes(draw) -> tuple[int, ...]:
    """0-d to 4-d, sizes 0 and 1 and around block and tile edges among them."""
    edge = st.sampled_from([0, 1, 2, 4, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 160])
    rank = draw(st.integers(0, 4))
    sizes = [draw(st.one_of(edge, st.integers(1, 70))) for _ in range(min(rank, 2))]
    return tuple(
        draw(st.permutations([*(draw(st.integers(1, 4)) for _ in range(rank - 2)), *sizes]))
    )


@settings(max_examples=400, deadline=None)
@given(q=st.sampled_from(EVERY), shape=shapes(), dtype=st.sampled_from(DTYPES))
@example(
    q=qtensor.MXFP8Quantizer(columnwise=True, swizzled=True),
    shape=(40, 1, 72),
    dtype=torch.bfloat16,
)
@example(
    q=qtensor.NVFP4Quantizer(columnwise=True, row_scaled=True),
    shape=(40, 1, 72),
    dtype=torch.bfloat16,
)
@example(
    q=qtensor.NVFP4Quantizer(columnwise=True, with_rht=True), shape=(17, 1, 33), dtype=torch.float32
)
def test_layout_equals_the_output(q: qtensor.Quantizer, shape: tuple[int, ...], dtype: torch.dtype):
    check_layout(q, shape, dtype)


@formats
def test_layout_equals_the_output_for_all_options(case: FormatCase):
    """Not a sample: every combination of options, with (S, 1, H) and with a ragged matrix."""
    of_format = [q for q in EVERY if q.format == case.name]
    assert len(of_format) == 3 * len(list(case.every_option()))
    for q in of_format:
        check_layout(q, (20, 1, 40), torch.bfloat16)


def test_layout_of_transposed_quantizers():
    assert {q.format for q in TRANSPOSED} >= {"mxfp8", "nvfp4"}
    for q in TRANSPOSED:
        check_layout(q, (20, 1, 40), torch.bfloat16)
        check_layout(q, (33, 72), torch.float32)


@formats
@usages
def test_layout_for_all_ranks(case: FormatCase, rowwise: bool, columnwise: bool):
    q = case.quantizer(rowwise=rowwise, columnwise=columnwise)
    for shape in SHAPES:
        check_layout(q, shape, torch.float16)


@formats
@usages
def test_flatten_round_trip(case: FormatCase, rowwise: bool, columnwise: bool):
    """Same type, bytes, metadata; the buffers are shared (T36)."""
    q = case.quantizer(rowwise=rowwise, columnwise=columnwise)
    for shape in SHAPES:
        t = q.quantize(torch.randn(shape).bfloat16(), **case.call())
        for bare in (False, True):
            source = q.assemble(t.buffers(), shape, t.dtype, bare=bare)
            names, context = source.__tensor_flatten__()
            hash(context)
            inner = {n: getattr(source, n) for n in names}
            back = type(source).__tensor_unflatten__(inner, context, t.shape, t.stride())
            assert type(back) is type(source)
            assert back.__tensor_flatten__() == (names, context)
            assert (tuple(back.shape), back.dtype, back.quantizer) == (shape, t.dtype, q)
            assert all(getattr(back, n) is inner[n] for n in names)
            assert_same(back.dequantize(), t.dequantize())


@formats
def test_context_holds_values_only(case: FormatCase):
    """No size, device, class or tensor: a graph would be made for each."""
    q = case.quantizer(columnwise=True)
    contexts = {
        q.quantize(torch.randn(s), **case.call()).__tensor_flatten__()[1]
        for s in ((3, 4), (40, 72), (2, 2, 2))
    }
    assert len(contexts) == 1
    name, dtype, quantizer, layout = contexts.pop()
    assert (name, dtype, quantizer, layout) == (
        q.tensor_cls.__qualname__,
        torch.float32,
        q,
        q.scale_layout,
    )


@formats
def test_update_usage_leaves_the_callers_quantizer_alone(case: FormatCase):
    q = case.quantizer(columnwise=True)
    proto = TensorProto((33, 72), torch.float32, q)
    other = TensorProto((33, 72), torch.float32, q)
    before = layout_of(proto.create_tensor())
    proto.update_usage(columnwise=False)
    assert q.columnwise
    assert other.quantizer == q
    assert layout_of(other.create_tensor()) == before
    assert proto.quantizer == case.quantizer()
    assert layout_of(proto.create_tensor()) == layout_of(
        case.quantizer().quantize(torch.ones(33, 72), **case.call())
    )
    with pytest.raises(qtensor.QTensorError, match="at least one usage"):
        proto.update_usage(rowwise=False)
    assert proto.quantizer == case.quantizer()


@formats
def test_to_tensor_proto(case: FormatCase):
    """Of plain tensors, wrappers, bare storages, with gradients and other devices (T40)."""
    q = case.quantizer(columnwise=True)
    x = ordinary((33, 72), torch.float16)
    plain = to_tensor_proto(x.requires_grad_())
    assert (plain.shape, plain.dtype, plain.quantizer, plain.requires_grad) == (
        (33, 72),
        torch.float16,
        None,
        True,
    )
    assert not plain.is_quantized
    assert plain.inner_names() == []
    assert plain.create_metadata() is None
    made = plain.create_tensor()
    assert type(made) is torch.Tensor
    assert (made.shape, made.dtype, made.requires_grad) == (x.shape, torch.float16, True)
    with pytest.raises(qtensor.QTensorError, match="only quantized tensors have usages"):
        plain.update_usage(rowwise=False)

    t = q.quantize(x.detach(), **case.call()).requires_grad_()
    proto = to_tensor_proto(t)
    assert proto.is_quantized
    assert (proto.quantizer, proto.requires_grad, str(proto.device)) == (q, True, "cpu")
    assert proto.create_tensor().requires_grad
    assert to_tensor_proto(t.detach().to("meta")).create_tensor().device.type == "meta"
    with pytest.raises(qtensor.ArgumentTypeError, match="a tensor or storage is needed; got list"):
        to_tensor_proto([1.0])
    with pytest.raises(qtensor.QTensorError, match="buffers are needed"):
        proto.assemble(proto.create_inner_tensors()[1:])


@formats
def test_create_tensor_traces_with_a_symbolic_batch(case: FormatCase):
    """Each option, in one piece, one graph for four batches (T39). Padding is zero; the rest is not
    initialised.
    """
    chosen = [case.quantizer(columnwise=True, **options) for options in case.each_option()]

    def region(x):
        protos = [TensorProto(x.shape, torch.bfloat16, q, device=x.device) for q in chosen]
        for proto in protos[:1]:
            proto.update_usage(columnwise=False)
        return [proto.create_tensor() for proto in protos], [
            proto.inner_names() for proto in protos
        ]

    compiled = Compiled(region)
    for batch in (140, 300, 200, 900):
        x = torch.empty(batch, 72)
        torch._dynamo.mark_dynamic(x, 0)
        got, names = compiled(x)
        want, wanted_names = region(x)
        assert names == wanted_names
        for a, b in zip(got, want, strict=True):
            assert type(a) is type(b)
            assert layout_of(a) == layout_of(b)
            assert a.__tensor_flatten__()[1] == b.__tensor_flatten__()[1]
            assert (a.shape, a.dtype) == ((batch, 72), torch.bfloat16)
    compiled.check_graphs(1)
