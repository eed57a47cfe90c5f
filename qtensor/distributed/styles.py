"""Parallel styles for ``torch.distributed.tensor.parallel.parallelize_module``.

torch's own ``ColwiseParallel`` and ``RowwiseParallel`` take ``qtensor.Linear``, which is a
``torch.nn.Linear``, but no other layer of qtensor. The styles of the same names here have the same
arguments and take all of them. They leave the exchange of activations to the layer, which knows the
recipe: it gathers the codes of an input whose rows are split, and sums a row-wise output with one
reduce-scatter where the output is split, also if the layer has a bias.

torch's other styles, such as ``SequenceParallel``, serve layers of qtensor as they are. The
``PrepareModuleInput`` of this module gathers codes instead of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    parallel,
)

from qtensor.core.dtensors import local_part
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.functional.ranks.dtensors import SequenceExchange
from qtensor.modules.grouped_linear import GroupedLinear
from qtensor.modules.layernorm_linear import LayerNormLinear
from qtensor.modules.layernorm_mlp import LayerNormMLP
from qtensor.modules.linear import LinearBase
from qtensor.recipes import Recipe, Role

_MODES = {"column": (Shard(0), Shard(0)), "row": (Shard(1), Replicate())}
"""Placements of weights (N, K) and biases (N,)."""


def _check_inputs(style: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse a call whose first positional argument is not a tensor."""
    if not inputs or not isinstance(inputs[0], Tensor):
        name = type(module).__name__
        rule = "the input must be a tensor, passed as the first positional argument"
        got = f"a {type(inputs[0]).__name__}" if inputs else "no positional argument"
        fix = "Call module(x), not module(name=x)"
        fail(f"{style} of {name}", rule, got, fix, ArgumentTypeError)


