"""T36: flatten and unflatten keep every byte and the metadata; a corrupted context is a
QTensorError.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formats import (
    BY_NAME,
    FORMATS,
    FormatCase,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    shares_memory,
    usages,
)

import qtensor

SHAPES = [(), (5,), (0, 64), (4, 128), (33, 130), (2, 3, 40), (2, 1, 3, 36)]


def forms(q: Any) -> list[Any]:
    return [q, q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)]


def rebuilt(t: Any, **changed: Any) -> Any:
    """``t`` through flatten and unflatten, with arguments replaced."""
    names, context = t.__tensor_flatten__()
    inner = {name: getattr(t, name) for name in names}
    arguments = {
        "inner": inner,
        "context": context,
        "outer_size": t.shape,
        "outer_stride": t.stride(),
    } | changed
    return type(t).__tensor_unflatten__(*arguments.values())


@layouts
@usages
def test_round_trip(case: FormatCase, options: dict, rowwise: bool, columnwise: bool) -> None:
    q = case.quantize(rand(33, 130), rowwise=rowwise, columnwise=columnwise, **options)
    for t in forms(q):
        again = rebuilt(t)
        assert_same_tensor(again, t)
        assert (again.dtype, again.shape, again.device) == (t.dtype, t.shape, t.device)
        assert again.quantizer == t.quantizer
        assert again.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert again.scale_layout == ("swizzled_32_4_4" if options.get("swizzled") else "plain")
        assert all(shares_memory(a, b) for a, b in zip(again.buffers(), t.buffers(), strict=True))
        assert torch.equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"]
)
@formats
def test_round_trip_of_shapes_and_dtypes(
    case: FormatCase, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for t in forms(case.quantize(rand(*shape, dtype=dtype), columnwise=True)):
        assert_same_tensor(rebuilt(t), t)
        assert rebuilt(t).dtype == dtype


@formats
def test_unflatten_after_the_buffers_changed(case: FormatCase) -> None:
    """What tracing does: other buffers of the same kind, another outer size."""
    a, b = case.quantize(rand(4, 128)), case.quantize(rand(8, 128, seed=1))
    inner = {name: getattr(b, name) for name in b.__tensor_flatten__()[0]}
    assert_same_tensor(rebuilt(a, inner=inner, outer_size=b.shape, outer_stride=b.stride()), b)


@formats
def test_context_holds_values_only(case: FormatCase) -> None:
    """Equal for every size and device; hashable; nothing in it is a tensor, class or size."""
    contexts = [
        t.__tensor_flatten__()[1]
        for t in (
            case.quantize(rand(4, 128)),
            case.quantize(rand(7, 3, 64)),
            case.quantize(rand(4, 128)).to("meta"),
        )
    ]
    assert contexts[0] == contexts[1] == contexts[2]
    assert len({hash(c) for c in contexts}) == 1
    assert contexts[0] == case.quantizer().create_metadata((4, 128), dtype=torch.float32)
    name, dtype, quantizer, layout = contexts[0]
    assert (name, dtype, layout) == (
        case.quantizer().tensor_cls.__qualname__,
        torch.float32,
        "plain",
    )
    assert quantizer == case.quantizer()
    assert contexts[0] != case.quantize(rand(4, 128), columnwise=True).__tensor_flatten__()[1]
    assert contexts[0] != case.quantize(rand(4, 128, dtype=torch.bfloat16)).__tensor_flatten__()[1]


@formats
def test_names_are_the_buffers_that_are_there(case: FormatCase) -> None:
    for rowwise, columnwise in ((True, False), (False, True), (True, True)):
        for t in forms(case.quantize(rand(4, 128), rowwise=rowwise, columnwise=columnwise)):
            names = t.__tensor_flatten__()[0]
            assert names == [a for a, _ in t._FLATTEN_TENSOR_BUFFERS if getattr(t, a) is not None]
            assert names == list(t.quantizer._describe_buffers(t.shape))
            assert all(
                keyword == attribute.lstrip("_") for attribute, keyword in t._FLATTEN_TENSOR_BUFFERS
            )


CORRUPTED: dict[str, Any] = {
    "none": lambda c: None,
    "empty": lambda c: (),
    "short": lambda c: c[:3],
    "long": lambda c: (*c, 1),
    "list": lambda c: list(c),
    "text": lambda c: "mxfp8",
    "class-object": lambda c: (qtensor.MXFP8Tensor, *c[1:]),
    "unknown-class": lambda c: ("NoSuchTensor", *c[1:]),
    "dtype-text": lambda c: (c[0], "float32", *c[2:]),
    "no-quantizer": lambda c: (c[0], c[1], None, c[3]),
    "canonical-text": lambda c: (c[0], c[1], c[2].canonical, c[3]),
    "other-layout": lambda c: (*c[:3], "swizzled_32_4_4"),
    "unknown-layout": lambda c: (*c[:3], 7),
}


@pytest.mark.parametrize("name", CORRUPTED)
@formats
def test_corrupted_contexts(case: FormatCase, name: str) -> None:
    for t in forms(case.quantize(rand(4, 128))):
        context = CORRUPTED[name](t.__tensor_flatten__()[1])
        with pytest.raises(qtensor.QTensorError, match=r"unflatten(\[\w+\])?: .*; got .*\. \w+"):
            rebuilt(t, context=context)


@pytest.mark.parametrize("other", FORMATS, ids=lambda c: f"as-{c.name}")
@formats
def test_a_context_of_another_format(case: FormatCase, other: FormatCase) -> None:
    q, foreign = case.quantize(rand(4, 128)), other.quantize(rand(4, 128)).__tensor_flatten__()[1]
    own = q.__tensor_flatten__()[1]
    mixed = (own[0], own[1], foreign[2], own[3])
    if q.spec is foreign[2].spec:
        assert rebuilt(q, context=mixed).quantizer == foreign[2]
        return
    other_names = list(foreign[2]._describe_buffers(q.shape)) != q.__tensor_flatten__()[0]
    for context in (mixed, *([foreign] if other_names else [])):
        with pytest.raises(qtensor.QTensorError, match=r"unflatten\[\w+\]: the buffers must be"):
            rebuilt(q, context=context)


@formats
def test_wrong_buffers(case: FormatCase) -> None:
    q = case.quantize(rand(4, 128))
    names = q.__tensor_flatten__()[0]
    inner = {name: getattr(q, name) for name in names}
    for wrong in (
        {},
        {names[0]: inner[names[0]]},
        inner | {"_extra": inner[names[0]]},
        dict(reversed(inner.items())),
    ):
        with pytest.raises(
            qtensor.QTensorError, match=r"unflatten\[\w+\]: the buffers must be .* got"
        ):
            rebuilt(q, inner=wrong)


def test_unknown_class_lists_what_is_known() -> None:
    q = BY_NAME["mxfp8"].quantize(rand(4, 128))
    with pytest.raises(
        qtensor.QTensorError, match=r"known: .*Float8Tensor.*MXFP8Tensor.*NVFP4Tensor"
    ):
        rebuilt(q, context=("NoSuchTensor", *q.__tensor_flatten__()[1][1:]))
