"""Recipes choose the quantizer of each operand of a GEMM.

A recipe holds plain values. Modules read it through its ``key``, a string that spells out all
options: an assignment to an option takes effect at the next forward, and equal recipes share
compiled graphs.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, Self, get_args

import torch

from qtensor.core.compile_constants import compile_constant as compile_constant
from qtensor.core.encoding import Function, decode_literals, encode_literals
from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.core.quantizer_registry import parse
from qtensor.quantizers import Quantizer

TensorRole = Literal[
    "input",
    "weight",
    "grad_output",
    "output",
    "grad_input",
    "qkv",
    "probabilities",
    "grad_scores",
]
TENSOR_ROLES: tuple[str, ...] = get_args(TensorRole)
"""The tensors that a recipe has quantizers for.

``output`` and ``grad_input`` are results, which are quantized only on request. The last three, and
``grad_output`` of the module "attention", are the operands of attention: queries, keys and values;
the result of the softmax; and the gradient of the scores.
"""
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


class Format(enum.Enum):
    """The FP8 elements of the forward pass and of the backward pass."""

    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")
    """E4M3 forward, E5M2 for gradients."""


@dataclass(frozen=True)
class Role:
    """One tensor of one module, for which a recipe chooses a quantizer.

    Attributes:
        tensor: one of ``TENSOR_ROLES``.
        module: "linear", "grouped_linear" or "attention".
        name: the module's name; "" if it has none.
    """

    tensor: str
    module: str = "linear"
    name: str = ""

    def __str__(self) -> str:
        return f"{self.module}_{self.tensor}"


FUNCTIONS: dict[int, Callable[[], Callable[..., Any] | None]] = {}
"""Weak references to the functions of recipes, by the numbers that stand for them in keys.

