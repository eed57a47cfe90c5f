"""``nn.MultiheadAttention`` in ``convert_`` and ``revert_``."""

from __future__ import annotations

from typing import Any

from torch import nn

from qtensor.modules.in_place import plain_class
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.modules.swap import Place, Weight, carry_over, fields_of, plain_weight, quantized_layer
from qtensor.modules.torch_attention import TorchMultiheadAttention
from qtensor.recipes import Recipe
from qtensor.storage.base import QuantizedTensorStorage


def attention_obstacle(module: Any, held: bool) -> str:
    """Return the reason for which an ``nn.MultiheadAttention`` cannot be replaced, or ""."""
    if plain_class(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} is a subclass, with a forward of its own"
    values = vars(module)
    if "forward" in values or values.get("_compiled_call_impl") is not None:
        return "its forward was replaced or compiled on the module itself"
    if held:
        return "it is sharded; convert it before fully_shard and parallelize_module"
    if not module._qkv_same_embed_dim:
        return "its keys or values have other features than its queries (kdim, vdim)"
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "add_bias_kv and add_zero_attn are not served"
    own = fields_of(TorchMultiheadAttention) - fields_of(nn.MultiheadAttention)
    if taken := sorted(values.keys() & own):
        return f"qtensor's module has attributes of the same name: {', '.join(taken)}"
    if type(module.out_proj) is not type(_fresh(1, 1).out_proj):
        return f"its out_proj is a {type(module.out_proj).__name__}"
    return ""


def _fresh(
    embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True
) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(embed_dim, num_heads, dropout, bias, device="meta")


def attention_weights(module: Any, name: str) -> list[Weight]:
    """Return the weights of an ``nn.MultiheadAttention`` at the path ``name``."""
    return [
        Weight("in_proj_weight", module.in_proj_weight, "linear", f"{name}.in_proj"),
        Weight("weight", module.out_proj.weight, "linear", f"{name}.out_proj"),
    ]


def parts_of(module: Any) -> list[Any]:
    """Return the layers that are replaced together with a layer, which is the first."""
    is_attention = isinstance(module, nn.MultiheadAttention)
    return [module, module.out_proj] if is_attention else [module]


def without_inner(
    layers: dict[Any, list[Place]], obstacles: dict[Any, str], kind: type[nn.Module]
) -> None:
    """Remove the out_proj of each attention that is replaced as a whole."""
    for module in list(layers):
        if isinstance(module, nn.MultiheadAttention) and not obstacles[module]:
            fresh = kind is nn.MultiheadAttention and not isinstance(module, QuantizedModule)
            if fresh or kind is TorchMultiheadAttention:
                layers.pop(module.out_proj, None)


def _carry_over(old: nn.MultiheadAttention, new: nn.MultiheadAttention) -> None:
    carry_over(old, new)
    # The new module gets an out_proj of its own, which the old one must not see.
    vars(new)["_modules"] = dict(old._modules)


def quantized_attention(
    old: nn.MultiheadAttention, name: str, recipe: Recipe | None
) -> TorchMultiheadAttention:
    """Return a ``TorchMultiheadAttention`` with the parameters of ``old``."""
    options = (old.dropout, old.in_proj_bias is not None, old.batch_first, "meta")
    new = TorchMultiheadAttention(
        *(old.embed_dim, old.num_heads, *options), recipe=recipe, name=name
    )
    _carry_over(old, new)
    new.in_proj_weight, new.in_proj_bias = old.in_proj_weight, old.in_proj_bias
    new.out_proj = quantized_layer(old.out_proj, f"{name}.out_proj", recipe)
    new.quantized_params = isinstance(old.in_proj_weight, QuantizedTensorStorage)
    return new


def plain_attention(
    old: TorchMultiheadAttention, plain: dict[Any, nn.Parameter]
) -> nn.MultiheadAttention:
    """Return an ``nn.MultiheadAttention`` with the parameters of ``old``; see ``plain_layer``."""
    bias = old.in_proj_bias is not None
    new = _fresh(old.embed_dim, old.num_heads, old.dropout, bias)
    out_proj = new.out_proj
    _carry_over(old, new)
    new.batch_first, new.out_proj = old.batch_first, out_proj
    new.in_proj_weight = plain_weight(old.in_proj_weight, plain)
    new.in_proj_bias = old.in_proj_bias
    carry_over(old.out_proj, new.out_proj)
    new.out_proj.weight = plain_weight(old.out_proj.weight, plain)
    new.out_proj.bias = old.out_proj.bias
    return new


def avoid_nested_tensors(model: nn.Module) -> None:
    """Keep each ``nn.TransformerEncoder`` from giving nested tensors to layers of qtensor.

    In evaluation with a padding mask it makes them for the fast path of torch's own layers.
    """
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder):
            continue
        if any([isinstance(part, QuantizedModule) for part in module.modules()]):
            module.use_nested_tensor = False
