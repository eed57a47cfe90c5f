"""The recipes: delayed, current, block, MXFP8 and NVFP4 scaling, and a custom one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.core.quantizer_registry import parse
from qtensor.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from qtensor.recipes.base import (
    Format,
    Recipe,
    Role,
    check_type,
    element,
    parse_recipe,
    refuse_value,
)


@dataclass(kw_only=True, eq=False)
class DelayedScaling(Recipe):
    """FP8 with one factor per tensor, computed from the maxima of earlier steps.

    Below, n is the number of operands: 3 (input, weight, gradient), or 3 per group in
    ``GroupedLinear``.

    Attributes:
        fp8_format: HYBRID (default), E4M3 or E5M2.
        margin: encode scales are divided by ``2 ** margin``.
        amax_history_len: number of steps in the history, 1 to 1024.
        amax_compute_algo: "max" over the history, "most_recent", or a function of torch ops from
            the history (length, n) float32 to the maxima (n,) float32.
        scaling_factor_compute_algo: a function of torch ops (amax, old scale, largest code values,
            recipe) -> new scale; all tensors are (n,) float32. None for the rule of
            docs/numerics.md.
        reduce_amax: reduce maxima over the ``amax_reduction_group`` of ``autocast``, if it has one.
    """

    fp8_format: Format | str = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., Tensor] | None = None
    reduce_amax: bool = True

    delayed: ClassVar[bool] = True

    def own_quantizer(self, role: Role) -> Quantizer:
        """Return delayed scaling for the operands of linear layers, which have a state.

        Results and the operands of attention have current scaling.
        """
        dtype = element(self, role)
        if role.module == "attention" or role.tensor in ("output", "grad_input"):
            return Float8CurrentScalingQuantizer(dtype=dtype)
        return Float8Quantizer(dtype=dtype)

    def validate(self) -> None:
        """See ``Recipe.validate``."""
        super().validate()
        check_type(self, "margin", int)
        check_type(self, "amax_history_len", int, 1)
        check_type(self, "reduce_amax", bool)
        if self.amax_history_len > MAX_HISTORY:
            refuse_value(
                "DelayedScaling",
                "amax_history_len",
                self.amax_history_len,
                (f"1 to {MAX_HISTORY}",),
            )
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in (
            "max",
            "most_recent",
        ):
            legal = ("max", "most_recent", "a function of torch ops")
            refuse_value("DelayedScaling", "amax_compute_algo", self.amax_compute_algo, legal)
        if not (
            self.scaling_factor_compute_algo is None or callable(self.scaling_factor_compute_algo)
        ):
            got = self.scaling_factor_compute_algo
            choices = (None, "a function of torch ops")
            refuse_value("DelayedScaling", "scaling_factor_compute_algo", got, choices)


MAX_HISTORY = 1024
"""Number of rows in the amax history of each module."""


@dataclass(kw_only=True, eq=False)
class Float8CurrentScaling(Recipe):
    """FP8 with one factor per tensor, computed from the maximum of that tensor.

    Attributes:
        fp8_format: HYBRID (default), E4M3 or E5M2.
        use_power_2_scales: round the encode scales down to powers of two.
        amax_epsilon: lower bound of the maximum.
    """

    fp8_format: Format | str = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    def own_quantizer(self, role: Role) -> Quantizer:
        """Return the quantizer of a role; only the element depends on the role."""
        return Float8CurrentScalingQuantizer(
            dtype=element(self, role),
            force_pow_2_scales=self.use_power_2_scales,
            amax_epsilon=self.amax_epsilon,
        )


@dataclass(kw_only=True, eq=False)
class Float8BlockScaling(Recipe):
    """FP8 with one factor per 1x128 block (activations, gradients) or 128x128 block (weights).

    Attributes:
        fp8_format: E4M3 (default), HYBRID or E5M2.
        use_f32_scales: use any float32 factor; by default factors are powers of two.
        amax_epsilon: lower bound of a block's maximum.
        x_block_scaling_dim: blocks of the input: 1 for 1x128, 2 for 128x128.
        w_block_scaling_dim: blocks of the weight: 1 for 1x128, 2 for 128x128.
        grad_block_scaling_dim: blocks of the gradient: 1 for 1x128, 2 for 128x128.
    """

    fp8_format: Format | str = Format.E4M3
    use_f32_scales: bool = False
    amax_epsilon: float = 0.0
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    has_attention: ClassVar[bool] = False

    def own_quantizer(self, role: Role) -> Quantizer:
        """Return the quantizer of a role, with the blocks that the options give to it."""
        dims = {"weight": self.w_block_scaling_dim, "grad_output": self.grad_block_scaling_dim}
        dims["grad_input"] = self.grad_block_scaling_dim
        return Float8BlockQuantizer(
            dtype=element(self, role),
            block_scaling_dim=dims.get(role.tensor, self.x_block_scaling_dim),
            force_pow_2_scales=not self.use_f32_scales,
            amax_epsilon=self.amax_epsilon,
        )


@dataclass(kw_only=True, eq=False)
class MXFP8BlockScaling(Recipe):
    """MXFP8: FP8 with one power of two per 32 elements.

    Attributes:
        fp8_format: E4M3 (default), HYBRID or E5M2.
        scale_mode: rounding of the factors: "rceil", "floor", "ceil" or "even".
        with_2d_quantization: use 32x32 blocks for weights, so that both directions hold the same
            codes.
        swizzled: store factors in the tiles that GEMMs of Blackwell read. Otherwise these GEMMs
            rearrange the factors of both operands at every product. Ranks then gather values, not
            codes.
    """

    fp8_format: Format | str = Format.E4M3
    scale_mode: str = "rceil"
    with_2d_quantization: bool = False
    swizzled: bool = False

    def own_quantizer(self, role: Role) -> Quantizer:
        """Return the quantizer of a role; only weights can have square blocks."""
        return MXFP8Quantizer(
            dtype=element(self, role),
            scale_mode=self.scale_mode,
            with_2d_quantization=self.with_2d_quantization and role.tensor == "weight",
            swizzled=self.swizzled,
        )


@dataclass(kw_only=True, eq=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 with one E4M3 factor per 16 elements and one float32 factor per tensor.

    Attributes:
        disable_rht: do not apply the random Hadamard transform to the operands of wgrad (inputs and
            gradients).
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: use 1x16 blocks for weights, not 16x16.
        row_scaled: one float32 factor per row of inputs; needs ``disable_rht``.
        use_4over6: map a block's maximum to 6 or to 4, whichever has the smaller error. Roles with
            stochastic rounding ignore it.
        e4m3_max: largest factor of a block: 448 or 256; 0 for the default.
        err_mode: error that ``use_4over6`` compares: "mae" or "mse".
        with_random_sign_mask: use random signs in the transform.
        swizzled: as for ``MXFP8BlockScaling``.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled: bool = False
    use_4over6: bool = False
    e4m3_max: float = 0.0
    err_mode: str = "mae"
    with_random_sign_mask: bool = True
    swizzled: bool = False

    has_attention: ClassVar[bool] = False

    def own_quantizer(self, role: Role) -> Quantizer:
        """Return the quantizer of a role.

        Inputs are rotated along M. Weights have square blocks. Gradients are rotated along M and
        rounded stochastically.
        """
        weight = role.tensor == "weight"
        gradient = role.tensor in ("grad_output", "grad_input")
        stochastic = gradient and not self.disable_stochastic_rounding
        four_over_six = {"use_4over6": True, "err_mode": self.err_mode} if self.use_4over6 else {}
        options: dict[str, Any] = {} if stochastic else four_over_six
        if self.e4m3_max:
            options["e4m3_max"] = self.e4m3_max
        return NVFP4Quantizer(
            with_2d_quantization=weight and not self.disable_2d_quantization,
            with_rht=not weight and not self.disable_rht,
            with_random_sign_mask=self.with_random_sign_mask,
            stochastic_rounding=stochastic,
            row_scaled=self.row_scaled and role.tensor == "input",
            swizzled=self.swizzled,
            **options,
        )


@dataclass(kw_only=True, eq=False)
class CustomRecipe(Recipe):
    """Quantizers that a function of the caller chooses.

    Attributes:
        factory: a function from a ``Role`` to a quantizer, a format id, or None for high precision.
            It is called once for each role of each module. Define it once: recipes with different
            functions are different and do not share compiled graphs.
        delayed_scaling: a ``DelayedScaling`` with margin, history and algorithm for the roles that
            get a ``Float8Quantizer``, which need one.
    """

    factory: Any = None
    delayed_scaling: DelayedScaling | str | None = None

    is_fixed: ClassVar[bool] = False

    def own_quantizer(self, role: Role) -> Quantizer | None:
        """Return the quantizer that the factory chooses for a role."""
        choice = self.factory(role)
        if choice is None or isinstance(choice, Quantizer):
            return choice
        if isinstance(choice, str):
            return parse(choice)  # type: ignore[return-value]
        fix = "Return a quantizer, a format id or None"
        rule = f"the factory must return a quantizer for {role}"
        fail("CustomRecipe", rule, repr(choice), fix, ArgumentTypeError)

    def validate(self) -> None:
        """See ``Recipe.validate``."""
        super().validate()
        if not callable(self.factory):
            fix = 'Pass a function, for example factory=lambda role: "mxfp8"'
            fail("CustomRecipe", "factory must be a function of a Role", repr(self.factory), fix)

    @property
    def delayed(self) -> bool:  # type: ignore[override]
        """Whether roles may ask for delayed scaling."""
        return self.delayed_scaling is not None

    @property
    def delayed_options(self) -> DelayedScaling | None:
        """The ``DelayedScaling`` of the roles with delayed scaling, or None."""
        if isinstance(self.delayed_scaling, str):
            return parse_recipe(self.delayed_scaling)
        return self.delayed_scaling
