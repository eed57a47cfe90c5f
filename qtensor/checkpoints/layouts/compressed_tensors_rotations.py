"""Read the rotations of inputs that a ``transform_config`` of compressed-tensors asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from qtensor.checkpoints.input_transforms import stored_transforms
from qtensor.checkpoints.layout_base import Layout
from qtensor.checkpoints.patterns import Pattern
from qtensor.modules.input_transform import InputTransform

_LARGEST = 1 << 14
"""The largest block: its matrix takes 1 GiB."""


class Rotation(NamedTuple):
    """Describe a rotation of the inputs of some modules.

    Attributes:
        size: of the rotated blocks.
        targets: names of modules, patterns, or the class "Linear" for every module.
        ignore: modules that are left out.
    """

    size: int
    targets: tuple[str | Pattern, ...]
    ignore: tuple[str | Pattern, ...]

    def names(self, module: str) -> bool:
        """Return True if the inputs of a module are rotated."""

        def hit(texts: tuple[str | Pattern, ...]) -> bool:
            return any(
                t.matches(module) if isinstance(t, Pattern) else t in (module, "Linear")
                for t in texts
            )

        return hit(self.targets) and not hit(self.ignore)


def online_rotations(layout: Layout) -> dict[str, InputTransform]:
    """Return the rotations of inputs that ``transform_config`` asks for, by module."""
    found = stored_transforms(layout.source)
    for target in _online(layout):
        for module in _modules_of(layout, target):
            if module in found:
                got = f"two for {module}"
                layout.refuse("", "an input has one rotation", got, "Export it again")
            found[module] = InputTransform(hadamard=target.size)
    return found


def _online(layout: Layout) -> Iterable[Rotation]:
    """Return the rotations that are not folded into the stored weights.

    Raises:
        CheckpointError: one of them cannot be applied.
    """
    config = layout.source.quantization.get("transform_config") or {"config_groups": {}}
    groups = config.get("config_groups") if isinstance(config, dict) else None
    if not isinstance(groups, dict):
        layout.refuse("", "transform_config has config_groups", repr(config), "Check config.json")
    for name, group in groups.items():
        places = group.get("apply") if isinstance(group, dict) else None
        if not isinstance(places, list) or any(not isinstance(p, dict) for p in places):
            rule = "a group of transform_config has a list apply"
            layout.refuse("", rule, repr(group), "Check config.json")
        for place in places:
            if place.get("location") not in ("weight_input", "weight_output"):
                yield _rotation(layout, str(name), group, place)


def _rotation(
    layout: Layout, name: str, group: Mapping[str, Any], place: Mapping[str, Any]
) -> Rotation:
    """Return an entry of ``apply`` after checking that inputs can be rotated so."""
    kind, location = group.get("type"), place.get("location")
    size: Any = group.get("head_dim")
    plain = kind == "hadamard" and not group.get("randomize") and location == "input"
    known = type(size) is int and 1 < size <= _LARGEST and size & (size - 1) == 0
    if not plain or not known:
        rule = (
            "rotations that are applied while the model runs are of type hadamard, not "
            "randomized, at the location input, with a head_dim that is a power of two"
        )
        got = f"{name}: {kind} at {location}, head_dim {size}"
        layout.refuse("", rule, got, "Run the model with vLLM")
    return Rotation(size, *(_targets(layout, place.get(k) or []) for k in ("targets", "ignore")))


def _targets(layout: Layout, texts: Any) -> tuple[str | Pattern, ...]:
    texts = texts if isinstance(texts, list) else [texts]
    return tuple(
        Pattern(text[3:], layout.place()) if text.startswith("re:") else text
        for text in map(str, texts)
    )


def _modules_of(layout: Layout, target: Rotation) -> list[str]:
    """Return the modules with weights that a rotation names, or refuse one that names none."""
    ends = (".weight", ".weight_packed")
    names = [n.rpartition(".")[0] for n in layout.source.tensors if f".{n}".endswith(ends)]
    modules = [m for m in dict.fromkeys(names) if target.names(m)]
    if not modules:
        got = ", ".join(map(str, target.targets))
        layout.refuse("", "a rotation names modules of the file", got, "Check config.json")
    return modules
