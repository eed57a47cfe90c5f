"""The options of every format, with the names and defaults of the quantizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

_ELEMENT_DEFAULT = {"mxfp6": "e2m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}
_SCALE_MODE_DEFAULT = {"mxfp6": "floor", "mxfp4": "floor"}


@dataclass(frozen=True)
class Options:
    """One quantization request. `None` means the default of the format, filled in by `for_format`.

    An option that the format does not use is ignored; an unknown name is a TypeError.
    """

    rowwise: bool = True
    columnwise: bool = False
    in_dtype: str = "float32"
    dtype: str | None = None
    force_pow_2_scales: bool | None = None
    amax_epsilon: float = 0.0
    axis: int = -1
    block_scaling_dim: int = 1
    scale_mode: str | None = None
    with_2d_quantization: bool = False
    packed: bool = False
    with_rht: bool = False
    with_random_sign_mask: bool = True
    stochastic_rounding: bool = False
    row_scaled: bool = False
    use_4over6: bool = False
    e4m3_max: int | None = None
    err_mode: str = "mae"
    swizzled: bool = False
    with_global_scale_inv: bool = False
    scale: np.ndarray | float | None = None
    random_bits: Mapping[str, np.ndarray] | None = None

    def for_format(self, fmt: str) -> Options:
        """The same options with every `None` replaced by the default of `fmt`
        (docs/numerics.md).
        """
        pow2 = (
            fmt == "fp8_blockwise" if self.force_pow_2_scales is None else self.force_pow_2_scales
        )
        e4m3_max = (256 if self.use_4over6 else 448) if self.e4m3_max is None else self.e4m3_max
        return replace(
            self,
            dtype=self.dtype or _ELEMENT_DEFAULT.get(fmt, "e4m3"),
            scale_mode=self.scale_mode or _SCALE_MODE_DEFAULT.get(fmt, "rceil"),
            force_pow_2_scales=pow2,
            e4m3_max=e4m3_max,
        )
