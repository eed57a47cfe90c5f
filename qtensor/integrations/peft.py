"""Merge LoRA adapters of PEFT into quantized weights, and train adapters for the merged weights.

PEFT computes ``x W^T + x (B A)^T`` in training. A merge rounds ``W + B A`` to the format of W, so
that a small change is lost. Layers that ``merge_aware_`` has changed compute ``x Q(W + B A)^T`` in
training already, and a merge writes the codes of ``Q(W + B A)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from torch.func import functional_call

from qtensor.core.errors import check, fail
from qtensor.library.dequantize import DEQUANTIZE_TENSOR
from qtensor.modules.conversion import Conversion, LayerReport
from qtensor.modules.input_transform import for_inputs_of
from qtensor.quantizers import Quantizer
from qtensor.storage.tensor import QuantizedTensor
from qtensor.weights.layers import WeightLayer, holders_of, layers_of
from qtensor.weights.merged_rounding import nearest_sum, shared_rows
from qtensor.weights.merging import Change

OP = "merge_aware_"


def merge_aware_(model: nn.Module) -> Conversion:
    """Let LoRA layers of PEFT compute with the weights that a merge will write, in place.

    The layer computes ``x Q(W + scaling * B A)^T``, where Q quantizes as the weight W is quantized,
    with the kernels of a merged layer. The gradient passes Q unchanged (straight through). A merge,
    by ``merge_lora_`` with ``method="nearest"`` or by PEFT's own methods, writes these weights, so
    that the merged model's outputs are those of training, bit for bit.

    Several active adapters are added before they are rounded. The layers stay layers of PEFT: its
    methods, files and configuration work as before. The memory of a training step grows by the
    change of one layer's weight and its gradient, in float32.

    Args:
        model: a model with adapters of PEFT over quantized weights.

    Returns:
        The layers that were changed, and those that were skipped with the reason. Its repr is a
        table.

    Raises:
        QTensorError: no layer can be changed; an adapter has dropout, which no merged weight has.
    """
    swapped, skipped = [], []
    for name, module in _layers_of_peft(model):
        own = _layer_name(model, name, module)
        names = [*module.lora_A]
        layer = _layer_of(module, own)
        reason = _obstacle(module, layer, names)
        features = f"{module.in_features} -> {module.out_features}"
        if not reason and not isinstance(_stored_weight(module), QuantizedTensor):
            reason = "its weight is not quantized"
        if layer is None or reason:
            skipped.append(LayerReport(own, features, reason))
            continue
        quantizer: Quantizer = _stored_weight(module).quantizer
        if dropped := [a for a in names if not isinstance(module.lora_dropout[a], nn.Identity)]:
            rule = "an adapter that becomes a part of the weight has no dropout"
            fail(OP, rule, f"lora_dropout in {own}, adapter {dropped[0]}", "Use lora_dropout=0.0")
        rule = "a merge gives the bytes of training only if rounding is to nearest"
        fix = "Quantize the weight without stochastic_rounding"
        check(quantizer.is_requantization_safe(), OP, rule, quantizer.canonical, fix)
        is_linear = isinstance(module, LoraLinear)
        module.__class__ = MergeAwareLinear if is_linear else MergeAwareParamWrapper
        module._merged_quantizer = quantizer
        module._shared_rows = shared_rows(_stored_weight(module))
        module._is_transposed = _is_transposed(module)
        swapped.append(LayerReport(own, features, quantizer.canonical))
    if not swapped:
        why = "; ".join(f"{each.name}: {each.note}" for each in skipped[:3]) or "none"
        rule = "the model needs an adapter of PEFT over a quantized weight"
        fail(OP, rule, why, "Quantize the weights with quantize_, then call get_peft_model")
    return Conversion("merge_aware_", tuple(swapped), tuple(skipped))


def changes(model: nn.Module) -> tuple[dict[str, Change], list[LayerReport]]:
    """Return the changes that active adapters of PEFT make, by the names of their layers.

    Returns:
        The changes, and a report of each layer with active adapters that cannot be merged.
    """
    found: dict[str, Change] = {}
    skipped: list[LayerReport] = []
    holders = holders_of(model)
    for name, module in _layers_of_peft(model):
        active = _active(module)
        if not active:
            continue
        own = _layer_name(model, name, module)
        layer = _layer_of(module, own)
        waiting = _waiting(module)
        reason = _obstacle(module, layer, waiting)
        if module.disable_adapters:
            reason = f"its adapters are disabled: {', '.join(active)}"
        elif not waiting:
            reason = f"its adapters are merged already: {', '.join(active)}"
        elif layer is not None and len(places := holders.get(id(layer.stored[0]), {})) > 1:
            reason = f"its weight is tied: {', '.join(places)}"
        if layer is None or reason:
            features = f"{module.in_features} -> {module.out_features}"
            skipped.append(LayerReport(own, features, reason))
        else:
            found[own] = Change(own, layer, _change(module, waiting), _marker(module, waiting))
    return found, skipped


# ---- layers of PEFT


def _layers_of_peft(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and modules of layers with adapters."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]


def _active(module: Any) -> list[str]:
    """Return the active adapters that a layer has."""
    known = (*module.lora_A, *module.lora_embedding_A)
    return [a for a in module.active_adapters if a in known]


def _waiting(module: Any) -> list[str]:
    """Return the active adapters of a layer that are neither disabled nor merged."""
    if module.disable_adapters:
        return []
    return [a for a in _active(module) if a not in module.merged_adapters]


def _layer_name(model: nn.Module, name: str, module: Any) -> str:
    """Return the name of a layer in the model without PEFT; stacked experts add the parameter's."""
    parts = [part for part in name.split(".") if part != "base_layer"]
    if isinstance(model, PeftModel) and parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    if isinstance(module, ParamWrapper):
        parts.append(module.parameter_name)
    return ".".join(parts)


