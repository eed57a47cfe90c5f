"""Arguments of calls that are refused, by message. Nothing given is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import BY_NAME, FormatCase, assert_same_bytes, formats
from torch.autograd import forward_ad

import qtensor


def refused(error: type[Exception], message: str) -> Any:
    """The error, with exactly this text in its message."""
    return pytest.raises(error, match=re.escape(message))


X = torch.linspace(-3, 3, 120).view(3, 40)
CALLS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "fp8",
        {},
        {"scale": torch.ones(1)},
        "quantize[fp8]: only delayed scaling takes scale=; got one. Drop scale=",
    ),
    (
        "fp8_delayed",
        {},
        {},
        "quantize[fp8_delayed]: delayed scaling needs scale=; got none. Pass scale=",
    ),
    ("fp8_delayed", {}, {"scale": 2.0}, "scale must be a float32 tensor of shape (1,); got 2.0"),
    (
        "fp8_delayed",
        {},
        {"scale": torch.ones(2)},
        "scale must be a float32 tensor of shape (1,); got tensor([1., 1.])",
    ),
    (
        "fp8_delayed",
        {},
        {"scale": torch.ones(1).double()},
        "scale must be a float32 tensor of shape (1,); got",
    ),
    (
        "mxfp8",
        {},
        {"noop_flag": torch.ones(1)},
        "noop_flag keeps bytes that exist; got no out=. Pass out= as well.",
    ),
    (
        "mxfp8",
        {},
        {"generator": torch.Generator()},
        "generator= needs a quantizer that rounds at random; got mxfp8",
    ),
    (
        "nvfp4",
        {},
        {"generator": torch.tensor([1])},
        "generator= needs a quantizer that rounds at random; got nvfp4",
    ),
    (
        "nvfp4",
        {"stochastic_rounding": True},
        {"generator": 5},
        "generator must be a torch.Generator or an int64 tensor; got int",
    ),
    (
        "nvfp4",
        {"stochastic_rounding": True},
        {"generator": torch.tensor([1.5])},
        "a seed tensor is one int64; got (1,) torch.float32",
    ),
    (
        "nvfp4",
        {"stochastic_rounding": True},
        {"generator": torch.tensor([1, 2])},
        "a seed tensor is one int64; got (2,) torch.int64",
    ),
    (
        "fp8",
        {},
        {"amax_reduction_group": object()},
        "amax_reduction_group needs torch.distributed; got not initialised",
    ),
]


@pytest.mark.parametrize(("name", "options", "call", "message"), CALLS, ids=range(len(CALLS)))
def test_wrong_argument(
    name: str, options: dict[str, Any], call: dict[str, Any], message: str
) -> None:
    before = X.clone()
    with refused(qtensor.QTensorError, message):
        qtensor.quantize(X, name, **options, **call)
    assert_same_bytes(X, before)


OUTS: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (
        lambda: torch.empty(3, 40),
        {},
        "update_quantized[mxfp8]: the destination must hold this quantizer's buffers; got Tensor. "
        "Pass",
    ),
    (
        lambda: qtensor.quantize(X, "fp8"),
        {},
        "the destination must hold this quantizer's buffers; got fp8. Pass",
    ),
    (
        lambda: qtensor.quantize(X, "mxfp8", columnwise=True),
        {},
        "the destination must hold this quantizer's buffers; got mxfp8(columnwise=True). Pass",
    ),
    (
        lambda: qtensor.quantize(X.t(), "mxfp8"),
        {},
        "update_quantized[mxfp8]: shapes must be equal; got (3, 40) into (40, 3)",
    ),
    (
        lambda: qtensor.quantize(X, "mxfp8"),
        {"noop_flag": torch.zeros(2)},
        "noop_flag must be a tensor of one element; got",
    ),
    (
        lambda: qtensor.quantize(X, "mxfp8"),
        {"noop_flag": 1},
        "noop_flag must be a tensor of one element; got 1",
    ),
    (
        lambda: qtensor.quantize(X, "mxfp8"),
        {"scale": torch.ones(1)},
        "only delayed scaling takes scale=; got one",
    ),
]


@pytest.mark.parametrize(("make", "call", "message"), OUTS, ids=range(len(OUTS)))
def test_wrong_out(make: Callable[[], Any], call: dict[str, Any], message: str) -> None:
    out = make()
    held = [b.clone() for b in out.buffers()] if isinstance(out, qtensor.QuantizedTensor) else []
    with refused(qtensor.QTensorError, message):
        qtensor.quantize(X, "mxfp8", out=out, **call)
    for buffer, before in zip(out.buffers() if held else [], held, strict=True):
        assert_same_bytes(buffer, before)


def test_amax_of_formats_without_delayed_scaling() -> None:
    for case in BY_NAME.values():
        if case.name != "fp8_delayed":
            with refused(
                qtensor.UnsupportedError,
                f"quantize_with_amax[{case.name}]: only delayed scaling returns the amax",
            ):
                case.quantizer().quantize_with_amax(X, scale=torch.ones(1))


STATE = qtensor.delayed_scaling_state(4, 2)
UPDATES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: qtensor.delayed_scaling_update(*STATE, algorithm="mean"),
        'algorithm must be "max", "most_recent" or a callable; got \'mean\'',
    ),
    (
        lambda: qtensor.delayed_scaling_update(*STATE, dtype="e2m1"),
        "must be one of e4m3, e5m2; got 'e2m1'",
    ),
    (
        lambda: qtensor.delayed_scaling_update(STATE[0], torch.ones(3)),
        "history must be (length, n) and scale (n,); got (4, 2) and (3,)",
    ),
    (
        lambda: qtensor.delayed_scaling_update(torch.ones(4), torch.ones(())),
        "history must be (length, n) and scale (n,); got (4,) and ()",
    ),
    (
        lambda: qtensor.delayed_scaling_update(*STATE, algorithm=lambda h: h),
        "the algorithm must return a tensor of shape (2,); got (4, 2)",
    ),
    (
        lambda: qtensor.delayed_scaling_update(*STATE, algorithm=lambda h: 3.0),
        "the algorithm must return a tensor of shape (2,); got float",
    ),
    (
        lambda: qtensor.record_amax_(STATE[0], torch.ones(3)),
        "history must be (length, n) and amax (n,); got (4, 2) and (3,)",
    ),
    (
        lambda: qtensor.record_amax_(STATE[0], torch.ones(1)),
        "history must be (length, n) and amax (n,); got (4, 2) and (1,)",
    ),
]


@pytest.mark.parametrize(("call", "message"), UPDATES, ids=range(len(UPDATES)))
def test_wrong_delayed_scaling_state(call: Callable[[], Any], message: str) -> None:
    with refused(qtensor.QTensorError, message):
        call()
    assert_same_bytes(STATE[0], torch.zeros(4, 2))
    assert_same_bytes(STATE[1], torch.ones(2))


@formats
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2], ids=str
)
def test_wrong_result_dtype(case: FormatCase, dtype: torch.dtype) -> None:
    q = case.quantize(X)
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    message = (
        f"dequantize[{case.name}]: the result's dtype must be float64, float32, bfloat16 or "
        f"float16; got {dtype}"
    )
    out = torch.zeros(3, 40, dtype=dtype)
    for function in (
        q.dequantize,
        bare.dequantize,
        lambda d: qtensor.dequantize(q, d),
        lambda d: qtensor.dequantize(q, out=out),
    ):
        with refused(qtensor.DtypeError, message):
            function(dtype)
    assert not out.view(torch.uint8).any()


@formats
@pytest.mark.parametrize("dtype", ["float32", "", 0, float], ids=repr)
def test_result_dtype_that_is_none(case: FormatCase, dtype: Any) -> None:
    """Something that is no dtype: torch would name a schema, and a falsy one would count as not
    given.
    """
    q = case.quantize(X)
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    message = (
        f"dequantize[{case.name}]: the result's dtype must be float64, float32, bfloat16 or "
        f"float16; got {dtype!r}. Pass a dtype, for example torch.float32."
    )
    for function in (q.dequantize, bare.dequantize):
        with refused(qtensor.DtypeError, message):
            function(dtype)


@pytest.mark.parametrize("value", [3, None, [1.0], "q"], ids=repr)
def test_dequantize_of_no_tensor(value: Any) -> None:
    message = (
        f"dequantize: a quantized tensor or storage is needed; got {type(value).__name__}. "
        "Quantize it first."
    )
    with refused(qtensor.ArgumentTypeError, message):
        qtensor.dequantize(value)


def _forward_mode(call: Callable[[Any], Any], x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any], torch.Tensor], object]] = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "vjp": torch.func.vjp,
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "vmap": lambda call, x: torch.vmap(call)(x),
    "forward mode": _forward_mode,
}


@formats
@pytest.mark.parametrize("transform", TRANSFORMS)
# The first forward-mode derivative warns that torch's own use of torch.jit.script is deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_transforms_of_the_input_are_refused(case: FormatCase, transform: str) -> None:
    """Instead of a raw error of torch, or a derivative that is silently lost."""
    quantizer, options = case.quantizer(), case.call()

    def call(x: torch.Tensor) -> torch.Tensor:
        return quantizer.quantize(x, **options).dequantize()

    with refused(qtensor.UnsupportedError, "transforms of torch.func and forward-mode derivatives"):
        TRANSFORMS[transform](call, torch.randn(4, 32, 64))
