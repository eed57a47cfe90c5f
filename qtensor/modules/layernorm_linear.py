"""``LayerNormLinear``: a norm, then a linear layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import fail
from qtensor.modules.linear import LinearBase, Output
from qtensor.modules.normed import Normed


class LayerNormLinear(Normed, LinearBase):
    """A norm, then a linear layer: ``norm(x) @ weight.T + bias``.

    Args:
        in_features: K, the dim that is normalized.
        out_features: N.
        eps: added to the norm's variance.
        bias: add a bias (N,) to the product.
        normalization: "LayerNorm" or "RMSNorm".
        return_layernorm_output: also return the normed input, as the last result. With
            ``sequence_parallel`` it has the rank's own rows.
        zero_centered_gamma: store the norm's weight minus 1.
        **options: options of ``Linear``.

    Raises:
        QTensorError: an argument is illegal, or two arguments do not go together.
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
        # ``self.name``, which error messages show, is set later, by the base class.
        name = options.get("name", "")
        label = f"{type(self).__name__}[{name}]" if name else type(self).__name__
        self._set_norm(label, normalization, eps, zero_centered_gamma)
        self.return_layernorm_output = return_layernorm_output
        if options.get("parallel_mode") == "row":
            rule = "the norm needs whole rows, so only out_features can be split"
            fail(label, rule, "parallel_mode='row'", "Pass 'column'")
        super().__init__(in_features, out_features, bias, **options)

    def _make_parameters(
        self, names: tuple[str, str], shape: Shape, has_bias: bool, factory: dict[str, Any]
    ) -> None:
        self._make_norm(self.in_features, factory, self._options.parallel)
        super()._make_parameters(names, shape, has_bias, factory)

    def reset_parameters(self) -> None:
        """Initialise like ``Linear``, and set the norm's weight to 1 and its bias to 0."""
        self._reset_norm(self._options.parallel)
        super().reset_parameters()

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        quantized_output: Output = False,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """Return ``norm(input) @ weight.T + bias``; see ``Linear.forward`` for the arguments.

        Returns:
            (..., out_features); then the bias (out_features,) with ``return_bias``, then the normed
            input (..., in_features) with ``return_layernorm_output``.
        """
        normed = self._norm(input, self.in_features)
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
        """Return the sizes and options for the repr of the module."""
        return f"{super().extra_repr()}, normalization={self.normalization}, eps={self._eps}"
