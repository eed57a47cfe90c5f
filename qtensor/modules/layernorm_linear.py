"""LayerNormLinear: a norm, then Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qtensor.errors import fail
from qtensor.functional.norm import norm
from qtensor.functional.parallel import Parallel
from qtensor.modules.linear import Linear, Output

NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
"""What users call a norm -> its kind in ``functional.norm``."""


def norm_kind(label: str, normalization: str) -> str:
    """The kind of a norm.

    Raises:
        QTensorError: no such norm.
    """
    if normalization not in NORMALIZATIONS:
        rule = f"normalization must be one of {', '.join(NORMALIZATIONS)}"
        fail(label, rule, repr(normalization), "Choose one of them")
    return NORMALIZATIONS[normalization]


def reset_norm(weight: Tensor, bias: Tensor | None, zero_centered_gamma: bool) -> None:
    """A norm that changes nothing."""
    with torch.no_grad():
        weight.fill_(0.0 if zero_centered_gamma else 1.0)
        if bias is not None:
            bias.zero_()


def mark_sequence_parallel(parallel: Parallel | None, *parameters: Any) -> None:
    """Tell frameworks whose gradients are those of the rank's rows alone: Megatron sums what is marked over the group."""
    for parameter in parameters:
        if parameter is not None and parallel is not None and parallel.sequence:
            parameter.sequence_parallel = True


def eps_text(label: str, eps: float) -> str:
    """An epsilon as text: Dynamo makes a float that a module holds symbolic, and compiles twice.

    Raises:
        QTensorError: no positive number.
    """
    if not isinstance(eps, float | int) or not eps >= 0:
        fail(label, "eps must be a number >= 0", repr(eps), "Pass 1e-5, say")
    return repr(float(eps))


class LayerNormLinear(Linear):
    """``Linear(norm(x))``.

    Args:
        in_features: K; the norm runs over it.
        out_features: N.
        eps: added to the norm's variance.
        bias: of the linear layer.
        normalization: "LayerNorm" or "RMSNorm".
        return_layernorm_output: also return the normed input, as the last result.
        zero_centered_gamma: the norm's weight is stored less 1.
        **options: of ``Linear``.

    Raises:
        QTensorError: arguments that do not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        # The name, which messages show, is not set before the parameters are made.
        name = options.get("name", "")
        label = f"{type(self).__name__}[{name}]" if name else type(self).__name__
        self._eps, self.normalization = eps_text(label, eps), normalization
        self.kind = norm_kind(label, normalization)
        self.return_layernorm_output = return_layernorm_output
        self.zero_centered_gamma = zero_centered_gamma
        if options.get("parallel_mode") == "row":
            rule = "the norm needs whole rows, so that only out_features can be split"
            fail(label, rule, "parallel_mode='row'", "Pass 'column'")
        super().__init__(in_features, out_features, bias, **options)
        mark_sequence_parallel(self._options.parallel, self.layer_norm_weight, self.layer_norm_bias)

    @property
    def eps(self) -> float:
        """What is added to the norm's variance."""
        return float(self._eps)

    def _make_parameters(
        self, rows: int, columns: int, bias: bool, factory: dict[str, Any]
    ) -> None:
        self.layer_norm_weight = nn.Parameter(torch.empty(self.in_features, **factory))
        if self.kind == "layernorm":
            self.layer_norm_bias = nn.Parameter(torch.empty(self.in_features, **factory))
        else:
            self.register_parameter("layer_norm_bias", None)
        super()._make_parameters(rows, columns, bias, factory)

    def reset_parameters(self) -> None:
        """As ``Linear``; the norm changes nothing."""
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        # Those that to_empty made have no marks.
        mark_sequence_parallel(self._options.parallel, self.layer_norm_weight, self.layer_norm_bias)
        super().reset_parameters()

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        quantized_output: Output = False,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """As ``Linear.forward``; with ``return_layernorm_output`` the normed input comes last."""
        inp = self._activation_dtype(inp)
        self._check_features(inp, self.in_features)
        normed = norm(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            kind=self.kind,
            eps=float(self._eps),
            zero_centered_gamma=self.zero_centered_gamma,
        )
        out = super().forward(
            normed,
            is_first_microbatch,
            quantized_output=quantized_output,
            skip_weight_update=skip_weight_update,
        )
        if not self.return_layernorm_output:
            return out
        return (*out, normed) if isinstance(out, tuple) else (out, normed)

    def extra_repr(self) -> str:
        """As ``Linear``, and the norm."""
        return f"{super().extra_repr()}, normalization={self.normalization}, eps={self._eps}"
