"""Recipes: which quantizer each role of a GEMM gets.

A recipe is a plain value object. Its options may be changed at any time; modules read it by its
text (``key``), so that a change takes effect at the next forward, equal recipes share compiled
graphs, and nothing live is kept in one.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import torch

from qtensor.errors import ArgumentTypeError, fail
from qtensor.library.codec import parse
from qtensor.library.constant import compile_constant as compile_constant
from qtensor.quantizers import Quantizer

TensorRole = Literal["input", "weight", "grad_output", "output", "grad_input"]
TENSOR_ROLES: tuple[str, ...] = get_args(TensorRole)
"""What a quantizer can be asked for.

The last two are results; they are quantized only where a caller asks for it.
"""
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


class Format(enum.Enum):
    """Which FP8 element the forward and the backward pass use."""

    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")
    """E4M3 forward, E5M2 for gradients."""


@dataclass(frozen=True)
class Role:
    """What a quantizer is for.

    Attributes:
        tensor: "input", "weight", "grad_output", "output" or "grad_input".
        module: "linear" or "grouped_linear".
        name: the module's name, "" where it has none.
    """

    tensor: str
    module: str = "linear"
    name: str = ""

    def __str__(self) -> str:
        return f"{self.module}_{self.tensor}"


CALLABLES: list[Callable[..., Any]] = []
"""Functions that recipes hold, by number: a text cannot hold them otherwise."""


def function_number(function: Callable[..., Any]) -> int:
    """The place of a function in ``CALLABLES``."""
    for number, known in enumerate(CALLABLES):
        if known is function:
            return number
    CALLABLES.append(function)
    return len(CALLABLES) - 1


class ReadOnlyDict(dict[str, Any]):
    """``recipe.overrides``: a dict that cannot be changed in place.

    The recipe's key is made when an option is assigned, so that a change in place would be ignored.
    """

    def _refuse(self, *args: Any, **options: Any) -> Any:
        rule = "overrides is read-only, because a recipe notices assignments alone"
        fix = 'Assign a new dict: recipe.overrides = {**recipe.overrides, "weight": "mxfp8"}'
        fail("recipe.overrides", rule, "a change in place", fix, ArgumentTypeError)

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)


def _read_only(value: Any) -> Any:
    """Return a read-only copy of a mapping and of the mappings in it; other values as they are."""
    if not isinstance(value, Mapping):
        return value
    return ReadOnlyDict({key: _read_only(item) for key, item in value.items()})


RECIPES: dict[str, type[Recipe]] = {}
"""Name -> class; the names that keys begin with."""


@dataclass(kw_only=True, eq=False)
class Recipe:
    """What recipes share.

    Attributes:
        backward_override: None: quantized backward GEMMs. "high_precision": they read the original
            operands, and the gradient unquantized. "dequantized": the dequantized operands of the
            forward, and the gradient unquantized.
        overrides: tensor role -> what to use instead of the recipe's own choice: a quantizer, a
            format id, a dict of options that differ, or None for high precision.
    """

    backward_override: str | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    delayed: ClassVar[bool] = False
    """Whether the recipe asks for state between steps."""
    is_fixed: ClassVar[bool] = True
    """Quantizers follow from the options alone, so that they can be made to check those."""
    option_names: ClassVar[tuple[str, ...]] = ("backward_override", "overrides")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [n for n, kind in inspect.get_annotations(cls).items() if "ClassVar" not in str(kind)]
        cls.option_names = tuple(dict.fromkeys((*cls.option_names, *own)))
        RECIPES[cls.__name__] = cls

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options that the recipe does not have, with an error of ours."""
        for name in options:
            if name not in cls.option_names:
                _refuse_option(cls, name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._key = _make_key(self)
        parse_recipe(self._key)

    def __setattr__(self, name: str, value: Any) -> None:
        known = name == "_key" or name in self.option_names
        if not known:
            _refuse_option(type(self), name)
        if name == "overrides":
            value = _read_only(value)
        ready = name != "_key" and hasattr(self, "_key")
        before = getattr(self, name, None)
        object.__setattr__(self, name, value)
        if not ready:
            return
        key = _make_key(self)
        try:
            parse_recipe(key)
        except Exception:
            object.__setattr__(self, name, before)
            raise
        object.__setattr__(self, "_key", key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    @property
    def key(self) -> str:
        """The recipe as text: ``MXFP8BlockScaling(fp8_format='E4M3')``.

        Equal recipes have equal keys.
        """
        return self._key

    def quantizer(self, role: Role) -> Quantizer | None:
        """The quantizer of a role, None for high precision. Usages are set by who calls."""
        own = self.own_quantizer(role)
        if role.tensor not in self.overrides:
            return own
        return _overridden(self, role, own, self.overrides[role.tensor])

    def own_quantizer(self, role: Role) -> Quantizer | None:
        """What the recipe gives to a role before ``overrides``."""
        raise NotImplementedError

    def validate(self) -> None:
        """Refuse options that are not legal.

        Raises:
            QTensorError: with the option and its legal values.
        """
        name = type(self).__name__
        if self.backward_override not in BACKWARD_OVERRIDES:
            refuse_value(name, "backward_override", self.backward_override, BACKWARD_OVERRIDES)
        if not isinstance(self.overrides, Mapping):
            refuse_value(name, "overrides", self.overrides, ('a dict such as {"weight": "mxfp8"}',))
        for role in self.overrides:
            if role not in TENSOR_ROLES:
                refuse_value(name, "a role of overrides", role, TENSOR_ROLES)
        for tensor in TENSOR_ROLES:
            if self.is_fixed:
                self.quantizer(Role(tensor))


def refuse_value(recipe: str, option: str, got: object, legal: tuple[Any, ...]) -> None:
    """Refuse the value of an option.

    Raises:
        QTensorError: always, with the legal values.
    """
    choices = ", ".join(v if isinstance(v, str) and " " in v else repr(v) for v in legal)
    fail(recipe, f"{option} must be one of {choices}", repr(got), "Choose one of them")


def check_type(recipe: Any, option: str, kind: type, least: float | None = None) -> None:
    """Refuse an option of another type, or below ``least``.

    Raises:
        ArgumentTypeError: with the value.
    """
    value = getattr(recipe, option)
    right = isinstance(value, kind) or (kind is float and type(value) is int)
    if (
        not right
        or (isinstance(value, bool) and kind is not bool)
        or (least is not None and not value >= least)
    ):
        rule = f"{option} must be of type {kind.__name__}" + (
            "" if least is None else f" >= {least}"
        )
        fail(type(recipe).__name__, rule, repr(value), "Pass such a value", ArgumentTypeError)


def _refuse_option(cls: type[Recipe], name: str) -> None:
    rule = "options must be the recipe's"
    fail(cls.__name__, rule, name, f"Choose among: {', '.join(cls.option_names)}")


def _overridden(recipe: Recipe, role: Role, own: Quantizer | None, given: Any) -> Quantizer | None:
    if given is None or isinstance(given, Quantizer):
        return given
    if isinstance(given, str):
        return parse(given)  # type: ignore[return-value]
    if isinstance(given, Mapping) and own is not None:
        return type(own)(**{**own.given_options(), **given})
    rule = f"overrides[{role.tensor!r}] must be a quantizer, a format id, a dict of options or None"
    fail(type(recipe).__name__, rule, repr(given), "Pass one of these")


# ---- keys
# ----------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """An option as a Python literal; quantizers as their canonical text, functions by number."""
    if isinstance(value, Format):
        return repr(value.name)
    if isinstance(value, Quantizer):
        return repr(value.canonical)
    if isinstance(value, torch.dtype):
        return repr(str(value).removeprefix("torch."))
    if isinstance(value, Mapping):
        items = ",".join(f"{k!r}:{_text(v)}" for k, v in value.items())
        return "{" + items + "}"
    if isinstance(value, Recipe):
        return repr(value._key)
    if callable(value):
        return f"('function',{function_number(value)})"
    if isinstance(value, float) and not math.isfinite(value):
        # Python has no literal for these.
        return f"('float','{float(value)}')"
    return repr(value)


def _make_key(recipe: Recipe) -> str:
    name = type(recipe).__name__
    given = {n: getattr(recipe, n) for n in recipe.option_names}
    if isinstance(given.get("fp8_format"), str):
        given["fp8_format"] = given["fp8_format"].upper()
    options = ",".join([f"{n}={_text(value)}" for n, value in given.items()])
    return f"{name}({options})"


def _literal(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "function":
        return CALLABLES[value[1]]
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "float":
        return float(value[1])
    if isinstance(value, dict):
        return {name: _literal(item) for name, item in value.items()}
    return value


@compile_constant
def parse_recipe(key: str) -> Recipe:
    """A private copy of the recipe that a key names.

    Raises:
        QTensorError: an option that is not legal.
    """
    name = key.partition("(")[0]
    call = ast.parse(key, mode="eval").body
    if name not in RECIPES or not isinstance(call, ast.Call):
        fail("recipe", f"the recipe must be one of {', '.join(RECIPES)}", key, "Choose one")
    cls = RECIPES[name]
    copy = object.__new__(cls)
    for keyword in call.keywords:
        value = _literal(ast.literal_eval(keyword.value))
        object.__setattr__(copy, str(keyword.arg), value)
    object.__setattr__(copy, "_key", key)
    copy.validate()
    return copy


def _elements(recipe: Any) -> tuple[str, str]:
    """(forward, backward) elements of an ``fp8_format``, a member of ``Format`` or its name."""
    given = recipe.fp8_format
    name = given.name if isinstance(given, Format) else str(given).upper()
    if name not in Format.__members__:
        refuse_value(type(recipe).__name__, "fp8_format", given, tuple(Format.__members__))
    return Format[name].value


def element(recipe: Any, role: Role) -> str:
    """The FP8 element of a role."""
    return _elements(recipe)[role.tensor in ("grad_output", "grad_input")]


@compile_constant
def role_quantizers(key: str, module: str, name: str) -> dict[str, Quantizer | None]:
    """Tensor role -> quantizer of a module's operands.

    Raises:
        QTensorError: a quantizer that a GEMM cannot read.
    """
    recipe = parse_recipe(key)
    return {t: recipe.quantizer(Role(t, module, name)) for t in TENSOR_ROLES[:3]}
