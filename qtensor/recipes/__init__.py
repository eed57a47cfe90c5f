"""Recipes choose the quantizer of each operand of a GEMM. They are plain values."""

from qtensor.recipes.base import (
    RECIPES,
    Format,
    Recipe,
    Role,
    compile_constant,
    parse_recipe,
    role_quantizers,
)
from qtensor.recipes.scaling import (
    MAX_HISTORY,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

__all__ = [
    "MAX_HISTORY",
    "RECIPES",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "Role",
    "compile_constant",
    "parse_recipe",
    "role_quantizers",
]
