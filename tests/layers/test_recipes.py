"""Recipes as values: which quantizer a role gets, options, mistakes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from training import RECIPES, WIDTH, build, region

import qtensor
from qtensor import QTensorError, recipes
from qtensor.recipes import Role

NAMED = [
    recipes.DelayedScaling,
    recipes.Float8CurrentScaling,
    recipes.Float8BlockScaling,
    recipes.MXFP8BlockScaling,
    recipes.NVFP4BlockScaling,
]
named = pytest.mark.parametrize("cls", NAMED)
BOUND = 4096
"""Entries of a cache of ``qtensor.core.compile_constants``."""


def module_factory(role: Role) -> str:
    return "mxfp8"


def text(recipe: recipes.Recipe, tensor: str) -> str | None:
    quantizer = recipe.quantizer(Role(tensor))
    return None if quantizer is None else quantizer.canonical


@named
def test_a_recipe_builds_with_no_arguments_and_is_a_value(cls):
    a, b = cls(), cls()
    assert a == b
    assert a.key == b.key
    for twin in (copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert twin == a
        assert twin.key == a.key
    assert recipes.parse_recipe(a.key) == a


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (recipes.DelayedScaling(), ("fp8_delayed", "fp8_delayed", "fp8_delayed(dtype=e5m2)")),
        (recipes.DelayedScaling(fp8_format="E4M3"), ("fp8_delayed",) * 3),
        (
            recipes.Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=1e-4),
            (
                "fp8(force_pow_2_scales=True,amax_epsilon=0.0001)",
                "fp8(force_pow_2_scales=True,amax_epsilon=0.0001)",
                "fp8(dtype=e5m2,force_pow_2_scales=True,amax_epsilon=0.0001)",
            ),
        ),
        (
            recipes.Float8BlockScaling(use_f32_scales=True, grad_block_scaling_dim=2),
            (
                "fp8_blockwise(force_pow_2_scales=False)",
                "fp8_blockwise(block_scaling_dim=2,force_pow_2_scales=False)",
                "fp8_blockwise(block_scaling_dim=2,force_pow_2_scales=False)",
            ),
        ),
        (
            recipes.MXFP8BlockScaling(with_2d_quantization=True, fp8_format=recipes.Format.HYBRID),
            ("mxfp8", "mxfp8(with_2d_quantization=True)", "mxfp8(dtype=e5m2)"),
        ),
        (
            recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
            ("nvfp4", "nvfp4(with_2d_quantization=True)", "nvfp4"),
        ),
        (
            recipes.NVFP4BlockScaling(
                use_4over6=True, err_mode="mse", disable_2d_quantization=True
            ),
            (
                "nvfp4(with_rht=True,use_4over6=True,err_mode=mse)",
                "nvfp4(use_4over6=True,err_mode=mse)",
                "nvfp4(stochastic_rounding=True,with_rht=True)",
            ),
        ),
        (
            recipes.MXFP8BlockScaling(
                overrides={"weight": "mxfp4", "input": {"scale_mode": "floor"}}
            ),
            ("mxfp8(scale_mode=floor)", "mxfp4", "mxfp8"),
        ),
        (
            recipes.Float8CurrentScaling(overrides={"grad_output": None}),
            ("fp8", "fp8", None),
        ),
    ],
)
def test_roles(recipe, expected):
    found = tuple(text(recipe, t) for t in ("input", "weight", "grad_output"))
    if None not in expected:
        assert [qtensor.core.quantizer_registry.parse(t) for t in found] == [
            qtensor.core.quantizer_registry.parse(t) for t in expected
        ]
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.DelayedScaling(margin="a"), "margin must be of type int"),
        (lambda: recipes.DelayedScaling(amax_history_len=0), "amax_history_len"),
        (lambda: recipes.DelayedScaling(amax_history_len=4096), "1 to 1024"),
        (lambda: recipes.DelayedScaling(amax_compute_algo="mean"), "'max', 'most_recent'"),
        (lambda: recipes.DelayedScaling(scaling_factor_compute_algo=1), "a function of torch ops"),
        (lambda: recipes.MXFP8BlockScaling(fp8_format="E3M4"), "'E4M3', 'E5M2', 'HYBRID'"),
        (lambda: recipes.MXFP8BlockScaling(scale_mode="up"), "scale_mode must be one of"),
        (lambda: recipes.MXFP8BlockScaling(margin=1), "options must be the recipe's; got margin"),
        (
            lambda: recipes.Float8BlockScaling(w_block_scaling_dim=3),
            "block_scaling_dim must be one of",
        ),
        (lambda: recipes.NVFP4BlockScaling(row_scaled=True), "exclude each other"),
        (
            lambda: recipes.NVFP4BlockScaling(backward_override="bf16"),
            "'high_precision', 'dequantized'",
        ),
        (lambda: recipes.Float8CurrentScaling(overrides={"w": None}), "a role of overrides"),
        (
            lambda: recipes.Float8CurrentScaling(overrides={"weight": 3}),
            "a format id, a dict of options",
        ),
        (
            lambda: recipes.Float8CurrentScaling(overrides="mxfp8"),
            "overrides must be one of a dict",
        ),
        (lambda: recipes.CustomRecipe(), "factory must be a function"),
        (
            lambda: qtensor.autocast(recipe=recipes.MXFP8BlockScaling),
            "Call it: MXFP8BlockScaling()",
        ),
        (lambda: qtensor.autocast(recipe="mxfp8"), "recipe must be a recipe object"),
        (lambda: qtensor.autocast(recipes.MXFP8BlockScaling()), "enabled must be True or False"),
        (lambda: qtensor.Linear(16, 16, recipe="mxfp8"), "recipe must be a recipe object"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(QTensorError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make()


@named
def test_an_option_that_is_not_legal_leaves_the_recipe_as_it_was(cls):
    recipe = cls()
    key = recipe.key
    with pytest.raises(QTensorError):
        recipe.backward_override = "no"
    with pytest.raises(QTensorError):
        recipe.unknown = 1
    assert recipe.key == key
    assert recipe.backward_override is None
    recipe.backward_override = "dequantized"
    assert recipe.key != key


def test_options_changed_within_a_recipe_take_effect_at_the_next_step():
    module, recipe = build("linear"), recipes.MXFP8BlockScaling()
    x = torch.randn(8, WIDTH)
    results = []
    for mode in ("rceil", "floor", "rceil"):
        recipe.scale_mode = mode
        with qtensor.autocast(recipe=recipe):
            results.append(module(x))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


CHANGES = {
    "set": lambda d: d.__setitem__("weight", "mxfp4"),
    "delete": lambda d: d.__delitem__("input"),
    "update": lambda d: d.update(weight="mxfp4"),
    "or": lambda d: d.__ior__({"weight": "mxfp4"}),
    "pop": lambda d: d.pop("input"),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault("weight", "mxfp4"),
    "clear": lambda d: d.clear(),
    "inner": lambda d: d["input"].update(scale_mode="ceil"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_overrides_cannot_be_changed_in_place(change):
    """Layers read the recipe's key, which such a change would not reach."""
    given = {"input": {"scale_mode": "floor"}}
    recipe = recipes.MXFP8BlockScaling(overrides=given)
    key = recipe.key
    given["weight"] = "mxfp4"
    for twin in (recipe, copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        with pytest.raises(QTensorError, match="Assign a new dict"):
            change(twin.overrides)
        assert twin.overrides == {"input": {"scale_mode": "floor"}}
        assert text(twin, "weight") == "mxfp8"
        assert twin.key == key
    recipe.overrides = {**recipe.overrides, "weight": "mxfp4"}
    assert text(recipe, "weight") == "mxfp4"
    assert recipe.key != key


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("cls", [recipes.Float8CurrentScaling, recipes.Float8BlockScaling])
def test_an_epsilon_that_no_quantizer_takes(cls, value):
    message = "amax_epsilon must be finite and not negative"
    with pytest.raises(QTensorError, match=message):
        cls(amax_epsilon=value)
    with pytest.raises(QTensorError, match=message):
        cls(overrides={"input": {"amax_epsilon": value}})
    recipe = cls()
    with pytest.raises(QTensorError, match=message):
        recipe.amax_epsilon = value
    assert recipe == cls()


def test_a_custom_factory_is_asked_once_for_each_role_of_each_module():
    asked = []

    def factory(role):
        asked.append(role)
        return {"input": "mxfp8", "weight": qtensor.quantizer("mxfp4")}.get(role.tensor)

    recipe = recipes.CustomRecipe(factory=factory)
    modules = [qtensor.Linear(WIDTH, WIDTH, name=f"layer{i}", recipe=recipe) for i in range(2)]
    for _ in range(3):
        for module in modules:
            module(torch.randn(32, WIDTH, requires_grad=True)).sum().backward()
    roles = ("input", "weight", "grad_output")
    assert asked == [Role(t, "linear", f"layer{i}") for i in range(2) for t in roles]
    assert str(asked[0]) == "linear_input"


def test_a_custom_factory_that_returns_something_else():
    recipe = recipes.CustomRecipe(factory=lambda role: 3)
    module = qtensor.Linear(WIDTH, WIDTH, recipe=recipe)
    with pytest.raises(QTensorError, match="must return a quantizer for linear_input; got 3"):
        module(torch.randn(2, WIDTH))


def test_delayed_roles_of_a_custom_recipe_need_their_options():
    without = recipes.CustomRecipe(factory=lambda role: qtensor.Float8Quantizer())
    module = qtensor.Linear(WIDTH, WIDTH)
    with (
        qtensor.autocast(recipe=without),
        pytest.raises(QTensorError, match="delayed scaling needs its options"),
    ):
        module(torch.randn(2, WIDTH))
    options = recipes.DelayedScaling(margin=1)
    given = recipes.CustomRecipe(
        factory=lambda role: qtensor.Float8Quantizer(), delayed_scaling=options
    )
    same = recipes.DelayedScaling(margin=1, fp8_format="E4M3")
    other = build_like(module)
    x = torch.randn(8, WIDTH)
    for _ in range(3):
        outs = []
        for m, recipe in ((module, given), (other, same)):
            with qtensor.autocast(recipe=recipe):
                outs.append(m(x))
        assert torch.equal(*outs)


def build_like(module):
    twin = qtensor.Linear(WIDTH, WIDTH)
    twin.load_state_dict(module.state_dict())
    return twin


# ---- autocast ------------------------------------------------------------------------------------


def output(module, x, recipe):
    with region(recipe):
        return module(x)


def test_regions_nest_and_restore():
    module, x = build("linear"), torch.randn(8, WIDTH)
    mx, nv = RECIPES["mxfp8"](), RECIPES["nvfp4"]()
    plain, of_mx, of_nv = (output(module, x, r) for r in (None, mx, nv))
    with qtensor.autocast(recipe=mx):
        assert torch.equal(module(x), of_mx)
        with qtensor.autocast(recipe=nv):
            assert torch.equal(module(x), of_nv)
            with qtensor.autocast(enabled=False):
                assert torch.equal(module(x), plain)
            assert torch.equal(module(x), of_nv)
        assert torch.equal(module(x), of_mx)
        with pytest.raises(RuntimeError), qtensor.autocast(recipe=nv):
            raise RuntimeError
        assert torch.equal(module(x), of_mx)
    assert torch.equal(module(x), plain)


def test_one_object_is_entered_once_at_a_time():
    scope = qtensor.autocast(recipe=RECIPES["mxfp8"]())
    with scope, pytest.raises(QTensorError, match="active only once at a time"):
        scope.__enter__()
    with scope:
        pass
    module, x = build("linear"), torch.randn(8, WIDTH)
    assert torch.equal(module(x), output(module, x, None))


def test_a_decorator_and_recursion():
    module, x = build("linear"), torch.randn(8, WIDTH)

    @qtensor.autocast(recipe=RECIPES["mxfp8"]())
    def run(depth):
        return module(x) if depth == 0 else run(depth - 1)

    assert torch.equal(run(2), output(module, x, RECIPES["mxfp8"]()))


def test_a_module_has_a_recipe_of_its_own():
    x = torch.randn(8, WIDTH)
    own = build("linear", recipe=RECIPES["mxfp8"]())
    plain = build("linear")
    assert torch.equal(own(x), output(plain, x, RECIPES["mxfp8"]()))
    assert torch.equal(output(own, x, RECIPES["nvfp4"]()), output(plain, x, RECIPES["nvfp4"]()))
    with qtensor.autocast(enabled=False):
        assert torch.equal(own(x), plain(x))


def test_functions_of_dropped_recipes_are_freed():
    def make() -> weakref.ref:
        def factory(role: Role) -> str:
            return "mxfp8"

        recipe = recipes.CustomRecipe(factory=factory)
        assert recipe.quantizer(Role("input")).format == "mxfp8"
        return weakref.ref(factory)

    freed = make()
    qtensor.core.compile_constants.forget_constants()  # bounded caches hold parsed recipes
    gc.collect()
    assert freed() is None


def test_functions_of_many_recipes_are_bounded():
    alive = [
        weakref.ref(recipes.CustomRecipe(factory=lambda role: "mxfp8").factory)
        for _ in range(BOUND + 50)
    ]
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= BOUND


def test_a_function_has_one_number_while_it_lives():
    def factory(role: Role) -> str:
        return "mxfp8"

    first, second = (recipes.CustomRecipe(factory=factory) for _ in range(2))
    qtensor.core.compile_constants.forget_constants()
    assert first == second
    assert recipes.parse_recipe(first.key).factory is factory


def test_a_key_without_its_function_is_an_error():
    key = recipes.CustomRecipe(factory=lambda role: "mxfp8").key
    qtensor.core.compile_constants.forget_constants()
    gc.collect()
    with pytest.raises(QTensorError, match="function of the recipe no longer exists"):
        recipes.parse_recipe(key)


def test_a_pickle_holds_no_number_of_a_function():
    """Another process numbers functions differently."""
    recipe = recipes.CustomRecipe(factory=module_factory)
    loaded = pickle.loads(pickle.dumps(recipe).replace(b"function(", b"function(9"))
    assert loaded == recipe
    assert loaded.quantizer(Role("input")).format == "mxfp8"


def test_a_recipe_inside_another_is_read_only():
    inner = recipes.DelayedScaling()
    custom = recipes.CustomRecipe(factory=lambda role: "mxfp8", delayed_scaling=inner)
    for recipe in (custom, copy.deepcopy(custom)):
        with pytest.raises(TypeError, match=r"DelayedScaling.margin: .* read-only.*Assign a new"):
            recipe.delayed_scaling.margin = 2
        assert recipe.delayed_scaling.margin == 0
    copied = copy.copy(inner)
    copied.margin = 2
    before = custom.key
    custom.delayed_scaling = copied
    assert custom.key != before
    assert custom.delayed_options.margin == 2


def test_functions_of_other_recipes_do_not_recompile():
    torch._dynamo.reset()
    counter = CompileCounter()
    layer = qtensor.Linear(WIDTH, WIDTH)
    compiled = torch.compile(layer, backend=counter)
    recipe = recipes.DelayedScaling(amax_compute_algo=lambda rows: rows.amax(0) * 0.5)
    others = []
    for _ in range(3):
        with qtensor.autocast(recipe=recipe):
            compiled(torch.ones(WIDTH, WIDTH))
        others.append(recipes.CustomRecipe(factory=lambda role: "mxfp8"))
    assert counter.frame_count == 1


@pytest.mark.parametrize("cls", [recipes.MXFP8BlockScaling, recipes.NVFP4BlockScaling])
def test_factors_in_tiles_change_no_result(cls):
    results = []
    for swizzled in (False, True):
        recipe = cls(swizzled=swizzled)
        assert all(recipe.quantizer(Role(t)).swizzled == swizzled for t in ("input", "weight"))
        torch.manual_seed(0)
        layer, x = qtensor.Linear(96, 160), torch.randn(64, 96, requires_grad=True)
        with qtensor.autocast(recipe=recipe):
            y = layer(x)
        y.square().sum().backward()
        results.append((y, x.grad, layer.weight.grad))
    for plain, tiled in zip(*results, strict=True):
        assert torch.equal(plain, tiled)


def test_training_md_describes_every_option():
    """The table has each option of each recipe with its default, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    table = page[page.index("| option of | default |") :].partition("\n\n")[0]
    found, section = {}, ""
    for line in table.splitlines()[2:]:
        name, default = [cell.strip().strip("`") for cell in line.strip("|").split("|")[:2]]
        if name.startswith("**"):
            section = name.strip("*`")
        else:
            found.setdefault(section, {})[name] = default
    common = {"all recipes": recipes.Recipe}
    wanted = {}
    for name, cls in (common | recipes.base.RECIPES).items():
        if cls.__module__.startswith("qtensor."):
            own = [f for f in dataclasses.fields(cls) if f.name in cls.__annotations__]
            wanted[name] = {f.name: _text_of_default(f) for f in own}
    assert found == wanted


def _text_of_default(option):
    if option.default is dataclasses.MISSING:
        return str(option.default_factory())
    value = option.default
    if isinstance(value, recipes.Format):
        return value.name
    return f'"{value}"' if isinstance(value, str) else str(value)