class _Style(parallel.ParallelStyle):
    """Base of the styles: split a layer's parameters, and lay out its first input and output."""

    mode: str
    input_layouts: Any
    output_layouts: Any
    use_local_output: bool

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if isinstance(module, LayerNormMLP):
            rule = "a module with two layers is split by its own options"
            fix = "Build it with set_parallel_mode=True, tp_group=mesh.get_group()"
            fail(f"{name} of {module.label}", rule, "one style", fix, UnsupportedError)
        if not isinstance(module, (LinearBase, GroupedLinear)):
            return super()._apply(module, device_mesh)  # type: ignore[safe-super]
        if self.mode == "row" and isinstance(module, LayerNormLinear):
            rule = "the norm needs whole rows, so only out_features can be split"
            fail(f"{name} of {module.label}", rule, "RowwiseParallel", "Use ColwiseParallel")
        if module._options.parallel is not None:
            rule = "a layer with parallel_mode is split over its tp_group already"
            fix = "Build it without parallel_mode"
            got = module._options.parallel.mode
            fail(f"{name} of {module.label}", rule, f"parallel_mode={got!r}", fix, UnsupportedError)
        out = self.output_layouts[0]
        dim = out.dim if self.mode == "row" and out.is_shard() else None
        module._options = module._options._replace(exchange=SequenceExchange(dim))
        return distribute_module(
            module, device_mesh, self._partition, self._prepare_input, self._prepare_output
        )

    def _partition(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace the weights and biases of a layer by DTensors; torch replicates the others."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            kind = 0 if name.startswith("weight") else 1
            if not name.startswith(("weight", "bias")):
                continue
            placements = [_MODES[self.mode][kind]]
            values = distribute_tensor(
                parameter, mesh, placements, src_data_rank=self.src_data_rank
            )
            split = nn.Parameter(values, requires_grad=parameter.requires_grad)
            module.register_parameter(name, split)

    def _prepare_input(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        _check_inputs(type(self).__name__, module, inputs)
        first, *others = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, self.input_layouts, run_check=False)
        elif first.placements != self.input_layouts:
            first = first.redistribute(placements=self.input_layouts)
        return (first, *others)

    def _prepare_output(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if not isinstance(outputs, tuple):
            return self._output(outputs)
        return (self._output(outputs[0]), *[self._local(other) for other in outputs[1:]])

    def _output(self, out: DTensor) -> Tensor:
        if out.placements != self.output_layouts:
            out = out.redistribute(placements=self.output_layouts)
        return self._local(out)

    def _local(self, out: Any) -> Any:
        return out.to_local() if self.use_local_output and isinstance(out, DTensor) else out


class ColwiseParallel(_Style, parallel.ColwiseParallel):
    """Split out_features of a layer over the ranks of a mesh.

    For ``qtensor.Linear``, ``LayerNormLinear`` and ``GroupedLinear``; for ``torch.nn.Linear`` and
    ``torch.nn.Embedding`` it is torch's style of the same name.

    Args:
        input_layouts: placement of the input; a plain tensor is read as a rank's part of it.
            ``Replicate()`` by default. ``Shard(i)`` says that ranks have different rows; the layer
            then gathers codes and factors where that gives the bytes of gathering values.
        output_layouts: placement of the output, ``Shard(-1)`` by default.
        use_local_output: return the rank's part as a plain tensor, instead of a DTensor.
    """

    mode = "column"


class RowwiseParallel(_Style, parallel.RowwiseParallel):
    """Split in_features of a layer over the ranks of a mesh.

    For ``qtensor.Linear`` and ``GroupedLinear``; for ``torch.nn.Linear`` and
    ``torch.nn.Embedding`` it is torch's style of the same name. ``LayerNormLinear`` cannot be split
    in this way, because its norm needs whole rows.

    Args:
        input_layouts: placement of the input; a plain tensor is read as a rank's part of it.
            ``Shard(-1)`` by default.
        output_layouts: placement of the output: ``Replicate()`` by default, or ``Shard(i)``.
        use_local_output: return the rank's part as a plain tensor, instead of a DTensor.
    """

    mode = "row"


class PrepareModuleInput(parallel.ParallelStyle):
    """Quantize and gather the first input of a module once, for all layers that read it.

    For a module whose layers share an input, for example the projections of queries, keys and
    values. Each rank quantizes its part with the codes of the whole, and one collective gathers
    codes and factors. The layers get a quantized DTensor; give them ``ColwiseParallel``. Their
    gradients of the input are added on each rank, and one reduce-scatter sums them.

    Args:
        recipe: the recipe of the layers, which must quantize their inputs. Delayed scaling is
            refused: each layer has factors of its own.
        input_layouts: placement of the input; a plain tensor is read as a rank's part of it.

    Raises:
        UnsupportedError: a recipe with delayed scaling, or one that leaves inputs unquantized.
    """

    def __init__(self, *, recipe: Recipe, input_layouts: Placement) -> None:
        super().__init__()
        quantizer = recipe.quantizer(Role("input"))
        if quantizer is None or quantizer.needs_scale:
            name = type(recipe).__name__
            rule = "the layers must share a quantizer of their input that needs no state"
            fix = "Use ColwiseParallel(input_layouts=...) for each layer"
            fail(f"PrepareModuleInput[{name}]", rule, f"{quantizer}", fix, UnsupportedError)
        self.quantizer, self.input_layouts = quantizer, input_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            _check_inputs("PrepareModuleInput", module, inputs)
            first, *others = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(
                    first, device_mesh, [self.input_layouts], run_check=False
                )
            columnwise = torch.is_grad_enabled()
            # Codes that both directions share travel once.
            shared = self.quantizer.spec.transpose_shares_bytes
            quantizer: Any = self.quantizer.with_usage(
                rowwise=True, columnwise=columnwise and not shared
            )
            whole = quantizer(first).redistribute(placements=[Replicate()])
            if columnwise and shared:
                local_part(whole).update_usage(columnwise=True)
            return (whole, *others)

        module.register_forward_pre_hook(prepare)
        return module


__all__ = ["ColwiseParallel", "PrepareModuleInput", "RowwiseParallel"]
