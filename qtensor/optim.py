"""Keep the state of torch's optimizers as quantized tensors, and seed the rounding of their steps.

The optimizers are torch's own: the functions below register hooks that run before and after
``step()``. docs/training.md shows how the formats of the state change losses and steps.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qtensor.api import Format, quantizer
from qtensor.core.dtensors import from_part, is_dtensor, local_part
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.quantizers import Quantizer
from qtensor.storage.ops.write import ROUNDS_AT_RANDOM, round_at_random
from qtensor.storage.tensor import QuantizedTensor

__all__ = [
    "SQUARE_ROOTS",
    "OptimizerHooks",
    "quantize_state_",
    "round_parameters_",
    "seed_rounding_",
]

SQUARE_ROOTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
"""Averages of squared gradients in torch's optimizers.

Their square roots are stored, because these span half as many powers of two. Small squares of a
block would become 0, and the optimizer would divide by ``eps`` alone.
"""

_ROOT = "_sqrt"


class OptimizerHooks:
    """Hold hooks of an optimizer; ``remove()`` takes them away."""

    def __init__(self, handles: Collection[Any], close: Callable[[], None]) -> None:
        self._handles = handles
        self._close = close

    def remove(self) -> None:
        """Remove the hooks, and decode the state that they have quantized."""
        for handle in self._handles:
            handle.remove()
        self._close()


def quantize_state_(
    optimizer: Optimizer,
    formats: Mapping[str, Format],
    *,
    square_roots: Collection[str] = SQUARE_ROOTS,
    min_numel: int = 4096,
    stochastic_rounding: bool = False,
    seed: int | None = None,
) -> OptimizerHooks:
    """Store entries of an optimizer's state as quantized tensors between its steps.

    Before each step the entries are decoded to the dtype that the optimizer gave them. After it
    they are quantized, once a step. A step therefore equals that of torch's optimizer (for-loop,
    foreach or fused) on the decoded state, and needs the memory of the decoded state while it runs.

    The quantized tensors are in ``optimizer.state`` and in ``optimizer.state_dict()``. An entry
    whose square root is stored has another name there, for example ``exp_avg_sq_sqrt``, so that an
    optimizer without these hooks cannot take roots for squares. ``load_state_dict`` accepts such a
    dict, and one with plain entries, which the next step quantizes.

    The state of a sharded parameter (DTensor) is quantized as the whole is: each rank has its part
    of the codes, and factors of the whole tensor come from the maximum over all ranks. Shards must
    end at blocks.

    Args:
        optimizer: an optimizer of ``torch.optim``, with or without state.
        formats: format id or quantizer by name of the entry, for example
            ``{"exp_avg": "mxfp8", "exp_avg_sq": "mxfp8"}``.
        square_roots: the names of the entries whose square root is stored.
        min_numel: an entry with fewer elements stays plain. So does one whose shape is not that of
            its parameter, such as ``step``.
        stochastic_rounding: round the values at random to the significant bits of the element, so
            that their mean over draws is exact above the subnormal range. Slow averages need it in
            a format whose scales are powers of two: to nearest, ``exp_avg_sq`` stops growing there
            when a step adds less than half a space of the grid. Formats with other scales refuse
            it; NVFP4 has an option of its own.
        seed: for rounding at random: each step and entry draws from this seed, and ``state_dict``
            counts the steps. Data-parallel ranks need equal seeds. Default: torch's generator of
            the device.

    Returns:
        The hooks. ``remove()`` takes them away and decodes the state.

    Raises:
        QTensorError: a format is unknown or cannot store state, or ``seed`` is given and nothing
            is rounded at random.
        ArgumentTypeError: ``optimizer`` is not an optimizer.
        UnsupportedError: at a step, if an entry is a subclass of tensor other than a DTensor.
    """
    _check_optimizer("quantize_state_", optimizer)
    quantizers = {
        name: _state_quantizer(name, fmt, stochastic_rounding) for name, fmt in formats.items()
    }
    drawn = stochastic_rounding or any(q.stochastic_rounding for q in quantizers.values())
    if seed is not None and not drawn:
        rule = "seed= needs rounding at random"
        got = sorted({q.canonical for q in quantizers.values()})
        fail("quantize_state_", rule, got, "Drop it, or pass stochastic_rounding=True")
    state = _State(quantizers, frozenset(square_roots), min_numel, stochastic_rounding, seed)

    def after(o: Optimizer, *_: object) -> None:
        if seed is not None:
            _count_step(o, "state_rounding_step")
        state.encode(o)

    state.encode(optimizer)
    handles = (
        optimizer.register_step_pre_hook(lambda o, *_: state.decode(o)),
        optimizer.register_step_post_hook(after),
    )
    return OptimizerHooks(handles, lambda: state.decode(optimizer))


def seed_rounding_(optimizer: Optimizer, seed: int) -> OptimizerHooks:
    """Let each step of an optimizer draw its random numbers from ``seed`` and the step's number.

    A step writes quantized parameters through their quantizers. Quantizers that round at random
    draw from torch's generators, which these hooks seed before the step and restore after it.
    ``state_dict`` counts the steps, so that a resumed run draws the same numbers. Data-parallel
    ranks with equal seeds and gradients have equal parameters.

    Args:
        optimizer: an optimizer of ``torch.optim``.
        seed: any integer.

    Returns:
        The hooks, which ``remove()`` takes away.

    Raises:
        ArgumentTypeError: ``optimizer`` is not an optimizer.
    """
    _check_optimizer("seed_rounding_", optimizer)
    around = ExitStack()

    def before(o: Optimizer, *_: object) -> None:
        around.close()  # left open by a step that raised
        devices = {p.device for group in o.param_groups for p in group["params"]}
        cuda = sorted(d.index for d in devices if d.type == "cuda")
        around.enter_context(torch.random.fork_rng(cuda))
        step = _count_step(o, "rounding_step")
        torch.manual_seed(_word(seed, step, 0))

    handles = (
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(lambda *_: around.close()),
    )
    return OptimizerHooks(handles, around.close)


def round_parameters_(optimizer: Optimizer, *, seed: int | None = None) -> OptimizerHooks:
    """Round the quantized parameters that an optimizer writes at random, not to nearest.

    Each write rounds the new values at random to the significant bits of the element, so that their
    mean over draws is exact above the subnormal range, and then quantizes them. Steps of less than
    half a space of the grid, which are lost to nearest, move the parameter on average. For-loop,
    foreach and fused optimizers take part. docs/numerics.md defines the rounding.

    Parameters whose quantizer rounds at random itself (NVFP4) and plain ones stay as they are.

    Args:
        optimizer: an optimizer of ``torch.optim``.
        seed: each step draws from this seed and its number, as with ``seed_rounding_``.
            Data-parallel ranks need equal seeds. Default: torch's generators.

    Returns:
        The hooks, which ``remove()`` takes away.

    Raises:
        ArgumentTypeError: ``optimizer`` is not an optimizer.
        QTensorError: here or at a step, if the scales of a parameter are not powers of two.
    """
    op = "round_parameters_"
    _check_optimizer(op, optimizer)
    _check_parameters(op, optimizer)
    around = ExitStack()

    def before(o: Optimizer, *_: object) -> None:
        around.close()  # left open by a step that raised
        _check_parameters(op, o)
        token = ROUNDS_AT_RANDOM.set(True)
        around.callback(ROUNDS_AT_RANDOM.reset, token)

    seeded = [] if seed is None else [seed_rounding_(optimizer, seed)]
    handles = (
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(lambda *_: around.close()),
        *seeded,
    )
    return OptimizerHooks(handles, around.close)


def _check_parameters(op: str, optimizer: Optimizer) -> None:
    """Refuse quantized parameters that cannot be rounded at random."""
    for group, entry in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(entry["params"]):
            found = getattr(local_part(parameter), "_quantizer", None)
            if found is None or found.stochastic_rounding or _has_powers_of_two(found):
                continue
            rule = (
                "values are rounded at random to the element's significant bits, and codes have "
                "these bits only if the scales are powers of two"
            )
            fix = "Use force_pow_2_scales=True or an MX format; nvfp4 has stochastic_rounding=True"
            fail(op, rule, f"{found.canonical} for parameter {index} of group {group}", fix)


def _has_powers_of_two(found: Quantizer) -> bool:
    return hasattr(found, "scale_mode") or bool(getattr(found, "force_pow_2_scales", False))


def _check_optimizer(op: str, optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        rule = "the first argument must be a torch.optim.Optimizer"
        fail(op, rule, type(optimizer).__name__, "Pass the optimizer itself", ArgumentTypeError)


def _state_quantizer(name: str, fmt: Format, stochastic_rounding: bool) -> Quantizer:
    found = quantizer(fmt)
    op = f"quantize_state_[{name}]"
    if found.needs_scale:
        rule = "state needs a format that finds its own scales"
        fail(op, rule, found.canonical, 'Use "fp8", for example')
    if stochastic_rounding and not _has_powers_of_two(found):
        rule = "stochastic_rounding=True needs a format whose scales are powers of two"
        fix = "Drop it, or use mxfp8 or fp8_blockwise; nvfp4 has the option itself"
        fail(op, rule, found.canonical, fix)
    return found


def _count_step(optimizer: Optimizer, key: str) -> int:
    """Return the number of steps before this one; ``state_dict`` holds the count."""
    group = optimizer.param_groups[0]
    count: int = group.get(key, 0)
    group[key] = count + 1
    return count


def _word(seed: int, step: int, index: int) -> int:
    """Return 64 bits, as a signed integer, that depend on all arguments."""
    digest = hashlib.sha256(f"{seed} {step} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class _State:
    """Decode and encode the entries of an optimizer's state."""

    def __init__(
        self,
        quantizers: dict[str, Quantizer],
        square_roots: frozenset[str],
        min_numel: int,
        stochastic_rounding: bool,
        seed: int | None,
    ) -> None:
        self.quantizers = quantizers
        self.square_roots = square_roots
        self.min_numel = min_numel
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed

    @torch.no_grad()
    def decode(self, optimizer: Optimizer) -> None:
        """Replace quantized entries by plain ones."""
        for entries in optimizer.state.values():
            for name in self.quantizers:
                root = entries.pop(name + _ROOT, None)
                if root is not None:
                    entries[name] = root.dequantize().square_()
                elif isinstance(local_part(entries.get(name)), QuantizedTensor):
                    entries[name] = entries[name].dequantize()

    @torch.no_grad()
    def encode(self, optimizer: Optimizer) -> None:
        """Replace plain entries by quantized ones."""
        seeds = self._seeds(optimizer)
        for parameter, entries in optimizer.state.items():
            for name, found in self.quantizers.items():
                value = entries.get(name)
                if not self._is_stored(parameter, value):
                    continue
                _check_plain(name, value)
                is_root = name in self.square_roots
                values = value.sqrt() if is_root else value
                seed = next(seeds)
                del entries[name]
                entries[name + _ROOT * is_root] = self._quantize(found, values, seed)

    def _quantize(self, found: Quantizer, values: Tensor, seed: int | None) -> Tensor:
        device = values.device
        if self.stochastic_rounding:
            generator = None if seed is None else torch.Generator(device).manual_seed(seed)
            rounded = round_at_random(local_part(values), found.element.mantissa_bits, generator)
            values = _as_part(rounded, values)
        random = found.stochastic_rounding and seed is not None
        return found.quantize(
            values, generator=torch.tensor([seed], device=device) if random else None
        )

    def _is_stored(self, parameter: Tensor, value: object) -> bool:
        return (
            isinstance(value, Tensor)
            and not isinstance(local_part(value), QuantizedTensor)
            and value.shape == parameter.shape
            and value.numel() >= self.min_numel
        )

    def _seeds(self, optimizer: Optimizer) -> Iterator[int | None]:
        """Yield a seed for each entry, or None for torch's generator."""
        if self.seed is None:
            return itertools.repeat(None)
        step = optimizer.param_groups[0].get("state_rounding_step", 0)
        return (_word(self.seed, step, index) for index in itertools.count())


def _as_part(local: Tensor, like: Any) -> Any:
    """Return ``local``, or the DTensor with the layout of ``like`` that has this part."""
    if not is_dtensor(like):
        return local
    return from_part(local, like.device_mesh, like.placements, like.shape)


def _check_plain(name: str, value: Tensor) -> None:
    if type(local_part(value)) is not Tensor:
        rule = "only the state of plain, quantized or sharded parameters can be quantized"
        fix = f"Leave {name!r} out of the formats"
        fail(f"quantize_state_[{name}]", rule, type(value).__name__, fix, UnsupportedError)
