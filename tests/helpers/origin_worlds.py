"""Quantized and plain worlds, in which origins and operations of ``origin_sweep.py`` run alike."""

from __future__ import annotations

import io
import pickle
import re
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from formats import BY_NAME
from torch import Tensor, nn

import qtensor
from qtensor.storage.tensor import QuantizedTensor

USAGES = {"row": (True, False), "col": (False, True), "both": (True, True)}


@dataclass(frozen=True)
class Config:
    """A format, its options, and the usages of a tensor."""

    format: str
    usage: str = "row"
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        words = [name if value is True else f"{name}={value}" for name, value in self.options]
        return "-".join((self.format, *words, self.usage))

    @property
    def quantizer(self) -> Any:
        rowwise, columnwise = USAGES[self.usage]
        options = dict(self.options)
        return BY_NAME[self.format].quantizer(rowwise=rowwise, columnwise=columnwise, **options)

    @property
    def unit(self) -> int:
        """Rows and columns of a part whose bounds are bounds of blocks."""
        return 128 if self.format == "fp8_blockwise" or dict(self.options).get("swizzled") else 64

    @property
    def shares_factors(self) -> bool:
        """Whether a part has a factor that also belongs to values outside it."""
        return self.format in ("fp8", "fp8_delayed", "fp8_rowwise", "nvfp4")


_SQUARE = (("with_2d_quantization", True),)
_SWIZZLED = (("swizzled", True),)
CONFIGS = [
    Config("fp8"),
    Config("fp8", "both"),
    Config("fp8_delayed", "both"),
    Config("fp8_rowwise"),
    Config("fp8_rowwise", "both", (("axis", 0),)),
    Config("fp8_blockwise"),
    Config("fp8_blockwise", "both"),
    Config("fp8_blockwise", "both", (("block_scaling_dim", 2),)),
    Config("mxfp8"),
    Config("mxfp8", "col"),
    Config("mxfp8", "both"),
    Config("mxfp8", "both", _SQUARE),
    Config("mxfp8", "both", _SWIZZLED),
    Config("mxfp6", "both", (("packed", True),)),
    Config("mxfp4"),
    Config("mxfp4", "both"),
    Config("nvfp4"),
    Config("nvfp4", "both"),
    Config("nvfp4", "both", _SQUARE),
    Config("nvfp4", "row", _SWIZZLED),
    Config("nvfp4", "row", (("row_scaled", True),)),
]


@cache
def pattern(seed: int, *shape: int) -> Tensor:
    """Return values of 1, 2 and 4 with signs, which every format holds exactly.

    Every fourth value along each dim is a 4, so that all blocks have the same factor.
    """
    g = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(0, 3, shape, generator=g)
    signs = 1 - 2 * torch.randint(0, 2, shape, generator=g)
    diagonal = torch.arange(shape[-1])
    if shape[1:]:
        diagonal = diagonal + torch.arange(shape[-2])[:, None]
    return signs * torch.where(diagonal % 4 == 0, 4.0, sizes)


@dataclass
class World:
    """Makes quantized tensors of a ``Config``, or plain tensors if it is None.

    Two worlds draw equal values in the same order. The values of each step are half as large as
    those of the step before: a whole tensor of them has other factors, and a part holds them
    exactly with the factors that it shares.
    """

    config: Config | None
    unit: int
    step: int = 0
    draws: int = 0
    alive: list[Any] = field(default_factory=list)
    """Objects that live as long as the world, such as the module of a parameter."""

    def values(self, *shape: int) -> Tensor:
        """Return the next plain values."""
        self.draws += 1
        return pattern(self.draws, *shape) * 2.0**-self.step

    def encode(self, values: Tensor) -> Any:
        """Return a tensor of this world with these values."""
        if self.config is None:
            return values.clone()
        return self.config.quantizer.quantize(values, **BY_NAME[self.config.format].call())

    def tensor(self, *shape: int) -> Any:
        """Return a tensor of this world with the next values."""
        return self.encode(self.values(*shape))

    def square(self) -> Any:
        """Return a tensor of two units in each dim."""
        return self.tensor(2 * self.unit, 2 * self.unit)

    def half(self) -> Any:
        """Return a tensor of the shape of half the rows of ``square``."""
        return self.tensor(self.unit, 2 * self.unit)

    def stack(self) -> Any:
        """Return a stack of two matrices."""
        return self.tensor(2, self.unit, 2 * self.unit)


# ---- what origins and operations do to a tensor


def upper(t: Any) -> Any:
    return t[: t.shape[0] // 2]


def lower(t: Any) -> Any:
    return t[t.shape[0] // 2 :]


def right(t: Any) -> Any:
    return t[..., t.shape[-1] // 2 :]


def frozen(t: Any) -> Any:
    return nn.Parameter(t, requires_grad=False)


def plain_values(t: Any) -> Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def use(t: Any, **usages: bool) -> Any:
    """Return ``t`` after ``update_usage``, which plain tensors do not have."""
    if isinstance(t, QuantizedTensor):
        t.update_usage(**usages)
    return t


def look(t: Any) -> Any:
    """Return ``t`` after reading what a notebook or a debugger reads of it."""
    if isinstance(t, QuantizedTensor):
        repr(t), t.buffers(), t.nbytes, t.__tensor_flatten__()
    return t


def unpickled(t: Any) -> Any:
    return pickle.loads(pickle.dumps(t))


def saved(t: Any) -> Any:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stepped(t: Any) -> Any:
    """Return ``t`` after a step of an optimizer, which halves its values."""
    p = nn.Parameter(t, requires_grad=True)
    p.grad = plain_values(t).clone()
    torch.optim.SGD([p], lr=0.5).step()
    return t


def swap(t: Any, other: Any) -> None:
    """Swap two tensors; plain ones by their data, because torch counts the references to them."""
    if not isinstance(t, QuantizedTensor):
        t.data, other.data = other.data, t.data
        return
    try:
        torch.utils.swap_tensors(t, other)
    except RuntimeError as error:
        raise qtensor.QTensorError("torch refuses it") from error


class Holder(nn.Module):
    """A module with one frozen weight."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = frozen(weight)

    def load(self, weight: Any, **options: Any) -> Any:
        """Return the weight after ``load_state_dict``; an error of ours is raised as such."""
        try:
            self.load_state_dict({"weight": weight}, **options)
        except RuntimeError as error:
            # torch puts the text of our error, which names the op and the format, into its own.
            if re.search(r"\b(copy_|view)(\[\w+\])?: ", str(error)):
                raise qtensor.QTensorError(str(error)) from error
            raise
        return self.weight


def checkpoint_loaded(t: Any, source: Any) -> Any:
    """Return ``t`` after a distributed checkpoint of ``source`` was loaded into it."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save({"w": source}, checkpoint_id=folder, no_dist=True)
            dcp.load({"w": t}, checkpoint_id=folder, no_dist=True)
        except dcp.api.CheckpointException as error:
            raise error.failures[0][0] from error
    return t
