"""The report of ``merge_lora_``: what is left of the change of each layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from qtensor.core.texts import aligned, some
from qtensor.modules.conversion import LayerReport


@dataclass(frozen=True)
class LayerMerge:
    """What is left of a change in the merged weight of a layer.

    Attributes:
        name: of the layer.
        features: its sizes, ``"64 -> 128"``.
        format: canonical text of the weight's quantizer; ``"plain"`` if it is not quantized.
        change: norm of the change, as a share of the norm of the weight.
        kept: projection of the weight's real change on the wanted one, 1 if all of it is there:
            ``<merged - before, change> / <change, change>``.
        weight_cosine: between the real and the wanted change of the weight.
        output_cosine: between the real and the wanted change of the layer's outputs, over the
            calibration inputs; None without them.
        note: further remarks.
    """

    name: str
    features: str
    format: str
    change: float
    kept: float
    weight_cosine: float
    output_cosine: float | None = None
    note: str = ""

    @property
    def survived(self) -> float:
        """The cosine of the outputs; without it, the lesser of projection and cosine of the weight.

        The projection alone can be 1 where rounding adds noise that is larger than the change.
        """
        own = min(self.kept, self.weight_cosine)
        return own if self.output_cosine is None else self.output_cosine


@dataclass(frozen=True, repr=False)
class MergeReport:
    """The result of ``merge_lora_``. Its repr is a table.

    Attributes:
        method: how the weights were rounded.
        layers: the layers that were merged.
        skipped: layers whose adapters are still there; each note gives the reason.
    """

    method: str
    layers: tuple[LayerMerge, ...]
    skipped: tuple[LayerReport, ...] = ()

    def __str__(self) -> str:
        titles = ("cosine of weights", "cosine of outputs", "note")
        rows = [("layer", "in -> out", "format", "change", "kept", *titles)]
        for each in self.layers:
            outputs = "" if each.output_cosine is None else f"{each.output_cosine:.3f}"
            shares = f"{each.change:.2%}", f"{each.kept:.1%}", f"{each.weight_cosine:.3f}", outputs
            rows.append((each.name, each.features, each.format, *shares, each.note))
        lines = [f"merge_lora_ with {self.method}: {len(self.layers)} layers", *aligned(rows)]
        if self.skipped:
            lines += ["", f"skipped ({len(self.skipped)})"]
            lines += [f"  {each.name}: {each.note}" for each in self.skipped]
        return "\n".join(lines)

    __repr__ = __str__


def warn_of_losses(op: str, merged: Sequence[LayerMerge], limit: float, method: str) -> None:
    """Warn of layers of whose change less than ``limit`` is left; a limit of 0 never warns."""
    lost = [each for each in merged if each.survived < limit]
    if not lost or limit <= 0:
        return
    listed = some([f"{each.name} ({each.survived:.0%})" for each in lost], 5)
    measured = lost[0].output_cosine is not None
    kind = "of the change of outputs (cosine)" if measured else "of the change"
    advice = {
        "nearest": 'method="gptq" with calibration inputs keeps more',
        "stochastic": 'method="gptq" with calibration inputs is closer',
        "gptq": "more bits, or adapters trained with merge_aware_ of qtensor.integrations.peft, "
        "keep more",
    }
    warnings.warn(
        f"{op}: less than {limit:.0%} {kind} is left in {len(lost)} of {len(merged)} layers: "
        f"{listed}. The change is small beside the steps of the format; {advice[method]}.",
        UserWarning,
        stacklevel=3,
    )
