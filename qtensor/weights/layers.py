"""The layers of a model whose weights can be quantized."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qtensor.core.errors import ArgumentTypeError, check, fail
from qtensor.core.texts import some
from qtensor.debug.layers import is_conv1d
from qtensor.modules.conversion import LayerReport
from qtensor.modules.convert import Filter
from qtensor.modules.grouped_linear import GroupedLinear
from qtensor.modules.in_place import plain_class
from qtensor.modules.linear import Linear
from qtensor.modules.parameters import FLOATING
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.rebuild import reshaped
from qtensor.weights.aware import QuantizationAware

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Weights of the experts of transformers, each (E, N, K)."""


FILTERED = "filtered"
"""Reason for which a layer stays as it is: ``filter_fn`` leaves it out."""
KINDS = ("linear", "attention", "convolution", "embedding", "recurrent")
"""Kinds of layers. ``"attention"`` are the projections of ``nn.MultiheadAttention``."""
PRODUCTS = KINDS[:2]
"""The kinds that ``quantize_`` and ``search`` take by default."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


@dataclass(frozen=True, eq=False)
class WeightLayer:
    """A product with one weight, the products of several experts, or a layer with another weight.

    Attributes:
        modules: the modules that hold the weights: one, or all that share a tied weight.
        parameters: names of the weights in each module. A ``GroupedLinear`` has one for each
            expert.
        transposed: whether the weight is stored as (K, N), as in ``Conv1D`` of transformers.
        stacked: whether the weight is (E, N, K), for all experts of a block of transformers.
        note: text about the layer for a report.
        kind: one of ``KINDS``.
        attention: the ``nn.MultiheadAttention`` that multiplies by the weight itself.
    """

    modules: tuple[Any, ...]
    parameters: tuple[str, ...] = ("weight",)
    transposed: bool = False
    stacked: bool = False
    note: str = ""
    kind: str = "linear"
    attention: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether the layer is one ``nn.Linear`` with a weight of its own, and is called."""
        single = self.kind == "linear" and len(self.modules) == 1
        return single and isinstance(self.modules[0], nn.Linear)

    @property
    def multiplies_inputs(self) -> bool:
        """Whether a calibration can see rows of inputs that the weight multiplies."""
        return self.kind in KINDS[:3]

    @property
    def stored(self) -> list[Any]:
        """The parameters."""
        return [self.modules[0]._parameters.get(name) for name in self.parameters]

    @property
    def weights(self) -> list[Tensor]:
        """The weights as they are quantized: each (N, K), or one (E, N, K)."""
        return [self._matrix(weight.detach()) for weight in self.stored]

    def _matrix(self, weight: Tensor) -> Tensor:
        if self.kind == "convolution":
            return weight.flatten(1)
        return weight.t() if self.transposed else weight

    @property
    def experts(self) -> int:
        """Number of matrices: 1, or one for each expert."""
        return len(self.stored[0]) if self.stacked else len(self.parameters)

    @property
    def features(self) -> str:
        """The sizes, for reports: ``"64 -> 128"``."""
        weight = self.stored[0]
        shape = ("?", "?") if weight is None or is_lazy(weight) else weight.shape
        if self.kind == "convolution" and len(shape) > 2:
            kernel = "x".join(map(str, shape[2:]))
            return f"{self.modules[0].in_channels} -> {shape[0]}, {kernel}"
        if self.kind == "embedding":
            return f"{shape[0]} -> {shape[-1]}"
        rows, columns = shape[-2:][::-1] if self.transposed else shape[-2:]
        return f"{columns} -> {rows}"

    @property
    def values(self) -> int:
        """Number of values of all weights."""
        return sum(weight.numel() for weight in self.stored)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all weights."""
        return sum(weight.nbytes for weight in self.stored)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put back the parameters that ``stored`` returned."""
        for name, parameter in zip(self.parameters, parameters, strict=True):
            for module in self.modules:
                setattr(module, name, parameter)

    def put(self, weights: Iterable[Tensor]) -> None:
        """Replace the weights by frozen, quantized parameters, in the form of ``weights``.

        Modules that share a weight share the new one.
        """
        values = [weight.t() if self.transposed else weight for weight in weights]
        if self.kind == "convolution":
            pairs: Any = zip(values, self.stored, strict=True)
            values = [reshaped(value, weight.shape) for value, weight in pairs]
        self.restore([nn.Parameter(value, requires_grad=False) for value in values])


