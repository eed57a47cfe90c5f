"""Base of the linear layers: quantized parameters, state, and calls into ``functional``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.autocasting import LastRegion, active_recipe, layer_recipe, recalls, restored
from qtensor.dtensor import install_rules, is_dtensor, local_part, part_of
from qtensor.errors import ArgumentTypeError, DtypeError, fail
from qtensor.functional.linear import run_linear
from qtensor.functional.linear_args import DelayedCall, LinearFwdArgs, Wgrad
from qtensor.functional.main_grad import report_when_accumulated
from qtensor.functional.one_op import LINEAR, one_op
from qtensor.functional.operands import draw, draw_seeds
from qtensor.functional.parallel import check_input
from qtensor.functional.plan import (
    LinearPlan,
    alignment,
    linear_plan,
    stored_weight_plan,
    weight_label,
)
from qtensor.functional.sharded import localize
from qtensor.functional.weight import is_valid_workspace
from qtensor.library.gradient import listen
from qtensor.modules.delayed_entries import HELPERS, entry_buffers, save_entries, take_entries
from qtensor.modules.options import Call, LinearOptions, check_original_input
from qtensor.modules.parameters import FLOATING, follows_calls, stored_canonical
from qtensor.modules.sharded import backward_dw, check_not_sharded, set_values
from qtensor.modules.state import DelayedPaths, DelayedState, LinearState
from qtensor.recipes import Recipe, Role, parse_recipe, role_quantizers


class QuantizedModule(nn.Module):
    """Base of the modules with quantized GEMMs.

    Attributes:
        name: shown in error messages, and passed to recipes as part of each role.
        recipe: used outside every ``qtensor.autocast`` region; None for high precision.
    """

    def __init__(self, recipe: Recipe | None = None, name: str = "") -> None:
        # The constructor of ``torch.nn.Linear`` would create parameters, so it is skipped.
        skipped: Any = nn.Linear if isinstance(self, nn.Linear) else QuantizedModule
        super(skipped, self).__init__()
        self._stored: dict[str, str] = {}
        self._states: dict[str, LinearState] = {}
        self._roles: dict[str, str] = {}
        self._last_region = LastRegion()
        self.name = name
        self.recipe = recipe
        self.quantized_params = False
        self.preserve_high_precision_init_val = False
        if not (recipe is None or isinstance(recipe, Recipe)):
            fail(
                self.label,
                "recipe must be a recipe object",
                repr(recipe),
                "Pass a recipe, for example qtensor.recipes.MXFP8BlockScaling()",
                ArgumentTypeError,
            )

    @property
    def label(self) -> str:
        """The class and the name of the module, for error messages."""
        kind = type(self).__name__
        return f"{kind}[{self.name}]" if self.name else kind

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, and record its quantizer for code that is traced."""
        super().register_parameter(name, param)
        self._stored[name] = stored_canonical(param)
        if is_dtensor(param):
            install_rules()
        for state in self._states.values():
            state.drop_workspace()
            if param is not None:
                state.move(param.device)

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

        Args:
            like: a tensor on the device of the call.
            weight: name of the weight.
            module: the kind of module, for the recipe's roles.
            name: the module's name, for the recipe's roles.
        """
        layer = self._states[weight]
        if like.is_meta:
            return DelayedState.without_data(layer.groups)
        self._delayed(weight)
        key = self._recipe_key()
        if not torch.compiler.is_compiling() and recalls(self._last_region):
            with restored(self._last_region.state):
                return layer.begin(key, module, name, self.training)
        return layer.begin(key, module, name, self.training)

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

    # ---- state dict
    # -------------------------------------------------------------------------------------

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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_entries(self, destination, prefix)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers of ``torch.nn.Module``; distributed checkpoints get more.

        ``torch.distributed.checkpoint.state_dict`` knows parameters and buffers alone. When it
        broadcasts a full state dict, it drops other entries on all ranks but the first. For
        everybody else the state of delayed scaling is no buffer: ``DistributedDataParallel`` would
        copy that of rank 0 at each forward.
        """
        buffers = super().named_buffers(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") == HELPERS:
            return chain(buffers, entry_buffers(self))
        return buffers

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # All entries are checked before the first one is written.
        loaded = take_entries(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for weight, state in self._states.items():
            state.drop_workspace()
            if weight in loaded:
                state.delayed.load(*loaded[weight])

    # ---- the call
    # -----------------------------------------------------------------------------------------

    def _recipe_key(self) -> str:
        recipe = self.recipe
        # Reads `_key`, not the property `key`: Dynamo would guard each step of the property.
        own = None if recipe is None else recipe._key
        if torch.compiler.is_compiling():
            return active_recipe(own)
        return layer_recipe(own, self._last_region, self)

    def _in_one_op(self, input: Tensor, weight: str, w: Tensor, b: Tensor | None) -> Tensor | None:
        """Return the output (..., N), computed as one op; None if that op cannot compute the layer.

        Each call of a compiled program checks everything that this function reads. ``weight`` is
        the name of the weight ``w`` (N, K); ``b`` is the bias (N,).
        """
        roles = self._roles[weight]
        if not roles or self._stored[weight]:
            return None
        training = torch.is_grad_enabled()
        dgrad, wgrad = training and input.requires_grad, training and w.requires_grad
        key = self._recipe_key()
        layer = one_op(key, roles, input.dtype, dgrad, wgrad)
        rows, columns = w.shape
        if not layer.text or rows % layer.multiple or columns % layer.multiple:
            return None
        if input.ndim == 0 or input.shape[-1] != columns or input.device != w.device:
            return None
        if not layer.takes_state:
            return LINEAR(input, w, b, layer.text)[0]
        module, _, name = roles.partition("/")
        plan = linear_plan(key, module, name, dgrad, wgrad)
        state, seeds, delayed = self._states[weight], None, None
        if any(plan.stochastic):
            seeds = draw(input, state.draws, sum(plan.stochastic))
        if any(plan.delayed):
            delayed = list(self._begin_delayed(input, weight, module, name))
        out, *amaxes = LINEAR(input, w, b, layer.text, seeds, delayed)
        self._record(amaxes, weight, plan)
        return out

    def _linear(
        self, input: Tensor, weight: str, bias: str, options: LinearOptions, call: Call | None
    ) -> Tensor:
        """Return ``input @ weight.T + bias``, (..., N).

        Args:
            input: (..., K), plain or quantized.
            weight: name of the weight (N, K).
            bias: name of the bias (N,), or "".
            options: the options of the layer.
            call: the options of this call; None for the defaults.
        """
        w = getattr(self, weight)
        b = getattr(self, bias) if bias else None
        if not (is_dtensor(w) or is_dtensor(input)):
            return self._local_linear(input, weight, w, b, options, call)
        self._check_features(input, w.shape[1])
        biases = [] if b is None else [b]
        own = localize(self.label, input, [w], biases, exchange=options.exchange)
        own.check_schedule(self.label, options)
        options = options._replace(parallel=own.parallel, placements=w.placements)
        b = own.biases[0] if biases else None
        call, asked = (None, "") if call is None else call.without_output()
        out = self._local_linear(own.input, weight, own.weights[0], b, options, call)
        return own.whole(out, asked)

    def _local_linear(
        self,
        input: Tensor,
        weight: str,
        w: Tensor,
        b: Tensor | None,
        options: LinearOptions,
        call: Call | None,
    ) -> Tensor:
        """Return the result of ``_linear`` for a weight ``w`` (N, K) and a bias ``b`` (N,)."""
        if call is None:
            one_op = options.parallel is None and follows_calls()
            out = self._in_one_op(input, weight, w, b) if one_op else None
            if out is not None:
                return out
            call = Call()
        state = self._states[weight]
        training = torch.is_grad_enabled()
        args = LinearFwdArgs(
            input,
            w,
            b,
            training and input.requires_grad,
            training and w.requires_grad,
            training and b is not None and b.requires_grad,
        )
        args.output_quantizer = call.output_quantizer
        args.plan = self._plan(args.inp_requires_grad, args.weight_requires_grad, weight, options)
        self._check_input(input, w, args.plan, options)
        self._complete(args, input, weight, options, call)
        if call.is_first_microbatch is not None:
            self._use_workspace(args, state, call)
        out, workspace, amaxes = run_linear(args)
        if workspace:
            state.workspace = [buffer.detach() for buffer in workspace]
            state.workspace_quantizer = args.plan.weight
            state.workspace_shape = tuple(w.shape)
        self._record(amaxes, weight, args.plan)
        wgrad = args.wgrad
        if wgrad is not None and wgrad.main_grad is not None:
            out = report_when_accumulated(out, state.report)
        return out

    def _complete(
        self,
        args: LinearFwdArgs,
        input: Tensor,
        weight: str,
        options: LinearOptions,
        call: Call,
    ) -> None:
        """Complete the arguments of a call from the layer's options and state.

        Args:
            args: its weight, plan and gradient flags are set.
            input: the input (..., K), or a tensor of its dtype and device.
            weight: name of the weight (N, K).
            options: the options of the layer.
            call: the options of this call.
        """
        plan, state = args.plan, self._states[weight]
        args.dtype = input.dtype
        args.parallel = options.parallel
        args.save_original_input = options.save_original_input
        if options.save_original_input and args.weight_requires_grad:
            check_original_input(self.label, plan)
        if call.seeds is not None:
            args.seeds = call.seeds
        elif any(plan.stochastic):
            args.seeds = draw_seeds(input, state.draws, plan.stochastic)
        if any(plan.delayed):
            args.delayed = self._begin_delayed(input, weight, options.module, options.name)
        scheduled = options.fuse_wgrad_accumulation or options.delay_wgrad_compute
        if scheduled and args.weight_requires_grad:
            args.wgrad = self._wgrad(getattr(self, weight), state, options)

    def _record(self, amaxes: list[Tensor], weight: str, plan: LinearPlan) -> None:
        """Record the maxima of input and weight, each (1,), in the state of delayed scaling."""
        if amaxes and self.training and not amaxes[0].is_meta:
            first = 0 if plan.delayed[0] else 1
            self._states[weight].delayed.record([amax.detach() for amax in amaxes], first)

    def _plan(self, dgrad: bool, wgrad: bool, weight: str, options: LinearOptions) -> LinearPlan:
        """Return the plan of a call; ``dgrad``, ``wgrad``: input and weight need gradients."""
        key = self._recipe_key()
        stored = self._stored[weight]
        if stored:
            # One call, because strict export cannot trace operations on a constant tuple.
            return stored_weight_plan(stored, key, options.module, options.name, dgrad, wgrad)
        return linear_plan(key, options.module, options.name, dgrad, wgrad)

    def _check_features(self, input: Tensor, columns: int) -> None:
        if input.ndim == 0 or input.shape[-1] != columns:
            fail(
                f"{self.label} input",
                f"its last dim must be in_features, {columns}",
                tuple(input.shape),
                "Fix the input or the module",
            )

    def _early_seeds(
        self, like: Tensor, weight: str, options: LinearOptions
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """Return seeds drawn before a checkpointed layer, which compiled code runs twice.

        ``like`` is a tensor on the layer's device. None if no operand rounds stochastically.
        """
        w = getattr(self, weight)
        plan = self._plan(like.requires_grad, w.requires_grad, weight, options)
        if not any(plan.stochastic):
            return None
        return draw_seeds(like, self._states[weight].draws, plan.stochastic)

    def _check_input(
        self, input: Tensor, weight: Tensor, plan: LinearPlan, options: LinearOptions
    ) -> None:
        self._check_features(input, weight.shape[1])
        if input.dtype not in FLOATING:
            fail(
                f"{self.label} input",
                "it must be float32, bfloat16 or float16",
                input.dtype,
                "Convert it first",
                DtypeError,
            )
        if input.device != weight.device:
            fail(
                f"{self.label} input",
                f"it must be on the weight's device, {weight.device}",
                input.device,
                "Move one of them",
            )
        if options.parallel is not None:
            check_input(self.label, input.shape, options.parallel)
        self._check_alignment(weight, plan, options)

    def _check_alignment(self, weight: Tensor, plan: LinearPlan, options: LinearOptions) -> None:
        rows, columns = weight.shape
        if not (rows % plan.multiple or columns % plan.multiple):
            return
        part = "" if options.parallel is None else ", of each rank's part,"
        if options.placements:
            part = f", of each rank's part ({part_of(options.placements)}),"
        for role, canonical in (("input", plan.input), ("weight", plan.weight)):
            multiple = alignment(canonical)
            if rows % multiple or columns % multiple:
                fail(
                    f"{self.label} {role}[{canonical.partition('(')[0]}]",
                    f"in_features and out_features{part} must be multiples of {multiple}",
                    f"{columns} and {rows}",
                    "Pad them, or run the layer under qtensor.autocast(enabled=False)",
                )

    def _wgrad(self, weight: Any, state: LinearState, options: LinearOptions) -> Wgrad:
        if options.delay_wgrad_compute:
            return Wgrad(token=state.token, key=state.key)
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            fail(
                f"{weight_label(options.module, options.name)}",
                "fuse_wgrad_accumulation adds to weight.main_grad",
                "none",
                "Set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32). Under "
                "fully_shard, which computes with a gathered copy of the weight, build the layer "
                "with fuse_wgrad_accumulation=False",
            )
        overwrite = bool(getattr(weight, "overwrite_main_grad", False))
        # An alias, so that the caller may change main_grad between forward and backward.
        return Wgrad(local_part(main_grad).data, overwrite, state.report)

    def _use_workspace(self, args: LinearFwdArgs, state: LinearState, call: Call) -> None:
        """Use the quantized weight of an earlier microbatch, or store that of this call."""
        if not args.plan.weight:
            return
        # A first microbatch without a noop flag allocates new buffers, so that its graph does not
        # depend on the stored weight.
        args.cache_weight = True
        if call.is_first_microbatch and call.noop is None:
            return
        valid = state.workspace is not None and is_valid_workspace(
            state.workspace_quantizer,
            state.workspace_shape,
            args.plan.weight,
            args.weight.shape,
        )
        if valid:
            args.cache_weight = False
            args.weight_workspace = state.workspace
            args.workspace_quantizer = state.workspace_quantizer
            args.update_workspace = bool(call.is_first_microbatch)
            args.noop = call.noop

    # ---- parameters
    # ----------------------------------------------------------------------------------------

    def _quantized_parameter(
        self, values: Tensor, recipe: Recipe | None, options: LinearOptions
    ) -> Any:
        """Return ``values`` (N, K), quantized in both directions as the recipe reads a weight."""
        key = self._recipe_key() if recipe is None else recipe.key
        if not key:
            fail(
                self.label,
                "quantized_params needs a recipe, which says how weights are quantized",
                "none",
                "Pass recipe=, or build the module inside qtensor.autocast(recipe=...)",
            )
        quantizer: Any = role_quantizers(key, options.module, options.name)["weight"]
        if quantizer is None:
            return values
        quantizer = quantizer.with_usage(rowwise=True, columnwise=True)
        if quantizer.needs_scale:
            quantizer = parse_recipe(key).own_quantizer(
                Role("output", options.module, options.name)
            )
            quantizer = quantizer.with_usage(rowwise=True, columnwise=True)
        with torch.no_grad():
            return quantizer(values)

    def _set_weight(self, weight: str, values: Tensor, options: LinearOptions) -> None:
        """Set the initial values (N, K) of a weight; quantize them with ``quantized_params``."""
        old = getattr(self, weight)
        if not self.quantized_params:
            set_values(old, values)
            return
        check_not_sharded(self.label, old)
        stored = self._quantized_parameter(values, self.recipe, options)
        parameter = nn.Parameter(stored, requires_grad=old.requires_grad)
        setattr(self, weight, parameter)
        if self.preserve_high_precision_init_val:
            parameter._high_precision_init_val = values.detach().cpu()  # type: ignore[attr-defined]

    def _backward_dw(self, weight: str, options: LinearOptions) -> None:
        key, fused = self._states[weight].key, options.fuse_wgrad_accumulation
        backward_dw(self.label, getattr(self, weight), key, fused)
