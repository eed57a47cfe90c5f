"""Sharded layers, and oracles written by hand: the result of a rank, from the whole tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import qtensor
from qtensor.recipes import Role

SIZE = 2
SEQUENCE, BATCH, K, N = 32, 4, 256, 256
"""(SEQUENCE, BATCH, K) inputs: 128 rows. Half of the features is whole blocks of every format."""

RECIPES: dict[str, Any] = {
    "high_precision": None,
    "current": qtensor.recipes.Float8CurrentScaling(),
    "delayed": qtensor.recipes.DelayedScaling(amax_history_len=4),
    "blockwise": qtensor.recipes.Float8BlockScaling(),
    "mxfp8": qtensor.recipes.MXFP8BlockScaling(),
    "nvfp4": qtensor.recipes.NVFP4BlockScaling(),
}
LOCAL = ("high_precision", "blockwise", "mxfp8")
"""Recipes whose factors see no more than a block: a shard of whole blocks has the codes of the
whole.
"""


def part(t: Tensor, rank: int, dim: int) -> Tensor:
    """Return a rank's part of a tensor."""
    size = t.shape[dim] // SIZE
    return t.narrow(dim, rank * size, size).contiguous()


@dataclass(frozen=True)
class Layer:
    """Options of a layer: ``row``, ``sequence`` and ``bias`` as in the arguments of the module."""

    mode: str
    sequence: bool
    bias: bool

    def __str__(self) -> str:
        return "-".join([self.mode, "sp" * self.sequence or "tp", "bias" * self.bias or "plain"])

    def inputs(self, x: Tensor, rank: int) -> Tensor:
        """Return the part of the whole input that a rank gets."""
        if self.mode == "row":
            return part(x, rank, -1)
        return part(x, rank, 0) if self.sequence else x

    def outputs(self, y: Tensor, rank: int) -> Tensor:
        """Return the part of the whole output, or of its gradient, that a rank holds."""
        if self.mode == "column":
            return part(y, rank, -1)
        return part(y, rank, 0) if self.sequence else y

    def weight(self, w: Tensor, rank: int) -> Tensor:
        return part(w, rank, 0 if self.mode == "column" else 1)

    def offset(self, b: Tensor | None, rank: int) -> Tensor | None:
        return part(b, rank, 0) if b is not None and self.mode == "column" else b


LAYERS = [
    Layer(mode, sequence, bias)
    for mode in ("column", "row")
    for sequence in (False, True)
    for bias in (False, True)
]


@dataclass
class Whole:
    """The tensors of an unsharded layer."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    dy: Tensor


def whole(bias: bool, dtype: torch.dtype = torch.float32, step: int = 0) -> Whole:
    """Parts along every dim have maxima of different size, so that a factor of the wrong tensor
    shows.
    """
    g = torch.Generator().manual_seed(7 + step)
    x = torch.randn(SEQUENCE, BATCH, K, generator=g)
    w = torch.randn(N, K, generator=g) / 16
    dy = torch.randn(SEQUENCE, BATCH, N, generator=g) * 2.0**step
    x[SEQUENCE // 2 :] *= 5
    x[..., K // 2 :] *= 3
    w[N // 2 :] *= 3
    w[:, K // 2 :] *= 5
    dy[SEQUENCE // 2 :] *= 11
    dy[..., N // 2 :] *= 7
    b = torch.randn(N, generator=g).to(dtype) if bias else None
    return Whole(x.to(dtype), w.to(dtype), b, dy.to(dtype))


@dataclass
class Result:
    """The output and the gradients of one rank."""

    y: Tensor
    dx: Tensor
    gradients: list[Tensor]
    """Of weight and bias, or of those of two layers."""
    amax: dict[str, Tensor] = field(default_factory=dict)
    """By role, under delayed scaling."""


Scales = dict[str, Tensor]


def quantized(
    recipe: Any, role: str, x: Tensor, seed: Tensor | None, scales: Scales
) -> tuple[Any, Tensor | None]:
    """Return an operand quantized in both directions, and its amax for delayed scaling."""
    quantizer = None if recipe is None else recipe.quantizer(Role(role))
    if quantizer is None:
        return x, None
    quantizer = quantizer.with_usage(rowwise=True, columnwise=True)
    if quantizer.needs_scale:
        return quantizer.quantize_with_amax(x, scale=scales[role])
    noise = {"generator": seed} if quantizer.stochastic_rounding else {}
    return quantizer.quantize(x, **noise), None


def oracle(
    layer: Layer, recipe: Any, t: Whole, scales: list[Scales], seeds: list[Tensor | None]
) -> list[Result]:
    """By rank, as are ``scales`` and ``seeds``. What a GEMM reads is one tensor: gathered sequences
    whole, shards of features alone.
    """
    parts = []
    for rank in range(SIZE):
        # What meets in this rank's GEMMs, whatever was split along the sequence.
        x = part(t.x, rank, -1) if layer.mode == "row" else t.x
        dy = t.dy if layer.mode == "row" else part(t.dy, rank, -1)
        rows, gradients = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        xq, ax = quantized(recipe, "input", rows, None, scales[rank])
        wq, aw = quantized(recipe, "weight", layer.weight(t.w, rank), None, scales[rank])
        gq, ag = quantized(recipe, "grad_output", gradients, seeds[rank], scales[rank])
        xb, wb = xq, wq
        override = None if recipe is None else recipe.backward_override
        if override is not None:
            # Beside a plain gradient the value of a quantized operand counts.
            gq = gradients
            xb, wb = (rows, layer.weight(t.w, rank)) if override == "high_precision" else (xq, wq)
        bias = layer.offset(t.b, rank) if layer.mode == "column" else None
        amax = {} if ax is None else {"input": ax, "weight": aw, "grad_output": ag}
        parts.append(
            Result(
                qtensor.gemm(xq, wq, "TN", bias, t.x.dtype).view(*x.shape[:-1], -1),
                qtensor.gemm(gq, wb, "NN", None, t.x.dtype).view(*x.shape[:-1], -1),
                [
                    qtensor.gemm(gq, xb, "NT", None, t.w.dtype),
                    *([] if t.b is None else [torch.ops.qtensor.bias_grad(gradients)]),
                ],
                amax,
            )
        )
    if layer.mode == "column":
        dx = parts[0].dx + parts[1].dx
        for rank, p in enumerate(parts):
            p.dx = layer.inputs(dx, rank)
    else:
        y = parts[0].y + parts[1].y
        for rank, p in enumerate(parts):
            p.y = layer.outputs(y, rank)
            p.y = p.y if t.b is None else p.y + t.b
    return parts


def build(layer: Layer, t: Whole, rank: int, group: Any, **options: Any) -> qtensor.Linear:
    """Return the sharded layer with a rank's part of the parameters."""
    module = qtensor.Linear(
        t.w.shape[1],
        t.w.shape[0],
        bias=t.b is not None,
        params_dtype=t.w.dtype,
        parallel_mode=layer.mode,
        tp_group=group,
        sequence_parallel=layer.sequence,
        **options,
    )
    with torch.no_grad():
        module.weight.copy_(layer.weight(t.w, rank))
        if module.bias is not None:
            module.bias.copy_(layer.offset(t.b, rank))
    return module