def weight_layers(
    op: str,
    model: nn.Module,
    filter_fn: Filter | None,
    kinds: Collection[str] = ("linear",),
    plain: bool = False,
    inputs: bool = False,
) -> tuple[dict[str, WeightLayer], list[LayerReport]]:
    """Return the layers of some kinds by name, and a report of each whose weight stays as it is.

    Modules that share a weight are one layer, with the name of the first.
    ``filter_fn(module, name)`` selects layers. Stacked experts, ``in_proj_weight`` and weights of
    recurrent layers have the name of their parameter. With ``plain``, layers of qtensor are left
    out. With ``inputs``, the inputs of the layers are asked for: weights may be quantized already,
    or lie as (E, K, N).
    """
    check_kinds(op, kinds)
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        fail(op, rule, type(model).__name__, "Pass one", ArgumentTypeError)
    if not (filter_fn is None or callable(filter_fn)):
        rule = "filter_fn must be a function of a module and its name"
        fail(op, rule, repr(filter_fn), "Pass one that returns a bool", ArgumentTypeError)
    holders = holders_of(model)
    found = named_layers(model, kinds)
    reasons = {}
    for name, layer in found.items():
        selected = filter_fn is None or filter_fn(layer.modules[0], name)
        reasons[name] = _obstacle(layer, plain, inputs) if selected else FILTERED
    layers: dict[str, WeightLayer] = {}
    for name, layer in found.items():
        if reasons[name]:
            continue
        places = {place: m for w in layer.stored for place, m in holders[id(w)].items()}
        if inputs or len(places) == len(layer.parameters):
            layers[name] = layer
            continue
        # Modules that compute the same product with one weight are one layer.
        sharing = {n: found[n] for n in found if found[n].modules[0] in places.values()}
        if len(sharing) < len(places) or not _alike(sharing, reasons):
            reasons[name] = f"its weight is tied: {', '.join(places)}"
        elif next(iter(sharing)) == name:
            note = f", shared with {', '.join(list(sharing)[1:])}"
            # A product with the weight decides what its rounding can see.
            kind = min((each.kind for each in sharing.values()), key=KINDS.index)
            modules = tuple(places.values())
            layers[name] = replace(layer, modules=modules, note=note, kind=kind)
    skipped = [LayerReport(n or "(root)", found[n].features, r) for n, r in reasons.items() if r]
    return layers, skipped


def holders_of(model: nn.Module) -> dict[int, dict[str, nn.Module]]:
    """Return the modules that hold each parameter, by its id and by its names in the model."""
    holders: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            holders.setdefault(id(parameter), {})[f"{name}.{own}" if name else own] = module
    return holders


def dense_modules(model: nn.Module) -> tuple[LayerReport, ...]:
    """Return a report of each module with plain parameters of its own: their share of all values.

    A parameter of several modules counts for the first of them.
    """
    values = {id(p): p.numel() for p in model.parameters() if not is_lazy(p)}
    total = max(sum(values.values()), 1)
    reports = []
    for name, module in model.named_modules():
        plain = [p for p in module._parameters.values() if not hasattr(p, "quantizer")]
        share = sum(values.pop(id(p), 0) for p in plain) / total
        if share:
            kind = plain_class(module).__name__
            reports.append(LayerReport(name or "(root)", kind, f"{100 * share:.3g} %"))
    return tuple(reports)


def named_layers(model: nn.Module, kinds: Collection[str] = ("linear",)) -> dict[str, WeightLayer]:
    """Return all layers of some kinds by name, whatever their weights are."""
    found: dict[str, WeightLayer] = {}
    for name, module in model.named_modules():
        for own, layer in layers_of(module, name).items():
            if layer.kind in kinds:
                # Attention names its output projection before that comes as a linear layer.
                found.setdefault(own, layer)
    return found


