"""Choose the quantizers of a recipe from the formats of layers by name."""

from __future__ import annotations

from collections.abc import Mapping

from qtensor.quantizers import Quantizer
from qtensor.recipes import Role


class LayerFormats:
    """The factory of a ``CustomRecipe`` that quantizes inputs and weights, and no gradients.

    It can be pickled, unlike a function inside of a function.

    Attributes:
        weights: format of the weight by the name of its layer; None for high precision.
        inputs: format of the input likewise.
    """

    def __init__(
        self,
        weights: Mapping[str, str | Quantizer | None],
        inputs: Mapping[str, str | Quantizer | None] | None = None,
    ) -> None:
        """Take the formats; inputs have those of the weights if ``inputs`` is None."""
        self.weights = dict(weights)
        self.inputs = self.weights if inputs is None else dict(inputs)

    def __call__(self, role: Role) -> str | Quantizer | None:
        """Return the quantizer of a role, or None for high precision."""
        formats = {"weight": self.weights, "input": self.inputs}.get(role.tensor, {})
        return formats.get(role.name)
