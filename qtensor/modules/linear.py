"""``Linear``, and the base that it shares with ``LayerNormLinear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qtensor.core.errors import ArgumentTypeError, check, fail
from qtensor.functional.linear.output import output_canonical
from qtensor.functional.ranks.parallel import MODES, Parallel
from qtensor.modules.linear_module import LinearModule
from qtensor.modules.options import Call, LinearOptions, check_features
from qtensor.modules.parameters import activation_dtype
from qtensor.quantizers import Quantizer
from qtensor.recipes import Recipe

Output = bool | str | Quantizer
_NAMES = ("weight", "bias")


def make_parallel(
    label: str,
    tp_group: dist.ProcessGroup | None,
    parallel_mode: str | None,
    sequence_parallel: bool,
    option: str = "parallel_mode",
) -> Parallel | None:
    """Return the split of a weight over a process group; None for no mode or a group of one.

    ``option`` is the name of the module's option that turns the split on.
    """
    off, choice = ("None", "'column' or 'row'") if option == "parallel_mode" else ("False", "True")
    if parallel_mode not in MODES:
        rule = "parallel_mode must be None, 'column' or 'row'"
        fail(label, rule, repr(parallel_mode), "Choose one")
    if parallel_mode is None:
        rule = f"sequence_parallel needs {option}"
        check(not sequence_parallel, label, rule, f"{option}={off}", f"Pass {choice}")
        return None
    if tp_group is None:
        rule = f"{option} needs the process group that the weight is split over"
        fix = "Pass a process group, for example tp_group=torch.distributed.group.WORLD"
        fail(label, rule, "tp_group=None", fix)
    if not (hasattr(tp_group, "group_name") and hasattr(tp_group, "size")):
        rule = "tp_group must be a process group that this rank belongs to"
        fix = "Pass what torch.distributed.new_group or DeviceMesh.get_group returns"
        fail(label, rule, repr(tp_group), fix, ArgumentTypeError)
    if tp_group.size() == 1:
        return None
    return Parallel(tp_group.group_name, tp_group.size(), parallel_mode, bool(sequence_parallel))


def shard(label: str, name: str, size: int, parallel: Parallel | None) -> int:
    """Return the part of a size that one rank holds; all of it without a split."""
    if parallel is None:
        return size
    rule = f"{name} must be a multiple of the {parallel.size} ranks of tp_group"
    check(size % parallel.size == 0, label, rule, size, "Choose another size or group")
    return size // parallel.size


def requested_output(key: Callable[[], str], request: Output, options: LinearOptions) -> str:
    """Return the canonical string of the output's quantizer; "" for a plain output.

    ``key`` returns the key of the active recipe. The request is True for the recipe's choice.
    """
    if request is False or request is None:
        return ""
    canonical = request.canonical if isinstance(request, Quantizer) else request
    name = canonical if isinstance(canonical, str) else ""
    return output_canonical(key(), name, options.module, options.name)


def one_dtype(
    label: str, params_dtype: torch.dtype | None, dtype: torch.dtype | None
) -> torch.dtype | None:
    """Return the dtype of a module's parameters; None for torch's default dtype."""
    if params_dtype is not None and dtype is not None:
        got = f"params_dtype={params_dtype}, dtype={dtype}"
        fail(label, "params_dtype and dtype are two names of one option", got, "Pass one of them")
    return dtype if params_dtype is None else params_dtype


class LinearBase(LinearModule):
    """Base of ``Linear``, ``LayerNormLinear`` and the linear operations of ``qtensor.ops``.

    See ``Linear`` for the arguments. Only ``Linear`` is a ``torch.nn.Linear``, because the other
    layers compute more than a product.
    """

    in_features: int
    out_features: int
    weight: Any
    bias: Any

    def __init__(
        self,
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
        preserve_high_precision_init_val: bool = False,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__(recipe, name)
        check_features(self.label, in_features=in_features, out_features=out_features)
        parallel = make_parallel(self.label, tp_group, parallel_mode, sequence_parallel)
        self.in_features, self.out_features = in_features, out_features
        self._rank = 0 if parallel is None or tp_group is None else tp_group.rank()
        rows, columns = out_features, in_features
        if parallel_mode == "column":
            rows = shard(self.label, "out_features", rows, parallel)
        if parallel_mode == "row":
            columns = shard(self.label, "in_features", columns, parallel)
        self.return_bias, self.quantized_params = return_bias, quantized_params
        self.preserve_high_precision_init_val = preserve_high_precision_init_val
        self.init_method = init_method
        self._options = LinearOptions(
            "linear",
            name,
            parallel,
            save_original_input,
            delay_wgrad_compute,
            fuse_wgrad_accumulation,
        )
        factory = {"device": device, "dtype": one_dtype(self.label, params_dtype, dtype)}
        self._make_layer(_NAMES, self._options, (rows, columns), bias, factory)
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as ``torch.nn.Linear`` does, or by ``init_method``.

        With ``quantized_params`` the weight is then quantized.
        """
        self._reset_parameters(_NAMES, (self.out_features, self.in_features), self._options)

    def get_high_precision_init_val(self) -> Tensor | None:
        """Return the initial values of a quantized weight, on the CPU; None without them."""
        return getattr(self.weight, "_high_precision_init_val", None)

    def clear_high_precision_init_val(self) -> None:
        """Free the initial values."""
        if hasattr(self.weight, "_high_precision_init_val"):
            del self.weight._high_precision_init_val

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        quantized_output: Output = False,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """Return ``input @ weight.T + bias``.

        Args:
            input: (..., in_features), plain or quantized; float32, bfloat16 or float16.
            is_first_microbatch: True quantizes the weight and stores the result for the following
                microbatches. False uses the stored result, even if the weight has changed. None
                stores nothing.
            quantized_output: quantize the output: True for the recipe's "output" role (rowwise), or
                a format id or quantizer. The output is differentiable.
            skip_weight_update: one element, read on its device. If it is non-zero, a first
                microbatch leaves the stored weight as it is.

        Returns:
            (..., out_features) in the dtype of ``input``; with ``return_bias`` a tuple of it and
            the bias (out_features,).

        Raises:
            QTensorError: the input or the recipe does not fit the layer.
        """
        input = activation_dtype(input)
        bias = "bias" if self.bias is not None and not self.return_bias else ""
        call = None
        if not (is_first_microbatch is None and quantized_output is False):
            output = requested_output(self._recipe_key, quantized_output, self._options)
            call = Call(is_first_microbatch, skip_weight_update, output)
        out = self._linear(input, "weight", bias, self._options, call)
        return (out, self.bias) if self.return_bias else out

    def backward_dw(self) -> None:
        """Compute the oldest postponed weight gradient, and add it to ``grad`` or ``main_grad``.

        Raises:
            QTensorError: no weight gradient is postponed.
        """
        self._backward_dw("weight", self._options)

    def extra_repr(self) -> str:
        """Return the sizes and options for the repr of the module."""
        split = self._options.parallel
        part = "" if split is None else f", parallel_mode={split.mode!r}, tp_size={split.size}"
        return f"{self._repr('weight', self.bias is not None)}{part}"