def _layer_of(module: Any, name: str) -> WeightLayer | None:
    """Return the linear layer below the adapters; None if it is something else."""
    base = module.get_base_layer()
    if isinstance(module, ParamWrapper):
        own = module.parameter_name
        return WeightLayer((base,), (own,), stacked=module.get_param().ndim == 3)
    return layers_of(base, name).get(name) if isinstance(module, LoraLinear) else None


def _obstacle(module: Any, layer: WeightLayer | None, names: Sequence[str]) -> str:
    """Return the reason for which adapters are not changes of a weight that can be added, or ""."""
    if layer is None:
        return f"adapters of a {type(module.get_base_layer()).__name__} are not merged"
    if len(layer.parameters) > 1:
        return "it has several weights"
    if variants := [a for a in names if a in module.lora_variant]:
        kind = type(module.lora_variant[variants[0]]).__name__
        return f"adapter {variants[0]} is more than a product of two matrices ({kind})"
    if [a for a in names if module.lora_bias[a]]:
        return "its adapter has a bias"
    weight = _stored_weight(module)
    if not isinstance(weight, QuantizedTensor) and type(weight) is not Tensor:
        return f"its weight is a {type(weight).__name__}"
    return ""


def _parameter(module: Any) -> Any:
    """Return the weight below the adapters, without autograd, as the model stores it."""
    is_linear = isinstance(module, LoraLinear)
    return (module.get_base_layer().weight if is_linear else module.get_param()).detach()


def _is_transposed(module: Any) -> bool:
    """Return whether the model stores a weight (K, N), or the weights of experts (E, K, N)."""
    if isinstance(module, LoraLinear):
        return bool(module.fan_in_fan_out)
    return bool(getattr(_parameter(module), "swapped", False))


def _stored_weight(module: Any) -> Any:
    """Return the weight below the adapters as it is quantized, (N, K) or (E, N, K)."""
    parameter = _parameter(module)
    if isinstance(module, LoraLinear):
        return parameter.t() if module.fan_in_fan_out else parameter
    return getattr(parameter, "stored", parameter)


