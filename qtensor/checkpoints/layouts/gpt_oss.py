"""Read and write the MXFP4 experts of gpt-oss, as transformers and the first release name them.

docs/checkpoints.md has the names. A block of 32 elements is 16 bytes, low nibble first, so the
blocks of a row are our packed codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble, rowwise_parts
from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.layout_base import DenseOnly, Group, Layout, Loaded, Writer
from qtensor.quantizers import MXFP4Quantizer
from qtensor.storage.tensor import QuantizedTensor

METHOD = "mxfp4"
_NAMES = (("_blocks", "_scales"), (".blocks", ".scales"))
"""What follows the logical name: in transformers, and in the release of a single file."""
_RELEASE = ("mlp1_weight", "mlp2_weight")
"""Last name parts of weights that take the second pair."""
_FIX = "Download the missing shard, or export the checkpoint again"


class GptOssLayout(Layout):
    """Read gpt-oss checkpoints.

    A quantized weight has the file's own orientation, (E, N, K). Its dense values are transposed,
    (E, K, N), as the parameter in transformers is.
    """

    name = "gpt-oss"
    rank = 63
    methods = (METHOD,)

    def groups(self) -> Iterable[Group]:
        """Return a group for each pair of blocks and scales."""
        tensors, used = self.source.tensors, set()
        for name, info in tensors.items():
            for blocks, scales in _NAMES:
                if name.endswith(blocks):
                    factor = tensors.get(name.removesuffix(blocks) + scales)
                    if factor is None:
                        rule = f"blocks have {scales[1:]} beside them"
                        self.refuse(name, rule, f"{info.dtype} {list(info.shape)} alone", _FIX)
                    used |= {name, factor.name}
                    yield self._group(name.removesuffix(blocks), info, factor)
                elif name.endswith(scales) and name.removesuffix(scales) + blocks not in tensors:
                    rule = f"scales have {blocks[1:]} beside them"
                    self.refuse(name, rule, f"{info.dtype} {list(info.shape)} alone", _FIX)
        self.refuse_leftovers(used)

    def _group(self, name: str, blocks: TensorInfo, scales: TensorInfo) -> Group:
        """Return the group of a weight after checking its shapes."""
        if len(blocks.shape) != 4 or blocks.shape[-1] != 16 or blocks.dtype != "U8":
            rule = "blocks are U8 of shape (experts, rows, blocks, 16)"
            self.refuse(blocks.name, rule, f"{blocks.dtype} of shape {list(blocks.shape)}", _FIX)
        why = f"{blocks.name} {list(blocks.shape)}"
        self.expect(scales, [blocks.shape[:-1]], ["U8", "F8_E8M0"], why)
        experts, rows, count, _ = blocks.shape
        shape, roles = (experts, 32 * count, rows), {"codes": blocks, "scale": scales}
        dtype = self.source.model_dtype or torch.bfloat16
        return Group(name, roles, shape, dtype, MXFP4Quantizer(), "gpt-oss mxfp4", transposed=True)

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the experts as MXFP4 of shape (E, N, K), with the codes of the file."""
        experts, cols, rows = group.shape
        parts = Parts(stored["codes"].flatten(-2), stored["scale"])
        return assemble(group.quantizer, (experts, rows, cols), group.dtype, parts)

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return element times 2^(c - 127) of shape (E, K, N), which is exact in bfloat16."""
        elements = arithmetic.e2m1(stored["codes"])
        factors = arithmetic.e8m0(stored["scale"]).unsqueeze(-1)
        values = arithmetic.product(elements, factors, dtype).flatten(-2)
        return values.transpose(1, 2).contiguous()


class GptOssWriter(Writer):
    """Write MXFP4 experts (E, N, K) with the names of transformers or of the first release.

    A name that ends in ``mlp1_weight`` or ``mlp2_weight`` is one of the release.
    """

    layout = "gpt-oss"
    formats = ("mxfp4 (experts)",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._experts: list[str] = []

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the blocks and the scales of stacked experts."""
        quantizer = tensor.quantizer
        if quantizer.spec.name != "mxfp4":
            self.refuse(name, "the layout holds MXFP4", quantizer.canonical)
        self.need_rowwise(name, tensor)
        if tensor.ndim != 3 or tensor.shape[-1] % 32 or name.endswith(".weight"):
            rule = "weights are stacked experts (E, N, K), K a multiple of 32"
            fix = "Write layout 'qtensor'"
            self.refuse(name, rule, f"{tuple(tensor.shape)} named {name!r}", fix)
        parts = rowwise_parts(tensor)
        experts, rows, cols = tensor.shape
        blocks, scales = _NAMES[name.rpartition(".")[2] in _RELEASE]
        self._experts.append(name)
        return {
            name + blocks: parts.codes.reshape(experts, rows, cols // 32, 16),
            name + scales: parts.scale.reshape(experts, rows, cols // 32),
        }

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization_config``."""
        if not self._experts:
            return self.model_config
        entry = {"quant_method": METHOD, "modules_to_not_convert": self.ignored(self._experts)}
        return {**self.model_config, "quantization_config": entry}


GptOssLayout.writer = GptOssWriter
