"""Bytes that a rank gives to collectives, and bytes that it holds, for the page on planning."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import qtensor
import qtensor.optim
from qtensor.distributed import Traffic, quantized_all_gather, reduce_amaxes
from qtensor.recipes import CustomRecipe

N, K, TOKENS = 1536, 512, 1536
"""Rows, columns and tokens. A part over 2, 3 or 4 ranks is whole tiles of 128 rows."""

WEIGHTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "`fp8`": ("fp8", {}, 8),
    "`fp8_rowwise`": ("fp8_rowwise", {}, 8 + 32 / K),
    "`fp8_blockwise`, 2-D blocks": ("fp8_blockwise", {"block_scaling_dim": 2}, 8 + 32 / 128**2),
    "`mxfp8`, 1-D blocks, both directions": ("mxfp8", {}, 2 * (8 + 8 / 32)),
    "`mxfp8`, 2-D blocks": ("mxfp8", {"with_2d_quantization": True}, 8 + 8 / 32),
    "`mxfp6`, packed, 2-D blocks": (
        "mxfp6",
        {"with_2d_quantization": True, "packed": True},
        6 + 8 / 32,
    ),
    "`mxfp4`, 2-D blocks": ("mxfp4", {"with_2d_quantization": True}, 4 + 8 / 32),
    "`nvfp4`, 2-D blocks": ("nvfp4", {"with_2d_quantization": True}, 4 + 8 / 16),
}
"""Format, options, and bits a value that travel."""

ACTIVATIONS = {
    "`fp8`": ("fp8", 8.0),
    "`fp8_rowwise`": ("fp8_rowwise", 8 + 32 / K),
    "`fp8_blockwise`": ("fp8_blockwise", 8 + 32 / 128),
    "`mxfp8`": ("mxfp8", 8 + 8 / 32),
    "`mxfp6`": ("mxfp6", 8 + 8 / 32),
    "`mxfp4`": ("mxfp4", 4 + 8 / 32),
    "`nvfp4`": ("nvfp4", 4 + 8 / 16),
}
"""Format and bits a value of rowwise data."""

STORED = {
    "float32": (None, 4.0),
    "`Float8CurrentScaling`": (qtensor.recipes.Float8CurrentScaling, 2.0),
    "`Float8BlockScaling`": (qtensor.recipes.Float8BlockScaling, 2 * (1 + 4 / 128**2)),
    "`MXFP8BlockScaling`": (qtensor.recipes.MXFP8BlockScaling, 2 * (1 + 1 / 32)),
    "`NVFP4BlockScaling`": (qtensor.recipes.NVFP4BlockScaling, 2 * (0.5 + 1 / 16)),
}
"""Recipe, and bytes a parameter stored with ``quantized_params=True``: both directions."""

STATES = {
    "float32": (None, 8.0),
    '`"mxfp8"`': ("mxfp8", 2 * (1 + 1 / 32)),
    '`"fp8_blockwise"`': ("fp8_blockwise", 2 * (1 + 4 / 128)),
}
"""Format of both averages of AdamW, and bytes a parameter."""


def recipe_of(weight: str) -> Any:
    fmt, options, _ = WEIGHTS[weight]
    quantizers = {"weight": qtensor.quantizer(fmt, **options)}
    return CustomRecipe(factory=lambda r: quantizers.get(r.tensor, qtensor.quantizer(fmt)))


def layer(recipe: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(qtensor.Linear(K, N, bias=False, recipe=recipe, **options))


def step(model: nn.Module) -> dict[str, int]:
    """Return the bytes that this rank gives to collectives in a forward and backward pass."""
    model(torch.randn(TOKENS, K)).sum().backward()  # the first pass also prepares
    with Traffic() as traffic:
        model(torch.randn(TOKENS, K)).sum().backward()
    return dict(traffic.sent)


def gather_of_weights(name: str) -> int:
    """Return the bytes of one gather of the weight."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name)
    model = layer(recipe_of(name) if dtype is None else None)
    options = {}
    if dtype is None:
        quantized_all_gather(model)
    else:
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    fully_shard(model, reshard_after_forward=True, **options)
    if dtype is None:
        reduce_amaxes(model)
    x = torch.randn(TOKENS, K)
    with torch.no_grad():
        model(x)
        model.reshard()
        with Traffic() as traffic:
            model(x)
    return traffic.gathered


def gather_by_torchao(name: str) -> int:
    """Return the bytes of one gather of the weight by torchao.

    gloo has no FP8 tensors. torch gathers bytes if the parameters of a layer have several dtypes:
    the layer has a bias, whose bytes are subtracted.
    """
    from torchao.float8 import (  # noqa: PLC0415 - only this measurement needs it
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    model = nn.Sequential(nn.Linear(K, N))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    fully_shard(model, reshard_after_forward=True)
    precompute_float8_dynamic_scale_for_fsdp(model)
    x = torch.randn(TOKENS, K)
    with torch.no_grad():
        model(x)
        model.reshard()
        precompute_float8_dynamic_scale_for_fsdp(model)
        with Traffic() as traffic:
            model(x)
    bias: Any = model[0].bias
    return traffic.gathered - bias.to_local().nbytes


def reduction_of_gradients(name: str) -> int:
    """Return the bytes of the gradients of one step."""
    model = layer(qtensor.recipes.MXFP8BlockScaling())
    if name == "DDP":
        return step(DistributedDataParallel(model))["allreduce_"]
    dtype = torch.float32 if "float32" in name else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    return step(fully_shard(model, mp_policy=policy))["_reduce_scatter_base_"]


def gather_of_activations(name: str) -> int:
    """Return the bytes of this rank's rows, gathered along dim 0 as codes or values."""
    x = torch.randn(TOKENS // dist.get_world_size(), K)
    x[0, 0] = 8.0  # tensor-wide factors are equal
    given: Any = x.bfloat16()
    if name != "bfloat16":
        given = qtensor.quantize(x, ACTIVATIONS[name][0])
    with torch.no_grad(), Traffic() as traffic:
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        out = gather(given, 0, dist.group.WORLD)
        out = out.wait() if isinstance(out, functional.AsyncCollectiveTensor) else out
    assert out.shape == (TOKENS, K)
    return sum(traffic.sent.values())


def stored_bytes(name: str) -> tuple[int, int]:
    """Return (bytes, parameters) of this rank's shard."""
    recipe, _ = STORED[name]
    stored = recipe is not None
    model = layer(recipe() if recipe else None, quantized_params=stored)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    local = model[0].weight.to_local().detach()
    buffers = local.buffers() if stored else [local]
    return sum(b.numel() * b.element_size() for b in buffers), local.numel()


def state_bytes(name: str) -> tuple[int, int]:
    """Return (bytes, parameters) of the state of AdamW."""
    fmt, _ = STATES[name]
    weight = nn.Parameter(torch.randn(N // dist.get_world_size(), K))
    optimizer = torch.optim.AdamW([weight])
    if fmt:
        qtensor.optim.quantize_state_(optimizer, {"exp_avg": fmt, "exp_avg_sq": fmt})
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    entries = [t for key, t in optimizer.state[weight].items() if key != "step"]
    total = 0
    for t in entries:
        buffers = t.buffers() if isinstance(t, qtensor.QuantizedTensor) else [t]
        total += sum(b.numel() * b.element_size() for b in buffers)
    return total, weight.numel()
