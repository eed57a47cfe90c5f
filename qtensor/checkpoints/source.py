"""``Source``: what a layout reads of an open file, besides the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qtensor.checkpoints.containers.base import TensorInfo

_MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Source:
    """Hold what a layout reads besides the weights: names, shapes, header texts and JSON files."""

    path: str
    """Path for messages."""
    tensors: Mapping[str, TensorInfo]
    """Every stored tensor by name."""
    headers: tuple[Mapping[str, str], ...] = ()
    """The texts (``__metadata__``) of each file's header."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json, or an empty dict."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other JSON files of the folder that layouts read, by name: hf_quant_config.json."""
    kind: str = "safetensors"
    """The container: ``"safetensors"``, ``"torch"`` or ``"gguf"``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the container has: records of a pickle, key-values of GGUF."""
    read: Callable[[str], Tensor] | None = None
    """Return a stored tensor by name. ``recognises`` must not call it; a layout whose description
    lies in small tensors (ComfyUI) calls it in ``groups``."""

    @functools.cached_property
    def quantization(self) -> Mapping[str, Any]:
        """Return ``quantization_config`` of the config, or of its text or language model part.

        One that names its method comes before one that does not.
        """
        parts = (self.config, *(self.config.get(k) for k in ("text_config", "llm_config")))
        found = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
        filled = [entry for entry in found if isinstance(entry, dict) and entry]
        return next((e for e in filled if e.get("quant_method")), filled[0] if filled else {})

    @property
    def method(self) -> str:
        """Return ``quant_method`` in lower case, or ""."""
        return str(self.quantization.get("quant_method") or "").lower()

    @functools.cached_property
    def model_dtype(self) -> torch.dtype | None:
        """Return the dtype of the model that the config names, or None."""
        for part in (self.config, *(self.config.get(k) for k in ("text_config", "llm_config"))):
            if isinstance(part, dict):
                name = part.get("torch_dtype") or part.get("dtype")
                dtype = getattr(torch, str(name).removeprefix("torch."), None)
                if isinstance(dtype, torch.dtype) and dtype in _MODEL_DTYPES:
                    return dtype
        return None
