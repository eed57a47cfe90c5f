"""One sample call for each op that docs/generate_op_matrix.py probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor import QuantizedTensor

ROWS, COLS = 128, 256
"""Whole blocks of every format, so that slices and views below are at block bounds."""
A = torch.ops.aten


@dataclass
class Operands:
    """Hold the operands of sample calls: all quantized, or all plain with the same values."""

    matrix: Any
    """(128, 256)"""
    vector: Any
    """(256,)"""
    scalar: Any
    """()"""
    other: Any
    """(128, 256), other values under the same quantizer."""
    square: Any
    """(256, 256)"""
    batch: Any
    """(2, 128, 256)"""
    mask: Tensor = field(
        default_factory=lambda: (torch.arange(ROWS * COLS) % 3 == 0).view(ROWS, COLS)
    )
    rows: Tensor = field(default_factory=lambda: torch.tensor([5, 0, 77]))


Sample = Callable[[Operands], Any]


def _each(names: str, make: Callable[[str], Sample]) -> dict[str, Sample]:
    return {name: make(name) for name in names.split()}


def _in_place(call: Callable[[Any, Operands], Any]) -> Sample:
    """Return a sample that runs ``call`` on a copy of the matrix and returns the copy."""

    def sample(o: Operands) -> Any:
        target = o.matrix.clone()
        call(target, o)
        return target

    return sample


def _foreach_in_place(call: Callable[[list[Any], Operands], Any]) -> Sample:
    def sample(o: Operands) -> Any:
        targets = [o.matrix.clone(), o.other.clone()]
        call(targets, o)
        return targets

    return sample


def plain(t: Any) -> Any:
    """Return the values of a quantized tensor; other objects are returned unchanged."""
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


PRESERVED: dict[str, Sample] = {
    **_each(
        "detach alias lift_fresh clone contiguous t squeeze",
        lambda n: lambda o: getattr(A, n)(o.matrix),
    ),
    "_to_copy": lambda o: A._to_copy(o.matrix, dtype=torch.bfloat16),
    "as_strided": lambda o: A.as_strided(o.matrix, [ROWS, COLS], [COLS, 1]),
    "copy_": _in_place(lambda t, o: A.copy_(t, o.other)),
    "empty_like": lambda o: A.empty_like(o.matrix),
    "new_empty": lambda o: A.new_empty(o.matrix, [64, COLS]),
    "new_empty_strided": lambda o: A.new_empty_strided(o.matrix, [64, COLS], [COLS, 1]),
    "new_zeros": lambda o: A.new_zeros(o.matrix, [64, COLS]),
    "slice": lambda o: A.slice(o.matrix, 1, 0, 128),
    "select": lambda o: A.select(o.batch, 0, 1),
    "split": lambda o: A.split(o.square, 128),
    "split_with_sizes": lambda o: A.split_with_sizes(o.square, [128, 128]),
    "unbind": lambda o: A.unbind(o.batch),
    "view": lambda o: A.view(o.matrix, [4, 32, COLS]),
    "_unsafe_view": lambda o: A._unsafe_view(o.matrix, [4, 32, COLS]),
    "reshape": lambda o: A.reshape(o.matrix, [4, -1, COLS]),
    "unsqueeze": lambda o: A.unsqueeze(o.matrix, 0),
    "transpose": lambda o: A.transpose(o.matrix, 0, 1),
    "permute": lambda o: A.permute(o.matrix, [1, 0]),
    "expand": lambda o: A.expand(o.matrix, [-1, COLS]),
    "cat": lambda o: A.cat([o.matrix, o.matrix]),
    "index": lambda o: A.index(o.matrix, [o.rows]),
    "constant_pad_nd": lambda o: A.constant_pad_nd(o.matrix, [0, 32, 0, 128]),
    "index_select": lambda o: A.index_select(o.matrix, 0, o.rows),
    "index_copy_": _in_place(
        lambda t, o: A.index_copy_(t, 0, o.rows, A.index_select(o.matrix, 0, o.rows.flip(0)))
    ),
    "index_put_": _in_place(
        lambda t, o: A.index_put_(t, [o.rows], A.index_select(o.matrix, 0, o.rows.flip(0)))
    ),
    "_pin_memory": lambda o: A._pin_memory(o.matrix),
    "is_pinned": lambda o: A.is_pinned(o.matrix),
    "is_same_size": lambda o: A.is_same_size(o.matrix, o.other),
}

ELSEWHERE: dict[str, Sample] = {
    "rows at 32: `t[32:96]`": lambda o: o.matrix[32:96],
    "rows anywhere: `t[3:77]`": lambda o: o.matrix[3:77],
    "columns at 16: `t[:, 16:48]`": lambda o: o.matrix[:, 16:48],
    "columns at 32: `t[:, 32:96]`": lambda o: o.matrix[:, 32:96],
    "columns anywhere: `t[:, 3:77]`": lambda o: o.matrix[:, 3:77],
    "every second row: `t[::2]`": lambda o: o.matrix[::2],
    "one row: `t[5]`": lambda o: o.matrix[5],
    "rows by number: `t[[5, 0, 77]]`": lambda o: o.matrix[[5, 0, 77]],
    "batches by number: `t[[1, 0]]` of (2, 128, 256)": lambda o: o.batch[[1, 0]],
    "one element: `t[3, 5]`": lambda o: o.matrix[3, 5],
    "by a mask: `t[mask]`": lambda o: o.matrix[o.mask],
    "elements by number: `t[[3, 4], [5, 6]]`": lambda o: o.matrix[[3, 4], [5, 6]],
    "one column: `t[:, 5]`": lambda o: o.matrix[:, 5],
    "a piece of a row: `t[5, 3:77]`": lambda o: o.matrix[5, 3:77],
    "a corner: `t[:4, :4]`": lambda o: o.matrix[:4, :4],
    "middle dim of (2, 128, 256): `t[:, 32:96]`": lambda o: o.batch[:, 32:96],
    "split by 5 rows": lambda o: o.matrix.split(5),
    "(128, 256) viewed as (64, 512)": lambda o: o.matrix.view(64, 512),
    "(128, 256) viewed as (256, 128)": lambda o: o.matrix.view(256, 128),
    "flattened: `t.flatten()`": lambda o: o.matrix.flatten(),
    "the last two of three dims transposed: `t.mT`": lambda o: o.batch.mT,
    "the first two of three dims transposed": lambda o: o.batch.transpose(0, 1),
    "repeated to more rows: `t.expand(2, 128, 256)`": lambda o: o.matrix.expand(2, ROWS, COLS),
    "`cat` of two halves along the last dim": lambda o: torch.cat(
        [o.matrix[:, :128], o.matrix[:, 128:]], 1
    ),
    "`cat` of tensors quantized apart": lambda o: torch.cat([o.matrix, o.other]),
    "`stack` of tensors quantized apart": lambda o: torch.stack([o.matrix, o.other]),
}
"""Calls that depend on where blocks lie, by their label in the document."""


def _scaled_mm(o: Operands) -> Tensor:
    if not isinstance(o.matrix, QuantizedTensor):
        return o.matrix @ o.square.t()
    a, b = o.matrix.scaled_mm_args("a"), o.square.scaled_mm_args("b")
    return F.scaled_mm(**a, **b, output_dtype=torch.float32)


def _scaled_grouped_mm(o: Operands) -> Tensor:
    """Return a few rows: bfloat16 results of two orders of sums differ in some of many values."""
    if not isinstance(o.matrix, QuantizedTensor):
        return (o.matrix.double() @ o.batch[0].double().t()).bfloat16()[:4]
    offs = torch.tensor([ROWS // 2, ROWS], dtype=torch.int32)
    a = o.matrix.scaled_grouped_mm_args("a", offs=offs)
    return F.scaled_grouped_mm(**a, **o.batch.scaled_grouped_mm_args("b"), offs=offs)[:4]


COMPUTED: dict[str, Sample] = {
    "matmul": lambda o: A.matmul(o.batch, plain(o.square)),
    "mm": lambda o: A.mm(o.matrix, plain(o.square)),
    "bmm": lambda o: A.bmm(o.batch, plain(o.batch).mT.contiguous()),
    "addmm": lambda o: A.addmm(plain(o.vector), o.matrix, plain(o.square)),
    "mv": lambda o: A.mv(o.matrix, plain(o.vector)),
    **_each("dot vdot", lambda n: lambda o: getattr(A, n)(o.vector, plain(o.vector))),
    "baddbmm": lambda o: A.baddbmm(torch.ones(1), o.batch, plain(o.batch).mT.contiguous()),
    "linear": lambda o: A.linear(o.matrix, o.square, plain(o.vector)),
    "_grouped_mm": lambda o: A._grouped_mm(
        plain(o.batch)[0, :, :ROWS].contiguous(),
        o.batch,
        torch.tensor([ROWS // 2, ROWS], dtype=torch.int32),
    ),
    "_scaled_mm_v2": lambda o: _scaled_mm(o),
    "_scaled_grouped_mm_v2": lambda o: _scaled_grouped_mm(o),
    "dequantize": lambda o: (
        A.dequantize(o.matrix) if isinstance(o.matrix, QuantizedTensor) else o.matrix
    ),
    "embedding": lambda o: A.embedding(o.matrix, o.rows),
    "_embedding_bag": lambda o: A._embedding_bag(o.matrix, o.rows, torch.tensor([0, 2]), mode=2),
    "_embedding_bag_forward_only": lambda o: A._embedding_bag_forward_only(
        o.matrix, o.rows, torch.tensor([0, 2]), mode=2
    ),
    "_embedding_bag_per_sample_weights_backward": lambda o: (
        A._embedding_bag_per_sample_weights_backward(
            torch.ones(2, COLS),
            o.matrix,
            o.rows,
            torch.tensor([0, 2]),
            torch.tensor([0, 0, 1]),
            0,
        )
    ),
    "convolution": lambda o: A.convolution(_signal(), o.batch, None, *_STEPS),
    "convolution_backward": lambda o: A.convolution_backward(
        torch.ones(1, 2, 5), _signal(), o.batch, None, *_STEPS, [True, False, False]
    ),
    "mkldnn_rnn_layer": lambda o: _lstm(o.matrix, False)[:3],
    "mkldnn_rnn_layer_backward": lambda o: _lstm_gradient(o.matrix),
    "addmm_": lambda o: A.addmm_(torch.ones(ROWS, COLS), o.matrix, plain(o.square)),
    "baddbmm_": lambda o: A.baddbmm_(
        torch.ones(2, ROWS, ROWS), o.batch, plain(o.batch).mT.contiguous()
    ),
    "_native_multi_head_attention": lambda o: A._native_multi_head_attention(
        *[plain(o.batch)] * 3, COLS, 4, *_projections(o)
    ),
    "_transformer_encoder_layer_fwd": lambda o: A._transformer_encoder_layer_fwd(
        plain(o.batch),
        COLS,
        4,
        *_projections(o),
        True,
        False,
        1e-5,
        *[torch.ones(COLS), torch.zeros(COLS)] * 2,
        *[o.square, torch.zeros(COLS)] * 2,
    ),
}


_STEPS = ([1], [0], [1], False, [0], 1)
"""Stride, padding, dilation, transposed, output padding and groups of a convolution."""


def _signal() -> Tensor:
    """Return the input of a convolution with (2, 128, 256)."""
    return torch.linspace(-1, 1, ROWS * (COLS + 4)).view(1, ROWS, COLS + 4)


_HIDDEN = ROWS // 4


def _lstm(weight: Any, train: bool) -> tuple[Tensor, ...]:
    """Return what a layer of an LSTM with a weight (4 * hidden, inputs) gives for three steps."""
    x, state = torch.linspace(-1, 1, 3 * COLS).view(3, 1, COLS), torch.zeros(1, _HIDDEN)
    others = [torch.full((ROWS, _HIDDEN), 0.1), torch.zeros(ROWS), torch.zeros(ROWS), state, state]
    kind = (False, [], 2, _HIDDEN, 1, True, False, False, train)
    result: tuple[Tensor, ...] = A.mkldnn_rnn_layer(x, weight, *others, *kind)
    return result


def _lstm_gradient(weight: Any) -> Tensor:
    """Return the gradient of the input of that layer."""
    y, hidden, cell, workspace = _lstm(plain(weight), True)
    x, state = torch.linspace(-1, 1, 3 * COLS).view(3, 1, COLS), torch.zeros(1, _HIDDEN)
    others = [torch.full((ROWS, _HIDDEN), 0.1), torch.zeros(ROWS), torch.zeros(ROWS), state, state]
    grads = [torch.ones_like(y), torch.zeros_like(hidden), torch.zeros_like(cell)]
    kind = (False, 2, _HIDDEN, 1, True, True, False, [], False, workspace)
    gradients = A.mkldnn_rnn_layer_backward(x, weight, *others, y, hidden, cell, *grads, *kind)
    return gradients[0]


def _projections(o: Operands) -> list[Any]:
    """Return weights and biases of the projections of attention, the first for q, k and v."""
    return [torch.cat([o.square] * 3), torch.zeros(3 * COLS), o.square, torch.zeros(COLS)]


_ALONE = """
abs neg sign sqrt rsqrt exp exp2 log log2 log1p expm1 reciprocal square sin cos tanh sigmoid erf
floor ceil round trunc relu gelu silu hardtanh leaky_relu elu softplus mish hardswish hardsigmoid
logical_not isnan isinf isfinite isposinf isneginf nan_to_num signbit frac sum mean amax amin max
min aminmax norm linalg_vector_norm std var std_mean var_mean prod any all argmax argmin median
count_nonzero nonzero sort histc ones_like zeros_like rand_like randn_like
"""
_WITH_ANOTHER = """
add sub rsub mul div pow maximum minimum fmod remainder floor_divide true_divide atan2 eq ne lt le
gt ge isclose logical_and logical_or equal allclose
"""
_WITH_A_BOUND = "clamp_min clamp_max full_like"
_LOSSES = "mse_loss smooth_l1_loss huber_loss"
_LISTS = "_foreach_neg _foreach_sqrt _foreach_abs _foreach_norm _foreach_reciprocal _foreach_max"
_TWO_LISTS = "_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_maximum"
_THREE_LISTS = "_foreach_addcmul _foreach_addcdiv"

DEQUANTIZED: dict[str, Sample] = {
    **_each(_ALONE, lambda n: lambda o: getattr(A, n)(o.matrix)),
    **_each(_WITH_ANOTHER, lambda n: lambda o: getattr(A, n)(o.matrix, o.other)),
    **_each(_WITH_A_BOUND, lambda n: lambda o: getattr(A, n)(o.matrix, 0.25)),
    **_each("_softmax _log_softmax", lambda n: lambda o: getattr(A, n)(o.matrix, 1, False)),
    **_each(_LOSSES, lambda n: lambda o: getattr(A, n)(o.matrix, plain(o.other))),
    **_each("_local_scalar_dense item is_nonzero", lambda n: lambda o: getattr(A, n)(o.scalar)),
    **_each(
        "addcmul addcdiv", lambda n: lambda o: getattr(A, n)(o.matrix, o.other, o.matrix, value=0.5)
    ),
    **_each(_LISTS, lambda n: lambda o: getattr(A, n)([o.matrix, o.other])),
    **_each(
        _TWO_LISTS, lambda n: lambda o: getattr(A, n)([o.matrix, o.other], [o.other, o.matrix])
    ),
    **_each(_THREE_LISTS, lambda n: lambda o: getattr(A, n)([o.matrix], [o.other], [o.other])),
    "lerp": lambda o: A.lerp(o.matrix, o.other, 0.25),
    "where": lambda o: A.where(o.mask, o.matrix, o.other),
    "clamp": lambda o: A.clamp(o.matrix, -1, 1),
    "masked_fill": lambda o: A.masked_fill(o.matrix, o.mask, 0.5),
    "logsumexp": lambda o: A.logsumexp(o.matrix, [1]),
    "cumsum": lambda o: A.cumsum(o.matrix, 1),
    "native_layer_norm": lambda o: A.native_layer_norm(o.matrix, [COLS], o.vector, o.vector, 1e-5),
    "native_dropout": lambda o: A.native_dropout(o.matrix, 0.5, True),
    "topk": lambda o: A.topk(o.matrix, 3),
    **_each("_linalg_svd linalg_qr", lambda n: lambda o: getattr(A, n)(o.square)),
    "bincount": lambda o: A.bincount(torch.arange(COLS) % 7, o.vector),
    "new_ones": lambda o: A.new_ones(o.matrix, [3]),
    "new_full": lambda o: A.new_full(o.matrix, [3], 0.5),
    "_foreach_lerp": lambda o: A._foreach_lerp([o.matrix], [o.other], 0.25),
    "_foreach_pow": lambda o: A._foreach_pow([o.matrix], 2),
}

_ALONE_ = """
neg_ abs_ sqrt_ zero_ normal_ uniform_ random_ trunc_ round_ sign_ relu_ nan_to_num_ reciprocal_
exp_ log_ erfinv_ bernoulli_
"""
_LISTS_ = "_foreach_neg_ _foreach_sqrt_ _foreach_zero_ _foreach_reciprocal_"
_TWO_LISTS_ = (
    "_foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_copy_ _foreach_maximum_"
)

IN_PLACE: dict[str, Sample] = {
    **_each(_ALONE_, lambda n: _in_place(lambda t, o: getattr(A, n)(t))),
    **_each("add_ sub_ mul_ div_", lambda n: _in_place(lambda t, o: getattr(A, n)(t, o.other))),
    **_each(
        "pow_ clamp_min_ clamp_max_ fill_", lambda n: _in_place(lambda t, o: getattr(A, n)(t, 2))
    ),
    **_each(
        "addcmul_ addcdiv_", lambda n: _in_place(lambda t, o: getattr(A, n)(t, o.other, o.other))
    ),
    **_each(_LISTS_, lambda n: _foreach_in_place(lambda ts, o: getattr(A, n)(ts))),
    **_each(
        _TWO_LISTS_,
        lambda n: _foreach_in_place(lambda ts, o: getattr(A, n)(ts, [o.other, o.matrix])),
    ),
    **_each(
        "_foreach_addcmul_ _foreach_addcdiv_",
        lambda n: _foreach_in_place(
            lambda ts, o: getattr(A, n)(ts, [o.other, o.other], [o.other, o.other])
        ),
    ),
    **_each(
        "_foreach_clamp_max_ _foreach_clamp_min_",
        lambda n: _foreach_in_place(lambda ts, o: getattr(A, n)(ts, 0.5)),
    ),
    "clamp_": _in_place(lambda t, o: A.clamp_(t, -1, 1)),
    "lerp_": _in_place(lambda t, o: A.lerp_(t, o.other, 0.25)),
    "masked_fill_": _in_place(lambda t, o: A.masked_fill_(t, o.mask, 0.5)),
    **{
        name: _foreach_in_place(lambda ts, o, name=name: _fused(name, ts, o))  # type: ignore[misc]
        for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    },
    "_foreach_lerp_": _foreach_in_place(
        lambda ts, o: A._foreach_lerp_(ts, [o.other, o.matrix], 0.25)
    ),
}


def _fused(name: str, targets: list[Any], o: Operands) -> None:
    """Run one step of a fused optimizer with plain gradients and state."""
    gradients = [plain(o.other), plain(o.matrix)]
    state = [[torch.zeros(ROWS, COLS) for _ in targets] for _ in range(2)]
    steps = [torch.ones(()) for _ in targets]
    numbers: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "maximize": False}
    if name == "_fused_sgd_":
        numbers |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": True}
        A._fused_sgd_(targets, gradients, state[0], **numbers)
    elif name == "_fused_adagrad_":
        numbers |= {"lr_decay": 0.0, "eps": 1e-8}
        A._fused_adagrad_(targets, gradients, state[0], steps, **numbers)
    else:
        numbers |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
        getattr(A, name)(targets, gradients, *state, [], steps, **numbers)


REFUSED: dict[str, Sample] = {
    "diagonal": lambda o: A.diagonal(o.matrix),
    "unfold": lambda o: A.unfold(o.matrix, 0, 32, 32),
    "gather": lambda o: A.gather(o.matrix, 1, o.mask.long()),
    "scatter_": lambda o: A.scatter_(o.matrix.clone(), 1, o.mask.long(), 0.0),
    "masked_select": lambda o: A.masked_select(o.matrix, o.mask),
    "flip": lambda o: A.flip(o.matrix, [0]),
    "roll": lambda o: A.roll(o.matrix, [1], [0]),
    "repeat": lambda o: A.repeat(o.matrix, [2, 1]),
    "tril": lambda o: A.tril(o.matrix),
    "cumprod": lambda o: A.cumprod(o.matrix, 0),
    "max_pool2d_with_indices": lambda o: A.max_pool2d_with_indices(o.batch, [2, 2]),
    "_scaled_dot_product_flash_attention_for_cpu": lambda o: (
        A._scaled_dot_product_flash_attention_for_cpu(*[o.batch.unsqueeze(0)] * 3)
    ),
    "linalg_eigh": lambda o: A.linalg_eigh(o.square),
    "bitwise_and": lambda o: A.bitwise_and(o.matrix, o.other),
    "set_": lambda o: A.set_(o.matrix.detach(), o.other),
    "resize_": lambda o: A.resize_(o.matrix.detach(), [4, 4]),
}
"""Common ops outside all tables. Every op that is not in a table raises as these do."""
