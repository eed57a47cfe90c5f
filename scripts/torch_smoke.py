"""Run each feature of qtensor once on the installed torch and print one JSON line per case.

``scripts/check_torch_versions.py`` runs this file in one environment per torch version and compares
the lines. A line is ``{"case": name, "digest": text}``, or ``{"case": name, "error": text}`` for a
case that raised. Inputs come from integer arithmetic, so every torch version computes on the same
bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import qtensor
import qtensor.distributed
from qtensor import ops, recipes

COMPILERS = ("aot_eager", "inductor")
FORMATS = (
    "fp8",
    "fp8_delayed",
    "fp8_rowwise",
    "fp8_blockwise",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
)
RECIPES = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
)
SHAPE = (256, 128)
"""Shape of the quantized matrices: a multiple of every block and every tile."""
_ERROR_LENGTH = 400


def values(*shape: int, seed: int = 1) -> Tensor:
    """Return float32 values of the given shape from integer arithmetic, between -8 and 8."""
    count = int(torch.tensor(shape).prod())
    index = torch.arange(1, count + 1, dtype=torch.int64)
    mixed = (index * 2654435761 + seed * 40503) % 1048573 * 69621 % 1048573
    return ((mixed.float() - 524286.0) / 65536.0).reshape(shape)


def leaves(result: Any) -> Iterator[Tensor | str]:
    """Yield the plain tensors of a result, and strings for all other objects."""
    if isinstance(result, qtensor.QuantizedTensor):
        yield f"{type(result).__name__}{tuple(result.shape)}"
        yield from result.buffers()
    elif isinstance(result, Tensor):
        yield result.detach()
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from leaves(part)
    else:
        yield str(result)


def digest(result: Any) -> str:
    """Return a hash of all bytes, shapes and dtypes of a result."""
    sha = hashlib.sha256()
    for leaf in leaves(result):
        if isinstance(leaf, Tensor):
            sha.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            sha.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(leaf.encode())
    return sha.hexdigest()[:16]


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type of the qtensor error that it raised."""
    try:
        return call()
    except qtensor.QTensorError as error:
        return type(error).__name__


def quantized(name: str, columnwise: bool = False, seed: int = 1) -> Any:
    """Return ``values`` of shape ``SHAPE`` quantized to a format."""
    arguments = {"scale": torch.tensor([32.0])} if name == "fp8_delayed" else {}
    quantizer = qtensor.quantizer(name, columnwise=columnwise)
    return quantizer.quantize(values(*SHAPE, seed=seed), **arguments)


def quantize(name: str) -> list[Any]:
    """Return quantized and decoded tensors, with rowwise data only and with both directions."""
    results = [quantized(name), quantized(name, columnwise=True)]
    return [*results, *(q.dequantize() for q in results)]


def aten_ops(name: str) -> list[Any]:
    """Run ops of each class of the op matrix; an op that raises counts by the type of its error."""
    q, both, x = quantized(name), quantized(name, columnwise=True), values(8, SHAPE[1], seed=3)
    calls: list[Callable[[], Any]] = [
        lambda: q[:32],
        lambda: q[:128],
        lambda: q[3],
        lambda: q[:, :64],
        lambda: both[:32],
        lambda: both[:128],
        lambda: both.t(),
        lambda: both.chunk(2),
        lambda: q.view(2, 128, 128),
        lambda: torch.cat([q, q]),
        lambda: q.clone(),
        lambda: q + 1,
        lambda: q.clone().mul_(2),
        lambda: q.sum(),
        lambda: functional.linear(x, q),
        lambda: x @ q.t(),
        lambda: functional.embedding(torch.tensor([0, 5, 255]), q),
        lambda: torch.empty_like(q).copy_(q),
    ]
    return [outcome(call) for call in calls]


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return ``function``, compiled to one graph unless ``backend`` is "eager"."""
    if backend == "eager":
        return function
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def train(model: torch.nn.Module, recipe: Any, backend: str, autograd: bool = False) -> list[Any]:
    """Return losses and gradients of three steps; ``autograd`` compiles the backward pass too."""

    def forward(x: Tensor) -> Tensor:
        with qtensor.autocast(recipe=recipe):
            return model(x)

    run, results = compiled(forward, backend), []
    torch.manual_seed(0)  # NVFP4BlockScaling rounds gradients at random.
    for step in range(3):
        y = run(values(64, 64, seed=step))
        if autograd:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
                y.square().mean().backward()
        else:
            y.square().mean().backward()
        results += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    return results


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """Set every parameter to ``values`` and return the model."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(values(*parameter.shape, seed=seed + 7) / 8)
    return model


def linear(recipe: str, backend: str, autograd: bool = False) -> list[Any]:
    """Train one linear layer under a recipe."""
    layer = filled(qtensor.Linear(64, 128))
    return train(layer, getattr(recipes, recipe)(), backend, autograd)


def largest_of_two(history: Tensor) -> Tensor:
    """Return the amax of each column (columns,) over the last two steps of a history."""
    return history[:2].amax(dim=0)


def linear_with_algorithm(backend: str, autograd: bool = False) -> list[Any]:
    """Train one linear layer under delayed scaling with an ``amax_compute_algo`` of the caller."""
    recipe = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo=largest_of_two)
    return train(filled(qtensor.Linear(64, 128)), recipe, backend, autograd)