def _sum_of_changes(module: Any, names: Sequence[str]) -> Tensor:
    """Return ``sum of scaling * B A`` over adapters, float32 (N, K) or (E, N, K)."""
    total = None
    # Mixed precision would round the factors in training, but not in a merge.
    with torch.autocast(module.lora_A[names[0]].weight.device.type, enabled=False):
        for name in names:
            a, b = module.lora_A[name].weight.float(), module.lora_B[name].weight.float()
            if isinstance(module, ParamWrapper) and module.get_param().ndim == 3:
                # PEFT stores the factors of all experts in two matrices: (E * r, K), (N, r * E).
                a = a.reshape(module.num_experts, -1, a.shape[-1])
                b = b.reshape(b.shape[0], -1, module.num_experts).permute(2, 0, 1)
            change = (b * module.scaling[name]) @ a
            total = change if total is None else total + change
        # The adapters read inputs that the layer below them has not transformed.
        return for_inputs_of(module.get_base_layer(), total)  # type: ignore[arg-type]


def _change(module: Any, names: Sequence[str]) -> Callable[[], Tensor]:
    def compute() -> Tensor:
        return _sum_of_changes(module, names).detach()

    return compute


def _marker(module: Any, names: Sequence[str]) -> Callable[[bool], None]:
    def mark(merged: bool) -> None:
        others = [name for name in module.merged_adapters if name not in names]
        module.merged_adapters[:] = [*others, *names] if merged else others

    return mark


class _MergeAware:
    """Base of both kinds of layers: computes the merged weight, and writes it in a merge."""

    def merged_weight(self: Any, names: Sequence[str]) -> Tensor:
        """Return the weight that merging these adapters gives, quantized (N, K) or (E, N, K).

        The gradient reaches the adapters as if nothing had been rounded.
        """
        # Compiled code cannot read properties of the parameter, so the module stores them.
        parameter = _parameter(self)
        values = DEQUANTIZE_TENSOR(parameter, torch.float32)
        values = values.transpose(-2, -1) if self._is_transposed else values
        total = values + _sum_of_changes(self, names)
        merged = nearest_sum(total, self._merged_quantizer, self._shared_rows)
        return merged.to(parameter.dtype)

    def _in_place_of_parameter(self: Any, names: Sequence[str]) -> Tensor:
        """Return the merged weight with the shape of the parameter."""
        weight = self.merged_weight(names)
        return weight.transpose(-2, -1) if self._is_transposed else weight

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write the codes of ``merged_weight`` into the weight; see PEFT.

        Raises:
            ValueError: with ``safe_merge``, the merged weight is not finite.
        """
        names = [a for a in check_adapters_to_merge(self, adapter_names) if a in self.lora_A]
        if not names:
            return
        with torch.no_grad():
            merged = self.merged_weight(names)
            if safe_merge and not merged.dequantize().isfinite().all():
                raise ValueError(f"NaN or inf in the merged weights; got adapters {names}.")
            _stored_weight(self).copy_(merged)
        self.merged_adapters.extend(names)

    def _to_merge(self: Any, options: dict[str, Any]) -> list[str]:
        """Return the adapters whose merged weight a call computes with."""
        if options.get("adapter_names") is not None:
            rule = "a merged weight is the same for all rows of a batch"
            fail(OP, rule, "adapter_names=", "Activate one adapter with set_adapter")
        return [] if self.merged else _waiting(self)


class MergeAwareLinear(_MergeAware, LoraLinear):
    """A LoRA layer of PEFT that computes with the weight that a merge writes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the layer below with the merged weight."""
        names = self._to_merge(kwargs)
        if not names:
            return super().forward(x, *args, **kwargs)
        weight = self._in_place_of_parameter(names)
        return functional_call(self.base_layer, {"weight": weight}, (x, *args), kwargs)


class MergeAwareParamWrapper(_MergeAware, ParamWrapper):
    """A LoRA layer of PEFT for a parameter, which computes with the value that a merge writes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the module below with the merged parameter."""
        names = self._to_merge(kwargs)
        if not names:
            return super().forward(x, *args, **kwargs)
        path, inner = self.parameter_name, self.base_layer
        while isinstance(inner, ParamWrapper):
            path, inner = f"base_layer.{path}", inner.base_layer
        weight = self._in_place_of_parameter(names)
        return functional_call(self.base_layer, {path: weight}, (x, *args), kwargs)


__all__ = ["MergeAwareLinear", "MergeAwareParamWrapper", "changes", "merge_aware_"]