A recipe and the cached copies of it, of which there is a limited number, hold the function itself.
"""
_NUMBERS: dict[int, int] = {}
"""The number of each function by its ``id``, while the function exists."""
_NEXT_NUMBER = itertools.count()


def function_number(function: Callable[..., Any]) -> int:
    """Return the number of a function in ``FUNCTIONS``; no other function ever has this number."""
    identity = id(function)
    if identity in _NUMBERS:
        return _NUMBERS[identity]
    number = next(_NEXT_NUMBER)
    try:
        # Without a callback, for which Dynamo would add a guard.
        FUNCTIONS[number] = weakref.ref(function)
        weakref.finalize(function, _forget_function, identity, number).atexit = False
    except TypeError:
        # The object does not allow weak references, so this entry stays.
        FUNCTIONS[number] = lambda: function
    _NUMBERS[identity] = number
    return number


def _forget_function(identity: int, number: int) -> None:
    # With defaults, because two threads may have numbered the same function.
    _NUMBERS.pop(identity, None)
    FUNCTIONS.pop(number, None)


class ReadOnlyDict(dict[str, Any]):
    """A dict that cannot be changed in place, for ``recipe.overrides``.

    A recipe computes its key when an option is assigned, so it would miss a change in place.
    """

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        rule = "overrides is read-only, because a recipe notices only assignments"
        fix = 'Assign a new dict: recipe.overrides = {**recipe.overrides, "weight": "mxfp8"}'
        fail("recipe.overrides", rule, "a change in place", fix, ArgumentTypeError)

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)


def _read_only(value: object) -> object:
    """Return a read-only copy of a mapping and of the mappings in it; other values as they are."""
    if not isinstance(value, Mapping):
        return value
    return ReadOnlyDict({key: _read_only(item) for key, item in value.items()})


RECIPES: dict[str, type[Recipe]] = {}
"""Class of each recipe by its name, with which keys begin."""


@dataclass(kw_only=True, eq=False)
class Recipe:
    """Base of all recipes.

    Attributes:
        backward_override: operands of the backward GEMMs. None: quantized. "high_precision": the
            original input and weight. "dequantized": the dequantized input and weight. Both strings
            leave the gradient unquantized.
        overrides: replacements of the recipe's own choices, by tensor role: a quantizer, a format
            id, a dict of options that differ, or None for high precision. Read-only: assign a new
            dict to change it.
        fp8_dpa: quantize the operands of attention too, in ``DotProductAttention``.
    """

    backward_override: str | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fp8_dpa: bool = False

    delayed: ClassVar[bool] = False
    """Whether the recipe needs state between steps."""
    is_fixed: ClassVar[bool] = True
    """Whether the options alone decide the quantizers; then ``validate`` creates all of them."""
    has_attention: ClassVar[bool] = True
    """Whether the recipe has quantizers for the operands of attention."""
    option_names: ClassVar[tuple[str, ...]] = ("backward_override", "overrides", "fp8_dpa")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = [n for n, kind in inspect.get_annotations(cls).items() if "ClassVar" not in str(kind)]
        cls.option_names = tuple(dict.fromkeys((*cls.option_names, *own)))
        RECIPES[cls.__name__] = cls

    def __new__(cls, *_: object, **options: object) -> Self:
        """Refuse options that the recipe does not have, with a ``QTensorError``."""
        for name in options:
            if name not in cls.option_names:
                _refuse_option(cls, name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._key = _make_key(self)
        parse_recipe(self._key)

    def __getstate__(self) -> dict[str, Any]:
        # The key of another process would have other numbers for functions.
        return {name: getattr(self, name) for name in self.option_names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._key = _make_key(self)

    def __setattr__(self, name: str, value: object) -> None:
        known = name == "_key" or name in self.option_names
        if not known:
            _refuse_option(type(self), name)
        if hasattr(self, "_holder"):
            rule = f"a recipe inside of a {self._holder} is read-only"
            fix = "Assign a new recipe to the option of the outer recipe"
            fail(f"{type(self).__name__}.{name}", rule, repr(value), fix, ArgumentTypeError)
        if name == "overrides":
            value = _read_only(value)
        if isinstance(value, Recipe):
            object.__setattr__(value, "_holder", type(self).__name__)
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
        """The recipe as a string with all options, for example ``MXFP8BlockScaling(...)``.

        Equal recipes have equal keys.
        """
        return self._key

    def quantizer(self, role: Role) -> Quantizer | None:
        """Return the quantizer of a role; None for high precision. The caller sets its usages."""
        own = self.own_quantizer(role)
        if role.tensor not in self.overrides:
            return own
        return _overridden(self, role, own, self.overrides[role.tensor])

    def own_quantizer(self, role: Role) -> Quantizer | None:
        """Return the quantizer of a role before ``overrides``; None for high precision."""
        raise NotImplementedError

    def validate(self) -> None:
        """Refuse option values that are not legal.

        Raises:
            QTensorError: an option has an illegal value. The message lists the legal ones.
        """
        name = type(self).__name__
        if self.backward_override not in BACKWARD_OVERRIDES:
            refuse_value(name, "backward_override", self.backward_override, BACKWARD_OVERRIDES)
        if not isinstance(self.overrides, Mapping):
            refuse_value(name, "overrides", self.overrides, ('a dict such as {"weight": "mxfp8"}',))
        check_type(self, "fp8_dpa", bool)
        if self.fp8_dpa and not self.has_attention:
            rule = "the recipe has no quantizers for attention"
            fix = "Use a CustomRecipe with fp8_dpa=True, whose factory chooses them"
            fail(name, rule, "fp8_dpa=True", fix)
        for role in self.overrides:
            if role not in TENSOR_ROLES:
                refuse_value(name, "a role of overrides", role, TENSOR_ROLES)
        for tensor in TENSOR_ROLES:
            if self.is_fixed:
                self.quantizer(Role(tensor))


def refuse_value(recipe: str, option: str, got: object, legal: tuple[Any, ...]) -> None:
    """Raise the error for an illegal option value."""
    choices = ", ".join(v if isinstance(v, str) and " " in v else repr(v) for v in legal)
    fail(recipe, f"{option} must be one of {choices}", repr(got), "Choose one of them")


def check_type(recipe: Recipe, option: str, kind: type, least: float | None = None) -> None:
    """Refuse an option that is not of type ``kind``, or is below ``least``."""
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


def _overridden(
    recipe: Recipe, role: Role, own: Quantizer | None, value: object
) -> Quantizer | None:
    """Return the quantizer that ``recipe.overrides[role.tensor] = value`` asks for."""
    if value is None or isinstance(value, Quantizer):
        return value
    if isinstance(value, str):
        return parse(value)  # type: ignore[return-value]
    if isinstance(value, Mapping) and own is not None:
        return type(own)(**{**own.changed_options(), **value})
    rule = f"overrides[{role.tensor!r}] must be a quantizer, a format id, a dict of options or None"
    fail(type(recipe).__name__, rule, repr(value), "Pass one of these")


# ---- keys


def _plain_value(value: object) -> object:
    """Return an option as values that keys can hold: strings, keys and numbers of functions."""
    if isinstance(value, Format):
        return value.name
    if isinstance(value, Quantizer):
        return value.canonical
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {name: _plain_value(item) for name, item in value.items()}
    if isinstance(value, Recipe):
        return value._key
    return Function(function_number(value)) if callable(value) else value


def _make_key(recipe: Recipe) -> str:
    name = type(recipe).__name__
    values = {option: getattr(recipe, option) for option in recipe.option_names}
    if isinstance(values.get("fp8_format"), str):
        values["fp8_format"] = values["fp8_format"].upper()
    plain = {option: _plain_value(value) for option, value in values.items()}
    return encode_literals(name, plain)


def _option(value: Any) -> Any:
    """Return the option that a value of ``_plain_value`` stands for."""
    if isinstance(value, Function):
        function = FUNCTIONS.get(value.number, lambda: None)()
        if function is None:
            rule = "the function of the recipe no longer exists"
            fail(
                "recipe", rule, f"function {value.number}", "Keep the recipe until backward has run"
            )
        return function
    if isinstance(value, dict):
        return {name: _option(item) for name, item in value.items()}
    return value


@compile_constant
def parse_recipe(key: str) -> Recipe:
    """Return a private copy of the recipe with this key.

    Raises:
        QTensorError: the key names an unknown recipe, or an option value is not legal.
    """
    name = key.partition("(")[0]
    if name not in RECIPES:
        fail("recipe", f"the recipe must be one of {', '.join(RECIPES)}", key, "Choose one")
    cls = RECIPES[name]
    copy = object.__new__(cls)
    for option, value in decode_literals(key)[1].items():
        object.__setattr__(copy, option, _option(value))
    object.__setattr__(copy, "_key", key)
    copy.validate()
    return copy


def _elements(recipe: Any) -> tuple[str, str]:
    """Return the (forward, backward) elements of ``recipe.fp8_format``, a ``Format`` or a name."""
    choice = recipe.fp8_format
    name = choice.name if isinstance(choice, Format) else str(choice).upper()
    if name not in Format.__members__:
        refuse_value(type(recipe).__name__, "fp8_format", choice, tuple(Format.__members__))
    return Format[name].value


def element(recipe: Any, role: Role) -> str:
    """Return the FP8 element of a role: "e4m3" or "e5m2"."""
    return _elements(recipe)[role.tensor.startswith("grad_")]


@compile_constant
def role_quantizers(key: str, module: str, name: str) -> dict[str, Quantizer | None]:
    """Return the quantizers of a module's input, weight and grad_output, by tensor role.

    Raises:
        QTensorError: GEMMs cannot read one of the quantizers.
    """
    recipe = parse_recipe(key)
    return {t: recipe.quantizer(Role(t, module, name)) for t in TENSOR_ROLES[:3]}
