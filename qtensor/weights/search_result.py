"""The result of ``search``: the choice, the trade-off curve, and what to do with them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from qtensor.core.errors import fail
from qtensor.core.texts import aligned
from qtensor.modules.conversion import Conversion
from qtensor.modules.convert import convert_
from qtensor.recipes import CustomRecipe, Role
from qtensor.weights.layers import KINDS, match
from qtensor.weights.quantize import quantize_

_VERSION = 1


@dataclass(frozen=True)
class GroupChoice:
    """The format of a group of layers.

    Attributes:
        names: the layers.
        format: the canonical text of their quantizer; None for high precision.
        bits: bits of a value, with factors and padding.
        error: the metric with this group alone quantized.
    """

    names: tuple[str, ...]
    format: str | None
    bits: float
    error: float


@dataclass(frozen=True)
class CurvePoint:
    """A choice that no other choice beats in both bits and error.

    Attributes:
        bits: bits of a value, as a mean over all layers.
        predicted: the sum of the groups' errors.
    """

    bits: float
    predicted: float


@dataclass(frozen=True, repr=False)
class SearchResult:
    """A format for each layer. ``str()`` gives a table.

    Attributes:
        groups: the choices.
        metric: name of the metric; less is better.
        activations: whether the inputs of the layers are quantized, too.
        bits: bits of a value, as a mean over all layers.
        predicted: the sum of the groups' errors.
        measured: the metric of the model with this choice.
        curve: the best choices for every budget, from the fewest bits on.
    """

    groups: tuple[GroupChoice, ...]
    metric: str
    activations: bool
    bits: float
    predicted: float
    measured: float
    curve: tuple[CurvePoint, ...]

    @property
    def formats(self) -> dict[str, str | None]:
        """The format of each layer by name, as ``quantize_`` takes it."""
        return {name: group.format for group in self.groups for name in group.names}

    def recipe(self) -> CustomRecipe:
        """Return a recipe that quantizes weights and inputs of the layers, and no gradients."""
        formats = self.formats

        def factory(role: Role) -> str | None:
            return formats.get(role.name) if role.tensor in ("weight", "input") else None

        return CustomRecipe(factory=factory, backward_override="high_precision")

    def apply(self, model: nn.Module) -> Conversion:
        """Quantize the layers of a model, in place.

        With ``activations``, ``convert_`` swaps the layers, and ``recipe()`` quantizes their
        weights and inputs. Otherwise ``quantize_`` replaces the weights.

        Args:
            model: the model of the search, or one with the same layers.

        Raises:
            QTensorError: the model has no layer of a name.
        """
        if not self.activations:
            return quantize_(
                model, self.formats, lambda module, name: name in self.formats, kinds=KINDS
            )
        chosen = {name for name, format in self.formats.items() if format is not None}
        known = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        match("SearchResult.apply", self.formats, known, "the result")
        return convert_(
            model, self.recipe(), lambda module, name: name in chosen, quantized_params=True
        )

    def save(self, path: str) -> None:
        """Write the result as JSON."""
        text = json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, indent=1)
        Path(path).write_text(text + "\n")

    @classmethod
    def load(cls, path: str) -> SearchResult:
        """Read a result that ``save`` wrote.

        Raises:
            QTensorError: the file is not such a result.
        """
        try:
            data: dict[str, Any] = json.loads(Path(path).read_text())
            version = data.pop("version")
            data["groups"] = tuple(
                GroupChoice(**{**group, "names": tuple(group["names"])}) for group in data["groups"]
            )
            data["curve"] = tuple(CurvePoint(**point) for point in data["curve"])
            result = cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            rule = "the file is one that SearchResult.save wrote"
            fail("SearchResult.load", rule, f"{path} ({error})", "Pass such a file")
        if version != _VERSION:
            rule = f"this version of qtensor reads version {_VERSION}"
            fail("SearchResult.load", rule, version, "Update qtensor, or search again")
        return result

    def __str__(self) -> str:
        head = (
            f"search: {self.bits:.2f} bits a value, {self.metric} {self.measured:.4g}"
            f" (sum over the groups alone: {self.predicted:.4g})"
        )
        rows = [("layers", "count", "format", "bits", self.metric)]
        rows += [
            (
                _shared_name(group.names),
                str(len(group.names)),
                group.format or "high precision",
                f"{group.bits:.2f}",
                f"{group.error:.3g}",
            )
            for group in self.groups
        ]
        return "\n".join([head, "", *[f"  {line}" for line in aligned(rows)]])

    __repr__ = __str__


def _shared_name(names: tuple[str, ...]) -> str:
    """Return one text for a group: the parts that all names share, with * for the others."""
    if len(names) == 1:
        return names[0] or "(root)"
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) > 1:
        return f"{names[0]}, ..."
    return ".".join(
        column[0] if len(set(column)) == 1 else "{" + ",".join(dict.fromkeys(column)) + "}"
        for column in zip(*parts, strict=True)
    )
