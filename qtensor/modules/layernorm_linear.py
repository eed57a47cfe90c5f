"""LayerNormLinear: a norm, then Linear."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qtensor.errors import fail
from qtensor.modules.base import activation_dtype
from qtensor.modules.linear import LinearBase, Output
from qtensor.modules.normed import Normed


class LayerNormLinear(Normed, LinearBase):
    """``Linear(norm(x))``.

    Args:
        in_features: K; the norm runs over it.
        out_features: N.
        eps: added to the norm's variance.
        bias: of the linear layer.
        normalization: "LayerNorm" or "RMSNorm".
        return_layernorm_output: also return the normed input, as the last result; with
            ``sequence_parallel`` that of the rank's rows.
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
        self._set_norm(label, normalization, eps, zero_centered_gamma)
        self.return_layernorm_output = return_layernorm_output
        if options.get("parallel_mode") == "row":
            rule = "the norm needs whole rows, so that only out_features can be split"
            fail(label, rule, "parallel_mode='row'", "Pass 'column'")
        super().__init__(in_features, out_features, bias, **options)
        self._mark_norm(self._options.parallel)

    def _make_parameters(
        self, rows: int, columns: int, bias: bool, factory: dict[str, Any]
    ) -> None:
        self._make_norm(self.in_features, factory)
        super()._make_parameters(rows, columns, bias, factory)

    def reset_parameters(self) -> None:
        """Return the same as ``Linear``; the norm changes nothing."""
        self._reset_norm()
        # Those that to_empty made have no marks.
        self._mark_norm(self._options.parallel)
        super().reset_parameters()

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        quantized_output: Output = False,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """Return the same as ``Linear.forward``, and the norm with ``return_layernorm_output``."""
        input = activation_dtype(input)
        self._check_features(input, self.in_features)
        normed = self._norm(input)
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
        """Initialise like ``Linear``, and the norm."""
        return f"{super().extra_repr()}, normalization={self.normalization}, eps={self._eps}"
