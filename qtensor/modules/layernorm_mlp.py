"""``LayerNormMLP``: a norm, a linear layer, an activation, a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qtensor.core.errors import check, fail, is_number
from qtensor.functional.activation import activation, clamped_swiglu
from qtensor.functional.checkpoint import checkpoint
from qtensor.library.activation import is_gated
from qtensor.modules.linear import Output, make_parallel, one_dtype, requested_output, shard
from qtensor.modules.linear_module import LinearModule
from qtensor.modules.normed import Normed
from qtensor.modules.options import Call, LinearOptions, check_features
from qtensor.recipes import Recipe
from qtensor.reference.activation import KINDS

_FC1, _FC2 = ("fc1_weight", "fc1_bias"), ("fc2_weight", "fc2_bias")


def activation_kind(label: str, activation: str, numbers: Mapping[str, float] | None) -> str:
    """Return the ``kind`` of ``functional.activation`` for an activation and its parameters."""
    if activation not in KINDS:
        rule = f"activation must be one of {', '.join(KINDS)}"
        fail(label, rule, repr(activation), "Choose one of them")
    if activation != "clamped_swiglu":
        rule = "activation_params are for clamped_swiglu"
        check(not numbers, label, rule, f"{numbers} for {activation}", "Leave them out")
        return activation
    numbers = numbers or {}
    rule = "activation_params of clamped_swiglu are alpha, limit and offset, numbers"
    known = set(numbers) <= {"alpha", "limit", "offset"}
    right = known and all(map(is_number, numbers.values()))
    check(right, label, rule, dict(numbers), "Fix them")
    return clamped_swiglu(**numbers)


class LayerNormMLP(Normed, LinearModule):
    """A norm, a linear layer, an activation, a linear layer: ``fc2(activation(fc1(norm(x))))``.

    Args:
        hidden_size: features of the input and the output.
        ffn_hidden_size: features of the input of fc2. With a gated activation fc1 has twice as many
            outputs: the first half is activated, then multiplied by the second half.
        eps: added to the norm's variance.
        bias: add biases in both linear layers.
        normalization: "LayerNorm" or "RMSNorm".
        activation: gelu (by tanh), qgelu, relu, silu, srelu, swiglu, geglu, qgeglu, reglu, sreglu,
            glu or clamped_swiglu.
        activation_params: numbers of clamped_swiglu: alpha (1.702), limit (7.0) and offset (1.0).
        recompute_activation: save the output of fc1 for backward, not the quantized input of fc2,
            and compute the activation again in backward.
        return_layernorm_output: also return the normed input, as the last result. With
            ``sequence_parallel`` it has the rank's own rows.
        return_bias: do not add the bias of fc2, and return it.
        zero_centered_gamma: store the norm's weight minus 1.
        device, params_dtype, dtype, recipe, init_method: see ``Linear``.
        output_layer_init_method: ``init_method`` of fc2; that of fc1 if None.
        quantized_params, fuse_wgrad_accumulation, delay_wgrad_compute: for both weights, see
            ``Linear``.
        name: shown in error messages. The roles of recipes have ``name.fc1`` and ``name.fc2``.
        set_parallel_mode: split the out_features of fc1 and the in_features of fc2 over
            ``tp_group``. With a gated activation, each half of fc1 is split.
        tp_group: process group of tensor parallelism.
        sequence_parallel: input and output of the module are split over the group along dim 0.

    Raises:
        QTensorError: an argument is illegal, or two arguments do not go together.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        recompute_activation: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.types.Device = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str = "",
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        quantized_params: bool = False,
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(recipe, name)
        check_features(self.label, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self._set_norm(self.label, normalization, eps, zero_centered_gamma)
        self.activation, self.init_method = activation, init_method
        self.output_layer_init_method = output_layer_init_method or init_method
        self._activation_kind = activation_kind(self.label, activation, activation_params)
        self.recompute_activation, self.return_bias = recompute_activation, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.quantized_params = quantized_params

        modes = ("column", "row") if set_parallel_mode else (None, None)
        first, second = (
            make_parallel(self.label, tp_group, mode, sequence_parallel, "set_parallel_mode")
            for mode in modes
        )
        self._rank = 0 if first is None or tp_group is None else tp_group.rank()
        wgrad_options = (False, delay_wgrad_compute, fuse_wgrad_accumulation)
        prefix = f"{name}." if name else ""
        self._fc1_options = LinearOptions("linear", f"{prefix}fc1", first, *wgrad_options)
        self._fc2_options = LinearOptions("linear", f"{prefix}fc2", second, *wgrad_options)

        ffn = shard(self.label, "ffn_hidden_size", ffn_hidden_size, first)
        factory = {"device": device, "dtype": one_dtype(self.label, params_dtype, dtype)}
        self._make_norm(hidden_size, factory, first)
        shapes = (self._halves * ffn, hidden_size), (hidden_size, ffn)
        self._make_layer(_FC1, self._fc1_options, shapes[0], bias, factory)
        self._make_layer(_FC2, self._fc2_options, shapes[1], bias, factory)
        if not self.fc1_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise both layers like ``torch.nn.Linear``, or by ``init_method``, and the norm."""
        self._reset_norm(self._fc1_options.parallel)
        hidden, ffn, halves = self.hidden_size, self.ffn_hidden_size, self._halves
        self._reset_parameters(_FC1, (halves * ffn, hidden), self._fc1_options, halves)
        draw = self.output_layer_init_method
        self._reset_parameters(_FC2, (hidden, ffn), self._fc2_options, init_method=draw)

    @property
    def _halves(self) -> int:
        """The halves of fc1's output features: a gated activation has two."""
        return 2 if is_gated(self._activation_kind) else 1

    def _layer_options(self, weight: str) -> LinearOptions:
        return self._fc1_options if weight == "fc1_weight" else self._fc2_options

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        quantized_output: Output = False,
    ) -> Any:
        """Return ``fc2(activation(fc1(norm(input))))``.

        Args:
            input: (..., hidden_size); float32, bfloat16 or float16.
            is_first_microbatch: see ``Linear.forward``.
            quantized_output: see ``Linear.forward``.

        Returns:
            (..., hidden_size); then the bias of fc2 (hidden_size,) with ``return_bias``, then the
            normed input (..., hidden_size) with ``return_layernorm_output``.
        """
        normed = self._norm(input, self.hidden_size)
        first = None if is_first_microbatch is None else Call(is_first_microbatch)
        second = first
        if quantized_output is not False:
            output = requested_output(self._recipe_key, quantized_output, self._fc2_options)
            second = Call(is_first_microbatch, None, output)
        bias1 = "fc1_bias" if self.fc1_bias is not None else ""
        bias2 = "fc2_bias" if self.fc2_bias is not None and not self.return_bias else ""
        hidden = self._linear(normed, "fc1_weight", bias1, self._fc1_options, first)

        def rest(h: Tensor) -> Tensor:
            activated = activation(h, self._activation_kind)
            return self._linear(activated, "fc2_weight", bias2, self._fc2_options, second)

        if self.recompute_activation and torch.is_grad_enabled():
            seeds = self._early_seeds(hidden, "fc2_weight", self._fc2_options)
            if seeds is not None:
                second = (Call() if second is None else second)._replace(seeds=seeds)
            out = checkpoint(rest, hidden)
        else:
            out = rest(hidden)
        results: list[Any] = [out]
        if self.return_bias:
            results.append(self.fc2_bias)
        if self.return_layernorm_output:
            results.append(normed)
        return tuple(results) if len(results) > 1 else out

    def backward_dw(self) -> None:
        """Compute the oldest postponed weight gradients of both layers; see ``Linear``."""
        for weight in ("fc2_weight", "fc1_weight"):
            self._backward_dw(weight, self._fc1_options)

    def extra_repr(self) -> str:
        """Return the sizes and options for the repr of the module."""
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        return f"{sizes}, normalization={self.normalization}, activation={self.activation}"
