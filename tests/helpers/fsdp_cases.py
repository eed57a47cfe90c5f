"""A small GPT trained under ``fully_shard`` on two ranks, and beside it in one process.

The oracle of a step holds one replica for each rank, gives each its batch, averages the gradients
and lets each replica make the same step. Two ranks add two gradients, a + b = b + a, and the half
of a float is exact: sharded training has the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qtensor

WIDTH, TOKENS, LENGTH = 64, 64, 32
RECIPES: dict[str, Callable[[], Any]] = {
    "current": qtensor.recipes.Float8CurrentScaling,
    "delayed": lambda: qtensor.recipes.DelayedScaling(amax_history_len=4),
    "blockwise": qtensor.recipes.Float8BlockScaling,
    "mxfp8": qtensor.recipes.MXFP8BlockScaling,
    "nvfp4": qtensor.recipes.NVFP4BlockScaling,
}
Named = list[tuple[str, Tensor]]
Prepare = Callable[[nn.Module], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain() -> GPT:
    torch.manual_seed(0)
    return GPT()


def converted(recipe: str, **options: Any) -> GPT:
    model = plain()
    qtensor.convert_(model, RECIPES[recipe](), **options)
    return model


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(call: Any, step: int, rank: int) -> Tensor:
    """Return the loss of a rank's batch; seeds of stochastic rounding follow from the arguments."""
    g = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, TOKENS, (2, LENGTH), generator=g)
    torch.manual_seed(1000 + 100 * step + rank)
    logits = call(tokens).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, tokens.roll(-1, 1).flatten())


def whole(t: Any) -> Tensor:
    """Return a copy of the whole tensor: ``full_tensor`` may return memory of the parameter."""
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()


def state(model: nn.Module, kind: str) -> Named:
    named = [(n, p if kind == "parameter" else p.grad) for n, p in model.named_parameters()]
    return [(f"{kind} {n}", whole(t)) for n, t in named if t is not None]


def train(model: nn.Module, call: Any = None, steps: int = 2, micro: int = 1) -> Named:
    """Return losses, gradients and parameters of each step of this rank's sharded model."""
    rank, optimizer = dist.get_rank(), torch.optim.AdamW(model.parameters(), lr=0.01)
    results: Named = []
    for step in range(steps):
        for i in range(micro):
            if micro > 1:
                model.set_requires_gradient_sync(i == micro - 1)
            loss = loss_of(model if call is None else call, micro * step + i, rank)
            loss.backward()
        results += [("loss", loss.detach()), *state(model, "gradient")]
        optimizer.step()
        optimizer.zero_grad()
        results += state(model, "parameter")
    return results


def expected(make: Callable[[], nn.Module], steps: int = 2, micro: int = 1) -> Named:
    """Return what ``train`` must return, by the oracle."""
    replicas = [make() for _ in range(dist.get_world_size())]
    optimizers = [torch.optim.AdamW(r.parameters(), lr=0.01) for r in replicas]
    results: Named = []
    for step in range(steps):
        for rank, replica in enumerate(replicas):
            for i in range(micro):
                loss = loss_of(replica, micro * step + i, rank)
                loss.backward()
            if rank == dist.get_rank():
                results.append(("loss", loss.detach()))
        for a, b in zip(*[r.parameters() for r in replicas], strict=True):
            if a.grad is not None:
                a.grad = (a.grad + b.grad) / 2
                b.grad = a.grad.clone()
        results += state(replicas[0], "gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        results += state(replicas[0], "parameter")
    return results


def assert_equal(ours: Named, theirs: Named) -> None:
    """Assert that two trainings have the same bytes."""
    assert [n.replace("_checkpoint_wrapped_module.", "") for n, _ in ours] == [
        n.replace("_checkpoint_wrapped_module.", "") for n, _ in theirs
    ]
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype, name
        different = int((a != b).sum())
        assert not different, f"{name}: {different} of {a.numel()} values differ"