def layers_of(module: nn.Module, name: str) -> dict[str, WeightLayer]:
    """Return the layers of one module by name: none, one, or the weights of stacked experts."""
    if isinstance(module, GroupedLinear):
        weights = tuple([f"weight{i}" for i in range(module.num_gemms)])
        return {name: WeightLayer((module,), weights)}
    if isinstance(module, QuantizedModule) and not module._states:
        return {}  # attention, which has no weights
    if isinstance(module, nn.Linear | QuantizedModule):
        return {name: WeightLayer((module,))}
    if is_conv1d(module):
        return {name: WeightLayer((module,), transposed=True)}
    if isinstance(module, _CONVOLUTIONS):
        return {name: WeightLayer((module,), kind="convolution")}
    if isinstance(module, _EMBEDDINGS):
        return {name: WeightLayer((module,), kind="embedding")}
    prefix = f"{name}." if name else ""
    if isinstance(module, nn.MultiheadAttention):
        about: dict[str, Any] = {"kind": "attention", "attention": module}
        owned = [n for n in _PROJECTIONS if module._parameters.get(n) is not None]
        found = {prefix + own: WeightLayer((module,), (own,), **about) for own in owned}
        return found | {f"{prefix}out_proj": WeightLayer((module.out_proj,), **about)}
    if isinstance(module, _RECURRENT):
        owned = [own for own in module._parameters if own.startswith("weight_")]
        return {prefix + own: WeightLayer((module,), (own,), kind="recurrent") for own in owned}
    if not is_experts(module):
        return {}
    owned = [own for own in STACKS if getattr(module._parameters.get(own), "ndim", 0) == 3]
    return {prefix + own: WeightLayer((module,), (own,), stacked=True) for own in owned}


_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of ``nn.MultiheadAttention``: one for query, key and value, or one for each."""


def check_kinds(op: str, kinds: object) -> None:
    """Refuse kinds of layers that do not exist."""
    rule = f"kinds holds some of {', '.join(KINDS)}"
    fix = f"Pass for example kinds={KINDS[:3]}"
    if isinstance(kinds, str) or not isinstance(kinds, Collection):
        fail(op, rule, repr(kinds), fix, ArgumentTypeError)
    wrong = [kind for kind in kinds if kind not in KINDS]
    check(bool(kinds) and not wrong, op, rule, wrong or "none", fix)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the experts of a block of transformers, with 3-D weights."""
    # The library's decorator of such classes sets these attributes.
    return (
        "transformers" in sys.modules
        and hasattr(module, "is_transposed")
        and hasattr(module, "num_experts")
    )


def _alike(sharing: Mapping[str, WeightLayer], reasons: Mapping[str, str]) -> bool:
    """Return whether layers that share a weight compute the same, and all may be quantized."""
    kinds = {(layer.transposed, plain_class(layer.modules[0])) for layer in sharing.values()}
    tables = ((False, kind) for kind in (*_EMBEDDINGS, nn.Linear))
    if kinds <= set(tables):
        kinds = set(list(kinds)[:1])  # rows of a table are those of a product
    is_ours = any(isinstance(layer.modules[0], QuantizedModule) for layer in sharing.values())
    return len(kinds) == 1 and not is_ours and not any(reasons[name] for name in sharing)


