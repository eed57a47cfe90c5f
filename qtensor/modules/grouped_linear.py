"""``GroupedLinear``: several linear layers of one size, over groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qtensor.core.buffer_shapes import rows_cols
from qtensor.core.dtensors import is_dtensor
from qtensor.core.errors import ArgumentTypeError, DtypeError, UnsupportedError, check, fail
from qtensor.functional.grouped.args import GroupedFwdArgs, GroupedWgrad, Splits
from qtensor.functional.grouped.grouped_function import run_grouped_linear
from qtensor.functional.linear.layer_plan import LinearPlan
from qtensor.functional.linear.main_grad import report_when_accumulated
from qtensor.functional.operands import draw
from qtensor.functional.ranks.dtensors import localize
from qtensor.functional.site import active
from qtensor.library.gradient import take_postponed
from qtensor.library.grouped import LISTED_SIZES, SPLIT_SIZES
from qtensor.library.ragged import is_partition
from qtensor.modules.input_checks import check_layer_input, check_width
from qtensor.modules.linear import make_parallel, one_dtype
from qtensor.modules.options import LinearOptions, check_features, check_original_input
from qtensor.modules.parameters import activation_dtype
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.modules.sharded_parameters import backward_dw
from qtensor.modules.state import LinearState
from qtensor.modules.weight_gradients import main_grad_of
from qtensor.modules.workspace import store_workspace, use_workspace
from qtensor.recipes import Recipe

MODULE = "grouped_linear"
"""The kind of module in the roles of recipes."""


class GroupedLinear(QuantizedModule):
    """``num_gemms`` linear layers of one size, each for one group of the input's rows (experts).

    ``y[rows of group i] = x[rows of group i] @ weight_i.T + bias_i``. Each group is quantized on
    its own. Forward and backward give the same bytes as a ``qtensor.Linear`` for its rows.

    The parameters are ``weight0``, ``weight1``, ... (N, K) and ``bias0``, ``bias1``, ... (N,).

    Args:
        num_gemms: number of groups.
        in_features: K. Under a recipe, a multiple of 16 (FP8, NVFP4) or 32 (MX).
        out_features: N, with the same rule.
        bias: add a bias (N,) to each group.
        device, params_dtype, dtype, recipe, name, init_method: see ``Linear``.
        quantized_params, fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input: for
            each weight, see ``Linear``.
        return_bias: do not add the biases, and return ``(y, [bias0, ...])``.
        parallel_mode: only None; see Raises.
        tp_group: ignored, for the signature of ``Linear``.
        sequence_parallel: only False; see Raises.

    Raises:
        QTensorError: an argument is illegal, or two arguments do not go together.
        UnsupportedError: ``parallel_mode`` or ``sequence_parallel`` is set. The code that sends
            tokens to experts decides which rows a rank has, and has to communicate.
    """

    weight0: nn.Parameter

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.types.Device = None,
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
        tp_group: dist.ProcessGroup | None = None,
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
            names = f"weight{i}", f"bias{i}"
            self._make_parameters(names, (out_features, in_features), bias, factory)
        if not self.weight0.is_meta:
            self.reset_parameters()

    def _check_parallel(
        self, mode: str | None, group: dist.ProcessGroup | None, sequence: bool
    ) -> None:
        if mode is None and not sequence:
            return
        if group is not None and hasattr(group, "size") and group.size() == 1:
            # One rank has nothing to communicate. This call checks the names of the options.
            make_parallel(self.label, group, mode, sequence)
            return
        rule = (
            "a grouped layer does not communicate: the code that sends tokens to experts must "
            "gather the inputs and sum the outputs over the group"
        )
        got = f"parallel_mode={mode!r}, sequence_parallel={sequence}"
        fix = (
            "Build it with the rank's own part of out_features (column) or in_features (row), and "
            "no parallel_mode"
        )
        fail(self.label, rule, got, fix, UnsupportedError)

    def _weights(self, weight: str) -> tuple[Any, ...]:
        return self._parameters_of(weight)

    def _parameters_of(self, kind: str) -> tuple[Any, ...]:
        """Return the parameters of all groups, in order; ``kind`` is "weight" or "bias"."""
        return tuple([getattr(self, f"{kind}{i}") for i in range(self.num_gemms)])

    def reset_parameters(self) -> None:
        """Initialise each group as ``torch.nn.Linear`` does, or by ``init_method``.

        With ``quantized_params`` the weights are then quantized.
        """
        shape = (self.out_features, self.in_features)
        for i in range(self.num_gemms):
            self._reset_parameters((f"weight{i}", f"bias{i}"), shape, self._options)

    def forward(
        self,
        input: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        *,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """Return the product of each group's rows with its weight, plus its bias.

        Under ``torch.compile``, a tensor ``m_splits`` gives one graph for all splits. A list of
        ints gives the smallest buffers, because they have the sizes of the groups, but Dynamo
        compiles another graph when a size becomes 0 or 1.

        Args:
            input: (..., in_features); float32, bfloat16 or float16. The rows of group 0 come first,
                then those of group 1, and so on. A quantized tensor is dequantized.
            m_splits: number of rows of each group: ``num_gemms`` ints, or an int64 tensor
                (num_gemms,), which is read on the host. Groups may be empty.
            is_first_microbatch: True quantizes the weights and stores the results for the following
                microbatches. False uses the stored results, even if the weights have changed. None
                stores nothing.
            skip_weight_update: one element, read on its device. If it is non-zero, a first
                microbatch leaves the stored weights as they are.

        Returns:
            (..., out_features) in the dtype of ``input``; with ``return_bias`` a tuple of it and
            the list of biases, each (out_features,).

        Raises:
            QTensorError: the input, the splits or the recipe do not fit the layer.
        """
        input = activation_dtype(input)
        biases = self._parameters_of("bias") if self.use_bias else ()
        weights, added = self._parameters_of("weight"), () if self.return_bias else biases
        own = None
        if is_dtensor(weights[0]) or is_dtensor(input):
            check_width(self.label, input, weights[0].shape[1])
            own = localize(self.label, input, weights, added, grouped=True)
            own.check_schedule(self.label, self._options)
            input, weights, added = own.input, tuple(own.weights), tuple(own.biases)
        args = self._args(input, m_splits, weights, added)
        state, shape = self._states["weight"], weights[0].shape
        if is_first_microbatch is not None:
            use_workspace(args, state, shape, is_first_microbatch, skip_weight_update)
        args.site = active(state.site)
        out, workspace, amaxes = run_grouped_linear(args)
        store_workspace(state, workspace, args.plan.weight, shape)
        self._record(amaxes, "weight", args.plan)
        if args.wgrad is not None and args.wgrad.main_grads:
            out = report_when_accumulated(out, state.report)
        if own is not None:
            out = own.whole(out)
        return (out, list(biases)) if self.return_bias else out

    def _args(
        self,
        input: Tensor,
        m_splits: Sequence[int] | Tensor,
        weights: tuple[Any, ...],
        biases: tuple[Any, ...],
    ) -> GroupedFwdArgs:
        """Return the arguments of ``run_grouped_linear`` for a call of this layer."""
        training = torch.is_grad_enabled()
        wanted = [i for i, w in enumerate(weights) if training and w.requires_grad]
        dgrad = training and input.requires_grad
        plan = self._grouped_plan(dgrad, bool(wanted))
        options, whole = self._options, self.weight0
        if is_dtensor(whole):
            options = options._replace(placements=whole.placements)
        check_layer_input(self.label, input, weights[0], plan, options)
        args = GroupedFwdArgs(input, weights, biases, self._splits(input, m_splits), dgrad)
        args.wanted = tuple(wanted)
        args.bias_requires_grad = training and any([b.requires_grad for b in biases])
        args.plan = plan
        self._complete_groups(args, input)
        return args

    def _complete_groups(self, args: GroupedFwdArgs, input: Tensor) -> None:
        """Fill in the arguments that depend on the layer's options and state."""
        plan, wanted = args.plan, args.wanted
        args.dtype = input.dtype
        args.save_original_input = self._options.save_original_input
        if args.save_original_input and wanted:
            check_original_input(self.label, plan)
        if any(plan.stochastic):
            args.seeds = self._seeds(input, self._states["weight"].draws, plan)
        if any(plan.delayed):
            args.delayed = self._begin_delayed(input, "weight", MODULE, self.name)
        scheduled = self._options.fuse_wgrad_accumulation or self._options.delay_wgrad_compute
        if scheduled and wanted:
            args.wgrad = self._grouped_wgrad(wanted)

    def _grouped_plan(self, dgrad: bool, wgrad: bool) -> LinearPlan:
        """Return the plan of a call, after checking that all weights are stored alike."""
        stored = self._stored["weight0"]
        for i in range(1, self.num_gemms):
            other = self._stored[f"weight{i}"]
            if other != stored:
                rule = "the weights of all groups must be stored alike"
                got = f"weight0 as {stored or 'plain'}, weight{i} as {other or 'plain'}"
                fix = "Quantize all of them with one quantizer, or none"
                fail(f"{self.label} weight", rule, got, fix)
        return self._plan(dgrad, wgrad, "weight0", self._options)

    def _splits(self, input: Tensor, m_splits: Sequence[int] | Tensor) -> Splits:
        """Return the sizes of the groups, checked."""
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
        # The op raises the error: in eager code here, in compiled code when its graph runs.
        return Splits((), LISTED_SIZES(sizes, groups, rows, self.label), groups)

    def _seeds(self, input: Tensor, draws: Tensor, plan: LinearPlan) -> tuple[Any, Any, Any]:
        """Return the seeds of input, weight and gradient: (num_gemms,) int64, or None.

        They are drawn in the order in which separate layers would draw them.
        """
        count = sum(plan.stochastic)
        drawn = draw(input, draws, self.num_gemms * count)
        column, seeds = 0, []
        for stochastic in plan.stochastic:
            seeds.append(drawn[column::count] if stochastic else None)
            column += stochastic
        return tuple(seeds)  # type: ignore[return-value]

    def _grouped_wgrad(self, wanted: Sequence[int]) -> GroupedWgrad:
        """Return the destination of the weight gradients of groups ``wanted``."""
        state = self._states["weight"]
        if self._options.delay_wgrad_compute:
            return GroupedWgrad(key=state.key)
        weights = [(f"{self.label} weight{i}", getattr(self, f"weight{i}")) for i in wanted]
        main_grads, overwrite = zip(*[main_grad_of(*weight) for weight in weights], strict=True)
        return GroupedWgrad(main_grads, overwrite)

    def backward_dw(self) -> None:
        """Compute the oldest postponed weight gradients, and add them to ``grad`` or ``main_grad``.

        Raises:
            QTensorError: no weight gradients are postponed.
            UnsupportedError: the module computes its weight gradients in backward.
        """
        if not self._options.delay_wgrad_compute:
            rule = "backward_dw is for modules with delay_wgrad_compute=True"
            fix = "Build it so, or remove the call: backward has computed the weight gradients"
            fail(self.label, rule, "delay_wgrad_compute=False", fix, UnsupportedError)
        key = self._states["weight"].key
        for weight in self._parameters_of("weight"):
            if weight.requires_grad:
                backward_dw(self.label, weight, key, self._options.fuse_wgrad_accumulation)
            else:
                take_postponed(key)

    def extra_repr(self) -> str:
        """Return the sizes and options for the repr of the module."""
        return f"num_gemms={self.num_gemms}, {self._repr('weight0', self.use_bias)}"
