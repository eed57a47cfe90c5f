"""The FORMATS table: one row for each format. Most parametrized tests read it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import qtensor


@dataclass(frozen=True)
class FormatCase:
    """Facts about one format that tests need."""

    name: str
    rel_step: float
    """Half an ulp of the element relative to its value: the bound of a value's relative error where
    it is normal.
    """
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of each option, the default first."""
    separate: tuple[str, ...] = ()
    """Options that add a buffer and change no other: combined with one other option at a time."""
    row_multiple: int = 1
    """Rows of a slice must be a multiple of this (rowwise data)."""
    col_multiple: int = 1
    min_sqnr: float = 25.0
    """Lowest signal to noise ratio, in decibels, of normally distributed values."""

    def quantizer(self, **options: Any) -> qtensor.Quantizer:
        return qtensor.quantizer(self.name, **options)

    def call(self, device: str = "cpu") -> dict[str, Tensor]:
        """Return the arguments that a call of this format needs."""
        return {"scale": torch.tensor([32.0], device=device)} if self.name == "fp8_delayed" else {}

    def quantize(self, x: Tensor, **options: Any) -> Any:
        return self.quantizer(**options).quantize(x, **self.call(x.device.type))

    def slice_multiples(
        self, *, rowwise: bool = True, columnwise: bool = False, **options: Any
    ) -> tuple[int, int]:
        """Return (rows, columns): the bounds of a slice are multiples of these
        (docs/numerics.md)."""
        block, swizzled = self.col_multiple, options.get("swizzled", False)
        row_tile, col_tile = (128, 4 * block) if swizzled else (1, block)
        rows = max(row_tile if rowwise else 1, col_tile if columnwise else 1)
        cols = max(col_tile if rowwise else 1, row_tile if columnwise else 1)
        if options.get("block_scaling_dim") == 2:
            rows = cols = block
        return rows, cols

    def every_option(self) -> Iterator[dict[str, Any]]:
        """Yield every legal combination of options, usages excepted.

        Options in ``separate`` are combined with the defaults, and with each other value of each
        option.
        """
        defaults = {name: values[0] for name, values in self.options.items()}
        axes = [
            values[:1] if name in self.separate else values for name, values in self.options.items()
        ]
        combined = [
            dict(zip(self.options, values, strict=True)) for values in itertools.product(*axes)
        ]
        for name in self.separate:
            others = [o for o in self.each_option() if name not in o]
            combined += [{**defaults, **other, name: self.options[name][1]} for other in others]
        for chosen in combined:
            try:
                self.quantizer(**chosen)
            except qtensor.QTensorError:
                continue
            yield chosen

    def each_option(self) -> Iterator[dict[str, Any]]:
        """Yield the defaults, then each other value of each option on its own."""
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
        {
            **_FP8,
            "block_scaling_dim": (1, 2),
            "force_pow_2_scales": (True, False),
            "amax_epsilon": (0.0, 0.25),
        },
        col_multiple=128,
    ),
    FormatCase("mxfp8", 2**-4, {**_FP8, "scale_mode": _MODES, **_MX}, col_multiple=32),
    FormatCase(
        "mxfp6",
        2**-4,
        {
            "dtype": ("e2m3", "e3m2"),
            "scale_mode": ("floor", "rceil", "ceil", "even"),
            **_MX,
            "packed": (False, True),
        },
        col_multiple=32,
    ),
    FormatCase(
        "mxfp4",
        2**-2,
        {"scale_mode": ("floor", "rceil", "ceil", "even"), **_MX},
        col_multiple=32,
        min_sqnr=13.0,
    ),
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
            "with_global_scale_inv": (False, True),
        },
        separate=("with_global_scale_inv",),
        col_multiple=16,
        min_sqnr=13.0,
    ),
]
BY_NAME = {case.name: case for case in FORMATS}
USAGES = [(True, False), (False, True), (True, True)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


_LAYOUTS = {
    "axis": 0,
    "block_scaling_dim": 2,
    "with_2d_quantization": True,
    "swizzled": True,
    "packed": True,
    "with_rht": True,
    "row_scaled": True,
    "with_global_scale_inv": True,
}


def _each_layout() -> Iterator[Any]:
    """Yield each format with its defaults, with each option that moves bytes, and with pairs of
    them."""
    for case in FORMATS:
        moved = [{name: value} for name, value in _LAYOUTS.items() if name in case.options]
        both = [{"swizzled": True, other: True} for other in ("with_2d_quantization", "packed")]
        both = [chosen for chosen in both if all(name in case.options for name in chosen)]
        for chosen in [{}, *moved, *both]:
            yield pytest.param(case, chosen, id="-".join((case.name, *chosen)))


layouts = pytest.mark.parametrize(("case", "options"), list(_each_layout()))
formats = pytest.mark.parametrize("case", FORMATS, ids=lambda c: c.name)
usages = pytest.mark.parametrize(("rowwise", "columnwise"), USAGES, ids=["row", "col", "both"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])


def assert_same_bytes(got: Tensor, want: Tensor, name: str = "buffer") -> None:
    """Assert equal shapes, dtypes and bytes; a failure names the first byte that differs."""
    assert tuple(got.shape) == tuple(want.shape), (
        f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    )
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, wanted {want.dtype}"
    # A clone, because an empty tensor counts as contiguous whatever its strides.
    a = got.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    b = want.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
    different = (a != b).nonzero().flatten()
    if different.numel():
        first = different[0].item()
        index = first // got.element_size()
        raise AssertionError(
            f"{name}: {different.numel()} of {a.numel()} bytes differ; first at byte {first} "
            f"(element {index}): "
            f"{a[first].item():#04x}, wanted {b[first].item():#04x}; values "
            f"{got.flatten()[index].item()} and "
            f"{want.flatten()[index].item()}"
        )


def assert_same_tensor(got: Any, want: Any) -> None:
    """Assert equal classes, flatten contexts, shapes, buffer names and bytes."""
    assert type(got) is type(want), f"{type(got).__name__}, wanted {type(want).__name__}"
    names, context = got.__tensor_flatten__()
    wanted_names, wanted_context = want.__tensor_flatten__()
    assert names == wanted_names
    assert context == wanted_context
    assert tuple(got.shape) == tuple(want.shape)
    for name in names:
        assert_same_bytes(getattr(got, name), getattr(want, name), name)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal values that do not depend on the global generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def requantized(q: Any, values: Tensor) -> Any:
    """Return ``values`` quantized by the quantizer of ``q``; delayed scaling keeps its scale."""
    call = {"scale": q._scale_inv.reciprocal()} if q.quantizer.needs_scale else {}
    return q.quantizer.quantize(values, **call)


def snapshot(q: Any) -> Any:
    """Return a copy, to prove later that an op left its input unchanged."""
    return q.quantizer.assemble([b.clone() for b in q.buffers()], q.shape, q.dtype)


def refusal(call: Callable[[], Any]) -> str:
    """Return the message of the QTensorError that ``call`` raises, or "" if it raises none."""
    try:
        call()
    except qtensor.QTensorError as error:
        return str(error)
    return ""


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two buffers share a storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
