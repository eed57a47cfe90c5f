"""Read and write FBGEMM FP8, transformers' ``fbgemm_fp8``: one float32 factor for each output.

The factors multiply. Stacked experts occur in Llama 4, stored (E, K, N).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble, kind_of, rowwise_parts
from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.layout_base import DenseOnly, Group, Layout, Loaded, Writer
from qtensor.quantizers import Float8RowwiseQuantizer
from qtensor.storage.tensor import QuantizedTensor

METHOD = "fbgemm_fp8"
_FLOATS = ("F32", "BF16")
_FIX = "Check config.json against the file, or download the missing shard"


class FbgemmFP8Layout(Layout):
    """Read FBGEMM FP8 checkpoints.

    A quantized tensor of stacked experts is (E, N, K), because our factors belong to rows. Its
    dense values are (E, K, N), as stored.
    """

    name = "fbgemm-fp8"
    rank = 64
    methods = (METHOD,)
    factor_names = frozenset({"input_scale", "input_scale_ub", "k_scale", "v_scale"})

    def groups(self) -> Iterable[Group]:
        """Return a group for each float8 weight; each needs its factors."""
        tensors, used = self.source.tensors, set()
        for name, info in tensors.items():
            if info.dtype == "F8_E5M2":
                fix = "Export the checkpoint again"
                self.refuse(name, "weights are F8_E4M3", info.dtype, fix)
            if info.dtype != "F8_E4M3":
                continue
            factor = tensors.get(f"{name}_scale")
            if factor is None:
                rule = f"a float8 weight has the factors {name}_scale"
                self.refuse(name, rule, "none", _FIX)
            used |= {name, factor.name}
            yield self._group(info, factor)
        self.refuse_leftovers(used)
        for name, info in tensors.items():
            if name.endswith((".weight_scale", "_proj_scale")) and name not in used:
                rule = "factors have a float8 weight"
                self.refuse(name, rule, f"factors {list(info.shape)} without one", _FIX)

    def _group(self, weight: TensorInfo, factor: TensorInfo) -> Group:
        """Return the group of a weight after checking its shapes."""
        shape, stacked = weight.shape, weight.name.rpartition(".")[2] != "weight"
        if len(shape) != 2 + stacked:
            rule = "a weight is 2-D and ends in '.weight', and stacked experts are 3-D"
            self.refuse(weight.name, rule, list(shape), "Export the checkpoint again")
        legal: list[tuple[int, ...]] = [(shape[0], 1)]
        if stacked:
            # down_proj has (E, N, 1), and still one factor for each index of its last dim.
            legal = [(shape[0], 1, shape[2]), (shape[0], shape[2], 1)]
        self.expect(factor, legal, _FLOATS, f"{weight.name} {list(shape)}, one factor an output,")
        dtype = self.source.model_dtype or torch.bfloat16
        roles = {"codes": weight, "scale": factor}
        scheme = f"fbgemm fp8{' experts' if stacked else ''}, {factor.dtype} factors"
        target = Float8RowwiseQuantizer()
        return Group(weight.name, roles, shape, dtype, target, scheme, None, transposed=stacked)

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a weight; codes of experts are copied into rows."""
        codes, shape = stored["codes"], group.shape
        if group.transposed:
            codes, shape = codes.transpose(1, 2), (shape[0], shape[2], shape[1])
        return assemble(group.quantizer, shape, group.dtype, Parts(codes, stored["scale"]))

    def rows_apart(self, group: Group) -> bool:
        """Return True: factors belong to rows."""
        return True

    def decodes_as_ours(self, group: Group, dtype: torch.dtype) -> bool:
        """Return True for weights; the values of experts are transposed."""
        return not group.transposed

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return code times factor in float32, rounded once to ``dtype`` (class P)."""
        factors = stored["scale"]
        if group.transposed:
            factors = factors.reshape(group.shape[0], 1, group.shape[2])
        return arithmetic.product(arithmetic.float8(stored["codes"]), factors, dtype)


class FbgemmFP8Writer(Writer):
    """Write FBGEMM FP8: 2-D weights (N, K), and experts (E, N, K), which are stored (E, K, N)."""

    layout = "fbgemm-fp8"
    formats = ("fp8_rowwise",)

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the codes and the factors of a weight or of stacked experts."""
        quantizer = quantizer_of(tensor)
        canonical = quantizer.canonical
        if kind_of(quantizer) != "fp8_rowwise":
            self.refuse(name, "the layout holds FP8 with factors of rows", canonical)
        self.need_rowwise(name, tensor)
        if quantizer.element.name != "e4m3":
            self.refuse(name, "the elements of FP8 are e4m3", canonical)
        stacked = not name.endswith(".weight")
        if tensor.ndim != 2 + stacked:
            rule = "a weight is 2-D and ends in '.weight', and stacked experts are 3-D"
            self.refuse(name, rule, f"{tuple(tensor.shape)} named {name!r}")
        parts = rowwise_parts(tensor)
        codes, scale = parts.codes.view(torch.float8_e4m3fn), parts.scale
        if name not in self._narrow:
            self._narrow[name] = _is_bfloat16(scale, tensor.dtype)
        if self._narrow[name]:
            scale = scale.bfloat16()
        if stacked:
            codes = codes.transpose(1, 2).contiguous()
            experts, _, rows = codes.shape
            down = name.endswith("down_proj")
            scale = scale.reshape((experts, rows, 1) if down else (experts, 1, rows))
        return {name: codes, f"{name}_scale": scale}

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization_config``."""
        if not self._narrow:
            return self.model_config
        entry = {
            "quant_method": METHOD,
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": self.ignored(self._narrow),
        }
        return {**self.model_config, "quantization_config": entry}


def _is_bfloat16(scale: Tensor, nominal: torch.dtype) -> bool:
    """Return True if factors were widened from bfloat16.

    Float32 factors that all are bfloat16 numbers by chance are powers of two.
    """
    if (
        nominal != torch.bfloat16
        or scale.is_meta
        or not torch.equal(scale.bfloat16().float(), scale)
    ):
        return False
    return bool((torch.frexp(scale).mantissa.abs() != 0.5).any())


FbgemmFP8Layout.writer = FbgemmFP8Writer
