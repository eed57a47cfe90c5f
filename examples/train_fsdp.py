"""Train a small GPT under ``fully_shard``, with any recipe, and resume from a checkpoint.

``torchrun --nproc-per-node 2 examples/train_fsdp.py --recipe mxfp8`` trains on the text of the
Python installation, on GPUs if there are enough, else on the CPU. ``--gather quantized`` lets codes
and scales travel instead of weights in high precision. ``--checkpoint FOLDER`` saves with
``torch.distributed.checkpoint`` and goes on from the last step that was saved, on any number of
ranks. Each line shows the loss, the tokens a second of all ranks, and the megabytes that this rank
gave to gathers of parameters in one step.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qtensor
from qtensor import recipes
from qtensor.distributed import Traffic, quantized_all_gather, reduce_amaxes


def _small_weights(role: recipes.Role) -> str:
    return "mxfp4" if role.tensor == "weight" else "mxfp6"


RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "none": lambda: None,
    "current": recipes.Float8CurrentScaling,
    "delayed": recipes.DelayedScaling,
    "blockwise": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "rowwise": lambda: recipes.CustomRecipe(factory=lambda role: "fp8_rowwise"),
    "mxfp6": lambda: recipes.CustomRecipe(factory=_small_weights),
}
VOCABULARY = 256


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` (batch, length, width) and both networks."""
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts]
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model over bytes."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, width // 64) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, length, 256) of the next bytes; ``tokens``: (batch, length)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--recipe", choices=RECIPES, default="mxfp8")
    parser.add_argument("--gather", choices=("plain", "quantized"), default="plain")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank and step")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and to resume from")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--bfloat16", action="store_true", help="gather and compute in bfloat16")
    return parser.parse_args(arguments)


def build(o: argparse.Namespace, device: torch.device) -> Any:
    """Return the sharded model."""
    torch.manual_seed(0)
    model = GPT(o.layers, o.width, o.length).to(device)
    recipe = RECIPES[o.recipe]()
    if recipe is not None:
        qtensor.convert_(model, recipe, lambda _, name: name != "head")
        if o.gather == "quantized":
            quantized_all_gather(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if o.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batch(text: Tensor, o: argparse.Namespace, step: int) -> Tensor:
    """Return tokens (batch, length + 1) of a step, others on each rank."""
    seed = step * dist.get_world_size() + dist.get_rank()
    starts = torch.randint(
        len(text) - o.length, (o.batch,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([text[s : s + o.length + 1] for s in starts.tolist()]).long()


def newest(folder: Path | None) -> int:
    """Return the last step of which a folder has a complete checkpoint; 0 without one."""
    if folder is None or not folder.is_dir():
        return 0
    # torch writes .metadata last.
    return max([int(path.parent.name) for path in folder.glob("*/.metadata")], default=0)


def save(folder: Path, step: int, model: Any, optimizer: Any) -> None:
    """Save model and optimizer, each rank its own shards."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(step))


def load(folder: Path, step: int, model: Any, optimizer: Any) -> None:
    """Load what ``save`` saved, with the sharding of this run."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(step))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def train(o: argparse.Namespace, device: torch.device) -> list[float]:
    """Train, and return the loss of each step on this rank."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"".join(path.read_bytes() for path in sources)[: 1 << 22]
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    model = build(o, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    first, losses = newest(o.checkpoint), []
    if first:
        load(o.checkpoint, first, model, optimizer)
    for step in range(first, o.steps):
        began = time.perf_counter()
        tokens = batch(text, o, step).to(device)
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        with Traffic() as traffic:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if o.gather == "quantized":
            reduce_amaxes(model)
        losses.append(float(loss.detach()))
        seconds = time.perf_counter() - began
        if dist.get_rank() == 0:
            rate = dist.get_world_size() * o.batch * o.length / seconds
            speed = f"{rate:.0f} tokens/s, {traffic.gathered / 1e6:.2f} MB gathered"
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {speed}", flush=True)
        if o.checkpoint is not None and (step + 1) % o.save_every == 0:
            save(o.checkpoint, step + 1, model, optimizer)
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the process group of torchrun, train, and leave it."""
    o = options(arguments)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(o, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
