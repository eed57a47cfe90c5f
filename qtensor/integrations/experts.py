"""Define the parameter of stacked experts: a quantized (E, N, K) and, if asked, its transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from qtensor.api import quantizer_of
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.core.torch_state import is_composite
from qtensor.integrations.stacking import stack
from qtensor.library.dequantize import DEQUANTIZE_TENSOR
from qtensor.quantizers import Quantizer
from qtensor.storage.ops.dispatch import is_view
from qtensor.storage.ops.grouped import check_call, group_sizes, grouped_product
from qtensor.storage.ops.lost_changes import WarnsOfLostChanges
from qtensor.storage.ops.products import gemm_operands
from qtensor.storage.ops.table import named
from qtensor.storage.tensor import QuantizedTensor

Args = tuple[Any, ...]
Options = dict[str, Any]
Handler = Callable[[OpOverload, Args, Options], Any]
"""Computes an op of which at least one argument is an ``ExpertWeights``."""


class ExpertWeights(WarnsOfLostChanges, torch.Tensor):
    """Hold the weights of all experts of a layer; each expert has its own factors.

    Experts are selected and multiplied without decoding the others. The transpose of the last two
    dims shares all bytes with the tensor.

    Attributes:
        stored: quantized (E, N, K), rowwise.
        swapped: True if the logical shape is (E, K, N).
    """

    _stored: QuantizedTensor
    _swapped: bool

    @staticmethod
    def __new__(
        cls: type[ExpertWeights],
        stored: Tensor,
        swapped: bool = False,
        *,
        requires_grad: bool = False,
    ) -> Any:
        """Make a tensor around quantized experts.

        Args:
            cls: this class.
            stored: quantized (E, N, K); or an ``ExpertWeights``, to make a parameter of it.
            swapped: True for the logical shape (E, K, N).
            requires_grad: must be False for a new tensor: the weights are frozen.

        Raises:
            QTensorError: ``stored`` is not a quantized tensor with three dims.
        """
        if isinstance(stored, ExpertWeights):
            # Libraries that move parameters rebuild them as type(parameter)(tensor, ...).
            return torch.nn.Parameter(stored, requires_grad=requires_grad)
        if not isinstance(stored, QuantizedTensor) or stored.ndim != 3:
            got = f"{type(stored).__name__} {tuple(getattr(stored, 'shape', ()))}"
            fix = "Pass qtensor.quantize(x, format) of a tensor with three dims"
            fail("ExpertWeights", "stored is quantized (E, N, K)", got, fix, ArgumentTypeError)
        experts, rows, columns = stored.shape
        shape = (experts, columns, rows) if swapped else (experts, rows, columns)
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=stored.dtype, device=stored.device, requires_grad=requires_grad
        )
        self._stored, self._swapped = stored, swapped
        return self

    @property
    def stored(self) -> QuantizedTensor:
        """Return the quantized tensor, (E, N, K)."""
        return self._stored

    @property
    def quantizer(self) -> Quantizer:
        """Return the quantizer of ``stored``."""
        return quantizer_of(self._stored)

    @property
    def swapped(self) -> bool:
        """Return True if the logical shape is (E, K, N)."""
        return self._swapped

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the number of bytes of all buffers."""
        return self._stored.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of all experts as a plain tensor of the logical shape."""
        values = self._stored.dequantize(dtype)
        return values.transpose(-2, -1) if self._swapped else values

    def data_ptr(self) -> int:
        """Raise the error of quantized tensors: a library would write raw memory."""
        return self._stored.data_ptr()

    def storage(self) -> Any:
        """Raise an error, as ``data_ptr`` does."""
        return self._stored.storage()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        canonical = self._stored.quantizer.canonical
        return f"ExpertWeights({tuple(self.shape)}, {canonical}, {self.dtype}, {self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["_stored"], self._swapped

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], swapped: bool, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> ExpertWeights:
        return ExpertWeights(inner["_stored"], swapped)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        stored = cast(QuantizedTensor, self._stored.clone())
        memo[id(self)] = copied = _rebuild(stored, self._swapped, self._is_parameter())
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _rebuild, (self._stored, self._swapped, self._is_parameter())

    def _is_parameter(self) -> bool:
        return isinstance(self, torch.nn.Parameter)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Options | None = None
    ) -> Any:
        handler = _HANDLERS.get(func._schema.name)
        if handler is not None:
            if is_view(func) and torch.is_inference_mode_enabled() and not args[0].is_inference():
                with torch.inference_mode(False):
                    return handler(func, args, kwargs or {})
            return handler(func, args, kwargs or {})
        if is_composite(func):
            # In inference mode torch does not decompose composite ops before dispatch.
            return func.decompose(*args, **(kwargs or {}))
        rule = f"{func} is not defined for the weights of experts"
        fix = "Call .dequantize() first, or select an expert: weight[e]"
        fail("ExpertWeights", rule, str(types), fix, UnsupportedError)


def _rebuild(stored: QuantizedTensor, swapped: bool, is_parameter: bool) -> Any:
    """Return the tensor or parameter that ``__reduce_ex__`` took apart."""
    made = ExpertWeights(stored, swapped)
    return torch.nn.Parameter(made, requires_grad=False) if is_parameter else made


torch.serialization.add_safe_globals([_rebuild, ExpertWeights])


# ---- handlers


def _refuse(rule: str, got: object) -> Any:
    fail("ExpertWeights", rule, got, "Call .dequantize() first", UnsupportedError)


def _share(func: OpOverload, args: Args, kwargs: Options) -> Any:
    weight = args[0]
    return ExpertWeights(weight._stored, weight._swapped)


def _of_stored(func: OpOverload, args: Args, kwargs: Options) -> Any:
    """Handle ops that act on every buffer alike: clone, to, pin_memory."""
    weight = args[0]
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    done = func(weight._stored, *args[1:], **kwargs)
    if not isinstance(done, QuantizedTensor):
        return done.transpose(-2, -1) if weight._swapped else done
    return ExpertWeights(done, weight._swapped)


def _copy(func: OpOverload, args: Args, kwargs: Options) -> Any:
    """Handle ``weight.copy_(other)``, which ``load_state_dict`` calls."""
    weight, source = args[:2]
    alike = isinstance(source, ExpertWeights) and source._swapped == weight._swapped
    if not isinstance(weight, ExpertWeights) or not alike:
        _refuse("the weights of experts are copied to those of the same orientation", source)
    weight._stored.copy_(source._stored)
    return weight


def _add_in_place(func: OpOverload, args: Args, kwargs: Options) -> Any:
    """Handle ``weight.add_(change)``, by which PEFT merges; each factor is computed again."""
    weight, change = args
    if isinstance(change, ExpertWeights):
        change = change.dequantize()
    func(weight._stored, change.transpose(-2, -1) if weight._swapped else change, **kwargs)
    return weight


def _transpose(func: OpOverload, args: Args, kwargs: Options) -> Any:
    weight, first, second = args
    if {first % 3, second % 3} != {1, 2}:
        _refuse("only the last two dims can be transposed", (first, second))
    return ExpertWeights(weight._stored, not weight._swapped)


def _permute(func: OpOverload, args: Args, kwargs: Options) -> Any:
    weight, order = args[0], tuple([d % 3 for d in args[1]])
    if order not in {(0, 1, 2), (0, 2, 1)}:
        _refuse("only the last two dims can be permuted", args[1])
    return ExpertWeights(weight._stored, weight._swapped ^ (order == (0, 2, 1)))


def _expert(weight: ExpertWeights, index: int) -> Any:
    matrix = weight._stored[index]
    return matrix.t() if weight._swapped else matrix


def _select(func: OpOverload, args: Args, kwargs: Options) -> Any:
    weight, dim, index = args
    if dim % 3:
        _refuse("an index selects an expert, along dim 0", f"dim {dim}")
    return _expert(weight, index)


def _unbind(func: OpOverload, args: Args, kwargs: Options) -> Any:
    dim = args[1] if len(args) > 1 else 0
    return [_select(func, (args[0], dim, i), {}) for i in range(args[0].shape[0])]


def _index(func: OpOverload, args: Args, kwargs: Options) -> Any:
    """Handle ``weight[experts]``: return the quantized weights of the experts that are named."""
    weight, indices = args[0], args[1]
    if func._schema.name == "aten::index_select":
        indices = [None] * (args[1] % 3) + [args[2]]
    if len(indices) != 1 or indices[0] is None or indices[0].dtype in (torch.bool, torch.uint8):
        _refuse("an index selects experts by their numbers, along dim 0", len(indices))
    if indices[0].ndim == 0:
        return _expert(weight, int(indices[0]))
    return ExpertWeights(weight._stored[indices[0]], weight._swapped)


def _split(func: OpOverload, args: Args, kwargs: Options) -> Any:
    """Handle ``split`` and ``chunk`` along the experts, or along the rows of each expert."""
    weight, size = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % 3
    if dim == 0:
        return [ExpertWeights(part, weight._swapped) for part in weight._stored.split(size)]
    if dim != (2 if weight._swapped else 1):
        _refuse("the dim along which factors run cannot be split", f"dim {dim}")
    pieces = [matrix.split(size) for matrix in weight._stored.unbind()]
    return [
        ExpertWeights(stack([[rows[i]] for rows in pieces], "split"), weight._swapped)
        for i in range(len(pieces[0]))
    ]


def _squeeze(func: OpOverload, args: Args, kwargs: Options) -> Any:
    weight = args[0]
    if weight.shape[0] != 1 or len(args) != 2 or args[1] not in (0, -3):
        _refuse("dim 0 of the weights of one expert can be squeezed", tuple(weight.shape))
    return _expert(weight, 0)


def _grouped_mm(func: OpOverload, args: Args, kwargs: Options) -> Tensor:
    names = ("self", "mat2", "offs", "bias", "out_dtype")
    given = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    x, weight = given["self"], given["mat2"]
    if not isinstance(weight, ExpertWeights) or isinstance(x, ExpertWeights):
        _refuse("the second operand of a grouped product has the experts", type(weight).__name__)
    check_call(x, weight, given["offs"], given["bias"])
    sizes = group_sizes(given["offs"], x.shape[0], "_grouped_mm")
    layout = "TN" if weight._swapped else "NN"
    return grouped_product(x, weight._stored, layout, sizes, given["out_dtype"])


def _fallback(func: OpOverload, args: Args, kwargs: Options) -> Tensor:
    """Handle the grouped product of transformers, which compiled code calls in float32."""
    given = named(func, args, kwargs)
    x, weight, offs = given["input"], given["weight"], given["offs"]
    return torch.ops.aten._grouped_mm.default(x, weight, offs)


def _fallback_backward(func: OpOverload, args: Args, kwargs: Options) -> Any:
    """Handle its backward pass with decoded weights: it always computes their gradient too."""
    given = named(func, args, kwargs)
    return func(**{**given, "weight": given["weight"].dequantize()})


def _bmm(func: OpOverload, args: Args, kwargs: Options) -> Tensor:
    x, weight = args
    if isinstance(weight, ExpertWeights):
        return gemm_operands(x, weight._stored, "TN" if weight._swapped else "NN")
    # weight @ x = (x.mT @ weight.mT).mT
    weight, x = x, weight
    layout = "NN" if weight._swapped else "TN"
    return gemm_operands(x.transpose(-2, -1), weight._stored, layout).transpose(-2, -1)


def _decoded(func: OpOverload, args: Args, kwargs: Options) -> Tensor:
    """Handle ops whose result needs every expert: PEFT adds its updates to the whole weight."""
    values = [a.dequantize() if isinstance(a, ExpertWeights) else a for a in args]
    return func(*values, **kwargs)


def _dequantize(func: OpOverload, args: Args, kwargs: Options) -> Tensor:
    return args[0].dequantize(*args[1:], **kwargs)


_HANDLERS: dict[str, Handler] = {
    "aten::detach": _share,
    "aten::alias": _share,
    "aten::lift_fresh": _share,
    "aten::contiguous": _share,
    "aten::clone": _of_stored,
    "aten::copy_": _copy,
    "aten::_to_copy": _of_stored,
    "aten::_pin_memory": _of_stored,
    "aten::transpose": _transpose,
    "aten::permute": _permute,
    "aten::select": _select,
    "aten::unbind": _unbind,
    "aten::index": _index,
    "aten::index_select": _index,
    "aten::split": _split,
    "aten::squeeze": _squeeze,
    "aten::_grouped_mm": _grouped_mm,
    "aten::bmm": _bmm,
    "transformers::grouped_mm_fallback": _fallback,
    "transformers::grouped_mm_fallback_backward": _fallback_backward,
    "aten::add": _decoded,
    "aten::add_": _add_in_place,
    "aten::sub_": _add_in_place,
    "aten::baddbmm": _decoded,
    "aten::dequantize": _dequantize,
    DEQUANTIZE_TENSOR._schema.name: _dequantize,
}
"""Handlers by op name; other ops raise."""
