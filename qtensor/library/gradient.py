"""Define the ops of backward that write state: accumulated gradients, stored operands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from qtensor.core.errors import fail
from qtensor.core.torch_state import without_autocast
from qtensor.kernels.products.problem import Pair, Product
from qtensor.library.checks import check_one
from qtensor.library.define import BODIES, Written, leaf_op, no_outputs
from qtensor.library.gemm import check_layout, check_product, output_shape


class GemmAccumulateArgs(NamedTuple):
    """Arguments of the op ``gemm_accumulate_``."""

    out: Written
    operands: Pair
    layout: str
    overwrite: bool = False


def _accumulate_fill(_: None, args: GemmAccumulateArgs) -> None:
    # Through .data: a saved tensor's version must not move, or a second backward is refused.
    target, pair = args.out.data, args.operands
    check_layout(args.layout)
    shape = output_shape(pair.a.shape, pair.b.shape, args.layout)
    if target.shape != shape or not target.is_floating_point():
        rule = f"out must be floating, of the shape {tuple(shape)} of the product"
        got = f"{target.dtype} {tuple(target.shape)}"
        fail("gemm_accumulate_", rule, got, "Pass such a tensor")
    if not target.is_cpu:
        from qtensor.kernels.products import choice  # noqa: PLC0415 - as in gemm.py

        check_product(pair, args.layout)
        in_place = choice.overwrite_ if args.overwrite else choice.accumulate_
        with without_autocast():
            if in_place(target, Product(pair, args.layout)):
                return
    # The product in float32, where it is accumulated; the sum is rounded once.
    result = BODIES["gemm"](*pair.a, *pair.b, args.layout, torch.float32)
    if args.overwrite:
        target.copy_(result)
    else:
        target.add_(result)


GEMM_ACCUMULATE = leaf_op(
    "gemm_accumulate_", GemmAccumulateArgs, "()", no_outputs, _accumulate_fill
)
"""``out += a.T @ b`` (layout NT), or ``out = a.T @ b`` with ``overwrite``: a weight gradient.

``a`` is grad_output (M, N), ``b`` the input (M, K), ``out`` (N, K).
"""

_PENDING: dict[int, deque[Pair]] = {}
"""Operands of weight gradients that ``backward_dw()`` will compute, oldest first, by module key."""


class _PostponeWgradArgs(NamedTuple):
    key: int
    operands: Pair


def _postpone_fill(_: None, args: _PostponeWgradArgs) -> None:
    postpone(args.key, args.operands)


def postpone(key: int, pair: Pair) -> None:
    """Store the operands of a weight gradient."""
    # A compiled graph may use the memory again once the op is done, so the buffers are copied.
    a, b = (
        operand._replace(buffers=[t.detach().clone() for t in operand.buffers]) for operand in pair
    )
    _PENDING.setdefault(key, deque()).append(Pair(a, b))


POSTPONE = leaf_op("postpone_wgrad_", _PostponeWgradArgs, "()", no_outputs, _postpone_fill)
"""Store the operands of a weight gradient."""
torch.fx.has_side_effect(POSTPONE)  # It writes none of its arguments: compilers would drop it.


def take_postponed(key: int) -> Pair:
    """Return the oldest stored operands of a module: grad_output (M, N) and input (M, K).

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
    """Forget the operands that are stored for a module that is gone."""
    _PENDING.pop(key, None)


_LISTENERS: dict[int, Callable[[], None]] = {}
"""Key of a module -> function that tells its weights that ``main_grad`` has their gradients."""


class _ReportAccumulatedArgs(NamedTuple):
    report: Written


def _report_accumulated_fill(_: None, args: _ReportAccumulatedArgs) -> None:
    state = args.report.data
    check_one("report_accumulated_", "report", state, torch.int64, 2)
    listener = _LISTENERS.get(int(state[0]))
    if listener is not None:
        listener()
    state[1] += 1


REPORT_ACCUMULATED = leaf_op(
    "report_accumulated_", _ReportAccumulatedArgs, "()", no_outputs, _report_accumulated_fill
)
"""Call the listener of key ``report[0]`` and count it in ``report[1]``; int64 (2,), CPU.

A tensor brings the key, so that one graph serves all layers, and is written, so that no compiler
drops the op.
"""


def listen(key: int, listener: Callable[[], None]) -> None:
    """Make ``listener`` the function that ``report_accumulated_`` calls for a key."""
    _LISTENERS[key] = listener


def drop_listener(key: int) -> None:
    """Forget the listener of a module that is gone."""
    _LISTENERS.pop(key, None)