def step(
    module: Any, call: Any, layer: Layer, t: Whole, rank: int, unsharded: bool = False
) -> Result:
    """Run one forward and backward of a layer by ``call``, from the random state that ``draws``
    reads."""
    torch.manual_seed(100 + rank)
    module.zero_grad()
    x = layer.inputs(t.x, rank).clone().requires_grad_()
    y = call(x)
    y.backward(t.dy if unsharded else layer.outputs(t.dy, rank))
    return Result(y.detach(), x.grad, [p.grad for p in module.parameters()])


# ---- column -> relu -> row -----------------------------------------------------------------------


class Mlp(torch.nn.Module):
    """Two sharded layers, and between them the activation of a rank's own features."""

    def __init__(self, layers: list[Layer], tensors: list[Whole], rank: int, group: Any) -> None:
        super().__init__()
        both = zip(layers, tensors, strict=True)
        self.layers = torch.nn.ModuleList([build(one, t, rank, group) for one, t in both])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.relu(self.layers[0](x)))


def mlp_layers(sequence: bool, bias: bool) -> tuple[list[Layer], list[Whole]]:
    layers = [Layer("column", sequence, bias), Layer("row", sequence, bias)]
    return layers, [whole(bias), whole(bias, step=1)]


def mlp_oracle(
    sequence: bool, bias: bool, recipe: Any, seeds: list[list[Tensor | None]]
) -> list[Result]:
    """Layer by layer, each by its own oracle, the whole of what is between them put together from
    the parts.
    """
    layers, (first, second) = mlp_layers(sequence, bias)
    scales = ones()
    hidden = torch.cat([r.y for r in oracle(layers[0], recipe, first, scales, seeds[0])], -1)
    last = Whole(torch.relu(hidden), second.w, second.b, second.dy)
    row = oracle(layers[1], recipe, last, scales, seeds[1])
    back = torch.cat([r.dx for r in row], -1) * (hidden > 0)
    column = oracle(layers[0], recipe, dataclasses.replace(first, dy=back), scales, seeds[0])
    return [
        Result(b.y, a.dx, [*a.gradients, *b.gradients]) for a, b in zip(column, row, strict=True)
    ]


def ones() -> list[Scales]:
    """Return delayed scaling's first factors."""
    one = dict.fromkeys(("input", "weight", "grad_output"), torch.ones(1))
    return [one] * SIZE


def draws(recipe: Any, rank: int, count: int) -> list[Tensor | None]:
    """Return the seeds that ``count`` layers draw in turn from the rank's random state."""
    quantizer = None if recipe is None else recipe.quantizer(Role("grad_output"))
    if quantizer is None or not quantizer.stochastic_rounding:
        return [None] * count
    g = torch.Generator().manual_seed(100 + rank)
    return [torch.empty(1, dtype=torch.int64).random_(generator=g) for _ in range(count)]
