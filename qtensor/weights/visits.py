"""Show the inputs of layers with products while a model runs."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qtensor.core.graphs import without_graphs
from qtensor.modules.grouped_linear import GroupedLinear
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.weights.layer_inputs import inputs_of
from qtensor.weights.layers import WeightLayer

See = Callable[[str, int, Tensor], None]
"""Called with the name of a layer, the number of an expert or 0, and rows (R, K) of its input."""
Finish = Callable[[str, Tensor | None], None]
"""Called after the rows of a call of a layer, with its name and the input; None for experts."""


@contextmanager
def visiting(
    op: str, layers: Mapping[str, WeightLayer], see: See, finish: Finish
) -> Iterator[Callable[[Any], None]]:
    """Call ``see`` and ``finish`` for each call of the layers.

    Yields:
        A function that takes the batch that runs next; its attention mask tells padding.
    """
    masks: list[Tensor | None] = [None]

    def padding(batch: object) -> None:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        masks[0] = mask if isinstance(mask, Tensor) else None

    def hook_of(name: str, layer: WeightLayer) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs, shared = inputs_of(op, name, layer, args, kwargs)
            for values in inputs:
                mask = masks[0]
                # As for the metrics of a search, positions that are padding do not count.
                if mask is not None and values.ndim == 3 and mask.shape == values.shape[:2]:
                    values = values[mask.bool()]
                rows = _rows(values)
                parts: tuple[Tensor, ...] = (rows,)
                if isinstance(module, GroupedLinear):
                    sizes = args[1] if len(args) > 1 else kwargs["m_splits"]
                    parts = rows.split(sizes.tolist() if isinstance(sizes, Tensor) else list(sizes))
                for expert, part in enumerate(parts):
                    see(name, expert, part)
            finish(name, shared)

        return hook

    with ExitStack() as stack:
        stacks = {name: layer for name, layer in layers.items() if layer.stacked}
        for name, layer in layers.items():
            if layer.stacked:
                continue
            for module in layer.modules if layer.attention is None else (layer.attention,):
                if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                    hook = module.register_forward_pre_hook(hook_of(name, layer), with_kwargs=True)
                    stack.callback(hook.remove)
        if stacks:
            stack.enter_context(_one_expert_at_a_time(stacks, finish))
            stack.enter_context(_Products(stacks, see))
        # Hooks do not run in fused layers, nor in graphs that were compiled without them.
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        stack.enter_context(without_graphs())
        yield padding


def _rows(x: Tensor) -> Tensor:
    """Return an input (..., K) of a product as rows (R, K), float32; one of a dim is one row."""
    return torch.atleast_2d(x.detach()).flatten(0, -2).float()


_MATRIX_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


class _Products(TorchFunctionMode):
    """Calls ``see`` for each product of rows with ``weight[expert]``, of stacked weights.

    That is ``linear(x, weight[expert])`` for (E, N, K) and ``x @ weight[expert]`` for (E, K, N).
    """

    def __init__(self, layers: Mapping[str, WeightLayer], see: See) -> None:
        super().__init__()
        self._see = see
        self._layers = {}
        for name, layer in layers.items():
            codes = _codes(layer.stored[0])
            self._layers[codes.untyped_storage().data_ptr()] = (name, layer.stored[0], codes)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        multiplies = func is F.linear or func in _MATRIX_PRODUCTS
        weight = args[1] if multiplies and len(args) > 1 else None
        if type(weight) is Tensor or isinstance(weight, QuantizedTensorStorage):
            self._see_product(args[0], weight)
        return func(*args, **(kwargs or {}))

    def _see_product(self, x: Tensor, weight: Any) -> None:
        own = _codes(weight)
        found = self._layers.get(own.untyped_storage().data_ptr())
        if found is None:
            return
        name, whole, codes = found
        if weight.shape in (whole.shape[1:], whole.shape[:0:-1]):
            expert = (own.storage_offset() - codes.storage_offset()) // codes[0].numel()
            self._see(name, expert, _rows(x))


def _codes(weight: Any) -> Tensor:
    """Return a plain tensor in whose memory a weight, or its codes, lie."""
    weight = getattr(weight, "stored", weight)  # of the quantized weights of experts
    if isinstance(weight, QuantizedTensorStorage):
        return weight.buffers()[0]
    return weight


@contextmanager
def _one_expert_at_a_time(layers: Mapping[str, WeightLayer], finish: Finish) -> Iterator[None]:
    """Let experts of transformers run their loop of one linear product after the other.

    By default they multiply all experts at once, by ``grouped_mm``. The class's own forward, which
    their library wraps, has the loop.
    """

    def after(name: str) -> Any:
        return lambda module, args, output: finish(name, None)

    with ExitStack() as stack:
        for name, layer in layers.items():
            (module,) = layer.modules
            stack.callback(module.register_forward_hook(after(name)).remove)
            if "forward" not in vars(module):
                loop = inspect.unwrap(type(module).forward)
                module.forward = types.MethodType(loop, module)
                stack.callback(delattr, module, "forward")
        yield
