"""The recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from qtensor.errors import ArgumentTypeError, fail
from qtensor.library.codec import parse
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
    """FP8 with one factor a tensor, from the maxima of the steps before.

    Attributes:
        fp8_format: HYBRID (default), E4M3 or E5M2.
        margin: factors are divided by ``2 ** margin``.
        amax_history_len: steps that the history keeps, 1 to 1024.
        amax_compute_algo: "max" over the history, "most_recent", or a function (length, n) -> (n,)
            of torch ops: n is 3, or 3 a group in GroupedLinear.
        scaling_factor_compute_algo: a function (amax, old scale, largest code values, recipe) ->
            scale of torch ops, all (3,) float32; None for the rule of docs/numerics.md.
        reduce_amax: take maxima over the ``amax_reduction_group`` of ``autocast`` where there is
            one.
    """

    fp8_format: Format | str = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True

    delayed: ClassVar[bool] = True

    def own_quantizer(self, role: Role) -> Quantizer:
        """Delayed scaling for the operands; current scaling for results, which have no state."""
        dtype = element(self, role)
        if role.tensor in ("output", "grad_input"):
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
"""Rows of every module's amax history."""


@dataclass(kw_only=True, eq=False)
class Float8CurrentScaling(Recipe):
    """FP8 with one factor a tensor, from the tensor's own maximum.

    Attributes:
        fp8_format: HYBRID (default), E4M3 or E5M2.
        use_power_2_scales: floor the factors to powers of two.
        amax_epsilon: lower bound of the amax.
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
    """FP8 with a factor for each 1x128 block (activations, gradients) or 128x128 block (weights).

    Attributes:
        fp8_format: E4M3 (default), HYBRID or E5M2.
        use_f32_scales: keep the factors as they are; by default they are powers of two.
        amax_epsilon: lower bound of a block's amax.
        x_block_scaling_dim: 1 for 1x128 blocks of the input, 2 for 128x128.
        w_block_scaling_dim: likewise of the weight.
        grad_block_scaling_dim: likewise of the gradient.
    """

    fp8_format: Format | str = Format.E4M3
    use_f32_scales: bool = False
    amax_epsilon: float = 0.0
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def own_quantizer(self, role: Role) -> Quantizer:
        """Square blocks for weights."""
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
    """MXFP8: a power of two for each 32 elements.

    Attributes:
        fp8_format: E4M3 (default), HYBRID or E5M2.
        scale_mode: how factors are rounded: "rceil", "floor", "ceil" or "even".
        with_2d_quantization: 32x32 blocks for weights, so that both directions hold the same codes.
    """

    fp8_format: Format | str = Format.E4M3
    scale_mode: str = "rceil"
    with_2d_quantization: bool = False

    def own_quantizer(self, role: Role) -> Quantizer:
        """Square blocks for weights alone."""
        return MXFP8Quantizer(
            dtype=element(self, role),
            scale_mode=self.scale_mode,
            with_2d_quantization=self.with_2d_quantization and role.tensor == "weight",
        )


@dataclass(kw_only=True, eq=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4: E2M1 with an E4M3 factor for 16 elements and a float32 factor for the tensor.

    Attributes:
        disable_rht: no random Hadamard transform of what wgrad reads (inputs and gradients).
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: 1x16 blocks for weights too.
        row_scaled: a float32 factor a row of inputs; needs ``disable_rht``.
        use_4over6: map a block's maximum to 6 or to 4, whichever has the smaller error; for all but
            stochastic roles.
        e4m3_max: largest factor of a block: 448, or 256; 0 for the default.
        err_mode: the error that ``use_4over6`` compares: "mae" or "mse".
        with_random_sign_mask: random signs in the transform.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled: bool = False
    use_4over6: bool = False
    e4m3_max: float = 0.0
    err_mode: str = "mae"
    with_random_sign_mask: bool = True

    def own_quantizer(self, role: Role) -> Quantizer:
        """Inputs: rotated along M.

        Weights: square blocks. Gradients: rotated along M, rounded at random.
        """
        weight = role.tensor == "weight"
        gradient = role.tensor in ("grad_output", "grad_input")
        stochastic = gradient and not self.disable_stochastic_rounding
        four = {"use_4over6": True, "err_mode": self.err_mode} if self.use_4over6 else {}
        options: dict[str, Any] = {} if stochastic else four
        if self.e4m3_max:
            options["e4m3_max"] = self.e4m3_max
        return NVFP4Quantizer(
            with_2d_quantization=weight and not self.disable_2d_quantization,
            with_rht=not weight and not self.disable_rht,
            with_random_sign_mask=self.with_random_sign_mask,
            stochastic_rounding=stochastic,
            row_scaled=self.row_scaled and role.tensor == "input",
            **options,
        )


@dataclass(kw_only=True, eq=False)
class CustomRecipe(Recipe):
    """Quantizers from a function of the role.

    Attributes:
        factory: ``Role`` -> a quantizer, a format id, or None for high precision. Called once for
            each role of each module. Make the function once: another function is another recipe,
            with graphs of its own.
        delayed_scaling: a ``DelayedScaling`` with margin, history and algorithm of the roles that
            get a ``Float8Quantizer``; needed for those.
    """

    factory: Any = None
    delayed_scaling: Any = None

    is_fixed: ClassVar[bool] = False

    def own_quantizer(self, role: Role) -> Quantizer | None:
        """What the factory says."""
        given = self.factory(role)
        if given is None or isinstance(given, Quantizer):
            return given
        if isinstance(given, str):
            return parse(given)  # type: ignore[return-value]
        fix = "Return a quantizer, a format id or None"
        rule = f"the factory must return a quantizer for {role}"
        fail("CustomRecipe", rule, repr(given), fix, ArgumentTypeError)

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
        """The recipe whose rules the delayed roles follow."""
        if isinstance(self.delayed_scaling, str):
            return parse_recipe(self.delayed_scaling)
        return self.delayed_scaling
