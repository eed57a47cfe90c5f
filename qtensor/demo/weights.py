"""Read the 2-D float tensors of a safetensors file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qtensor.core.errors import check, fail


@dataclass(frozen=True)
class Source:
    """The file that the matrices come from, with totals."""

    name: str
    matrices: int
    """Number of 2-D float tensors, which are quantized."""
    skipped: int
    """Number of other tensors: other ranks, integers, other float types."""
    values: int
    nbytes: int
    """Bytes of the matrices before quantization."""


def load_weights(path: Path, name: str | None = None) -> tuple[Source, dict[str, Tensor]]:
    """Return the totals, and each 2-D float32, bfloat16 or float16 tensor of ``path`` by name.

    Empty ones are left out.
    """
    try:
        with safe_open(path, framework="pt") as file:
            keys = sorted(file.keys())
            wanted = [key for key in keys if _is_matrix(file.get_slice(key))]
            matrices = {key: file.get_tensor(key) for key in wanted}
    except (SafetensorError, OSError) as error:
        rule = "--weights must be a safetensors file"
        fix = "Save the tensors with safetensors.torch.save_file(tensors, path)"
        fail("demo", rule, f"{path} ({error})", fix)
    rule = "--weights needs at least one 2-D tensor of float32, bfloat16 or float16"
    got = f"{path} with {len(keys)} other tensors"
    check(bool(matrices), "demo", rule, got, "Pass a file with a model's weight matrices")
    source = Source(
        name=name or str(path),
        matrices=len(matrices),
        skipped=len(keys) - len(matrices),
        values=sum(w.numel() for w in matrices.values()),
        nbytes=sum(w.nbytes for w in matrices.values()),
    )
    return source, matrices


def _is_matrix(tensor_slice: Any) -> bool:
    """Return True if a slice is 2-D, float and not empty; reads only the file's header."""
    shape = tensor_slice.get_shape()
    return len(shape) == 2 and 0 not in shape and tensor_slice.get_dtype() in ("F32", "BF16", "F16")
