"""``rotate_``: spread outliers over channels before quantizing; the model computes the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.errors import check, fail
from qtensor.core.texts import some
from qtensor.modules.conversion import Conversion, LayerReport
from qtensor.modules.input_hook import QUANTIZER, TRANSFORM, set_input_step
from qtensor.modules.input_transform import InputTransform, hadamard_matrix, rotate
from qtensor.weights.layers import Filter, WeightLayer, is_experts, weight_layers, why_skipped
from qtensor.weights.libraries import tell_libraries
from qtensor.weights.measurement import evaluating, restorer
from qtensor.weights.metrics import as_batches, call, same_random_numbers
from qtensor.weights.norms import NormReaders, find_norms
from qtensor.weights.pairs import kind_of, layer_pairs

OP = "rotate_"
TRANSFORMED = "its inputs have a transform already"
"""Reason for which a layer stays as it is."""
LEAST = 16
"""The smallest group of channels that is worth a rotation: a block of NVFP4."""
_MARK = "_inputs_are_rotated"
"""Attribute of norms and layers whose inputs arrive rotated; nothing else tells a second call."""
_TOLERANCE = {torch.float32: 1e-3}
"""The most by which outputs may move, as a share of the largest one; 0.05 for other dtypes."""


def rotate_(
    model: nn.Module,
    calibration: Iterable[Any],
    filter_fn: Filter | None = None,
    *,
    size: int = 128,
    residual: bool = True,
    values: bool = True,
) -> Conversion:
    """Rotate the input channels of linear layers, in place, so that outliers become small.

    Call it before ``quantize_``: weights, and inputs that are quantized too, then lose less. The
    rotations are block-diagonal Hadamard matrices (QuaRot, Ashkboos et al., 2024; SpinQuant, Liu et
    al., 2024). The model computes what it computed before: the rotated weights undo each rotation.

    - *residual*: the sum that blocks add their outputs to, and that layers read through RMSNorms.
      The norms' weights and the rotation are folded into the embeddings and layers around it, which
      costs nothing at run time.
    - *values*: the values of attention, which a layer makes and another one reads after the
      attention. The rotation of each head is folded into both layers. Such a pair is found by
      trying the rotation, which must not change the outputs.
    - *inputs*: each other ``nn.Linear`` gets an ``InputTransform``, which rotates its inputs at
      each call.

    Args:
        model: the root, with plain weights. It is changed in place.
        calibration: inputs of the model, as ``quantize_`` takes them. A run on the first one shows
            which layers read which norm. The outputs for all inputs are compared with those before.
        filter_fn: ``(module, name) -> bool`` selects layers whose inputs are rotated at each call.
        size: channels of a group of such an input, or fewer where it does not divide them.
        residual: False leaves out the rotation of the residual.
        values: False rotates the inputs of layers that read values at each call, as other inputs,
            in groups that may span heads.

    Returns:
        Reports of the layers that were rotated, and of the others with the reason.

    Raises:
        QTensorError: the size is not a power of two, no layer can be rotated, a layer rotates its
            inputs already, or the outputs moved by more than 1e-3 of the largest one (float32; 0.05
            for other dtypes). The model is as before.
    """
    rule, fix = "size is a power of two of at least 16", "Pass 128"
    fits = isinstance(size, int) and size >= LEAST and power_of_two_in(size) == size
    check(fits, OP, rule, repr(size), fix)
    _check_not_rotated(model)
    layers, skipped = weight_layers(OP, model, filter_fn, plain=True)
    batches = as_batches(OP, "calibration", calibration)
    swapped: list[LayerReport] = []
    # The last line of the block empties the stack; after an error it undoes all changes.
    with evaluating(model), torch.no_grad(), same_random_numbers(model), ExitStack() as undo:

        def outputs(some: Sequence[Any] = batches) -> list[Tensor]:
            return [call(OP, f"calibration[{i}]", model, b) for i, b in enumerate(some)]

        want = comparable(OP, outputs())
        done: dict[int, LayerReport] = {}
        if residual:
            done, why = _rotate_residual(model, batches[0], lambda: moved_by(outputs(), want), undo)
            if why:
                skipped.append(LayerReport("(residual)", "", f"not rotated: {why}"))

        def moved_first() -> float | None:
            return moved_by(outputs(batches[:1]), want[:1])

        for pair in find_pairs(layers, done, size, moved_first) if values else ():
            undo.callback(restorer(pair.parameters))
            pair.rotate()
            _mark(pair.reader, undo)
            note = f"reads {pair.first}, rotated with it in groups of {pair.size}"
            report = LayerReport(pair.second, shape_of(pair.reader.weight), note)
            done[id(pair.reader.weight)] = report
        swapped += done.values()
        for name, layer in layers.items():
            group = min(size, power_of_two_in(layer.stored[0].shape[-1]))
            if id(layer.stored[0]) in done:
                continue
            if reason := _obstacle(layer, group):
                skipped.append(LayerReport(name or "(root)", layer.features, reason))
                continue
            _rotate_online(layer, group, undo)
            note = f"its inputs are rotated in groups of {group} at each call"
            swapped.append(LayerReport(name or "(root)", layer.features, note))
        reasons = why_skipped(skipped[-3:])
        check(bool(swapped), OP, "a layer must allow a rotation", reasons, "Check filter_fn")
        if (moved := moved_by(outputs(), want)) is not None:
            rule = "a rotated model computes what it computed before"
            got = f"outputs that moved by {moved:.1e} of the largest"
            fix = "Use float32, and leave out layers whose weights other code reads"
            fail(OP, rule, got, fix)
        undo.pop_all()
    tell_libraries(model)
    return Conversion("rotate_", tuple(swapped), tuple(skipped), ())


def _check_not_rotated(model: object) -> None:
    """Refuse a model that is rotated: a Hadamard matrix is its own inverse."""
    rotating = []
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        step = module._modules.get(TRANSFORM)
        if (isinstance(step, InputTransform) and step.block) or _MARK in vars(module):
            rotating.append(name or "(root)")
    rule = "a model is rotated once, because a second rotation undoes the first"
    fix = "Start from the model of before, and rotate all layers in one call"
    got = f"a rotation of the inputs of {some(rotating)}"
    check(not rotating, OP, rule, got, fix)


def _mark(module: nn.Module, undo: ExitStack) -> None:
    """Note that the inputs of a norm or layer are rotated by the weights around it."""
    setattr(module, _MARK, True)
    undo.callback(vars(module).pop, _MARK, None)


def _rotate_residual(
    model: nn.Module, batch: Any, moved: Callable[[], float | None], undo: ExitStack
) -> tuple[dict[int, LayerReport], str]:
    """Rotate the residual if that changes no output.

    Returns:
        A report of each layer that reads it, by the id of its weight, and the reason if there is
        none.
    """
    plan, why = Residual.of(model, batch)
    if plan is None:
        return {}, why
    with ExitStack() as trial:
        trial.callback(restorer(plan.parameters))
        plan.rotate()
        if (by := moved()) is not None:
            return {}, f"its outputs would move by {by:.1e}: the residual has other readers"
        undo.enter_context(trial.pop_all())
        for norm in plan.norms:
            _mark(norm.norm, undo)
    note = f"reads the residual, rotated in groups of {plan.size}"
    return {id(p): LayerReport(n, shape_of(p, dim), note) for n, p, dim in plan.readers}, ""


def shape_of(weight: Tensor, dim: int = -1) -> str:
    """Return the sizes of a weight, whose dim for inputs is -1 or -2: ``"64 -> 128"``."""
    return f"{weight.shape[dim]} -> {weight.shape[-3 - dim]}"


def comparable(op: str, outputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs of a model, if later ones can be compared with each.

    Raises:
        QTensorError: an output is NaN or empty, or on the device meta.
    """
    rule = "the outputs of the model must show whether it computes the same"
    for i, output in enumerate(outputs):
        data = f"output of calibration[{i}] has no data: it is on the device meta"
        check(not output.is_meta, op, rule, data, "Load the weights first")
        got = f"{'NaN in the' if output.numel() else 'an empty'} output of calibration[{i}]"
        fits = output.numel() > 0 and not bool(output.isnan().any())
        check(fits, op, rule, got, "Leave this input out, or repair it")
    return outputs


