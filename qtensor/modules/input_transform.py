"""``InputTransform``: scales and rotates the input of a linear layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.errors import check
from qtensor.core.torch_state import has_modes
from qtensor.modules.input_hook import TRANSFORM, InputStep, set_input_step
from qtensor.storage.base import QuantizedTensorStorage


class InputTransform(InputStep):
    """Scale the channels of an input (..., K), then rotate blocks of them.

    The weight of the layer contains the inverse, so that the layer computes what it did before.
    Files with a ``pre_quant_scale`` (AWQ) or a ``transform_config`` (rotations) need it. Both steps
    are float32 and round once to the dtype of the input.

    Attributes:
        scale: factors of the channels, (K,), or None.
        hadamard: int64 (1,), the size n of the rotated blocks, a power of two, or None. Each block
            of n channels is multiplied by Sylvester's Hadamard matrix and divided by ``sqrt(n)``.
    """

    scale: Tensor | None
    hadamard: Tensor | None
    _matrix: Tensor | None

    def __init__(
        self,
        scale: Tensor | None = None,
        hadamard: int = 0,
        device: torch.types.Device = None,
    ) -> None:
        """Make a transform.

        Args:
            scale: factors of the channels, (K,); None for no factors.
            hadamard: size of the rotated blocks, a power of two; 0 for no rotation.
            device: device of the tensors.

        Raises:
            QTensorError: a factor is 0 or not finite, ``scale`` is not a vector, or the size is not
                a power of two.
        """
        super().__init__()
        if scale is not None:
            rule = "scale is a vector (K,) of finite factors, none is 0"
            bad = scale[~scale.isfinite() | (scale == 0)]
            got = f"{bad[0].item()} among them" if bad.numel() else f"shape {tuple(scale.shape)}"
            fits = scale.ndim == 1 and not bad.numel()
            check(fits, "InputTransform", rule, got, "Export the model again")
            scale = scale.detach().to(device)
        rule = "the size of a Hadamard matrix is a power of two"
        fits = hadamard == 0 or (hadamard > 1 and hadamard & (hadamard - 1) == 0)
        check(fits, "InputTransform", rule, hadamard, "Choose another size")
        size = torch.tensor([hadamard], device=device) if hadamard else None
        matrix = hadamard_matrix(hadamard, device) if hadamard else None
        self.register_buffer("scale", scale)
        self.register_buffer("hadamard", size)
        self.register_buffer("_matrix", matrix, persistent=False)
        self.block = hadamard

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed input, of the shape and dtype of ``x``."""
        values = x.dequantize() if isinstance(x, QuantizedTensorStorage) else x
        if self.scale is not None:
            values = (values.float() * self.scale.float()).to(x.dtype)
        if self._matrix is not None:
            values = rotate(values, self._matrix)
        return values

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        # A model may be rotated in blocks of another size than the one that was saved.
        size = self.hadamard
        if size is not None and not size.is_meta and int(size) != self.block:
            self.block = int(size)
            self._matrix = hadamard_matrix(self.block, size.device)

    def into_weight(self, weight: Tensor) -> Tensor:
        """Return a weight (N, K) as it is for inputs that are not transformed."""
        if self._matrix is not None:
            weight = rotate(weight, self._matrix)
        return weight if self.scale is None else weight * self.scale.to(weight.dtype)

    def of_weight(self, weight: Tensor) -> Tensor:
        """Return a weight (N, K) for inputs that are not transformed as it is for transformed ones.

        It is the inverse of ``into_weight``.
        """
        weight = weight if self.scale is None else weight / self.scale.to(weight.dtype)
        return weight if self._matrix is None else rotate(weight, self._matrix)

    def extra_repr(self) -> str:
        """Return what the transform does for the repr of the module."""
        parts = ["scale"] if self.scale is not None else []
        return ", ".join([*parts, *([f"hadamard={self.block}"] if self.block else [])])


def for_inputs_of(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight (N, K), or a change of one, as it is for inputs that a layer transforms."""
    transform = layer._modules.get(TRANSFORM)
    return transform.of_weight(weight) if isinstance(transform, InputTransform) else weight


def undo_transforms(model: nn.Module) -> None:
    """Let all layers of a model take their inputs as they are; plain weights change accordingly."""
    for module in model.modules():
        transform = module._modules.get(TRANSFORM)
        if isinstance(transform, InputTransform):
            weight: Tensor = module.weight  # type: ignore[assignment]
            with torch.no_grad():
                weight.copy_(transform.into_weight(weight.float()))
            set_input_step(module, TRANSFORM, None)


def rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """Return ``x`` (..., K) with each block of n channels times ``matrix`` (n, n) / sqrt(n).

    As compressed-tensors does: a product in the dtype of the matrix, divided, rounded once.
    """
    size = matrix.shape[0]
    blocks = x.to(matrix.dtype).unflatten(-1, (-1, size))
    return ((blocks @ matrix) / size**0.5).flatten(-2).to(x.dtype)


def hadamard_matrix(
    size: int, device: torch.types.Device = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return Sylvester's Hadamard matrix (size, size) of ones and minus ones; it is symmetric."""
    # A fake tensor must not be cached: later calls compute.
    make = _hadamard.__wrapped__ if has_modes() else _hadamard
    return make(size, torch.device(device or "cpu"), dtype)


@functools.lru_cache(maxsize=16)
def _hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # autograd saves the matrix
        matrix = torch.ones(1, 1, dtype=dtype, device=device)
        while len(matrix) < size:
            top, bottom = torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)
            matrix = torch.cat((top, bottom))
    return matrix
