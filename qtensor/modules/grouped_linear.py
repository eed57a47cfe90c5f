"""GroupedLinear."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.errors import ArgumentTypeError, DtypeError, UnsupportedError, check, fail
from qtensor.functional.delayed_wgrad import backward_dw
from qtensor.functional.grouped_args import GroupedFwdArgs, GroupedWgrad, Splits
from qtensor.functional.grouped_linear import run_grouped_linear
from qtensor.functional.main_grad import reporting
from qtensor.functional.plan import LinearPlan, covers, linear_plan, stored_weight_plan
from qtensor.layout import rows_cols
from qtensor.library.gradient import take_postponed
from qtensor.library.grouped import LISTED_SIZES, SPLIT_SIZES
from qtensor.library.quantize import DRAW_SEEDS
from qtensor.library.ragged import is_partition
from qtensor.modules.base import LinearOptions, QuantizedModule, check_features
from qtensor.modules.linear import make_parallel, one_dtype
from qtensor.modules.state import LinearState
from qtensor.recipes import Recipe

MODULE = "grouped_linear"
"""For the roles of recipes."""


class GroupedLinear(QuantizedModule):
    """``num_gemms`` linear layers of one size over groups of the input's rows (experts).

    ``y[rows of group i] = x[rows of group i] @ weight_i.T + bias_i``. Each group is quantized on
    its own and has the bytes, forward and backward, that ``qtensor.Linear`` gives for its rows.

    Parameters are ``weight0``, ``weight1``, ... (N, K) and ``bias0``, ``bias1``, ... (N,).

    Args:
        num_gemms: number of groups.
        in_features: K; a multiple of 16 (FP8, NVFP4) or 32 (MX) where a recipe is in force.
        out_features: N; likewise.
        bias: add a bias (N,) to each group.
        device: of the parameters; "meta" leaves them without data until ``to_empty`` and
            ``reset_parameters``.
        params_dtype: of the parameters; torch's default dtype if None. ``dtype=`` means the same.
        recipe: used outside of every ``autocast``.
        name: for messages and the roles of recipes.
        init_method: fills a weight in place; as in ``torch.nn.Linear`` if None.
        quantized_params: store the weights quantized, as the recipe in force at construction (or
            ``recipe``) reads them.
        return_bias: do not add the biases; return ``(y, [bias0, ...])``.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad`` of each weight (or write them
            into it, where its ``overwrite_main_grad`` is true), leave ``grad`` alone and set
            ``grad_added_to_main_grad``.
        delay_wgrad_compute: leave weight gradients to ``backward_dw()``.
        save_original_input: save the input itself for backward and quantize it again there.
        parallel_mode: None; others are refused: see Raises.
        tp_group: not used.
        sequence_parallel: False.

    Raises:
        QTensorError: arguments that do not fit.
        UnsupportedError: ``parallel_mode`` or ``sequence_parallel``: which rows a rank has, and so
            what goes over the group, is decided where tokens are sent to experts.
    """

    weight0: nn.Parameter

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        params_dtype: torch.dtype | None = None,
        *,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        name: str = "",
        init_method: Callable[[Tensor], Any] | None = None,
        quantized_params: bool = False,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(recipe, name)
        self._check_parallel(parallel_mode, tp_group, sequence_parallel)
        sizes = {"in_features": in_features, "out_features": out_features}
        check_features(self.label, num_gemms=num_gemms, **sizes)
        self.num_gemms = num_gemms
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bool(bias), return_bias
        self.quantized_params = quantized_params
        self.init_method = init_method
        self._options = LinearOptions(
            MODULE,
            name,
            None,
            save_original_input,
            delay_wgrad_compute,
            fuse_wgrad_accumulation,
        )
        self._own_state("weight", LinearState(groups=num_gemms))
        factory = {"device": device, "dtype": one_dtype(self.label, params_dtype, dtype)}
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
            self.register_parameter(f"weight{i}", weight)
            kept = nn.Parameter(torch.empty(out_features, **factory)) if bias else None
            self.register_parameter(f"bias{i}", kept)
        if not self.weight0.is_meta:
            self.reset_parameters()

    def _check_parallel(self, mode: str | None, group: Any, sequence: bool) -> None:
        if mode is None and not sequence:
            return
        if hasattr(group, "size") and group.size() == 1:
            make_parallel(self.label, group, mode, sequence)
            return
        rule = (
            "a grouped layer does not communicate: the rows of its groups come from sending "
            "tokens to experts, and"
            " the code that sends and collects them has to gather inputs and sum outputs over the "
            "group"
        )
        got = f"parallel_mode={mode!r}, sequence_parallel={sequence}"
        fix = (
            "Build it with the rank's own part of out_features (column) or in_features (row), and "
            "no parallel_mode"
        )
        fail(self.label, rule, got, fix, UnsupportedError)

    def _weights(self, weight: str) -> tuple[Any, ...]:
        return self._named(weight)

    def _named(self, kind: str) -> tuple[Any, ...]:
        return tuple([getattr(self, f"{kind}{i}") for i in range(self.num_gemms)])

    def reset_parameters(self) -> None:
        """Initialise each group like ``torch.nn.Linear`` or ``init_method``; quantize if asked."""
        for i, (weight, bias) in enumerate(
            zip(self._named("weight"), self._named("bias"), strict=True)
        ):
            values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            with torch.no_grad():
                if self.init_method is None:
                    nn.init.kaiming_uniform_(values, a=math.sqrt(5))
                else:
                    self.init_method(values)
                if bias is not None:
                    bound = 1 / math.sqrt(self.in_features)
                    nn.init.uniform_(bias, -bound, bound)
                if not self.quantized_params:
                    weight.copy_(values)
                    continue
            stored = self._quantized_parameter(values, self.recipe, self._options)
            setattr(self, f"weight{i}", nn.Parameter(stored, requires_grad=weight.requires_grad))

    # ---- the call
    # -------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        *,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """The layer.

        Under ``torch.compile`` a tensor ``m_splits`` gives one graph for all splits. A list of ints
        gives the smallest buffers, whose sizes are those of the groups; Dynamo makes a graph of its
        own where a size becomes 0 or 1.

        Args:
            input: (..., in_features), whose rows lie in groups, one behind the other. A quantized
                tensor is dequantized.
            m_splits: rows of each group: ``num_gemms`` ints, or an int64 tensor (num_gemms,), which
                is read on the host. Groups may be empty.
            is_first_microbatch: True: quantize the weights and keep them for the microbatches that
                follow; False: use what is kept, whatever the weights are now; None: keep nothing.
            skip_weight_update: one element; non-zero leaves the kept weights as they are on a first
                microbatch. Read on the device.

        Returns:
            (..., out_features) in the dtype of ``input``; with ``return_bias`` also the list of
            biases.

        Raises:
            QTensorError: an input, splits or a recipe that does not fit.
        """
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        biases = self._named("bias") if self.use_bias else ()
        args = self._args(input, m_splits, () if self.return_bias else biases)
        if is_first_microbatch is not None and args.plan.weight:
            self._use_kept_weights(args, is_first_microbatch, skip_weight_update)
        state = self._states["weight"]
        out, workspace, amaxes = run_grouped_linear(args)
        if workspace:
            state.workspace = [buffer.detach() for buffer in workspace]
            state.workspace_quantizer = args.plan.weight
            state.workspace_shape = tuple(self.weight0.shape)
        self._record_groups(amaxes, args.plan)
        if args.wgrad is not None and args.wgrad.main_grads:
            out = reporting(out, state.report)
        return (out, list(biases)) if self.return_bias else out

    def _args(
        self, input: Tensor, m_splits: Sequence[int] | Tensor, biases: tuple[Any, ...]
    ) -> GroupedFwdArgs:
        """The arguments of a call."""
        weights = self._named("weight")
        training = torch.is_grad_enabled()
        wanted = [i for i, w in enumerate(weights) if training and w.requires_grad]
        dgrad = training and input.requires_grad
        key = self._recipe_key()
        plan = self._grouped_plan(key, dgrad, bool(wanted))
        self._check_input(input, weights[0], plan, self._options)
        args = GroupedFwdArgs(input, weights, biases, self._splits(input, m_splits), dgrad)
        args.wanted = tuple(wanted)
        args.bias_requires_grad = training and any([b.requires_grad for b in biases])
        args.plan = plan
        self._complete_groups(args, input)
        return args

    def _complete_groups(self, args: GroupedFwdArgs, input: Tensor) -> None:
        """Fill in arguments that follow from state and options, on the device of ``input``."""
        plan, wanted = args.plan, args.wanted
        args.dtype = input.dtype
        args.save_original_input = self._options.save_original_input
        if args.save_original_input and wanted:
            self._check_original_input(plan)
        if any(plan.stochastic):
            args.seeds = self._seeds(input, self._states["weight"].draws, plan)
        if any(plan.delayed):
            args.delayed = self._delayed("weight").begin(
                self._recipe_key(), MODULE, self.name, self.training, self.num_gemms
            )
        scheduled = self._options.fuse_wgrad_accumulation or self._options.delay_wgrad_compute
        if scheduled and wanted:
            args.wgrad = self._grouped_wgrad(wanted)

    def _record_groups(self, amaxes: list[Tensor], plan: LinearPlan) -> None:
        """The maxima of inputs and weights into the state of delayed scaling."""
        if amaxes and self.training:
            first = 0 if plan.delayed[0] else self.num_gemms
            self._states["weight"].delayed.record([amax.detach() for amax in amaxes], first)

    def _grouped_plan(self, key: str, dgrad: bool, wgrad: bool) -> LinearPlan:
        stored = self._stored["weight0"]
        for i in range(1, self.num_gemms):
            other = self._stored[f"weight{i}"]
            if other != stored:
                fail(
                    f"{self.label} weight",
                    "the weights of all groups must be stored alike",
                    f"weight0 as {stored or 'plain'}, weight{i} as {other or 'plain'}",
                    "Quantize all of them by one quantizer, or none",
                )
        if stored:
            return stored_weight_plan(stored, key, MODULE, self.name, dgrad, wgrad)
        return linear_plan(key, MODULE, self.name, dgrad, wgrad)

    def _splits(self, input: Tensor, m_splits: Sequence[int] | Tensor) -> Splits:
        """The checked sizes of the groups."""
        groups, label = self.num_gemms, f"{self.label} m_splits"
        rows = rows_cols(input.shape)[0]
        if isinstance(m_splits, Tensor):
            kind, shape = m_splits.dtype, tuple(m_splits.shape)
            rule = "a tensor of group sizes must be int64"
            check(kind is torch.int64, label, rule, kind, "Call .to(torch.int64)", DtypeError)
            rule = f"a tensor of group sizes must have the shape ({groups},)"
            check(shape == (groups,), label, rule, shape, "Pass one size for each weight")
            return Splits((), SPLIT_SIZES(m_splits, rows, self.label), groups)
        if not isinstance(m_splits, (list, tuple)):
            rule = "group sizes must be a list of ints or an int64 tensor"
            fail(label, rule, type(m_splits).__name__, "Pass such a list", ArgumentTypeError)
        sizes = tuple(m_splits)
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
                rule = "group sizes must be ints"
                fail(label, rule, repr(size), "Convert them with int(...)", ArgumentTypeError)
        if len(sizes) == groups and is_partition(sizes, rows):
            return Splits(sizes, None, groups)
        # Raises: in eager code here, in compiled code when the graph of such calls runs.
        return Splits((), LISTED_SIZES(sizes, groups, rows, self.label), groups)

    def _seeds(self, input: Tensor, draws: Tensor, plan: LinearPlan) -> tuple[Any, Any, Any]:
        """Return a seed for each group and stochastic role, in the order of separate layers."""
        count = sum(plan.stochastic)
        drawn = DRAW_SEEDS(input, draws, self.num_gemms * count)
        place, seeds = 0, []
        for stochastic in plan.stochastic:
            seeds.append(drawn[place::count] if stochastic else None)
            place += stochastic
        return tuple(seeds)  # type: ignore[return-value]

    def _grouped_wgrad(self, wanted: Sequence[int]) -> GroupedWgrad:
        """Where the weight gradients go."""
        state = self._states["weight"]
        if self._options.delay_wgrad_compute:
            return GroupedWgrad(token=state.token, key=state.key)
        weights = [getattr(self, f"weight{i}") for i in wanted]
        for i, weight in zip(wanted, weights, strict=True):
            if getattr(weight, "main_grad", None) is None:
                fail(
                    f"{self.label} weight{i}",
                    "fuse_wgrad_accumulation adds to main_grad of each weight",
                    "none",
                    f"Set weight{i}.main_grad = torch.zeros_like(weight{i}, dtype=torch.float32)",
                )
        overwrite = tuple([bool(getattr(w, "overwrite_main_grad", False)) for w in weights])
        # Aliases: what a user does to main_grad between forward and backward is no error.
        return GroupedWgrad(tuple([w.main_grad.data for w in weights]), overwrite)

    def _use_kept_weights(self, args: GroupedFwdArgs, first: bool, noop: Tensor | None) -> None:
        """Serve the quantized weights from what is kept, or have what is made kept."""
        state = self._states["weight"]
        if first and noop is None:
            # New buffers, without a look at what was kept before: the graph does not depend on it.
            args.cache_weight = True
            return
        valid = (
            state.workspace is not None
            and covers(state.workspace_quantizer, args.plan.weight)
            and state.workspace_shape == tuple(self.weight0.shape)
        )
        if valid:
            args.weight_workspace = state.workspace
            args.workspace_quantizer = state.workspace_quantizer
            args.update_workspace = first
            args.noop = noop
        else:
            args.cache_weight = True

    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradients, into ``grad`` or ``main_grad``.

        Raises:
            QTensorError: there are none.
            UnsupportedError: the module computes its weight gradients in backward.
        """
        if not self._options.delay_wgrad_compute:
            rule = "backward_dw is for modules with delay_wgrad_compute=True"
            fix = "Build the module so, or drop the call: backward computes the weight gradients"
            fail(self.label, rule, "delay_wgrad_compute=False", fix, UnsupportedError)
        key = self._states["weight"].key
        for weight in self._named("weight"):
            if weight.requires_grad:
                backward_dw(weight, key, self._options.fuse_wgrad_accumulation)
            else:
                take_postponed(key)

    def extra_repr(self) -> str:
        """Sizes, and what differs from a list of ``torch.nn.Linear``."""
        own = "" if self.recipe is None else f", recipe={type(self.recipe).__name__}"
        stored = self._stored.get("weight0", "")
        kept = f", stored={stored}" if stored else ""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"num_gemms={self.num_gemms}, {sizes}, bias={self.use_bias}{own}{kept}"
