"""Compute layers with a quantized weight that are not products of matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qtensor.core.errors import DtypeError, UnsupportedError, check, fail
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import parse, usage_part
from qtensor.library.dequantize import DEQUANTIZE
from qtensor.library.layer_weights import CONVOLUTION, USED_ROWS
from qtensor.storage import geometry
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.table import COMPUTE, Args, Kwargs, Op, implements, named
from qtensor.storage.ops.write import plain
from qtensor.storage.rebuild import tensor_of

_MAX = 2
"""The mode of ``embedding_bag`` that takes maxima."""


def _values(t: Any) -> Any:
    return plain(t) if is_quantized(t) else t


# ---- convolutions


@implements(COMPUTE, "convolution")
def _convolution(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``convolution``: decode a tile of output channels at a time."""
    given = {
        name: _values(t) if name != "weight" else t for name, t in named(func, args, kwargs).items()
    }
    x, weight, bias, *steps = given.values()
    if not is_quantized(weight):
        return func(**given)
    dtypes = [t.dtype for t in (x, bias) if t is not None]
    rule = "the input and the bias have the dtype of the weight"
    got = f"{' and '.join(map(str, dtypes))} for {weight.dtype}"
    fix = "Convert them, or the module with .to(dtype), which keeps the codes"
    check({*dtypes} == {weight.dtype}, "convolution", rule, got, fix, DtypeError)
    tensor = tensor_of(weight)
    buffers, canonical = tensor.buffers(), tensor._quantizer.canonical
    return CONVOLUTION(x, buffers, canonical, tensor.shape, weight.shape, bias, *steps)


@implements(COMPUTE, "convolution_backward")
def _convolution_backward(func: Op, args: Args, kwargs: Kwargs) -> tuple[Tensor | None, ...]:
    """Handle the backward pass: decode the weight of the layer, for the gradient of the input."""
    return func(*map(_values, args), **kwargs)


# ---- recurrent layers


@implements(COMPUTE, "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
def _lstm_layer(func: Op, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
    """Handle one direction of one layer of an LSTM on a CPU: decode its weights.

    GRU and RNN arrive as products, which read the codes.
    """
    return func(*map(_values, args), **kwargs)


# ---- embeddings


def _check_table(op: str, weight: Any, *others: Any) -> None:
    """Refuse quantized indices, offsets and weights of samples.

    Raises:
        UnsupportedError: another tensor than the table is quantized.
    """
    if not is_quantized(weight) or any(map(is_quantized, others)):
        rule = "of the arguments, only the table may be quantized"
        fail(op, rule, "another quantized argument", "Dequantize it", UnsupportedError)


@implements(COMPUTE, "embedding")
def _embedding(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``embedding``: decode only the rows that ``index`` names."""
    weight, index = args[:2]
    _check_table("embedding", weight, index)
    _, rowwise = usage_part(weight._quantizer.canonical, "rowwise")
    buffers = None
    if rowwise and weight.ndim == 2:
        buffers = geometry.select_rows(weight, index.reshape(-1), parse(rowwise).slots)
    if buffers is None:
        return func(plain(weight), index, *args[2:], **kwargs)
    columns = weight.shape[1]
    rows = DEQUANTIZE(buffers, rowwise, (index.numel(), columns), weight.dtype)
    return rows.reshape(*index.shape, columns)


def _used(weight: Any, index: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the needed rows, the places of the indices, the rows' numbers, and that of padding."""
    table: Any = Operand(weight.buffers(), weight._quantizer.canonical, weight.shape)
    rows, places, numbers = USED_ROWS(*table, index, padding, weight.dtype)
    return rows, places, numbers, -1 if padding < 0 else 0


@implements(COMPUTE, "_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(func: Op, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
    """Handle ``embedding_bag``: decode each row once that ``index`` names, and reduce these."""
    given = named(func, args, kwargs)
    weight, index = given["weight"], given["indices"]
    _check_table("embedding_bag", weight, index, given["offsets"], given["per_sample_weights"])
    rows, places, numbers, padding = _used(weight, index, given["padding_idx"])
    given |= {"weight": rows, "indices": places, "padding_idx": padding}
    *first, chosen = func(**given)
    if given["mode"] == _MAX:
        chosen = numbers.index_select(0, chosen.reshape(-1)).view(chosen.shape)
    return (*first, chosen)


@implements(COMPUTE, "_embedding_bag_per_sample_weights_backward")
def _per_sample_weights_backward(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle the gradient of the weights of samples."""
    given = named(func, args, kwargs)
    weight, index = given["weight"], given["indices"]
    _check_table("embedding_bag", weight, given["grad"], index, given["offsets"])
    rows, places, _, padding = _used(weight, index, given["padding_idx"])
    return func(**given | {"weight": rows, "indices": places, "padding_idx": padding})
