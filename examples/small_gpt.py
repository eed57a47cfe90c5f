"""Train a small byte-level GPT of plain ``nn.Linear`` layers, and measure its perplexity.

``python examples/small_gpt.py --output small_gpt.pt`` reads the sources of Python's standard
library, trains on nine tenths of the files and prints the perplexity of a byte on the others. It
takes about ten minutes on two cores. ``benchmarks.rounding`` quantizes the weights of this model.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the training."""

    width: int = 192
    heads: int = 6
    layers: int = 4
    hidden: int = 512
    context: int = 192
    batch: int = 16
    steps: int = 1200
    learning_rate: float = 3e-3


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm, with the layer names of Llama models."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(c.width), nn.RMSNorm(c.width)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(c.width, c.width, bias=False))
        self.gate_proj = nn.Linear(c.width, c.hidden, bias=False)
        self.up_proj = nn.Linear(c.width, c.hidden, bias=False)
        self.down_proj = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C) for an input of (B, T, C)."""
        h = self.attention_norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, c.width)
        self.positions = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width)
        self.head = nn.Linear(c.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, 256) of tokens (B, T)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those held out, uint8: sources of the standard library.

    The hash of a file's name decides where it belongs, so that most files of another version of
    Python are on the same side.

    Raises:
        FileNotFoundError: the installation has less than a megabyte of sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sides: tuple[bytearray, bytearray] = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("site-packages/", "dist-packages/", "test/", "encodings/")):
            side = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0
            sides[side].extend(path.read_bytes())
    if sum(map(len, sides)) < LEAST_BYTES:
        raise FileNotFoundError(f"less than {LEAST_BYTES} bytes of *.py under {root}")
    train, held_out = (torch.frombuffer(side, dtype=torch.uint8) for side in sides)
    return train, held_out


def windows(data: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Return ``count`` random windows of the data, int64 (count, length)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - length, (count,), generator=generator)
    return torch.stack([data[start : start + length] for start in starts.tolist()]).long()


def batches(data: Tensor, c: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets) for each step."""
    for step in range(c.steps):
        rows = windows(data, c.batch, c.context + 1, step)
        yield rows[:, :-1], rows[:, 1:]


def train(data: Tensor, c: Config, seed: int = 0) -> GPT:
    """Return a trained model in eval mode."""
    torch.manual_seed(seed)
    model = GPT(c)
    fit(model, data, c)
    return model


def fit(model: nn.Module, data: Tensor, c: Config) -> None:
    """Train a model to predict the next byte, and set it to eval mode.

    Args:
        model: tokens (B, T) to logits (B, T, 256).
        data: uint8 bytes.
        c: has the sizes of the training.
    """

    def losses() -> Iterator[Tensor]:
        for tokens, targets in batches(data, c):
            yield F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    descend(model, losses(), c.steps, c.learning_rate, weight_decay=0.1)


def descend(
    model: nn.Module, losses: Iterator[Tensor], steps: int, rate: float, weight_decay: float
) -> None:
    """Train a model with AdamW, and set it to eval mode.

    Args:
        model: whose parameters are trained.
        losses: computes a loss for each step.
        steps: number of them; the rate rises in the first twentieth, then falls as a cosine.
        rate: the largest learning rate.
        weight_decay: of AdamW.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=weight_decay
    )
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * s / steps))
    )
    model.train()
    began = time.perf_counter()
    for step, loss in enumerate(losses):
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"{step:5} {loss.item():.4f} {time.perf_counter() - began:.0f} s", flush=True)
    model.eval()


@torch.no_grad()
def perplexity(model: nn.Module, data: Tensor, context: int, count: int = 512) -> float:
    """Return the perplexity of a byte: exp of the mean cross-entropy in random windows.

    Args:
        model: tokens (B, T) to logits (B, T, V).
        data: uint8 bytes.
        context: tokens of a window; the first half of them is context only.
        count: number of windows; the same ones in each call.
    """
    rows = windows(data, count, context + 1, seed=1 << 20)
    total, half = 0.0, context // 2
    for part in rows.split(32):
        logits, targets = model(part[:, :-1])[:, half:], part[:, half + 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        total += float(loss.double().sum())
    return math.exp(total / (count * (context - half)))


def save(model: GPT, c: Config, path: Path) -> None:
    """Write the weights and the sizes."""
    torch.save({"config": asdict(c), "state": model.state_dict()}, path)


def load(path: Path) -> tuple[GPT, Config]:
    """Return the model that ``save`` wrote, in eval mode, and its sizes."""
    data = torch.load(path, weights_only=True)
    c = Config(**data["config"])
    model = GPT(c)
    model.load_state_dict(data["state"])
    return model.eval(), c


def main() -> None:
    """Train the model, write it, and print its perplexity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--output", type=Path, default=Path("small_gpt.pt"))
    arguments = parser.parse_args()
    config = Config(steps=arguments.steps)
    data, held_out = corpus()
    print(f"{len(data):,} bytes to train on, {len(held_out):,} held out", flush=True)
    model = train(data, config)
    save(model, config, arguments.output)
    print(f"perplexity {perplexity(model, held_out, config.context):.4f}")


if __name__ == "__main__":
    main()