def _obstacle(layer: WeightLayer, plain: bool, inputs: bool) -> str:
    """Return the reason for which a layer's weights are not replaced by quantized ones, or ""."""
    module = layer.modules[0]
    if any(map(is_lazy, layer.stored)):
        return "its weight has no size yet; run the model on an input first"
    if isinstance(module, QuantizedModule):
        if plain:
            return f"a {type(module).__name__} of qtensor computes as its recipe says"
        if not inputs and (reason := _own_obstacle(module)):
            return reason
    elif reason := _own_forward(layer):
        return reason
    elif isinstance(module, _EMBEDDINGS) and module.max_norm is not None:
        return "max_norm scales its rows in place when they are used"
    if layer.stacked and module.is_transposed and not inputs:
        return "its experts are stored as (E, K, N), and blocks would lie along N"
    for weight in layer.stored:
        if weight is None:
            return "its weight is not a parameter"
        if inputs and hasattr(weight, "quantizer"):
            continue
        if isinstance(weight, QuantizedTensorStorage):
            return f"its weight is quantized already: {weight._quantizer.canonical}"
        if type(weight) is not nn.Parameter:
            return f"its weight is a {type(weight).__name__}"
        if weight.dtype not in FLOATING:
            return f"its weight is {weight.dtype}; float32, bfloat16 and float16 can be quantized"
        if weight.numel() == 0:
            return "its weight has no elements"
    return ""


def _own_forward(layer: WeightLayer) -> str:
    """Return the reason if a subclass of a layer of torch computes something of its own, or ""."""
    module = layer.modules[0]
    if isinstance(layer.attention, nn.MultiheadAttention):
        module = layer.attention
    bases = (nn.Linear, nn.MultiheadAttention, *_CONVOLUTIONS, *_EMBEDDINGS, *_RECURRENT)
    base = next((base for base in bases if isinstance(module, base)), None)
    kind = plain_class(module)
    if base is None or kind is base:
        return ""
    if isinstance(module, QuantizationAware):
        return "prepare_qat_ has prepared it; convert_qat_ quantizes its weight"
    return f"{kind.__name__} is a subclass of nn.{base.__name__}, with a forward of its own"


def _own_obstacle(module: QuantizedModule) -> str:
    """Return the reason for which the weights of a layer of qtensor are not replaced, or ""."""
    if plain_class(module) not in (Linear, GroupedLinear):
        kind = type(module).__name__
        return (
            f"{kind} computes more than a product; use qtensor.convert_ with quantized_params=True"
        )
    if module._layer_options("weight").parallel is not None:
        return "its weight is split over ranks"
    return ""


@contextmanager
def replaced(layers: Iterable[WeightLayer], weights: Iterable[Sequence[Tensor]]) -> Iterator[None]:
    """Replace the weights of some layers inside the block."""
    layers = list(layers)
    own = [layer.stored for layer in layers]
    try:
        for layer, tensors in zip(layers, weights, strict=True):
            layer.put(tensors)
        yield
    finally:
        for layer, parameters in zip(layers, own, strict=True):
            layer.restore(parameters)


def why_skipped(skipped: Iterable[LayerReport], most: int = 3) -> str:
    """Return the reasons of the first layers, those that the caller did not leave out before."""
    reports = sorted(skipped, key=lambda report: report.note == FILTERED)
    return "; ".join(f"{report.name}: {report.note}" for report in reports[:most])


def match(
    op: str,
    patterns: Iterable[str],
    names: Iterable[str],
    what: str,
    every: bool = True,
    skipped: Iterable[LayerReport] = (),
) -> dict[str, str]:
    """Return the first pattern that matches each name; names without one are left out.

    ``what`` is the argument that holds the patterns, the most important first. With ``every``, each
    must match a name; the error names those of the ``skipped`` layers that it matches.
    """
    patterns, names = list(patterns), list(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            rule, fix = f"each pattern of {what} is a string", 'Pass names or patterns, like "*.q"'
            fail(op, rule, repr(pattern), fix, ArgumentTypeError)
        if every and not any(fnmatchcase(name, pattern) for name in names):
            rule = f"each pattern of {what} must match a layer that can be quantized"
            why = why_skipped(each for each in skipped if fnmatchcase(each.name, pattern))
            got = f"{pattern!r}{why and f', which matches only skipped layers: {why}'}"
            fail(op, rule, got, f"Choose among the layers: {some(names) or '(none)'}")
    found = {}
    for name in names:
        first = next((p for p in patterns if fnmatchcase(name, p)), None)
        if first is not None:
            found[name] = first
    return found