def moved_by(got: Sequence[Tensor], want: Sequence[Tensor]) -> float | None:
    """Return by what share of the largest output outputs moved, or None if that is rounding."""
    worst, least = 0.0, torch.finfo(torch.float32).tiny
    for after, before in zip(got, want, strict=True):
        a, b = after.float(), before.float()
        largest = float(torch.where(b.isfinite(), b, 0).abs().max().clamp(min=least))
        # Equal infinities did not move, and a new NaN did.
        distance = torch.where(a == b, 0, a - b).abs().nan_to_num(nan=torch.inf)
        worst = max(worst, float(distance.max()) / largest)
    return None if worst <= _TOLERANCE.get(want[0].dtype, 0.05) else worst


def transforms(layer: WeightLayer) -> bool:
    """Return whether the layer scales or rotates its inputs at each call."""
    return any(TRANSFORM in module._modules for module in layer.modules)


def _obstacle(layer: WeightLayer, size: int) -> str:
    """Return the reason for which the inputs of a layer are not rotated at each call, or ""."""
    if not layer.is_plain:
        return "its inputs cannot be rotated at each call"
    if transforms(layer):
        return TRANSFORMED
    if QUANTIZER in layer.modules[0]._modules:
        return "its inputs are quantized already; calibrate after rotate_"
    return "" if size >= LEAST else f"no power of two of at least {LEAST} divides its inputs"


