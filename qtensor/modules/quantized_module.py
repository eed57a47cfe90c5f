"""``QuantizedModule``: quantized parameters, the state between calls, and its ``state_dict``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.autocasting import LastRegion, active_recipe, layer_recipe
from qtensor.core.buffer_shapes import Shape
from qtensor.core.dtensors import install_rules, is_dtensor
from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.functional.linear.args import DelayedCall
from qtensor.functional.linear.layer_plan import LinearPlan, linear_plan, stored_weight_plan
from qtensor.library.gradient import listen
from qtensor.modules.delayed_entries import save_entries, take_entries
from qtensor.modules.options import LinearOptions
from qtensor.modules.parameters import (
    initial_bias,
    initial_weight,
    own_part,
    stored_canonical,
    weight_quantizer,
)
from qtensor.modules.sharded_parameters import check_not_sharded, set_values
from qtensor.modules.state import DelayedPaths, DelayedState, LinearState
from qtensor.recipes import Recipe, role_quantizers
from qtensor.storage.ranks.splits import note_splits


class QuantizedModule(nn.Module):
    """Base of the modules with quantized GEMMs.

    Attributes:
        name: shown in error messages, and passed to recipes as part of each role.
        recipe: used outside every ``qtensor.autocast`` region; None for high precision.
    """

    def __init__(self, recipe: Recipe | None = None, name: str = "") -> None:
        # The constructors of torch's layers would create parameters, so they are skipped.
        layers = (nn.Linear, nn.MultiheadAttention)
        skipped: Any = next((kind for kind in layers if isinstance(self, kind)), QuantizedModule)
        super(skipped, self).__init__()
        self._stored: dict[str, str] = {}
        self._states: dict[str, LinearState] = {}
        self._roles: dict[str, str] = {}
        self._last_region = LastRegion()
        self.name = name
        self.recipe = recipe
        self.quantized_params = False
        self.preserve_high_precision_init_val = False
        self.init_method: Callable[[Tensor], Any] | None = None
        self._rank = 0
        if not (recipe is None or isinstance(recipe, Recipe)):
            rule = "recipe must be a recipe object"
            fix = "Pass a recipe, for example qtensor.recipes.MXFP8BlockScaling()"
            fail(self.label, rule, repr(recipe), fix, ArgumentTypeError)

    @property
    def label(self) -> str:
        """The class and the name of the module, for error messages."""
        kind = type(self).__name__
        return f"{kind}[{self.name}]" if self.name else kind

    def _repr(self, weight: str, bias: bool) -> str:
        """Return sizes, recipe and the format of a stored weight, for ``extra_repr``."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
        recipe = "" if self.recipe is None else f", recipe={type(self.recipe).__name__}"
        canonical = self._stored.get(weight, "")
        return f"{sizes}{recipe}, stored={canonical}" if canonical else f"{sizes}{recipe}"

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, and record its quantizer for code that is traced."""
        super().register_parameter(name, param)
        self._stored[name] = stored_canonical(param)
        if is_dtensor(param):
            install_rules()
            note_splits(param)
        for state in self._states.values():
            state.drop_workspace()
            if param is not None:
                state.move(param.device)

    # ---- recipe and state

    def _recipe_key(self) -> str:
        recipe = self.recipe
        # Reads `_key`, not the property `key`: Dynamo would guard each step of the property.
        own = None if recipe is None else recipe._key
        if torch.compiler.is_compiling():
            return active_recipe(own)
        return layer_recipe(own, self._last_region, self)

    def _own_state(self, weight: str, state: LinearState) -> None:
        """Store the state of a layer under the name of its weight."""
        self._states[weight] = state
        self._roles.setdefault(weight, "")
        module = weakref.ref(self)

        def accumulated() -> None:
            alive = module()
            for parameter in () if alive is None else alive._weights(weight):
                if parameter.requires_grad:
                    parameter.grad_added_to_main_grad = True

        listen(state.key, accumulated)

    def _delayed(self, weight: str) -> DelayedState:
        """Return the state of delayed scaling of a layer, on the device of its weight."""
        state = self._states[weight]
        if not torch.compiler.is_compiling():
            # Some libraries replace parameters without a call of the module's own methods.
            state.move(self._weights(weight)[0].device)
        return state.delayed

    def _begin_delayed(self, like: Tensor, weight: str, module: str, name: str) -> DelayedCall:
        """Return the factors of delayed scaling of a call.

        ``module`` and ``name`` describe the layer to the recipe; ``like`` is on the device of the
        call.
        """
        layer = self._states[weight]
        if like.is_meta:
            return DelayedState.without_data(layer.groups)
        self._delayed(weight)
        return layer.begin(self._recipe_key(), module, name, self.training)

    def _layer_options(self, weight: str) -> LinearOptions:
        """Return the options of the layer whose state is stored as ``weight``."""
        options: LinearOptions = self._options  # type: ignore[assignment]
        return options

    def _weights(self, weight: str) -> Sequence[Any]:
        """Return the parameters, each (N, K), that share the state stored as ``weight``."""
        return (getattr(self, weight),)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Pickles of earlier versions have none.
        self._last_region = LastRegion()
        for weight, layer_state in self._states.items():
            self._own_state(weight, layer_state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        for name, parameter in self._parameters.items():
            self._stored[name] = stored_canonical(parameter)
        for weight, state in self._states.items():
            state.apply(fn)
            state.move(self._weights(weight)[0].device)
        return result

    # ---- parameters

    def _quantized_parameter(self, values: Tensor, options: LinearOptions) -> Any:
        """Return ``values`` (N, K), quantized in both directions as the recipe reads a weight."""
        key = self._recipe_key() if self.recipe is None else self.recipe.key
        if not key:
            rule = "quantized_params needs a recipe, which says how weights are quantized"
            fix = "Pass recipe=, or build the module inside qtensor.autocast(recipe=...)"
            fail(self.label, rule, "none", fix)
        quantizer = weight_quantizer(key, options)
        with torch.no_grad():
            return values if quantizer is None else quantizer(values)

    def _make_parameters(
        self, names: tuple[str, str], shape: Shape, has_bias: bool, factory: dict[str, Any]
    ) -> None:
        """Make a weight of shape (N, K) and a bias (N,), with these names, without values.

        Without a bias its name stands for None. ``factory`` has the device and the dtype.
        """
        weight, bias = names
        self.register_parameter(weight, nn.Parameter(torch.empty(*shape, **factory)))
        values = nn.Parameter(torch.empty(shape[0], **factory)) if has_bias else None
        self.register_parameter(bias, values)

    def _reset_parameters(
        self,
        names: tuple[str, str],
        shape: Shape,
        options: LinearOptions,
        halves: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """Initialise a weight and a bias as ``torch.nn.Linear`` does, or by ``init_method``.

        Without ``init_method`` the one of the module counts.

        Each rank of a split layer draws the whole layer, of ``shape`` (N, K), and takes its part of
        each of ``halves``. If it drew its part alone, ranks with equal seeds would have equal
        parts, and ranks with different seeds would have different biases in a row layer.
        """
        weight, bias = (getattr(self, name) for name in names)
        values = initial_weight(shape, weight, init_method or self.init_method)
        if bias is not None:
            drawn = initial_bias(shape[0], shape[1], bias)
            set_values(bias, own_part(drawn, bias.shape, self._rank, halves))
        self._set_weight(names[0], own_part(values, weight.shape, self._rank, halves), options)

    def _set_weight(self, weight: str, values: Tensor, options: LinearOptions) -> None:
        """Set the initial values (N, K) of a weight; quantize them with ``quantized_params``."""
        old = getattr(self, weight)
        if not self.quantized_params:
            set_values(old, values)
            return
        check_not_sharded(self.label, old)
        stored = self._quantized_parameter(values, options)
        parameter = nn.Parameter(stored, requires_grad=old.requires_grad)
        setattr(self, weight, parameter)
        if self.preserve_high_precision_init_val:
            parameter._high_precision_init_val = values.detach().cpu()  # type: ignore[attr-defined]

    # ---- the call

    def _plan(self, dgrad: bool, wgrad: bool, weight: str, options: LinearOptions) -> LinearPlan:
        """Return the plan of a call; ``dgrad``, ``wgrad``: input and weight need gradients."""
        key, stored = self._recipe_key(), self._stored[weight]
        if stored:
            # One call, because strict export cannot trace operations on a constant tuple.
            return stored_weight_plan(stored, key, options.module, options.name, dgrad, wgrad)
        return linear_plan(key, options.module, options.name, dgrad, wgrad)

    def _record(self, amaxes: list[Tensor], weight: str, plan: LinearPlan) -> None:
        """Record the maxima of inputs and weights, each (1,), in the state of delayed scaling."""
        if amaxes and self.training and not amaxes[0].is_meta:
            # The columns of the history: inputs of all groups, then their weights.
            state = self._states[weight]
            first = 0 if plan.delayed[0] else state.groups
            state.delayed.record([amax.detach() for amax in amaxes], first)

    # ---- state dict

    @property
    def _delayed_scaling(self) -> DelayedPaths:
        """The state of delayed scaling under the names that it has in a ``state_dict``."""
        return DelayedPaths(self._states)

    def _needs_delayed(self, weight: str) -> bool:
        """Return whether the active recipe has delayed scaling for an operand of a layer."""
        key = self._recipe_key()
        if not key:
            return False
        options = self._layer_options(weight)
        quantizers = role_quantizers(key, options.module, options.name).values()
        return any(quantizer is not None and quantizer.needs_scale for quantizer in quantizers)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_entries(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # All entries are checked before the first one is written.
        loaded = take_entries(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for weight, state in self._states.items():
            state.drop_workspace()
            if weight in loaded:
                state.delayed.load(*loaded[weight])
