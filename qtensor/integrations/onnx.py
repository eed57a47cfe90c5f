"""Export models with quantized weights to ONNX.

``torch.onnx.export`` traces the model with plain weights in place of the quantized ones, and writes
them as initializers. Each of these is then replaced by the codes and factors of its quantized
weight and by ``DequantizeLinear``, whose result is ``q.dequantize()`` to the bit.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from qtensor.core.buffer_shapes import ceil_div, rows_cols
from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.core.version import install_command
from qtensor.reference.blocks import read_scales
from qtensor.reference.elements import unpack_pairs
from qtensor.reference.scaling import e8m0_decode_factor
from qtensor.storage.base import is_quantized
from qtensor.storage.rebuild import tensor_of
from qtensor.storage.tensor import QuantizedTensor

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray
    from torch.onnx import ONNXProgram

OPSET = 23
"""The default opset: the first with FLOAT4E2M1. onnxruntime runs its FP8 factors and blocks."""
_OF_TORCH = 23
"""The last opset that torch writes itself."""
_SCALES_E8M0 = 24
_FIRST = {"e4m3": 21, "e5m2": 21, "e2m1": 23}
"""Element -> first opset whose ``DequantizeLinear`` has it, with blocks.

6-bit codes have opset 28, which neither torch nor onnxscript writes.
"""
_DTYPES = {
    "e4m3": ("FLOAT8E4M3FN", "float8_e4m3fn"),
    "e5m2": ("FLOAT8E5M2", "float8_e5m2"),
    "e2m1": ("FLOAT4E2M1", "float4_e2m1fn"),
    "e8m0": ("FLOAT8E8M0", "float8_e8m0fnu"),
}
"""Element -> names of its dtype in ONNX and in ml_dtypes."""


def export(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    opset_version: int = OPSET,
    exact: bool = True,
    **options: Any,
) -> ONNXProgram:
    """Return the ONNX program of a model whose quantized weights stay quantized.

    A weight becomes codes, factors and ``DequantizeLinear``, whose result equals ``dequantize()``
    of the weight to the bit. Plain ``torch.onnx.export`` of such a model is an error.

    Args:
        model: with quantized parameters or buffers. It is traced, and unchanged afterwards.
        args: example inputs, as for ``torch.onnx.export``.
        f: file to write; None to write none.
        opset_version: 21 or later for FP8, 23 (the default) or later for 4 bits. From 24 on,
            factors of MX are FLOAT8E8M0; before, they are float32 numbers of the same values.
        exact: write NVFP4 as ``DequantizeLinear`` of the codes and ``Mul`` by the factor of the
            tensor. False writes two ``DequantizeLinear``, the pattern that TensorRT fuses: the
            factor of a block is multiplied by that of the tensor first, so that a value is rounded
            twice in float32 (a relative error of at most 2^-23).
        **options: other arguments of ``torch.onnx.export``; ``dynamo`` is True. ``external_data``
            and ``keep_initializers_as_inputs`` are those of writing ``f``.

    Returns:
        The program, whose ``save`` writes a file.

    Raises:
        UnsupportedError: ONNX cannot express a format, an option of it, or its elements at
            ``opset_version``; onnx or onnxscript is not installed; or ``verify=True``.
        QTensorError: the model has no quantized weights, or an input is quantized.
    """
    libraries, stored = _libraries(), _quantized(model)
    rule = "the model must have quantized parameters or buffers"
    fix = "Use torch.onnx.export, for a model with a recipe after qtensor.revert_(model)"
    check(bool(stored), "onnx.export", rule, type(model).__name__, fix)
    for name, t in stored.items():
        _refuse(name, t, opset_version)
    _check_options(args, options)
    optimize = options.pop("optimize", True)
    kept = ("external_data", "keep_initializers_as_inputs")
    writing = {name: options.pop(name) for name in kept if name in options}
    # A placeholder is plain already, so its dequantize changes nothing.
    table: Any = {torch.ops.aten.dequantize.self: libraries.identity}
    table |= options.pop("custom_translation_table", None) or {}
    options |= {"custom_translation_table": table, "opset_version": min(opset_version, _OF_TORCH)}
    with _plain_weights(model) as placeholders:
        program = torch.onnx.export(model, args, **options, dynamo=True, optimize=False)
        assert program is not None  # noqa: S101 - with dynamo=True, torch returns one
        if opset_version > _OF_TORCH:
            libraries.convert(program.model, opset_version)
        _insert(program.model, placeholders, opset_version, exact)
    if optimize:
        # The optimizer leaves DequantizeLinear as it is.
        program.optimize()
    if f is not None:
        program.save(f, **writing)
    return program


def _check_options(args: Any, options: dict[str, Any]) -> None:
    """Refuse arguments of ``torch.onnx.export`` that do not fit, and remove ``dynamo``."""
    inputs = args if isinstance(args, (tuple, list)) else [args]
    rule, fix = "example inputs must be plain", "Pass plain tensors"
    count = sum(map(is_quantized, inputs))
    check(not count, "onnx.export", rule, f"{count} quantized", fix)
    for word in ("verify", "report"):
        rule = f"{word}=True would run the program before the weights are in it"
        fix = "Leave it out, and run the returned program"
        check(not options.get(word), "onnx.export", rule, word, fix, UnsupportedError)
    dynamo = options.pop("dynamo", True)
    check(dynamo is True, "onnx.export", "dynamo must be True", dynamo, "Leave it out")


class _Libraries(NamedTuple):
    """What an export calls of onnxscript.

    Attributes:
        convert: changes the opset of a model.
        identity: writes an Identity node.
    """

    convert: Any
    identity: Any


def _libraries() -> _Libraries:
    try:
        importlib.import_module("onnx")
        converter = importlib.import_module("onnxscript.version_converter")
        opset = importlib.import_module("onnxscript").opset18
    except ImportError as error:
        rule, fix = "it needs onnx and onnxscript", f"Run: {install_command('onnx')}"
        fail("onnx.export", rule, str(error), fix, UnsupportedError)
    return _Libraries(converter.convert_version, lambda x: opset.Identity(x))


# ---- the weights of a model


def _entries(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, QuantizedTensor]]:
    """Yield the name of each quantized parameter and buffer, and the dict and key that hold it."""
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for key, t in held.items():
                if is_quantized(t):
                    yield f"{path}.{key}" if path else key, held, key, t


def _quantized(model: nn.Module) -> dict[str, QuantizedTensor]:
    return {name: t for name, _, _, t in _entries(model)}


@contextlib.contextmanager
def _plain_weights(model: nn.Module) -> Iterator[dict[int, QuantizedTensor]]:
    """Put plain placeholders in place of quantized weights, and the weights back at the end.

    Yields:
        Address of a placeholder -> the weight. Weights that are one tensor share a placeholder.
    """
    placeholders: dict[int, Tensor] = {}
    weights: dict[int, QuantizedTensor] = {}
    replaced = []
    try:
        for _, held, key, t in list(_entries(model)):
            plain = placeholders.get(id(t))
            if plain is None:
                # Zeros that nobody writes take no memory.
                plain = torch.zeros(t.shape, dtype=t.dtype)
                if isinstance(t, nn.Parameter):
                    plain = nn.Parameter(plain, requires_grad=False)
                placeholders[id(t)] = plain
                weights[plain.data_ptr()] = t
            replaced.append((held, key, t))
            held[key] = plain
        yield weights
    finally:
        for held, key, t in replaced:
            held[key] = t


# ---- weights that ONNX can express


def _refuse(name: str, t: QuantizedTensor, opset: int) -> None:
    """Refuse a weight that ``DequantizeLinear`` cannot decode.

    Raises:
        UnsupportedError: with the reason.
    """
    quantizer: Any = t._quantizer
    reason, fix = None, "Quantize the weight in another format, or dequantize it before the export"
    label, element = quantizer.format, quantizer.element.name
    if label not in _LABELS or element not in _FIRST:
        reason = f"DequantizeLinear has no {label}, at the opsets that torch and onnxscript write"
    elif not quantizer.factors_are_local:
        reason = "DequantizeLinear does not undo a rotation (with_rht)"
    elif opset < _FIRST[element]:
        reason = f"DequantizeLinear has {element} codes from opset {_FIRST[element]} on"
        fix = f"Pass opset_version={_FIRST[element]}"
    elif t.ndim == 0 or (t.ndim != 2 and quantizer.side() == "_columnwise"):
        reason, fix = (
            f"DequantizeLinear has no axis for the factors of a weight with {t.ndim} dims",
            "Quantize it rowwise, in 2 dims",
        )
    elif t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reason = f"a decoded weight cannot be cast to the nominal dtype {t.dtype}"
    if reason is not None:
        fail(f"onnx.export[{name}]", reason, quantizer.canonical, fix, UnsupportedError)


_LABELS = ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4")


class _Parts(NamedTuple):
    """A weight as ONNX stores it.

    Attributes:
        codes: element codes of the shape of the weight, a byte each.
        element: of the codes.
        scale: factors: a scalar, one a line of ``axis``, or one a block along ``axis``.
        scale_element: "" for float32 numbers, "e8m0" or "e4m3" for codes.
        axis: along which factors differ.
        block: values that share a factor along ``axis``; 0 without blocks.
        wide: factor of the whole tensor, by which the values are multiplied at last, float32; or
            one for each row.
    """

    codes: NDArray[Any]
    element: str
    scale: NDArray[Any]
    scale_element: str = ""
    axis: int = 0
    block: int = 0
    wide: NDArray[Any] | None = None


def parts(t: QuantizedTensor) -> _Parts:
    """Return codes and factors of a tensor whose values are its rowwise data.

    Args:
        t: (..., K), whole or a part.
    """
    quantizer: Any = t._quantizer
    buffers = [buffer.detach().cpu() for buffer in t.buffers()]
    named = dict(zip(quantizer.slot_names, buffers, strict=True))
    rows, cols = rows_cols(t.shape)
    element, label = quantizer.element.name, quantizer.format
    if quantizer.spec.name == "fp8":
        codes, factor = named["_data"], named["_scale_inv"]
        if quantizer.per_tensor:
            return _Parts(codes.numpy(), element, factor.reshape(()).numpy())
        if quantizer.axis == 0:
            return _Parts(codes.numpy(), element, factor.reshape(-1).numpy(), axis=t.ndim - 1)
        lines = factor.reshape(t.shape[:-1])
        if t.ndim == 2:
            return _Parts(codes.numpy(), element, lines.numpy(), axis=0)
        # One factor for each row of a stack: a block that is the whole row.
        return _Parts(
            codes.numpy(), element, lines[..., None].numpy(), "", t.ndim - 1, max(cols, 1)
        )
    raw, axis = named["_rowwise_data"], t.ndim - 1
    stored = named["_rowwise_scale_inv"]
    if label == "fp8_blockwise":
        grid = stored.t() if quantizer.block_scaling_dim == 1 else stored.repeat_interleave(128, 0)
        grid = grid[:rows, : ceil_div(cols, 128)].reshape(*t.shape[:-1], -1)
        return _Parts(raw.numpy(), element, grid.contiguous().numpy(), "", axis, 128)
    block = quantizer.spec.block[1]
    grid = read_scales(stored, bool(getattr(quantizer, "swizzled", False)))
    grid = grid[:rows, : ceil_div(cols, block)].reshape(*t.shape[:-1], -1).contiguous()
    codes = raw.reshape(rows, -1)
    codes = (unpack_pairs(codes, cols) if element == "e2m1" else codes).reshape(t.shape)
    wide = None
    if label == "nvfp4":
        wide = named[quantizer.global_buffer("_rowwise")]
        if quantizer.global_divisor != 1:
            wide = wide / torch.full_like(wide, quantizer.global_divisor)
        wide = wide.reshape(*t.shape[:-1], 1) if quantizer.row_scaled else wide.reshape(())
        wide = wide.numpy()
    return _Parts(codes.numpy(), element, grid.numpy(), quantizer.spec.scale, axis, block, wide)


# ---- the graph


def _insert(model: ir.Model, weights: dict[int, QuantizedTensor], opset: int, exact: bool) -> None:
    """Replace the initializers that are placeholders by decoded weights."""
    graph = model.graph
    first: ir.Node | None = next(iter(graph), None)
    for name, value in list(graph.initializers.items()):
        raw = getattr(value.const_value, "raw", None)
        weight = weights.get(raw.data_ptr()) if isinstance(raw, Tensor) and raw.numel() else None
        if weight is None:
            continue
        writer = _Writer(graph, name, opset, exact)
        decoded = writer.decoded(weight)
        value.replace_all_uses_with(decoded, replace_graph_outputs=True)
        del graph.initializers[name]
        decoded.name = name
        if first is None:
            graph.extend(writer.nodes)
        else:
            graph.insert_before(first, writer.nodes)


class _Writer:
    """Writes the nodes that decode one weight.

    Args:
        graph: that gets the initializers.
        name: of the weight.
        opset: of the model.
        exact: see ``export``.
    """

    def __init__(self, graph: ir.Graph, name: str, opset: int, exact: bool) -> None:
        self.ir = importlib.import_module("onnx_ir")
        self.graph, self.name, self.opset, self.exact = graph, name, opset, exact
        self.nodes: list[ir.Node] = []

    def decoded(self, t: QuantizedTensor) -> ir.Value:
        """Return the value of a weight in its nominal dtype."""
        if (matrix := tensor_of(t)) is not t:
            # The weight of a convolution is quantized as a matrix.
            shape = self._initializer("shape", np.array(t.shape, np.int64))
            value = self.decoded(matrix)
            return self._node("Reshape", [value, shape], tuple(t.shape), value.dtype.name)
        turned = t._quantizer.side() == "_columnwise" or not t._quantizer.rowwise
        stored = parts(cast("QuantizedTensor", t.t()) if turned else t)
        value = self._dequantized(stored)
        if t.dtype != torch.float32:
            to = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}[t.dtype]
            value = self._node("Cast", [value], value.shape, to, to=self._dtype(to))
        if turned:
            kind = value.dtype.name
            value = self._node("Transpose", [value], tuple(t.shape), kind, perm=[1, 0])
        return value

    def _dequantized(self, stored: _Parts) -> ir.Value:
        """Return float32 values."""
        shape = stored.codes.shape
        codes = self._initializer("codes", stored.codes, stored.element)
        wide = None if stored.wide is None else self._initializer("global_scale", stored.wide)
        scale = self._scale(stored, wide)
        blocks = {"axis": stored.axis, "block_size": stored.block} if stored.block else {}
        if scale.shape is not None and len(scale.shape) and not stored.block:
            blocks = {"axis": stored.axis}
        if scale.dtype == self._dtype("FLOAT8E8M0"):
            blocks["output_dtype"] = int(self._dtype("FLOAT"))
        value = self._node("DequantizeLinear", [codes, scale], shape, "FLOAT", **blocks)
        if wide is None or not self.exact:
            return value
        return self._node("Mul", [value, wide], shape, "FLOAT")

    def _scale(self, stored: _Parts, wide: ir.Value | None) -> ir.Value:
        """Return the factors that ``DequantizeLinear`` of the codes reads."""
        if stored.scale_element == "":
            return self._initializer("scale", stored.scale)
        if stored.scale_element == "e8m0":
            if self.opset >= _SCALES_E8M0:
                return self._initializer("scale", stored.scale, "e8m0")
            numbers = e8m0_decode_factor(torch.from_numpy(stored.scale))
            return self._initializer("scale", numbers.numpy())
        scale = self._initializer("scale", stored.scale, stored.scale_element)
        shape = stored.scale.shape
        if wide is not None and not self.exact and stored.wide is not None and not stored.wide.ndim:
            return self._node("DequantizeLinear", [scale, wide], shape, "FLOAT")
        # DequantizeLinear by 1, where Cast would do: optimizers leave it and its FP8 input alone.
        one = self._initializer("one", np.ones((), np.float32))
        value = self._node("DequantizeLinear", [scale, one], shape, "FLOAT")
        if wide is not None and not self.exact:
            value = self._node("Mul", [value, wide], shape, "FLOAT")
        return value

    def _dtype(self, name: str) -> Any:
        return getattr(self.ir.DataType, name)

    def _initializer(self, part: str, data: NDArray[Any], element: str = "") -> ir.Value:
        """Return an initializer of float32 or int64 numbers, or of element codes."""
        name, kind = f"{self.name}.{part}", "INT64" if data.dtype == np.int64 else "FLOAT"
        if element:
            kind, numpy_name = _DTYPES[element]
            data = data.view(getattr(importlib.import_module("ml_dtypes"), numpy_name))
        tensor = self.ir.Tensor(np.ascontiguousarray(data).reshape(data.shape), name=name)
        value = self.ir.Value(
            name=name,
            const_value=tensor,
            type=self.ir.TensorType(self._dtype(kind)),
            shape=self.ir.Shape(data.shape),
        )
        self.graph.register_initializer(value)
        return value

    def _node(
        self, op: str, inputs: list[ir.Value], shape: Any, kind: str, **attributes: Any
    ) -> ir.Value:
        """Return the output of a new node."""
        node = self.ir.node(op, inputs, attributes=attributes or None)
        (value,) = node.outputs
        node.name = f"{self.name}.decode_{len(self.nodes)}"
        value.name = f"{node.name}.output"
        value.type = self.ir.TensorType(self._dtype(kind))
        value.shape = self.ir.Shape(shape)
        self.nodes.append(node)
        return value
