"""The matmul op with a backend asked for by name, and with fast accumulation allowed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.layout import Shape
from qtensor.library.define import below_autograd, leaf_op
from qtensor.library.gemm import check_layout, check_product, fill_by_decoding, output_shape


class GemmByArgs(NamedTuple):
    """Arguments of the op ``gemm_by``."""

    a: list[Tensor]
    a_quantizer: str
    a_shape: Shape
    b: list[Tensor]
    b_quantizer: str
    b_shape: Shape
    layout: str
    dtype: torch.dtype
    bias: Tensor | None
    backend: str
    fast: bool


def _alloc(args: GemmByArgs) -> Tensor:
    check_layout(args.layout)
    return torch.empty(
        output_shape(args.a_shape, args.b_shape, args.layout),
        dtype=args.dtype,
        device=args.a[0].device,
    )


def _fill(out: Tensor, args: GemmByArgs) -> None:
    check_product(args)
    product = args[:7]
    if args.backend != "auto" or not out.is_cpu:
        from qtensor.library import backends  # noqa: PLC0415 - as in gemm.py

        with below_autograd():
            if backends.multiply_(out, *product, args.bias, args.backend, args.fast):
                return
    fill_by_decoding(out, *product, args.dtype, args.bias)


GEMM_BY = leaf_op(
    "gemm_by(Tensor[] a, str a_quantizer, SymInt[] a_shape, Tensor[] b, str b_quantizer, SymInt[] b_shape, "
    "str layout, ScalarType dtype, Tensor? bias, str backend, bool fast) -> Tensor",
    GemmByArgs,
    _alloc,
    _fill,
)
"""``gemm`` by one of ``backends.BACKENDS`` or "auto"; with ``fast``, sums may stay in narrow accumulators."""
