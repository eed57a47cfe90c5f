"""Read the 2-D float tensors of a safetensors file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qtensor.demo.report import Source
from qtensor.errors import check, fail

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Element types that the demo quantizes, by their safetensors names."""


@dataclass(frozen=True)
class Weights:
    """The matrices of one file.

    Attributes:
        source: name and totals, for the report.
        matrices: name to (rows, columns) tensor, in the order of the names.
    """

    source: Source
    matrices: dict[str, Tensor]


def load_weights(path: Path, name: str | None = None) -> Weights:
    """Read every 2-D float32, bfloat16 or float16 tensor of ``path`` that is not empty.

    Args:
        path: a safetensors file.
        name: name in the report; the path by default.

    Raises:
        QTensorError: the file does not exist, is not a safetensors file, or holds no matrix.
    """
    check(
        path.is_file(),
        op="demo",
        rule="--weights must be a file",
        got=f"{path} ({'a folder' if path.is_dir() else 'no such file'})",
        fix="Pass the path of a .safetensors file",
    )
    try:
        matrices, total = _read(path)
    except (SafetensorError, OSError) as error:
        fail(
            op="demo",
            rule="--weights must be a safetensors file",
            got=f"{path} ({error})",
            fix="Save the tensors with safetensors.torch.save_file(tensors, path)",
        )
    check(
        bool(matrices),
        op="demo",
        rule="--weights needs at least one 2-D tensor of float32, bfloat16 or float16",
        got=f"{path} with {total} other tensors",
        fix="Pass a file with a model's weight matrices",
    )
    source = Source(
        name=name or str(path),
        matrices=len(matrices),
        skipped=total - len(matrices),
        values=sum(w.numel() for w in matrices.values()),
        nbytes=sum(w.nbytes for w in matrices.values()),
    )
    return Weights(source, matrices)


def _read(path: Path) -> tuple[dict[str, Tensor], int]:
    """Return the matrices, and the number of all tensors in the file."""
    with safe_open(path, framework="pt") as file:
        keys = sorted(file.keys())
        wanted = [key for key in keys if _is_matrix(file.get_slice(key))]
        return {key: file.get_tensor(key) for key in wanted}, len(keys)


def _is_matrix(tensor_slice: Any) -> bool:
    """Return True if a slice is 2-D, float and not empty; reads only the file's header."""
    shape, dtype = tensor_slice.get_shape(), tensor_slice.get_dtype()
    return len(shape) == 2 and 0 not in shape and dtype in FLOATS
