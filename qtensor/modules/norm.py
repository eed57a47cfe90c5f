"""``Norm``: LayerNorm or RMSNorm as a module, with the parameters of ``LayerNormLinear``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qtensor.functional.ranks.parallel import Parallel
from qtensor.modules.normed import Normed


class Norm(Normed, nn.Module):
    """LayerNorm or RMSNorm over the last dim.

    Args:
        features: size of the last dim.
        normalization: "LayerNorm" or "RMSNorm".
        eps: added to the variance.
        zero_centered_gamma: store the weight minus 1.
        factory: device and dtype of the parameters.
        parallel: the split of the layers around it, for sequence parallelism.
    """

    def __init__(
        self,
        features: int,
        normalization: str,
        eps: float,
        zero_centered_gamma: bool,
        factory: dict[str, Any],
        parallel: Parallel | None = None,
    ) -> None:
        super().__init__()
        self.features, self._parallel = features, parallel
        self._set_norm(self.label, normalization, eps, zero_centered_gamma)
        self._make_norm(features, factory, parallel)
        if not self.layer_norm_weight.is_meta:
            self.reset_parameters()

    @property
    def label(self) -> str:
        """The name for error messages."""
        return type(self).__name__

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        self._reset_norm(self._parallel)

    def forward(self, input: Tensor) -> Tensor:
        """Return the norm of ``input`` (..., features)."""
        return self._norm(input, self.features)

    def extra_repr(self) -> str:
        """Return the options for the repr of the module."""
        return f"{self.features}, normalization={self.normalization}, eps={self._eps}"
