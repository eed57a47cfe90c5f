"""Train a small GPT on text from the Python installation, in high precision and with each recipe.

``python examples/train_lm.py`` compiles each model with ``fullgraph=True`` and trains all of them
from one seed on the same batches. It writes ``docs/training_losses.png`` (with matplotlib, from the
extra ``plot``), ``docs/training_losses.md`` and a JSON file. It takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtensor
from qtensor import recipes

DOCS = Path(__file__).parents[1] / "docs"
RECIPES: dict[str, recipes.Recipe | None] = {
    "high precision": None,
    "DelayedScaling": recipes.DelayedScaling(amax_history_len=16),
    "Float8CurrentScaling": recipes.Float8CurrentScaling(),
    "Float8BlockScaling": recipes.Float8BlockScaling(),
    "MXFP8BlockScaling": recipes.MXFP8BlockScaling(),
    "NVFP4BlockScaling": recipes.NVFP4BlockScaling(),
}
LIMITS = {"NVFP4BlockScaling": 0.03}
"""Largest allowed relative difference of the final loss from high precision (default 0.01)."""
TAIL = 40
"""The final loss is the mean of this many steps, because the loss of one batch varies."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the run."""

    width: int = 128
    heads: int = 4
    layers: int = 2
    context: int = 128
    batch: int = 16
    steps: int = 300
    vocabulary: int = 256
    learning_rate: float = 2e-3


def corpus(limit: int = 4 << 20) -> bytes:
    """Return licences and documentation of the Python installation, in a fixed order.

    Raises:
        FileNotFoundError: there are no text files.
    """
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), Path(paths["purelib"])]
    names = ("LICENSE*", "*.txt", "*.rst", "*.md")
    files = {p for root in roots for name in names for p in root.rglob(name) if p.is_file()}
    texts = [p.read_bytes() for p in sorted(files, key=lambda p: (p.name, p.stat().st_size))]
    data = b"\n".join(t for t in texts if t)[:limit]
    if len(data) < 1 << 16:
        # A minimal installation has little text, so add the standard library's sources.
        sources = sorted(Path(paths["stdlib"]).glob("*.py"))
        data += b"\n".join(p.read_bytes() for p in sources)[:limit]
    if not data:
        raise FileNotFoundError(f"no text under {roots}")
    return data


class Block(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = qtensor.LayerNormLinear(
            c.width, 3 * c.width, normalization="RMSNorm", bias=False
        )
        self.proj = qtensor.Linear(c.width, c.width, bias=False)
        self.mlp = qtensor.LayerNormMLP(
            c.width, 4 * c.width, normalization="RMSNorm", activation="srelu", bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C) for an input of (B, T, C)."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """A byte-level language model. Embeddings and head stay in high precision, as is usual."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of (B, T) tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batches(data: Tensor, c: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets); the sequence is the same for every model."""
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(data) - c.context - 1, (c.batch,), generator=generator)
        rows = torch.stack([data[s : s + c.context + 1] for s in starts.tolist()])
        yield rows[:, :-1].long(), rows[:, 1:].long()


def train(recipe: recipes.Recipe | None, data: Tensor, c: Config) -> tuple[list[float], float]:
    """Train a model, and return the loss of every step and the seconds that it took."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.learning_rate, weight_decay=0.1)
    warm = max(1, c.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, max(0.1, 1 - s / c.steps))
    )
    step = torch.compile(model, fullgraph=True)
    losses, start = [], time.perf_counter()
    for _, (tokens, targets) in zip(range(c.steps), batches(data, c), strict=False):
        with qtensor.autocast(enabled=recipe is not None, recipe=recipe):
            loss = step(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - start


def table(results: dict[str, list[float]], seconds: dict[str, float], c: Config, size: int) -> str:
    """Return the results as Markdown."""

    def final(name: str) -> float:
        tail = results[name][-TAIL:]
        return sum(tail) / len(tail)

    base = final("high precision")
    lines = [
        "# Losses of a small GPT by recipe",
        "",
        f"`python examples/train_lm.py`: {c.layers} layers of width {c.width}, "
        f"{c.batch} x {c.context} bytes a step, {c.steps} steps over {size:,} bytes of text "
        "from the Python installation; one seed, the same batches, compiled "
        f"with `fullgraph=True`. {platform.machine()} CPU, {torch.get_num_threads()} threads, "
        f"PyTorch {torch.__version__}. "
        f"Final loss: mean of the last {TAIL} steps.",
        "",
        "| recipe | final loss | against high precision | allowed | seconds |",
        "|---|---|---|---|---|",
    ]
    for name in results:
        off, limit = final(name) / base - 1, LIMITS.get(name, 0.01)
        allowed = "" if name == "high precision" else f"{limit:.0%}"
        lines.append(
            f"| {name} | {final(name):.4f} | {off:+.2%} | {allowed} | {seconds[name]:.0f} |"
        )
    return "\n".join([*lines, "", "![Loss by step](training_losses.png)", ""])


def plot(results: dict[str, list[float]], path: Path) -> None:
    """Plot the smoothed losses by step."""
    import matplotlib  # noqa: PLC0415 - an optional package

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, losses in results.items():
        width = min(20, len(losses))
        smooth = torch.tensor(losses).unfold(0, width, 1).mean(1)
        axes.plot(range(width - 1, len(losses)), smooth, label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="cross-entropy, mean of 20 steps", title="A small GPT by recipe")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train the models and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--output", type=Path, default=DOCS)
    arguments = parser.parse_args()
    config = Config(steps=arguments.steps)
    text = corpus()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    names = ["high precision", *(n for n in arguments.recipes if n != "high precision")]
    results, seconds = {}, {}
    for name in names:
        results[name], seconds[name] = train(RECIPES[name], data, config)
        print(f"{name:22} {results[name][-1]:.4f} after {seconds[name]:.0f} s", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    page = table(results, seconds, config, len(text))
    (arguments.output / "training_losses.md").write_text(page)
    (arguments.output / "training_losses.json").write_text(json.dumps(results) + "\n")
    plot(results, arguments.output / "training_losses.png")
    print(page)


if __name__ == "__main__":
    main()
