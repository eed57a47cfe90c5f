"""``LinearModule``: the base of modules that compute linear layers, and the call of one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.dtensors import is_dtensor
from qtensor.functional.linear.args import LinearFwdArgs
from qtensor.functional.linear.layer_plan import linear_plan, weight_label
from qtensor.functional.linear.linear_function import run_linear
from qtensor.functional.linear.main_grad import report_when_accumulated
from qtensor.functional.linear.one_op import LINEAR, one_op
from qtensor.functional.operands import draw, draw_seeds
from qtensor.functional.ranks.dtensors import localize
from qtensor.functional.site import active
from qtensor.modules.input_checks import check_layer_input, check_width
from qtensor.modules.options import Call, LinearOptions, check_original_input, one_op_roles
from qtensor.modules.parameters import follows_calls
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.modules.sharded_parameters import backward_dw
from qtensor.modules.state import LinearState
from qtensor.modules.weight_gradients import weight_gradient
from qtensor.modules.workspace import store_workspace, use_workspace


class LinearModule(QuantizedModule):
    """Base of ``Linear``, ``LayerNormLinear`` and ``LayerNormMLP``.

    ``_linear`` computes one layer. It takes this rank's parts of DTensors and calls
    ``_local_linear``, which in a compiled model leaves most layers to ``_in_one_op``.
    """

    def _make_layer(
        self,
        names: tuple[str, str],
        options: LinearOptions,
        shape: Shape,
        has_bias: bool,
        factory: dict[str, Any],
    ) -> None:
        """Make the state and the parameters of a layer; see ``_make_parameters``."""
        self._roles[names[0]] = one_op_roles(options)
        self._own_state(names[0], LinearState())
        self._make_parameters(names, shape, has_bias, factory)

    def _linear(
        self, input: Tensor, weight: str, bias: str, options: LinearOptions, call: Call | None
    ) -> Tensor:
        """Return ``input @ weight.T + bias``, (..., N).

        ``weight`` is the name of a weight (N, K), ``bias`` the name of a bias (N,), or "". The
        options of this call are the defaults if ``call`` is None.
        """
        w = getattr(self, weight)
        b = getattr(self, bias) if bias else None
        if not (is_dtensor(w) or is_dtensor(input)):
            return self._local_linear(input, weight, w, b, options, call)
        check_width(self.label, input, w.shape[1])
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
        state = self._states[weight]
        if call is None:
            may_be_one_op = options.parallel is None and follows_calls() and state.site is None
            out = self._in_one_op(input, weight, w, b) if may_be_one_op else None
            if out is not None:
                return out
            call = Call()
        training = torch.is_grad_enabled()
        args = LinearFwdArgs(
            input,
            w,
            b,
            training and input.requires_grad,
            training and w.requires_grad,
            training and b is not None and b.requires_grad,
        )
        args.output_quantizer, args.site = call.output_quantizer, active(state.site)
        args.plan = self._plan(args.inp_requires_grad, args.weight_requires_grad, weight, options)
        check_layer_input(self.label, input, w, args.plan, options)
        self._complete(args, input, weight, options, call)
        first = call.is_first_microbatch
        if first is not None:
            use_workspace(args, state, w.shape, first, call.noop)
        out, workspace, amaxes = run_linear(args)
        store_workspace(state, workspace, args.plan.weight, w.shape)
        self._record(amaxes, weight, args.plan)
        wgrad = args.wgrad
        if wgrad is not None and wgrad.main_grad is not None:
            out = report_when_accumulated(out, state.report)
        return out

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
            begun = self._begin_delayed(input, weight, module, name)
            delayed = [begun.scales, begun.ticket, begun.report]
        out, *amaxes = LINEAR(input, w, b, layer.text, seeds, delayed)
        self._record(amaxes, weight, plan)
        return out

    def _complete(
        self, args: LinearFwdArgs, input: Tensor, weight: str, options: LinearOptions, call: Call
    ) -> None:
        """Complete the arguments of a call from the layer's options and state.

        Weight, plan and gradient flags of ``args`` are set. ``input`` is the input (..., K), or a
        tensor of its dtype and device.
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
            label = weight_label(options.module, options.name)
            args.wgrad = weight_gradient(label, getattr(self, weight), state, options)

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

    def _backward_dw(self, weight: str, options: LinearOptions) -> None:
        key, fused = self._states[weight].key, options.fuse_wgrad_accumulation
        backward_dw(self.label, getattr(self, weight), key, fused)