def power_of_two_in(size: int) -> int:
    """Return the largest power of two that divides a size."""
    return size & -size


def rotated(x: Tensor, size: int) -> Tensor:
    """Return x (..., K) rotated in groups of ``size`` channels, in its dtype; its own inverse."""
    return rotate(x, hadamard_matrix(size, x.device, x.dtype))


def _rotate_online(layer: WeightLayer, size: int, undo: ExitStack) -> None:
    """Rotate a layer's weight and, at each call, its input."""
    (module,), (weight,) = layer.modules, layer.stored
    undo.callback(restorer([weight]))
    undo.callback(set_input_step, module, TRANSFORM, None)
    weight.copy_(rotated(weight.double(), size))
    set_input_step(module, TRANSFORM, InputTransform(hadamard=size, device=weight.device))


class Pair:
    """Two layers; channels of the first one's output are those of the second one's input.

    Attributes:
        first: name of the layer ``source``.
        second: name of the layer ``reader``.
        size: channels of a rotated group.
    """

    def __init__(self, first: str, second: str, source: nn.Linear, reader: nn.Linear) -> None:
        self.first, self.second, self.source, self.reader = first, second, source, reader
        self.size = LEAST

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that ``rotate`` changes."""
        changed = (self.source.weight, self.source.bias, self.reader.weight)
        return [parameter for parameter in changed if parameter is not None]

    def rotate(self) -> None:
        """Rotate the groups of channels in both layers."""
        _rotate_dim(self.source.weight, -2, self.size)
        _rotate_dim(self.reader.weight, -1, self.size)
        if self.source.bias is not None:
            _rotate_dim(self.source.bias, -1, self.size)


def find_pairs(
    layers: Mapping[str, WeightLayer],
    done: Collection[int],
    largest: int,
    moved: Callable[[], float | None],
) -> list[Pair]:
    """Return pairs of layers between which a rotation changes nothing, not rotated.

    Pairs of one kind (the same names in each block) are tried together.

    Args:
        layers: by name.
        done: ids of the weights whose inputs are rotated already.
        largest: the most channels of a group.
        moved: returns by what share the outputs of the model moved, or None if that is rounding.
    """
    kinds: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for first, second in layer_pairs(layers):
        layer = layers[second]
        width = power_of_two_in(layers[first].modules[0].out_features)
        if id(layer.stored[0]) not in done and not _obstacle(layer, width):
            kinds.setdefault(kind_of(first, second), []).append((first, second))
    found: list[Pair] = []
    taken: set[str] = set()
    for names in kinds.values():
        if any(second in taken for _, second in names):
            continue
        kind = [Pair(a, b, layers[a].modules[0], layers[b].modules[0]) for a, b in names]
        if not _fits(kind, LEAST, moved):
            continue
        # A group of 16 lies in a head; larger ones may not.
        sizes = [min(largest, power_of_two_in(pair.source.out_features)) for pair in kind]
        size = min(sizes)
        while size > LEAST and not _fits(kind, size, moved):
            size //= 2
        for pair in kind:
            pair.size = size
        found += kind
        taken |= {second for _, second in names}
    return found


def _fits(kind: Sequence[Pair], size: int, moved: Callable[[], float | None]) -> bool:
    """Return whether the model computes the same with rotated pairs; they are put back."""
    with ExitStack() as trial:
        trial.callback(restorer(p for pair in kind for p in pair.parameters))
        for pair in kind:
            pair.size = size
            pair.rotate()
        return moved() is None


def _rotate_dim(parameter: Tensor, dim: int, size: int, scale: Tensor | float = 1.0) -> None:
    """Multiply the channels along a dim of a parameter, and rotate groups of them, in place."""
    channels_last = parameter.double().movedim(dim, -1) * scale
    parameter.copy_(rotated(channels_last, size).movedim(-1, dim))


class Residual:
    """The parameters around the residual of a model, which RMSNorms read.

    Attributes:
        size: channels of a group.
        norms: the norms that read it.
        writers: the parameters whose products are added to it, each with the dim that holds its
            channels: embeddings (V, K) and biases (..., K) along -1, weights (..., K, inputs) along
            -2, and weights of experts that are stored as (E, inputs, K) along -1.
    """

    def __init__(
        self, size: int, norms: list[NormReaders], writers: list[tuple[nn.Parameter, int]]
    ) -> None:
        self.size, self.norms, self.writers = size, norms, writers

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> tuple[Residual | None, str]:
        """Return the residual, or None and the reason for which it cannot be rotated."""
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        widths = {embedding.embedding_dim for embedding in embeddings}
        norms = [n for n in find_norms(OP, model, batch) if n.scale.numel() in widths]
        if not norms:
            return None, "no norm of the size of an embedding is read by linear layers"
        if any(norm.centers or getattr(norm.norm, "bias", None) is not None for norm in norms):
            return None, "LayerNorm does not commute with a rotation"
        width = norms[0].scale.numel()
        if (size := power_of_two_in(width)) < LEAST:
            return None, f"no power of two of at least {LEAST} divides {width}"
        readers = {id(p) for norm in norms for p in norm.readers.values()}
        writers: dict[int, tuple[nn.Parameter, int]] = {}
        for module in model.modules():
            own = module._parameters
            if isinstance(module, nn.Embedding) and module.embedding_dim == width:
                found = [("weight", -1)]
            elif isinstance(module, nn.Linear) and module.out_features == width:
                found = [] if id(module.weight) in readers else [("weight", -2), ("bias", -1)]
            else:
                # Experts (E, K, N) hold the channels of their outputs along -1.
                rows = -1 if getattr(module, "is_transposed", False) else -2
                found = [("down_proj", rows), ("down_proj_bias", -1)] if is_experts(module) else []
            for name, dim in found:
                parameter = own.get(name)
                if parameter is not None:
                    writers[id(parameter)] = (parameter, dim)
        if readers & writers.keys():
            return None, "an embedding is tied to the weight of a layer that reads the residual"
        return cls(size, norms, list(writers.values())), ""

    @property
    def readers(self) -> list[tuple[str, nn.Parameter, int]]:
        """The layers behind the norms: names, weights, and the dim that holds the channels."""
        return [
            (name.removesuffix(".weight"), parameter, norm.dims[name])
            for norm in self.norms
            for name, parameter in norm.readers.items()
        ]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that ``rotate`` changes."""
        scales: list[Any] = [norm.norm.weight for norm in self.norms]
        return [*(p for _, p, _ in self.readers), *(p for p, _ in self.writers), *scales]

    def rotate(self) -> None:
        """Fold the weights of the norms into their readers, and rotate readers and writers."""
        for norm in self.norms:
            for name, weight in norm.readers.items():
                _rotate_dim(weight, norm.dims[name], self.size, norm.scale)
            norm.set_scale(torch.ones_like(norm.scale))
        for weight, dim in self.writers:
            _rotate_dim(weight, dim, self.size)