def sequential(recipe: str, backend: str) -> list[Any]:
    """Train a gated MLP that is written as a sequence of operations."""
    steps = ops.RMSNorm(64), ops.Linear(64, 256), ops.SwiGLU(), ops.Linear(128, 64)
    return train(filled(ops.Sequential(*steps)), getattr(recipes, recipe)(), backend)


def mlp(recipe: str, backend: str) -> list[Any]:
    """Train a LayerNormMLP."""
    return train(filled(qtensor.LayerNormMLP(64, 128)), getattr(recipes, recipe)(), backend)


def boundary(name: str, backend: str) -> list[Any]:
    """Pass quantized tensors into and out of a compiled function, with two batch sizes."""
    weight, options = quantized(name), {}
    if name == "fp8_delayed":
        options = {"scale": torch.tensor([4.0])}

    def step(x: Tensor, weight: Any) -> Any:
        return qtensor.quantize(functional.linear(x, weight), name, **options)

    run = compiled(step, backend)
    return [run(values(batch, SHAPE[1]), weight) for batch in (128, 256)]


def save_and_load(name: str) -> list[Any]:
    """Save a quantized parameter and load it with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save({"weight": torch.nn.Parameter(quantized(name), requires_grad=False)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    return [loaded.detach(), loaded.dequantize()]


class Exported(torch.nn.Module):
    """A linear layer with an MXFP8 weight that quantizes its input to MXFP8 first."""

    def __init__(self) -> None:
        super().__init__()
        weight = qtensor.quantize(values(48, 64), "mxfp8")
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quantizer = qtensor.quantizer("mxfp8")

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 48) products for a (batch, 64) float32 input."""
        return functional.linear(self.quantizer(x).dequantize(), self.weight)


def exported_program() -> torch.export.ExportedProgram:
    """Return the program of ``Exported`` for any batch size."""
    batch = {0: torch.export.Dim("batch", min=2, max=4096)}
    return torch.export.export(Exported(), (values(40, 64),), dynamic_shapes={"x": batch})


def export() -> Any:
    """Export, save, load and run a program."""
    file = io.BytesIO()
    torch.export.save(exported_program().run_decompositions(), file)
    file.seek(0)
    return torch.export.load(file).module()(values(72, 64))


def package() -> Any:
    """Build an AOTInductor package, load it and run it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "program.pt2")
        torch._inductor.aoti_compile_and_package(exported_program(), package_path=path)
        return torch._inductor.aoti_load_package(path)(values(72, 64))


def _sharded_rank(rank: int, recipe: str, folder: str) -> None:
    """Train one step on a rank of two, and save the loss and the weights as this rank sees them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = filled(torch.nn.Sequential(qtensor.Linear(64, 128), qtensor.Linear(128, 64)))
    qtensor.distributed.quantized_all_gather(model, getattr(recipes, recipe)())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    torch.manual_seed(rank)  # NVFP4BlockScaling rounds gradients at random.
    with qtensor.autocast(recipe=getattr(recipes, recipe)()):
        loss = model(values(64, 64, seed=rank)).square().mean()
    loss.backward()
    optimizer.step()
    qtensor.distributed.reduce_amaxes(model)
    weights = [p.full_tensor().detach().clone() for p in model.parameters()]
    torch.save([loss.detach(), *weights], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def sharded(recipe: str) -> list[Any]:
    """Train one step under ``fully_shard`` on two processes; codes of the weights are gathered."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sharded_rank, (recipe, folder), nprocs=2)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]


def cases() -> dict[str, Callable[[], Any]]:
    """Return every case by name; a name that ends in a compiler must equal the case "... eager"."""
    table: dict[str, Callable[[], Any]] = {}
    for name in FORMATS:
        table[f"quantize {name}"] = partial(quantize, name)
        table[f"aten ops {name}"] = partial(aten_ops, name)
        table[f"save and load {name}"] = partial(save_and_load, name)
        for backend in ("eager", *COMPILERS):
            table[f"boundary {name} {backend}"] = partial(boundary, name, backend)
    for recipe in RECIPES:
        for backend in ("eager", *COMPILERS):
            table[f"Linear {recipe} {backend}"] = partial(linear, recipe, backend)
        table[f"Linear {recipe} compiled autograd"] = partial(linear, recipe, "aot_eager", True)
    for backend in ("eager", *COMPILERS):
        table[f"Algorithm Linear {backend}"] = partial(linear_with_algorithm, backend)
    table["Algorithm Linear compiled autograd"] = partial(linear_with_algorithm, "aot_eager", True)
    for recipe in ("DelayedScaling", "MXFP8BlockScaling"):
        for backend in ("eager", *COMPILERS):
            table[f"ops.Sequential {recipe} {backend}"] = partial(sequential, recipe, backend)
            table[f"LayerNormMLP {recipe} {backend}"] = partial(mlp, recipe, backend)
    for recipe in ("Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"):
        table[f"fully_shard {recipe}"] = partial(sharded, recipe)
    table["Exported eager"] = lambda: Exported()(values(72, 64))
    table["Exported torch.export"] = export
    table["Exported AOTInductor"] = package
    return table


def main() -> None:
    """Run all cases."""
    warnings.simplefilter("ignore")
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for name, case in cases().items():
        line = {"case": name}
        try:
            line["digest"] = digest(case())
        except Exception as error:  # noqa: BLE001 - the table reports it
            line["error"] = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
