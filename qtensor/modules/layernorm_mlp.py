"""LayerNormMLP: a norm, a linear layer, an activation, a linear layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.errors import check, fail
from qtensor.functional.activation import activation, clamped_swiglu
from qtensor.functional.checkpoint import checkpoint
from qtensor.modules.base import (
    Call,
    LinearOptions,
    QuantizedModule,
    activation_dtype,
    check_features,
    one_op_roles,
)
from qtensor.modules.linear import Output, asked_output, make_parallel, one_dtype, own_part, shard
from qtensor.modules.normed import Normed
from qtensor.modules.state import LinearState
from qtensor.recipes import Recipe

GATED = ("swiglu", "geglu", "reglu", "qgeglu", "sreglu", "glu", "clamped_swiglu")
ACTIVATIONS = ("gelu", "relu", "silu", "srelu", "qgelu", *GATED)


def activation_kind(label: str, activation: str, numbers: Mapping[str, float] | None) -> str:
    """An activation as ``functional.activation`` takes it.

    Raises:
        QTensorError: no such activation, or numbers that it does not take.
    """
    if activation not in ACTIVATIONS:
        rule = f"activation must be one of {', '.join(ACTIVATIONS)}"
        fail(label, rule, repr(activation), "Choose one of them")
    if activation != "clamped_swiglu":
        rule = "activation_params are for clamped_swiglu"
        check(not numbers, label, rule, f"{numbers} for {activation}", "Leave them out")
        return activation
    numbers = numbers or {}
    rule = "activation_params of clamped_swiglu are alpha, limit and offset, numbers"
    known = set(numbers) <= {"alpha", "limit", "offset"}
    right = known and all(isinstance(v, int | float) for v in numbers.values())
    check(right, label, rule, dict(numbers), "Fix them")
    return clamped_swiglu(**numbers)


class LayerNormMLP(Normed, QuantizedModule):
    """``fc2(activation(fc1(norm(x))))``.

    Args:
        hidden_size: of the input and output.
        ffn_hidden_size: what fc2 reads; fc1 makes twice as much for a gated activation: first the
            part that is activated, then the one that it is multiplied with.
        eps: added to the norm's variance.
        bias: of both linear layers.
        normalization: "LayerNorm" or "RMSNorm".
        activation: gelu (by tanh), qgelu, relu, silu, srelu, swiglu, geglu, qgeglu, reglu, sreglu,
            glu or clamped_swiglu.
        activation_params: of clamped_swiglu: alpha (1.702), limit (7.0) and offset (1.0).
        recompute_activation: save what fc1 makes instead of fc2's quantized input, and compute that
            again in backward.
        return_layernorm_output: also return the normed input; with ``sequence_parallel`` that of
            the rank's rows.
        return_bias: do not add fc2's bias; return it.
        zero_centered_gamma: the norm's weight is stored less 1.
        device: of the parameters.
        params_dtype: of the parameters; torch's default dtype if None. ``dtype=`` means the same.
        recipe: used outside of every ``autocast``.
        name: for messages and the roles of recipes (``name.fc1``, ``name.fc2``).
        init_method: fills the weights in place, the whole of split ones.
        quantized_params: store both weights quantized.
        set_parallel_mode: split fc1's out_features (of a gated activation each half) and fc2's
            in_features over ``tp_group``.
        tp_group: process group of tensor parallelism.
        sequence_parallel: the activations outside are split over the group along dim 0.
        fuse_wgrad_accumulation: see ``Linear``.
        delay_wgrad_compute: see ``Linear``.

    Raises:
        QTensorError: arguments that do not fit.
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
        device: Any = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str = "",
        init_method: Callable[[Tensor], Any] | None = None,
        quantized_params: bool = False,
        set_parallel_mode: bool = False,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(recipe, name)
        check_features(self.label, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self._set_norm(self.label, normalization, eps, zero_centered_gamma)
        self.activation, self.init_method = activation, init_method
        self._activation_kind = activation_kind(self.label, activation, activation_params)
        self.recompute_activation, self.return_bias = recompute_activation, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.quantized_params = quantized_params

        modes = ("column", "row") if set_parallel_mode else (None, None)
        first, second = (
            make_parallel(self.label, tp_group, mode, sequence_parallel, "set_parallel_mode")
            for mode in modes
        )
        self._rank = 0 if first is None else tp_group.rank()
        later = (False, delay_wgrad_compute, fuse_wgrad_accumulation)
        prefix = f"{name}." if name else ""
        self._fc1_options = LinearOptions("linear", f"{prefix}fc1", first, *later)
        self._fc2_options = LinearOptions("linear", f"{prefix}fc2", second, *later)
        self._roles["fc1_weight"] = one_op_roles(self._fc1_options)
        self._roles["fc2_weight"] = one_op_roles(self._fc2_options)
        self._own_state("fc1_weight", LinearState())
        self._own_state("fc2_weight", LinearState())

        ffn = shard(self.label, "ffn_hidden_size", ffn_hidden_size, first)
        made = 2 * ffn if activation in GATED else ffn
        factory = {"device": device, "dtype": one_dtype(self.label, params_dtype, dtype)}

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **factory))

        self._make_norm(hidden_size, factory)
        self.fc1_weight = parameter(made, hidden_size)
        self.fc1_bias = parameter(made) if bias else None
        self.fc2_weight = parameter(hidden_size, ffn)
        self.fc2_bias = parameter(hidden_size) if bias else None
        self._mark_norm(first)
        if not self.fc1_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise both layers like ``torch.nn.Linear``, or by ``init_method``, and the norm.

        A split layer draws the whole and takes its part, of a gated fc1 that of each half.
        """
        self._reset_norm()
        # Those that to_empty made have no marks.
        self._mark_norm(self._fc1_options.parallel)
        halves = 2 if self.activation in GATED else 1
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        wholes = {"fc1": (halves * ffn, hidden), "fc2": (hidden, ffn)}
        for layer, options in (("fc1", self._fc1_options), ("fc2", self._fc2_options)):
            weight, bias = getattr(self, f"{layer}_weight"), getattr(self, f"{layer}_bias")
            shape, count = wholes[layer], halves if layer == "fc1" else 1
            values = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            with torch.no_grad():
                if self.init_method is None:
                    nn.init.kaiming_uniform_(values, a=math.sqrt(5))
                else:
                    self.init_method(values)
                if bias is not None:
                    bound = 1 / math.sqrt(shape[1])
                    drawn = nn.init.uniform_(bias.new_empty(shape[0]), -bound, bound)
                    bias.copy_(self._own_part(drawn, bias.shape, count))
            self._set_weight(
                f"{layer}_weight", self._own_part(values, weight.shape, count), options
            )

    def _own_part(self, whole: Tensor, shape: torch.Size, halves: int) -> Tensor:
        """This rank's part of a parameter: that of each half behind the other."""
        one = torch.Size((shape[0] // halves, *shape[1:]))
        parts = [own_part(half, one, self._rank) for half in whole.chunk(halves)]
        return parts[0] if halves == 1 else torch.cat(parts)

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        quantized_output: Output = False,
    ) -> Any:
        """The block.

        Args:
            input: (..., hidden_size).
            is_first_microbatch: as in ``Linear.forward``.
            quantized_output: as in ``Linear.forward``.

        Returns:
            (..., hidden_size); then fc2's bias with ``return_bias``, then the normed input with
            ``return_layernorm_output``.
        """
        input = activation_dtype(input)
        self._check_features(input, self.hidden_size)
        normed = self._norm(input)
        first = None if is_first_microbatch is None else Call(is_first_microbatch)
        second = first
        if quantized_output is not False:
            text = asked_output(self._recipe_key, quantized_output, self._fc2_options)
            second = Call(is_first_microbatch, None, text)
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
        results = [out]
        if self.return_bias:
            results.append(self.fc2_bias)
        if self.return_layernorm_output:
            results.append(normed)
        return tuple(results) if len(results) > 1 else out

    def backward_dw(self) -> None:
        """Compute the weight gradients that were delayed first; see ``Linear.backward_dw``."""
        for weight in ("fc2_weight", "fc1_weight"):
            self._backward_dw(weight, self._fc1_options)

    def extra_repr(self) -> str:
        """Sizes and kinds."""
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        return f"{sizes}, normalization={self.normalization}, activation={self.activation}"
