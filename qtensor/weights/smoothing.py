"""``smooth_``: move scales from inputs of layers to weights; the model computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtensor.api import Format
from qtensor.core.errors import check, is_number
from qtensor.modules.conversion import Conversion, LayerReport
from qtensor.modules.input_hook import TRANSFORM
from qtensor.quantizers import Quantizer
from qtensor.weights.layers import Filter, WeightLayer, weight_layers
from qtensor.weights.measurement import evaluating, restorer
from qtensor.weights.metrics import as_batches, call, run, same_random_numbers
from qtensor.weights.norms import NormReaders, find_norms
from qtensor.weights.pairs import kind_of, layer_pairs
from qtensor.weights.quantize import as_quantizer
from qtensor.weights.rotation import TRANSFORMED, comparable, moved_by, transforms
from qtensor.weights.visits import visiting

OP = "smooth_"
ROWS = 256
"""Rows of the inputs of each layer that the search of scales looks at."""
_ALPHAS = tuple(i / 10 for i in range(1, 11))
_LEAST = 1e-4
"""Scales are at least this share of the largest one before they are centred."""


@dataclass(frozen=True)
class Rows:
    """Rows of a weight, (N, K), and of a bias, (N,) or None, that make the channels of an input."""

    weight: Tensor
    bias: Tensor | None


@dataclass
class Fold:
    """A place where a scale of each channel can move from one weight to others.

    Attributes:
        source: divides the channels of its output by a scale.
        name: of the source.
        readers: the layers that multiply these channels, by name.
        width: number of channels of the source.
        head: channels of a head that several heads of the readers share; 0 if none do.
        expert: number of the expert whose weights these are; 0 outside of stacks.
    """

    source: NormReaders | Rows
    name: str
    readers: Mapping[str, Tensor]
    width: int
    head: int = 0
    expert: int = 0

    def spread(self, scale: Tensor, channels: int) -> Tensor:
        """Return a scale (width,) of the source as one of the readers' (channels,)."""
        if not self.head:
            return scale
        copies = channels // self.width
        return scale.view(-1, 1, self.head).expand(-1, copies, -1).reshape(-1)

    def gather(self, scale: Tensor) -> Tensor:
        """Return one scale (width,) for the geometric mean of those of the readers' channels."""
        if not self.head:
            return scale
        return scale.log().view(self.width // self.head, -1, self.head).mean(1).exp().reshape(-1)

    def apply(self, scale: Tensor) -> None:
        """Divide the channels of the source by a scale (width,), and multiply the readers'."""
        if isinstance(self.source, NormReaders):
            self.source.set_scale(self.source.scale / scale)
        else:
            weight, bias = self.source.weight, self.source.bias
            weight.copy_(weight.double() / scale[:, None])
            if bias is not None:
                bias.copy_(bias.double() / scale)
        for weight in self.readers.values():
            weight.copy_(weight.double() * self.spread(scale, weight.shape[-1]))


def smooth_(
    model: nn.Module,
    format: Format,
    calibration: Iterable[Any],
    filter_fn: Filter | None = None,
    *,
    inputs: Format | None = None,
    alpha: float | None = None,
) -> Conversion:
    """Divide the input channels of layers by scales, and multiply their weights by them, in place.

    Call it before ``quantize_``, and after ``rotate_`` if you use both. Inputs with outliers in
    single channels, and the weights that multiply them, then lose less (AWQ, Lin et al., 2023;
    SmoothQuant, Xiao et al., 2022). The division is folded into the norm, or the linear layer, in
    front of a layer, so that the model computes what it computed before, at no cost. A place for
    scales is found by trying random ones, which must not change the outputs. Each expert of a stack
    has scales of its own between its two products.

    Args:
        model: the root, with plain weights. It is changed in place.
        format: of the weights later, as ``quantize_`` takes it.
        calibration: inputs of the model, as ``quantize_`` takes them.
        filter_fn: ``(module, name) -> bool`` selects layers.
        inputs: the format of the layers' inputs later, or None if they stay in high precision.
        alpha: the exponent of SmoothQuant's rule, 0 to 1: the scale of channel j is
            ``max |x_j|^alpha / max |W_j|^(1 - alpha)``. None tries this rule and AWQ's,
            ``(mean |x_j|)^alpha``, with exponents from 0.1 to 1. It takes the scales with the least
            squared error of the layers' outputs over ``ROWS`` rows of inputs, or none if no scales
            make the error smaller.

    Returns:
        Reports of the layers, with the error of their outputs before and after.

    Raises:
        QTensorError: a format is unknown, ``alpha`` is out of range, the model fails on an input,
            or no scale can be folded. The model is as before.
    """
    rule, fix = "alpha is a number from 0 to 1, or None", "Pass 0.5"
    fits = alpha is None or (is_number(alpha) and 0 <= alpha <= 1)
    check(fits, OP, rule, repr(alpha), fix)
    weights = cast(Quantizer, as_quantizer(OP, format))
    quantized = _decoded(weights), _decoded(as_quantizer(OP, inputs) if inputs else None)
    layers, skipped = weight_layers(OP, model, filter_fn, plain=True)
    batches = as_batches(OP, "calibration", calibration)
    done: dict[str, list[tuple[Fold, tuple[Tensor, float, float]]]] = {}
    with evaluating(model), torch.no_grad(), same_random_numbers(model):
        folds = find_folds(model, layers, batches[0])
        rule = "the model needs a norm or a linear layer into which scales can be folded"
        turned = [f"{n}: {TRANSFORMED}" for n, layer in layers.items() if transforms(layer)]
        notes = [*turned, *(f"{report.name}: {report.note}" for report in skipped)][:3]
        got = "; ".join(["no such place", *notes])
        check(bool(folds), OP, rule, got, "Check the model and filter_fn")
        samples = _samples(model, layers, folds, batches)
        for fold in folds:
            chosen = _search(fold, samples, quantized, alpha)
            if chosen is not None:
                done.setdefault(fold.name, []).append((fold, chosen))
        # Nothing changes before the search is over: an error leaves the model as it was.
        for fold, chosen in (pair for pairs in done.values() for pair in pairs):
            fold.apply(chosen[0])
    swapped = [report for pairs in done.values() for report in _reports(pairs)]
    for name, layer in layers.items():
        if name not in {report.name for report in swapped}:
            note = TRANSFORMED if transforms(layer) else "no scale helps"
            skipped.append(LayerReport(name or "(root)", layer.features, note))
    return Conversion("smooth_", tuple(swapped), tuple(skipped), ())


def _reports(pairs: Sequence[tuple[Fold, tuple[Tensor, float, float]]]) -> list[LayerReport]:
    """Return the reports of the readers of one source, or of all experts of a stack."""
    fold, scales = pairs[0][0], torch.stack([chosen[0] for _, chosen in pairs])
    before, after = (sum(chosen[i] for _, chosen in pairs) for i in (1, 2))
    low, high = (float(v) for v in scales.aminmax())
    note = f"scales of {fold.name} {low:.2g} to {high:.2g}, error x {after / before:.2f}"
    note += f", {len(pairs)} experts" if len(pairs) > 1 else ""
    shapes = {n: f"{w.shape[-1]} -> {w.shape[-2]}" for n, w in fold.readers.items()}
    return [LayerReport(name, shape, note) for name, shape in shapes.items()]


# ---- places


def find_folds(model: nn.Module, layers: Mapping[str, WeightLayer], batch: Any) -> list[Fold]:
    """Return the places where scales can be folded, those of norms first.

    Places of one kind (the same names in each block) are tried together.
    """
    (want,) = comparable(OP, [call(OP, "calibration[0]", model, batch)])
    names = {id(layer.stored[0]): name for name, layer in layers.items()}
    kinds: dict[tuple[str, ...], list[Fold]] = {}
    behind = (*_behind_norms(model, batch, names), *_behind_layers(model, layers))
    for fold in (*behind, *_inside_experts(layers)):
        kinds.setdefault(kind_of(fold.name, *fold.readers), []).append(fold)
    found: list[Fold] = []
    taken: set[str] = set()
    generator = torch.Generator().manual_seed(0)
    for kind in kinds.values():
        if any(name in taken for fold in kind for name in fold.readers):
            continue
        touched = [p for fold in kind for p in _touched(fold)]
        with ExitStack() as trial:
            trial.callback(restorer(touched))
            for fold in kind:
                scale = torch.rand(fold.width, generator=generator, dtype=torch.float64) + 0.5
                fold.apply(scale.to(touched[0].device))
            moved = moved_by([call(OP, "calibration[0]", model, batch)], [want])
        if moved is None:
            found += kind
            taken |= {name for fold in kind for name in fold.readers}
    return found


def _touched(fold: Fold) -> list[Tensor]:
    source: Any = fold.source.norm if isinstance(fold.source, NormReaders) else fold.source
    own = [getattr(source, name, None) for name in ("weight", "bias")]
    return [*fold.readers.values(), *(p for p in own if isinstance(p, Tensor))]


def _behind_norms(model: nn.Module, batch: Any, names: Mapping[int, str]) -> Iterator[Fold]:
    for norm in find_norms(OP, model, batch):
        # Each reader of the norm must take the scale, whether it is quantized later or not.
        readers = {names.get(id(p), n.removesuffix(".weight")): p for n, p in norm.readers.items()}
        modules = [model.get_submodule(_module(n, model)) for n in readers]
        fits = all(TRANSFORM not in module._modules for module in modules)
        fits = fits and set(norm.dims.values()) == {-1}
        if any(id(p) in names for p in readers.values()) and fits:
            yield Fold(norm, norm.name, readers, norm.scale.numel())


def _module(name: str, model: nn.Module) -> str:
    """Return the name of the module that has a layer's weight."""
    return name if name in dict(model.named_modules()) else name.rpartition(".")[0]


def _behind_layers(model: nn.Module, layers: Mapping[str, WeightLayer]) -> Iterator[Fold]:
    """Yield pairs of layers of one block: the outputs of the first may be inputs of the second."""
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", 0) or 0
    head = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    for first, second in layer_pairs(layers):
        source, reader = (cast(nn.Linear, layers[n].modules[0]) for n in (first, second))
        width, channels = source.out_features, reader.in_features
        shares = width != channels and head and width % head == 0
        if width == channels or shares:
            rows = Rows(source.weight, source.bias)
            yield Fold(rows, first, {second: reader.weight}, width, head if shares else 0)


def _inside_experts(layers: Mapping[str, WeightLayer]) -> Iterator[Fold]:
    """Yield pairs of products of each expert: rows that are not gates make the second's inputs."""
    for name, layer in layers.items():
        own, module = layer.parameters[0], layer.modules[0]
        if not layer.stacked or own != "down_proj":
            continue
        first = "gate_up_proj" if module.has_gate else "up_proj"
        source = name.removesuffix(own) + first
        if source not in layers:
            continue
        stack, bias = getattr(module, first), getattr(module, f"{first}_bias", None)
        for expert, reader in enumerate(module.down_proj):
            width = reader.shape[-1]
            last = slice(stack.shape[1] - width, None)
            rows = Rows(stack[expert, last], None if bias is None else bias[expert, last])
            yield Fold(rows, source, {name: reader}, width, expert=expert)


# ---- scales


def _samples(
    model: nn.Module,
    layers: Mapping[str, WeightLayer],
    folds: Sequence[Fold],
    batches: Sequence[Any],
) -> dict[tuple[str, int], Tensor]:
    """Return up to ``ROWS`` rows of the inputs of each fold, float32, by source and expert."""
    first = {next(n for n in fold.readers if n in layers): fold.name for fold in folds}
    each = max(1, ROWS // len(batches))
    parts: dict[tuple[str, int], list[Tensor]] = {}
    # Scales of a norm are for all experts that read it.
    apart = {fold.name for fold in folds if isinstance(fold.source, Rows)}

    def see(name: str, expert: int, rows: Tensor) -> None:
        picked = torch.linspace(0, len(rows) - 1, min(each, len(rows))).long()
        source = first[name]
        parts.setdefault((source, expert if source in apart else 0), []).append(
            rows[picked.to(rows.device)].clone()
        )

    watched = {name: layers[name] for name in first}
    with visiting(OP, watched, see, lambda name, x: None) as padding:
        for i, batch in enumerate(batches):
            padding(batch)
            run(OP, f"calibration[{i}]", model, batch)
    return {name: torch.cat(rows) for name, rows in parts.items()}


def _decoded(quantizer: Quantizer | None) -> Callable[[Tensor], Tensor]:
    """Return a function to the values that quantizing leaves."""
    if quantizer is None:
        return lambda x: x
    return lambda x: quantizer(x).dequantize()


def _search(
    fold: Fold,
    samples: Mapping[tuple[str, int], Tensor],
    quantized: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
    alpha: float | None,
) -> tuple[Tensor, float, float] | None:
    """Return the best scale (width,) with the errors before and after, or None for no scale."""
    x = samples.get((fold.name, fold.expert))
    if x is None or not len(x):
        return None
    weights = [w.float().flatten(0, -2) for w in fold.readers.values()]
    products = [F.linear(x, w) for w in weights]

    def error(scale: Tensor) -> float:
        each = fold.spread(scale, x.shape[-1]).float()
        inputs = quantized[1](x / each)
        outputs = (F.linear(inputs, quantized[0](w * each)) for w in weights)
        return sum(float((o - p).square().sum()) for o, p in zip(outputs, products, strict=True))

    largest = torch.stack([w.abs().amax(0) for w in weights]).amax(0).double()
    scales = [_centred(fold, r) for r in _rules(x.double().abs(), largest, alpha)]
    before = error(torch.ones_like(scales[0]))
    errors = [error(scale) for scale in scales]
    best = min(range(len(scales)), key=errors.__getitem__)
    better = alpha is not None or errors[best] < before
    return (scales[best], before, errors[best]) if better else None


def _rules(x: Tensor, weights: Tensor, alpha: float | None) -> Iterator[Tensor]:
    """Yield scales from the magnitudes of inputs (R, K) and the largest of weights (K,)."""
    for a in _ALPHAS if alpha is None else (alpha,):
        yield x.amax(0) ** a / weights.clamp(min=torch.finfo(torch.float32).tiny) ** (1 - a)
        if alpha is None:
            yield x.mean(0) ** a


def _centred(fold: Fold, scale: Tensor) -> Tensor:
    """Return a scale of the source whose smallest and largest values are reciprocal."""
    scale = fold.gather(scale.clamp(min=float(scale.max()) * _LEAST or 1.0))
    return scale / (scale.min() * scale.max()).sqrt()
