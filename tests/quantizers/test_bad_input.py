"""Tensors, formats, options and usages that are refused, by message. Nothing given is changed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import FormatCase, assert_same_bytes, assert_same_tensor, formats, snapshot
from torch import Tensor

import qtensor

WRONG_DTYPES = [
    torch.float64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def csr(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: CSR support is in beta state.
        return x.to_sparse_csr()


LAYOUTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "coo": (Tensor.to_sparse, "got torch.sparse_coo. Call .to_dense() first."),
    "csr": (csr, "got torch.sparse_csr. Call .to_dense() first."),
    "mkldnn": (Tensor.to_mkldnn, "got torch._mkldnn. Call .to_dense() first."),
    "nested": (
        lambda x: torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged),
        "the input must be a dense tensor; got a nested one. Pad it, or quantize its parts.",
    ),
}


def refused(error: type[Exception], message: str) -> Any:
    """The error, with exactly this text in its message."""
    return pytest.raises(error, match=re.escape(message))


@formats
@pytest.mark.parametrize("dtype", WRONG_DTYPES, ids=str)
def test_wrong_dtype(case: FormatCase, dtype: torch.dtype) -> None:
    """A TypeError too (docs/numerics.md), naming the dtype and those that are taken."""
    x = torch.ones(3, 40).to(dtype)
    before = x.clone()
    message = (
        f"quantize[{case.name}]: the input must be float32, bfloat16 or float16; got {dtype}. "
        "Convert it"
    )
    with refused(TypeError, message) as caught:
        case.quantize(x)
    assert isinstance(caught.value, qtensor.QTensorError)
    assert_same_bytes(x.view(torch.uint8), before.view(torch.uint8))


@formats
def test_wrong_dtype_that_requires_grad(case: FormatCase) -> None:
    x = torch.ones(3, 40, dtype=torch.float64, requires_grad=True)
    with refused(
        qtensor.DtypeError, "the input must be float32, bfloat16 or float16; got torch.float64"
    ):
        case.quantize(x)
    assert x.grad_fn is None


@formats
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_layout(case: FormatCase, layout: str) -> None:
    make, message = LAYOUTS[layout]
    x = make(torch.ones(3, 40))
    with refused(TypeError, message) as caught:
        case.quantize(x)
    assert isinstance(caught.value, qtensor.QTensorError)
    assert str(caught.value).startswith(f"quantize[{case.name}]")


@formats
@pytest.mark.parametrize("x", [[1.0, 2.0], 3.0, None, "text"], ids=str)
def test_no_tensor(case: FormatCase, x: Any) -> None:
    message = (
        f"quantize[{case.name}]: the input must be a torch.Tensor; got {type(x).__name__}. "
        "Convert it"
    )
    with refused(qtensor.ArgumentTypeError, message):
        case.quantizer()(x, **case.call())


@pytest.mark.parametrize("name", ["int8", "", "MXFP8", "mxfp8 ", "fp8(dtype=e5m2)"])
def test_unknown_format(name: str) -> None:
    known = ", ".join(qtensor.formats())
    for function in (qtensor.quantizer, lambda f: qtensor.quantize(torch.ones(3), f)):
        with refused(
            qtensor.QTensorError,
            f"the format must be a registered one; got {name!r}. Choose one of: {known}; for a",
        ):
            function(name)


@pytest.mark.parametrize(
    "fmt", [5, None, ["mxfp8"], qtensor.MXFP8Quantizer, torch.float8_e4m3fn], ids=repr
)
def test_format_of_a_wrong_type(fmt: Any) -> None:
    with refused(qtensor.ArgumentTypeError, f"the format is an id or a quantizer; got {fmt!r}. C"):
        qtensor.quantize(torch.ones(3), fmt)


@formats
@pytest.mark.parametrize(
    "option",
    ["block", "format", "spec", "canonical", "slots", "per_tensor", "needs_scale", "Rowwise"],
)
def test_unknown_option(case: FormatCase, option: str) -> None:
    """The message lists the options, and only those."""
    known = ", ".join(case.quantizer().option_names())
    message = (
        f"quantizer[{case.name}]: the option must be one of the format's; got {option}. "
        "Choose among: "
        f"{known}."
    )
    for function in (
        case.quantizer,
        type(case.quantizer()),
        lambda **o: qtensor.quantize(torch.ones(3), case.name, **o),
    ):
        with refused(qtensor.QTensorError, message):
            function(**{option: True})


VALUES = [
    (
        "mxfp8",
        {"scale_mode": "up"},
        "scale_mode must be one of 'rceil', 'floor', 'ceil', 'even'; got 'up'",
    ),
    ("mxfp8", {"dtype": "e2m1"}, "dtype must be one of 'e4m3', 'e5m2'; got 'e2m1'"),
    ("mxfp6", {"dtype": "e4m3"}, "dtype must be one of 'e2m3', 'e3m2'; got 'e4m3'"),
    ("mxfp4", {"dtype": "e2m3"}, "dtype must be one of 'e2m1'; got 'e2m3'"),
    ("fp8", {"dtype": torch.float16}, "dtype must be one of 'e4m3', 'e5m2'; got 'torch.float16'"),
    (
        "fp8",
        {"dtype": torch.float8_e4m3fnuz},
        "dtype must be one of 'e4m3', 'e5m2'; got 'torch.float8_e4m3fnuz'",
    ),
    ("fp8", {"amax_epsilon": -1.0}, "amax_epsilon must be finite and not negative; got -1.0"),
    (
        "fp8",
        {"amax_epsilon": float("nan")},
        "amax_epsilon must be finite and not negative; got nan",
    ),
    (
        "fp8",
        {"amax_epsilon": float("inf")},
        "amax_epsilon must be finite and not negative; got inf",
    ),
    ("fp8", {"amax_epsilon": "0"}, "amax_epsilon must be a float; got '0'"),
    ("fp8", {"force_pow_2_scales": 1}, "force_pow_2_scales must be a bool; got 1"),
    ("fp8", {"rowwise": "yes"}, "rowwise must be a bool; got 'yes'"),
    ("fp8_rowwise", {"axis": 1}, "axis must be one of -1, 0; got 1"),
    ("fp8_rowwise", {"axis": False}, "axis must be a int; got False"),
    ("fp8_blockwise", {"block_scaling_dim": 3}, "block_scaling_dim must be one of 1, 2; got 3"),
    ("fp8_blockwise", {"block_scaling_dim": True}, "block_scaling_dim must be a int; got True"),
    ("nvfp4", {"e4m3_max": 240}, "e4m3_max must be one of 448.0, 256.0; got 240.0"),
    ("nvfp4", {"err_mode": "max"}, "err_mode must be one of 'mae', 'mse'; got 'max'"),
    ("nvfp4", {"row_scaled": True, "with_rht": True}, "row_scaled and with_rht exclude each other"),
    (
        "nvfp4",
        {"row_scaled": True, "with_2d_quantization": True},
        "row_scaled and with_2d_quantization exclude each other",
    ),
    (
        "nvfp4",
        {"row_scaled": True, "stochastic_rounding": True},
        "row_scaled and stochastic_rounding exclude each other",
    ),
    (
        "nvfp4",
        {"with_2d_quantization": True, "with_rht": True},
        "with_2d_quantization and with_rht exclude each other",
    ),
    (
        "nvfp4",
        {"use_4over6": True, "stochastic_rounding": True},
        "use_4over6 and stochastic_rounding exclude each other",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), VALUES, ids=lambda v: str(v)[:60])
def test_wrong_value(name: str, options: dict[str, Any], message: str) -> None:
    with refused(qtensor.QTensorError, f"quantizer[{name}]: {message}"):
        qtensor.quantizer(name, **options)


@formats
def test_no_usage(case: FormatCase) -> None:
    message = (
        f"quantizer[{case.name}]: at least one usage is needed; got rowwise=False, "
        "columnwise=False. Ask for"
    )
    with refused(qtensor.QTensorError, message):
        case.quantizer(rowwise=False)
    with refused(qtensor.QTensorError, message):
        case.quantizer().with_usage(rowwise=False)
    q = case.quantize(torch.ones(3, 40))
    before = snapshot(q)
    with refused(qtensor.QTensorError, message):
        q.update_usage(rowwise=False)
    assert_same_tensor(q, before)


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("missing", ["rowwise", "columnwise"])
def test_impossible_usage(name: str, missing: str) -> None:
    """Directions that were quantized on their own: a RuntimeError too, and nothing changes."""
    held = "columnwise" if missing == "rowwise" else "rowwise"
    q = qtensor.quantize(torch.randn(5, 40), name, **{held: True, missing: False})
    before = snapshot(q)
    message = (
        f"update_usage[{name}]: {missing} data cannot be derived from the other direction; got "
        f"{ {'rowwise': held == 'rowwise', 'columnwise': held == 'columnwise'} }. "
        f"Quantize the high-precision tensor with {missing}=True."
    )
    with refused(qtensor.UnsupportedError, message) as caught:
        q.update_usage(**{missing: True})
    assert isinstance(caught.value, RuntimeError)
    assert_same_tensor(q, before)


def test_errors_are_value_errors() -> None:
    """One base for user mistakes; a wrong kind of thing is a TypeError, an absent one a
    NotImplementedError.
    """
    assert issubclass(qtensor.QTensorError, ValueError)
    assert issubclass(qtensor.ArgumentTypeError, TypeError)
    assert issubclass(qtensor.DtypeError, qtensor.ArgumentTypeError)
    assert issubclass(qtensor.UnsupportedError, NotImplementedError)
    assert all(
        issubclass(e, qtensor.QTensorError)
        for e in (qtensor.ArgumentTypeError, qtensor.UnsupportedError)
    )
