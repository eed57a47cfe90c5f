"""Read the single files of Black Forest Labs: FP8 with a factor a row, and NVFP4.

Nothing in such a file describes it, so that the caller names the layout; diffusers reads it with
``BFLQuantizationConfig``. A quantized ``m.weight`` has factors beside it:

- ``fp8r``: F8_E4M3 (N, K), and ``m.weight_scale`` F32 (N,).
- ``nvfp4``: U8 (N, K / 2), low nibble first, ``m.weight_scale`` F8_E4M3 (N, K / 16), one
  ``m.weight_scale_2``, F32, and ``m.input_scale``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble
from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.layout_base import DenseOnly, Group, Layout, Loaded, Source
from qtensor.checkpoints.nvfp4_factor import from_factor
from qtensor.quantizers import Float8RowwiseQuantizer, NVFP4Quantizer
from qtensor.storage.tensor import QuantizedTensor

SCALE, FACTOR = "weight_scale", "weight_scale_2"
_FIX = "Check layout=, or download the file again"


class BFLLayout(Layout):
    """Read files of Black Forest Labs. Layers without ``weight_scale`` are plain."""

    name = "bfl"
    rank = 45
    factor_names = frozenset({"input_scale"})

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return False: names alone do not settle the layout, and the file holds nothing else."""
        return False

    def groups(self) -> Iterable[Group]:
        """Return a group for each layer with a factor."""
        tensors, used = self.source.tensors, set()
        for name, scale in tensors.items():
            module, _, last = name.rpartition(".")
            if last != SCALE:
                continue
            weight = tensors.get(f"{module}.weight")
            if weight is None:
                self.refuse(name, "a factor has a weight", "none", _FIX)
            factor = tensors.get(f"{module}.{FACTOR}")
            used |= {name, weight.name, f"{module}.{FACTOR}"}
            yield self._fp8(weight, scale) if factor is None else self._nvfp4(weight, scale, factor)
        self.refuse_leftovers(used)

    def _fp8(self, weight: TensorInfo, scale: TensorInfo) -> Group:
        """Return the group of a weight with a factor for each row."""
        rows = weight.shape[:1]
        if len(weight.shape) != 2:
            self.refuse(weight.name, "weights are matrices", list(weight.shape), _FIX)
        self.expect(weight, [weight.shape], ["F8_E4M3"], "a weight with factors of rows")
        self.expect(scale, [rows, (*rows, 1)], ["F32"], f"{weight.name} {list(weight.shape)}")
        roles = {"codes": weight, "scale": scale}
        return Group(
            weight.name, roles, weight.shape, torch.bfloat16, Float8RowwiseQuantizer(), "fp8r"
        )

    def _nvfp4(self, weight: TensorInfo, scale: TensorInfo, factor: TensorInfo) -> Group:
        """Return the group of an NVFP4 weight."""
        if len(weight.shape) != 2 or weight.shape[1] % 8:
            rule = "NVFP4 weights are matrices of whole blocks of 16"
            self.refuse(weight.name, rule, list(weight.shape), _FIX)
        rows, half = weight.shape
        why = f"{weight.name} {list(weight.shape)}"
        self.expect(weight, [weight.shape], ["U8"], f"{weight.name} with {FACTOR}")
        self.expect(scale, [(rows, half // 8)], ["F8_E4M3"], why)
        self.expect(factor, [(), (1,)], ["F32"], why)
        roles = {"codes": weight, "scale": scale, "factor": factor}
        shape = (rows, 2 * half)
        return Group(weight.name, roles, shape, torch.bfloat16, NVFP4Quantizer(), "nvfp4")

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a weight."""
        if group.scheme == "fp8r":
            return super().read(group, stored)
        found = from_factor(self._factor(group, stored))
        parts = Parts(stored["codes"], stored["scale"], found.amax, found.factor)
        return assemble(found.quantizer, group.shape, group.dtype, parts)

    def _factor(self, group: Group, stored: Loaded) -> Tensor:
        rule = "tensor factors are finite and not negative"
        return self.tensor_factor(group, stored, rule, _FIX)

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return FP8 by class P, and NVFP4 by class S: factors are multiplied first."""
        if group.scheme == "fp8r":
            elements = arithmetic.float8(stored["codes"])
            return arithmetic.product(elements, stored["scale"].reshape(-1, 1), dtype)
        elements = arithmetic.e2m1(stored["codes"])
        scales = arithmetic.float8(stored["scale"])
        factor = self._factor(group, stored).reshape(())
        return arithmetic.scales_first(elements, scales, factor, 16, dtype)

    def rows_apart(self, group: Group) -> bool:
        """Return True: every row has factors of its own."""
        return True
