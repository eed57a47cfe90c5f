"""The FORMATS table: one row a format, read by every parametrised test. A registered format without a row fails a test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import qtensor


@dataclass(frozen=True)
class FormatCase:
    """What tests need to know of a format."""

    name: str
    rel_step: float
    """Half an ulp of the element relative to its value: the bound of a value's relative error where it is normal."""
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of each option, the default first."""
    row_multiple: int = 1
    """Rows of a slice must be a multiple of this (rowwise data)."""
    col_multiple: int = 1
    min_sqnr: float = 25.0
    """On randn: from BEHAVIOURS A5 and A24."""

    def quantizer(self, **options: Any) -> qtensor.Quantizer:
        return qtensor.quantizer(self.name, **options)

    def call(self, device: str = "cpu") -> dict[str, Tensor]:
        """Arguments that a call of this format must bring."""
        return {"scale": torch.tensor([32.0], device=device)} if self.name == "fp8_delayed" else {}

    def quantize(self, x: Tensor, **options: Any) -> Any:
        return self.quantizer(**options).quantize(x, **self.call(x.device.type))

    def every_option(self) -> Iterator[dict[str, Any]]:
        """Every legal combination of options (usages not among them)."""
        for values in itertools.product(*self.options.values()):
            chosen = dict(zip(self.options, values, strict=True))
            try:
                self.quantizer(**chosen)
            except qtensor.QTensorError:
                continue
            yield chosen

    def each_option(self) -> Iterator[dict[str, Any]]:
        """The defaults, then each non-default value of each option on its own."""
        yield {}
        for name, values in self.options.items():
            for value in values[1:]:
                yield {name: value}


_FP8 = {"dtype": ("e4m3", "e5m2")}
_SCALED = {"force_pow_2_scales": (False, True), "amax_epsilon": (0.0, 0.25)}
_MX = {
    "with_2d_quantization": (False, True),
    "swizzled": (False, True),
}
_MODES = ("rceil", "floor", "ceil", "even")

FORMATS = [
    FormatCase("fp8", 2**-4, {**_FP8, **_SCALED}),
    FormatCase("fp8_delayed", 2**-4, {**_FP8}),
    FormatCase("fp8_rowwise", 2**-4, {**_FP8, "axis": (-1, 0), **_SCALED}),
    FormatCase(
        "fp8_blockwise",
        2**-4,
        {**_FP8, "block_scaling_dim": (1, 2), "force_pow_2_scales": (True, False), "amax_epsilon": (0.0, 0.25)},
        col_multiple=128,
    ),
    FormatCase("mxfp8", 2**-4, {**_FP8, "scale_mode": _MODES, **_MX}, col_multiple=32),
    FormatCase(
        "mxfp6",
        2**-4,
        {"dtype": ("e2m3", "e3m2"), "scale_mode": ("floor", "rceil", "ceil", "even"), **_MX, "packed": (False, True)},
        col_multiple=32,
    ),
    FormatCase("mxfp4", 2**-2, {"scale_mode": ("floor", "rceil", "ceil", "even"), **_MX}, col_multiple=32, min_sqnr=13.0),
    FormatCase(
        "nvfp4",
        2**-2,
        {
            "with_2d_quantization": (False, True),
            "with_rht": (False, True),
            "with_random_sign_mask": (True, False),
            "stochastic_rounding": (False, True),
            "row_scaled": (False, True),
            "use_4over6": (False, True),
            "e4m3_max": (0.0, 448.0, 256.0),
            "err_mode": ("mae", "mse"),
            "swizzled": (False, True),
        },
        col_multiple=16,
        min_sqnr=13.0,
    ),
]
BY_NAME = {case.name: case for case in FORMATS}
USAGES = [(True, False), (False, True), (True, True)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

formats = pytest.mark.parametrize("case", FORMATS, ids=lambda c: c.name)
usages = pytest.mark.parametrize(("rowwise", "columnwise"), USAGES, ids=["row", "col", "both"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])


def assert_same_bytes(got: Tensor, want: Tensor, name: str = "buffer") -> None:
    """Equal shape, dtype and bytes; a failure says how many differ, where first, and both values."""
    assert tuple(got.shape) == tuple(want.shape), f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, wanted {want.dtype}"
    a = got.detach().contiguous().flatten().view(torch.uint8)
    b = want.detach().contiguous().flatten().view(torch.uint8)
    different = (a != b).nonzero().flatten()
    if different.numel():
        first = different[0].item()
        index = first // got.element_size()
        raise AssertionError(
            f"{name}: {different.numel()} of {a.numel()} bytes differ; first at byte {first} (element {index}): "
            f"{a[first].item():#04x}, wanted {b[first].item():#04x}; values {got.flatten()[index].item()} and "
            f"{want.flatten()[index].item()}"
        )


def assert_same_tensor(got: Any, want: Any) -> None:
    """Equal class, flatten context, shape, buffer names and bytes."""
    assert type(got) is type(want), f"{type(got).__name__}, wanted {type(want).__name__}"
    names, context = got.__tensor_flatten__()
    wanted_names, wanted_context = want.__tensor_flatten__()
    assert names == wanted_names
    assert context == wanted_context
    assert tuple(got.shape) == tuple(want.shape)
    for name in names:
        assert_same_bytes(getattr(got, name), getattr(want, name), name)
