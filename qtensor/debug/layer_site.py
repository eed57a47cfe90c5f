"""``LayerSite``: hand the tensors of a layer to a recorder; Dynamo traces it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.debug.op import FORWARD_ROLES, RECORD_GROUPS, RECORD_TENSOR, SINKS
from qtensor.functional.operands import Quantized
from qtensor.storage.base import QuantizedTensorStorage


class LayerSite(NamedTuple):
    """One recorded layer: a ``Site`` of ``qtensor.functional``."""

    ticket: Tensor
    """Number of the layer, int64 (1,) on the CPU; (groups,) for a layer of groups."""
    forward_token: Tensor
    """Number of the recorder, int64 (1,) on the CPU; forward graphs write to it."""
    backward_token: Tensor
    """Number of the recorder for backward graphs, which must not write what forward saved."""
    roles: tuple[str, ...]
    formats: dict[str, str] | None
    """Role -> canonical text of a quantizer to try; None for the quantizers of the layer."""

    def is_idle(self) -> bool:
        """Return whether eager code can leave out the records of this step."""
        if torch.compiler.is_compiling():
            return False
        sink = SINKS.get(int(self.forward_token))
        return sink is None or not sink.active

    def asks_for(self, role: str) -> bool:
        """Return whether tensors of a role are recorded."""
        return role in self.roles

    def take(
        self,
        role: str,
        x: Tensor | Quantized | QuantizedTensorStorage,
        quantizer: str = "",
        scale: Tensor | None = None,
        splits: tuple[Shape, Tensor | None, int] | None = None,
        group: int | None = None,
    ) -> None:
        """Hand a plain or quantized tensor, or the rows of groups, to the recorder."""
        if role not in self.roles:
            return
        if self.formats is not None:
            quantizer, scale = self.formats.get(role, ""), None
        if isinstance(x, QuantizedTensorStorage) and splits is not None:
            x = x.dequantize()
        stored = ""
        if isinstance(x, Quantized):
            buffers, stored, _ = x.operand
        elif isinstance(x, QuantizedTensorStorage):
            buffers, stored = x.buffers(), x._quantizer.canonical
        else:
            buffers = [x.detach()]
        if buffers[0].is_meta:
            return
        if stored:
            quantizer, scale = "", None
        token = self.forward_token if role in FORWARD_ROLES else self.backward_token
        ticket = self.ticket if group is None else self.ticket[group : group + 1]
        if splits is None:
            RECORD_TENSOR(buffers, stored, x.shape, role, quantizer, ticket, token, scale)
        else:
            RECORD_GROUPS(buffers[0], role, quantizer, ticket, token, *splits, scale)


def joined(sites: Mapping[str, LayerSite]) -> LayerSite:
    """Return the site of a layer whose groups have these sites."""
    first, *others = sites.values()
    if not others:
        return first
    return first._replace(ticket=torch.cat([site.ticket for site in sites.values()]))