class Linear(LinearBase, nn.Linear):
    """``y = x @ weight.T + bias`` with quantized operands, forward and backward.

    The active recipe decides the format of each operand: the recipe of ``qtensor.autocast``, or the
    module's own outside every region. Without a recipe the layer computes in high precision.
    The forward GEMM (fprop) reads rowwise x and weight, dgrad reads rowwise dy and columnwise
    weight, and wgrad reads columnwise dy and columnwise x.

    The layer is a ``torch.nn.Linear`` with the same attributes, so that libraries that look for one
    find it.

    Args:
        in_features: K. Under a recipe, a multiple of 16 (FP8, NVFP4) or 32 (MX).
        out_features: N, with the same rule.
        bias: add a bias (N,).
        device: device of the parameters. "meta" leaves them without data until ``to_empty`` and
            ``reset_parameters``, or ``load_state_dict(assign=True)``.
        params_dtype: dtype of the parameters; torch's default dtype if None.
        dtype: another name for ``params_dtype``.
        recipe: used outside every ``autocast`` region.
        name: shown in error messages, and passed to recipes as part of each role.
        init_method: fills the weight in place, (out_features, in_features), before it is split over
            ranks. Without it the layer is initialised as ``torch.nn.Linear``.
        quantized_params: store the weight quantized, as ``recipe`` or the recipe that is active at
            construction reads it.
        preserve_high_precision_init_val: store the initial values of a quantized weight on the CPU
            until ``clear_high_precision_init_val()``.
        return_bias: do not add the bias, and return ``(y, bias)``.
        parallel_mode: None for no split; "column" splits out_features over ``tp_group``, "row"
            splits in_features. Every rank draws the whole layer and takes its part, so that all
            ranks must start from the same random state.
        tp_group: process group of tensor parallelism, for ``parallel_mode``.
        sequence_parallel: split the activations between sharded layers over the group along dim 0.
        fuse_wgrad_accumulation: add weight gradients to ``weight.main_grad`` and leave
            ``weight.grad`` alone. If ``weight.overwrite_main_grad`` is true, overwrite instead.
            Backward sets ``weight.grad_added_to_main_grad``.
        delay_wgrad_compute: postpone weight gradients until ``backward_dw()``.
        save_original_input: save the input itself for backward, and quantize it again there.

    Raises:
        QTensorError: an argument is illegal, or two arguments do not go together.
    """
