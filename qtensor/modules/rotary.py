"""``RotaryPositionEmbedding``: the angles by which attention rotates queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qtensor.core.errors import check
from qtensor.functional.attention.rotary import angles
from qtensor.modules.options import check_features


class RotaryPositionEmbedding(nn.Module):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), for ``rotary_pos_emb``.

    Args:
        dim: channels of a head.
        rotary_percent: the share of the channels that is rotated.
        seq_len_interpolation_factor: divide positions by this number.
        rotary_base: the greatest wavelength is about ``2 * pi * rotary_base`` positions.
        interleaved: pairs are neighbouring channels, not channels i and i + dim / 2. Build the
            attention with ``rotary_pos_interleaved`` alike.
        device: device of the angles.

    Raises:
        QTensorError: the number of rotated channels is not even.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.types.Device = None,
    ) -> None:
        super().__init__()
        check_features("RotaryPositionEmbedding", dim=dim)
        self.size = int(dim * rotary_percent)
        rule, fix = "dim * rotary_percent must be even", "Choose another size"
        check(self.size > 0 and self.size % 2 == 0, type(self).__name__, rule, self.size, fix)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.rotary_base, self.interleaved = rotary_base, interleaved
        inverse = torch.empty(self.size // 2, dtype=torch.float32, device=device)
        self.register_buffer("inv_freq", inverse, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the angles at position 1."""
        if self.inv_freq.is_meta:
            return
        steps = torch.arange(0, self.size, 2, dtype=torch.float32, device=self.inv_freq.device)
        with torch.no_grad():
            self.inv_freq.copy_(1.0 / self.rotary_base ** (steps / self.size))

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles (max_seq_len, 1, 1, channels) float32 of positions from ``offset`` on.

        With a cache, ``offset`` is the number of tokens before those of the call.
        """
        positions = torch.arange(max_seq_len, device=self.inv_freq.device) + offset
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        return angles(self.inv_freq, positions, self.interleaved)
