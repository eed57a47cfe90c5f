"""The norm in front of a linear layer: its parameters, options and call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.errors import fail
from qtensor.functional.norm import norm
from qtensor.functional.ranks.parallel import Parallel
from qtensor.modules.input_checks import check_width
from qtensor.modules.parameters import activation_dtype

NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
"""The ``kind`` of ``functional.norm`` for each legal value of ``normalization``."""


def eps_text(label: str, eps: float) -> str:
    """Return an epsilon as a string: Dynamo would make a float symbolic, and compile twice."""
    if not isinstance(eps, float | int) or not eps >= 0:
        fail(label, "eps must be a number >= 0", repr(eps), "Pass a number, for example 1e-5")
    return repr(float(eps))


def reset_norm(weight: Tensor, bias: Tensor | None, zero_centered_gamma: bool) -> None:
    """Fill a norm's weight (features,) with 1, or 0 if zero-centered, and its bias with 0."""
    with torch.no_grad():
        weight.fill_(0.0 if zero_centered_gamma else 1.0)
        if bias is not None:
            bias.zero_()


class Normed:
    """Mixin for modules that apply a norm to their input.

    Attributes:
        normalization: "LayerNorm" or "RMSNorm".
        kind: "layernorm" or "rmsnorm", for ``functional.norm``.
        zero_centered_gamma: whether the norm's weight is stored minus 1.
        layer_norm_weight: (features,).
        layer_norm_bias: (features,); None for RMSNorm.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def _set_norm(
        self, label: str, normalization: str, eps: float, zero_centered_gamma: bool
    ) -> None:
        """Check and store the options of the norm."""
        if normalization not in NORMALIZATIONS:
            rule = f"normalization must be one of {', '.join(NORMALIZATIONS)}"
            fail(label, rule, repr(normalization), "Choose one of them")
        self._eps = eps_text(label, eps)
        self.normalization, self.kind = normalization, NORMALIZATIONS[normalization]
        self.zero_centered_gamma = zero_centered_gamma

    @property
    def eps(self) -> float:
        """The number that is added to the norm's variance."""
        return float(self._eps)

    def _make_norm(self, features: int, factory: dict[str, Any], parallel: Parallel | None) -> None:
        self.layer_norm_weight = nn.Parameter(torch.empty(features, **factory))
        has_bias = self.kind == "layernorm"
        bias = nn.Parameter(torch.empty(features, **factory)) if has_bias else None
        self.register_parameter("layer_norm_bias", bias)  # type: ignore[attr-defined]
        self._mark_norm(parallel)

    def _reset_norm(self, parallel: Parallel | None) -> None:
        """Set the norm's weight to 1 and its bias to 0."""
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        # `to_empty` replaces the parameters; the new ones have no marks.
        self._mark_norm(parallel)

    def _mark_norm(self, parallel: Parallel | None) -> None:
        """Mark parameters for Megatron, which then sums their gradients over the group."""
        if parallel is None or not parallel.sequence:
            return
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def _norm(self, input: Tensor, features: int) -> Tensor:
        """Return the norm of an input (..., features), after checking it."""
        input = activation_dtype(input)
        check_width(self.label, input, features)  # type: ignore[attr-defined]
        return norm(
            input,
            self.layer_norm_weight,
            self.layer_norm_bias,
            kind=self.kind,
            eps=float(self._eps),
            zero_centered_gamma=self.zero_centered_gamma,
        )
