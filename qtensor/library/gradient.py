"""Define the ops of backward that write state: accumulated gradients, stored operands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.errors import fail
from qtensor.kernels.gemm.problem import Product
from qtensor.layout import Shape
from qtensor.library.define import BODIES, below_autograd, leaf_op, no_outputs
from qtensor.library.gemm import GemmArgs, check_layout, check_product, product_shape

Operand = tuple[list[Tensor], str, tuple[int, ...]]
"""(buffers, canonical text of the quantizer or "", logical shape)."""

OPERANDS = (
    "Tensor[] a, str a_quantizer, SymInt[] a_shape, Tensor[] b, str b_quantizer, SymInt[] b_shape"
)


class GemmAccumulateArgs(NamedTuple):
    """Arguments of the op ``gemm_accumulate_``."""

    out: Tensor
    a: list[Tensor]
    a_quantizer: str
    a_shape: Shape
    b: list[Tensor]
    b_quantizer: str
    b_shape: Shape
    layout: str
    overwrite: bool = False


def _accumulate_fill(_: None, args: GemmAccumulateArgs) -> None:
    # Through .data: a saved tensor's version must not move, or a second backward is refused.
    target = args.out.data
    check_layout(args.layout)
    shape = product_shape(args)
    if target.shape != shape or not target.is_floating_point():
        rule = f"out must be floating, of the shape {tuple(shape)} of the product"
        got = f"{target.dtype} {tuple(target.shape)}"
        fail("gemm_accumulate_", rule, got, "Pass such a tensor")
    if not target.is_cpu:
        from qtensor.kernels.gemm import choice  # noqa: PLC0415 - as in gemm.py

        check_product(GemmArgs(*args[1:8], torch.float32))
        in_place = choice.overwrite_ if args.overwrite else choice.accumulate_
        with below_autograd(), torch._C._DisableAutocast():
            if in_place(target, Product(*args[1:8])):
                return
    # The product in float32, where it is accumulated; the sum is rounded once.
    result = BODIES["gemm"](*args[1:8], torch.float32)
    if args.overwrite:
        target.copy_(result)
    else:
        target.add_(result)


GEMM_ACCUMULATE = leaf_op(
    f"gemm_accumulate_(Tensor(a!) out, {OPERANDS}, str layout, bool overwrite=False) -> ()",
    GemmAccumulateArgs,
    no_outputs,
    _accumulate_fill,
)
"""``out += a.T @ b`` (layout NT), or ``out = ...``: the weight gradient added where it is kept."""

_PENDING: dict[int, deque[tuple[Operand, Operand]]] = {}
"""Operands of weight gradients that ``backward_dw()`` will compute, oldest first, by module key."""


class PostponeWgradArgs(NamedTuple):
    """Arguments of the op ``postpone_wgrad_``."""

    token: Tensor
    key: int
    a: list[Tensor]
    a_quantizer: str
    a_shape: Shape
    b: list[Tensor]
    b_quantizer: str
    b_shape: Shape


def _postpone_fill(_: None, args: PostponeWgradArgs) -> None:
    # Copies: a compiled graph may use the memory again once the op is done.
    left = ([t.detach().clone() for t in args.a], args.a_quantizer, tuple(args.a_shape))
    right = ([t.detach().clone() for t in args.b], args.b_quantizer, tuple(args.b_shape))
    _PENDING.setdefault(args.key, deque()).append((left, right))
    args.token.data.add_(1)


POSTPONE = leaf_op(
    f"postpone_wgrad_(Tensor(a!) token, int key, {OPERANDS}) -> ()",
    PostponeWgradArgs,
    no_outputs,
    _postpone_fill,
)
"""Store the operands of a weight gradient; writing the token keeps the op in compiled code."""


def take_postponed(key: int) -> tuple[Operand, Operand]:
    """The operands (grad_output, input) that were kept first.

    Raises:
        QTensorError: there are none.
    """
    pending = _PENDING.get(key)
    if not pending:
        rule = "a backward pass must have gone before"
        fix = "Call backward_dw() once for each backward pass, with delay_wgrad_compute=True"
        fail("backward_dw", rule, "no postponed weight gradient", fix)
    return pending.popleft()


def drop_postponed(key: int) -> None:
    """Forget what is kept for a module that is gone."""
    _PENDING.pop(key, None)


def postponed(key: int) -> int:
    """Number of weight gradients that wait."""
    return len(_PENDING.get(key, ()))


_LISTENERS: dict[int, Callable[[], None]] = {}
"""Key of a module -> what tells its weights that their gradients are in ``main_grad``."""


class ReportAccumulatedArgs(NamedTuple):
    """Arguments of the op ``report_accumulated_``."""

    report: Tensor


def _report_accumulated_fill(_: None, args: ReportAccumulatedArgs) -> None:
    state = args.report.data
    if state.shape != (2,) or state.dtype is not torch.int64:
        got = f"{state.dtype} {tuple(state.shape)}"
        fail("report_accumulated_", "report must be int64 of shape (2,)", got, "Pass such a tensor")
    listener = _LISTENERS.get(int(state[0]))
    if listener is not None:
        listener()
    state[1] += 1


REPORT_ACCUMULATED = leaf_op(
    "report_accumulated_(Tensor(a!) report) -> ()",
    ReportAccumulatedArgs,
    no_outputs,
    _report_accumulated_fill,
)
"""Call the listener of key ``report[0]`` and count it in ``report[1]``; int64 (2,), CPU.

A tensor brings the key, so that one graph serves all layers, and is written, so that no compiler
drops the op.
"""


def listen(key: int, listener: Callable[[], None]) -> None:
    """What ``report_accumulated_`` calls for a key, in place of what it called before."""
    _LISTENERS[key] = listener


def drop_listener(key: int) -> None:
    """Forget the listener of a module that is gone."""
    _LISTENERS.pop(key, None)
