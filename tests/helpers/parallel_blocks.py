"""LayerNormLinear and LayerNormMLP split over two ranks, and oracles composed from those of their
layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import parallel_cases
import torch
from parallel_cases import BATCH, SEQUENCE, SIZE, K, Layer, Result, Scales, Whole, oracle, part
from torch import Tensor

import qtensor

FFN, OUT = 256, 256
ops = torch.ops.qtensor

RECIPES: dict[str, Any] = {
    **parallel_cases.RECIPES,
    # To nearest: in which order layers draw their seeds is another test's matter.
    "nvfp4": qtensor.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


@dataclass(frozen=True)
class Block:
    """Options of a block: an activation makes it an MLP; ``norm`` is layernorm or rmsnorm."""

    norm: str
    activation: str | None
    sequence: bool
    bias: bool

    def __str__(self) -> str:
        split, bias = "sp" * self.sequence or "tp", "bias" * self.bias or "plain"
        return "-".join([self.norm, self.activation or "linear", split, bias])

    @property
    def gated(self) -> bool:
        return self.activation is not None and self.activation.endswith("glu")

    def local(self, x: Tensor, rank: int) -> Tensor:
        """Return the part of a tensor outside of the layers that a rank holds."""
        return part(x, rank, 0) if self.sequence else x

    @property
    def layers(self) -> list[Layer]:
        column = Layer("column", self.sequence, self.bias)
        return [column, Layer("row", self.sequence, self.bias)][: 2 if self.activation else 1]


BLOCKS = [
    Block("layernorm", None, False, True),
    Block("rmsnorm", None, True, False),
    Block("layernorm", None, True, True),
    Block("rmsnorm", "swiglu", False, False),
    Block("layernorm", "gelu", False, True),
    Block("layernorm", "clamped_swiglu", True, True),
    Block("rmsnorm", "srelu", True, True),
]


@dataclass
class Tensors:
    """Tensors of an unsharded block. A gated fc1 holds the activated half first, then the gate."""

    x: Tensor
    dy: Tensor
    gamma: Tensor
    beta: Tensor | None
    weights: list[Tensor]
    biases: list[Tensor | None]


def tensors(block: Block, step: int = 0) -> Tensors:
    """Parts along every dim have maxima of different size, so that a factor of the wrong tensor
    shows.
    """
    g = torch.Generator().manual_seed(11 + step)
    fixed = torch.Generator().manual_seed(11)
    x = torch.randn(SEQUENCE, BATCH, K, generator=g) * 2.0**step
    x[SEQUENCE // 2 :, :, ::3] *= 5
    made = FFN * (2 if block.gated else 1)
    sizes = [(made, K), (OUT, FFN)] if block.activation else [(made, K)]
    dy = torch.randn(SEQUENCE, BATCH, sizes[-1][0], generator=g) * 2.0**step
    dy[SEQUENCE // 2 :] *= 11
    dy[..., dy.shape[-1] // 2 :] *= 7
    weights = [torch.randn(size, generator=fixed) / 16 for size in sizes]
    for w in weights:
        w[len(w) // 2 :] *= 3
        w[:, w.shape[1] // 2 :] *= 5
    biases = [torch.randn(n, generator=fixed) if block.bias else None for n, _ in sizes]
    gamma = 1 + torch.randn(K, generator=fixed) / 4
    beta = torch.randn(K, generator=fixed) if block.norm == "layernorm" else None
    return Tensors(x, dy, gamma, beta, weights, biases)


def ranked(t: Tensor | None, gated: bool) -> Tensor | None:
    """Return the rows of fc1 in the order of ranks: a rank holds its part of both halves."""
    if t is None or not gated:
        return t
    halves = [h.chunk(SIZE) for h in t.chunk(2)]
    return torch.cat([half[rank] for rank in range(SIZE) for half in halves])


def settings(block: Block) -> tuple[str, float, bool]:
    return block.norm, 1e-5, False


def block_oracle(
    block: Block, recipe: Any, t: Tensors, scales: list[list[Scales]]
) -> list[list[Result]]:
    """By rank and layer; the first layer's result has the block's dx, the last one's its output.

    Gradients of the first layer: gamma, beta where there is one, weight, bias. ``scales`` by layer
    and rank.
    """
    none = [None] * SIZE
    normed = ops.norm(t.x, t.gamma, t.beta, *settings(block), t.x.dtype)[0]
    first = Whole(normed, ranked(t.weights[0], block.gated), ranked(t.biases[0], block.gated), t.dy)
    found = []
    if block.activation:
        # Forward alone: what the gradient is does not matter.
        any_dy = torch.zeros(*t.x.shape[:-1], len(t.weights[0]))
        forward = oracle(
            block.layers[0], recipe, dataclasses.replace(first, dy=any_dy), scales[0], none
        )
        hidden = [r.y for r in forward]
        inner = torch.cat([ops.activation(h, block.activation) for h in hidden], -1)
        second = Whole(inner, t.weights[1], t.biases[1], t.dy)
        found = oracle(block.layers[1], recipe, second, scales[1], none)
        back = [
            ops.activation_backward(r.dx, h, block.activation)
            for r, h in zip(found, hidden, strict=True)
        ]
        first.dy = torch.cat(back, -1)
    else:
        first.dy = t.dy
    results = oracle(block.layers[0], recipe, first, scales[0], none)
    for rank, result in enumerate(results):
        x = block.local(t.x, rank)
        stats = ops.norm(x, t.gamma, t.beta, *settings(block), x.dtype)[1:]
        result.dx, *norm = ops.norm_backward(
            result.dx, x, t.gamma, *stats, block.norm, False, t.beta is not None
        )
        result.gradients = [*(g for g in norm if g.numel()), *result.gradients]
    return [[r, *found[rank : rank + 1]] for rank, r in enumerate(results)]


def joined(layers: list[Result]) -> Result:
    """Return the result of a block from the results of its layers."""
    return Result(layers[-1].y, layers[0].dx, [g for r in layers for g in r.gradients])


def build(block: Block, t: Tensors, rank: int | None, group: Any, **options: Any) -> Any:
    """Return the block with a rank's part of the parameters, or with all of them if rank is
    None."""
    norm = {"normalization": "LayerNorm" if block.norm == "layernorm" else "RMSNorm"}
    options = {**norm, "bias": block.bias, **options}
    if rank is not None:
        options |= {"tp_group": group, "sequence_parallel": block.sequence}
    split = rank is not None
    if block.activation:
        module = qtensor.LayerNormMLP(
            K, FFN, activation=block.activation, set_parallel_mode=split, **options
        )
        names = [("fc1_weight", "fc1_bias"), ("fc2_weight", "fc2_bias")]
    else:
        mode = "column" if split else None
        module = qtensor.LayerNormLinear(K, len(t.weights[0]), parallel_mode=mode, **options)
        names = [("weight", "bias")]
    values = {"layer_norm_weight": t.gamma, "layer_norm_bias": t.beta}
    for i, (weight, bias) in enumerate(names):
        w, b = t.weights[i], t.biases[i]
        if split:
            layer, gated = block.layers[i], block.gated and i == 0
            w, b = layer.weight(ranked(w, gated), rank), layer.offset(ranked(b, gated), rank)
        values |= {weight: w, bias: b}
    module.load_state_dict({n: v for n, v in values.items() if v is not None})
    return module


def step(module: Any, call: Any, x: Tensor, dy: Tensor) -> Result:
    """Run one forward and backward."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.backward(dy)
    return Result(y.detach(), x.grad, [p.grad for p in module.parameters()])
