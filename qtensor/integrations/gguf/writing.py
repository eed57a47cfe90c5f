"""Write a model of transformers as a GGUF file."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from qtensor import checkpoints
from qtensor.checkpoints import Checkpoint
from qtensor.checkpoints.buffers import rowwise_parts
from qtensor.checkpoints.checkpoint import open_with_factors
from qtensor.checkpoints.input_transforms import PRE_SCALE, ROTATION
from qtensor.checkpoints.nvfp4_factor import factor_in
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.core.texts import some
from qtensor.integrations.gguf.families import family_of
from qtensor.integrations.gguf.metadata import frequency_factors, key_values, text_config
from qtensor.integrations.gguf.naming import (
    FREQUENCIES,
    Entry,
    Renamed,
    check_complete,
    check_known,
    plain_name,
    to_gguf,
)
from qtensor.integrations.gguf.tokenizer import tokenizer_pairs
from qtensor.modules.input_hook import TRANSFORM
from qtensor.storage.tensor import QuantizedTensor

PathLike = str | os.PathLike[str]
FORMATS = ("mxfp4", "nvfp4")
"""Formats that GGUF files hold."""
_OTHER_PARTS = ("vision", "multi_modal", "multimodal", "audio", "image", "embed_vision")
"""How the names of parts of a model begin, besides its language model."""
_ACTIVATIONS = ("k_scale", "v_scale", "q_scale", "input_global_scale")


def save_gguf(
    model: nn.Module | Mapping[str, Tensor] | PathLike,
    path: PathLike,
    config: Mapping[str, Any] | None = None,
    *,
    decode: torch.dtype | None = None,
    metadata: Mapping[str, Any] | PathLike | None = None,
    accept_unscaled: bool = False,
    overwrite: bool = False,
) -> dict[str, str]:
    """Write a model as a GGUF file with the names, the metadata and the rows of llama.cpp.

    Families are Llama, Mistral, Mixtral, Qwen 2, Qwen 3, Qwen 3 MoE, Gemma 1 to 3 and gpt-oss.
    NVFP4 and MXFP4 weights keep their codes and factors. Vectors, norms, routers and biases become
    float32, other plain tensors keep their dtype; the output layer is left out if it is tied.

    Args:
        model: a model of transformers; a folder or file that ``qtensor.checkpoints`` opens; an open
            checkpoint; or a state dict with the names of checkpoints.
        path: a file that ends in ``.gguf``.
        config: config.json of the model; by default that of ``model``.
        decode: dtype for quantized weights that GGUF has no type for, such as FP8: they are decoded
            as their origin does. None refuses them.
        metadata: further key-values, such as ``{"general.name": "x"}``; or the tokenizer: a folder
            with the tokenizer.json of Llama 3, Qwen or gpt-oss, or a GGUF file of the model.
            Without a tokenizer, llama.cpp computes logits of token ids and reads no text.
        accept_unscaled: True to write NVFP4 weights in feed-forward layers of Qwen 2, Gemma and
            gpt-oss: llama.cpp 0.3.36 reads them and forgets their tensor factors there.
        overwrite: True to replace a file.

    Returns:
        Tensors and entries of the config that are left out, with the reason.

    Raises:
        CheckpointError: GGUF cannot hold a weight, or the file exists.
        UnsupportedError: the family is not among these, llama.cpp computes something else than the
            config says, a tensor has no place or is missing, ``decode`` is None and needed, or
            layers scale or rotate their inputs.
    """
    if isinstance(model, (str, os.PathLike)):
        with open_with_factors(model) as checkpoint:
            return save_gguf(
                checkpoint,
                path,
                config,
                decode=decode,
                metadata=metadata,
                accept_unscaled=accept_unscaled,
                overwrite=overwrite,
            )
    state, found = _weights(model)
    _refuse_transforms(state)
    config = text_config(_plain_config(found if config is None else config))
    family = family_of(config)
    names, left_out = _selected(state, config)
    if config.get("sliding_window") and not family.pattern:
        left_out["config.json: sliding_window"] = "llama.cpp attends to all positions"
    plan = to_gguf(family, config, names)
    check_known(plan.unknown, family, "Pass a state dict without them")
    check_complete(family, config["num_hidden_layers"], plan.entries)
    factors = frequency_factors(config)
    if factors is not None:
        plan.entries[FREQUENCIES] = Entry((), lambda: factors)
    finish = functools.partial(_stored, scaled=family.scaled or accept_unscaled)
    tensors = Renamed(plan, _Reader(state, decode).read, finish)
    pairs = {**key_values(family, config), **_metadata(metadata, config["vocab_size"])}
    checkpoints.save(tensors, path, layout="gguf", config=pairs, overwrite=overwrite)
    return left_out


def _plain_config(config: Any) -> Mapping[str, Any]:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping) or not config:
        fix = "Pass config=, the content of config.json"
        fail("save_gguf", "the model has a config", type(config).__name__, fix, ArgumentTypeError)
    return config


def _weights(model: Any) -> tuple[Mapping[str, Tensor], Any]:
    """Return the tensors of a model by the names of checkpoints, and its config."""
    if isinstance(model, Checkpoint):
        return model, model.config
    if isinstance(model, nn.Module):
        from qtensor.integrations.transformers import weights  # noqa: PLC0415 needs transformers

        return weights(model), getattr(model, "config", None)
    if not isinstance(model, Mapping):
        fix = "Pass a model, a path, an open checkpoint or a state dict"
        got = type(model).__name__
        fail("save_gguf", "model holds weights by name", got, fix, ArgumentTypeError)
    return model, None


def _refuse_transforms(state: Mapping[str, Tensor]) -> None:
    """Refuse weights that are right only for inputs that layers scale or rotate."""
    ends = (f".{PRE_SCALE}", f".{ROTATION}", f".{TRANSFORM}.scale", f".{TRANSFORM}.hadamard")
    found = [name for name in state if name.endswith(ends)]
    if isinstance(state, Checkpoint):
        found += state.input_transforms
    if found:
        fix = (
            "Write the weights for plain inputs: call dequantize() of a model of transformers, or "
            "qtensor.checkpoints.dequantize for files"
        )
        rule = "llama.cpp neither scales nor rotates the inputs of layers"
        fail("save_gguf", rule, some(found), fix, UnsupportedError)


def _selected(
    state: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Return the names that are written, and the others with the reason."""
    names, left_out = [], {}
    for name in state:
        own = plain_name(name)
        if own.startswith("lm_head.") and config.get("tie_word_embeddings"):
            left_out[name] = "the output layer is tied to the embeddings"
        elif own.endswith("rotary_emb.inv_freq"):
            left_out[name] = "llama.cpp computes it from the metadata"
        elif own.rpartition(".")[2] in _ACTIVATIONS:
            left_out[name] = "llama.cpp has no such factor of activations"
        elif own.removeprefix("model.").startswith(_OTHER_PARTS):
            left_out[name] = "it is not a part of the language model"
        else:
            names.append(name)
    return names, left_out


class _Reader:
    """Read the tensors of a model, and decode the weights that GGUF has no type for."""

    def __init__(self, state: Mapping[str, Tensor], decode: torch.dtype | None) -> None:
        self._state, self._decode = state, decode

    def read(self, name: str) -> Tensor:
        """Return a plain tensor, or a weight in a format of GGUF files."""
        tensor = self._state[name]
        stored = isinstance(self._state, Checkpoint) and name in self._state.groups
        if isinstance(tensor, QuantizedTensor):
            if tensor.quantizer.format in FORMATS:
                return tensor.detach()
            got = f"{name} in {tensor.quantizer.canonical}"
        elif not stored:
            return tensor.detach()
        else:
            got = f"{name}: {self._state.why_dense(name)}"  # type: ignore[attr-defined]
        if self._decode is None:
            fix = "Pass decode=torch.bfloat16 to write its values, or quantize it to one of them"
            rule = f"GGUF files hold quantized weights in {' and '.join(FORMATS)}"
            fail("save_gguf", rule, got, fix, UnsupportedError)
        if stored:
            return self._state.dense(name, self._decode)  # type: ignore[attr-defined]
        return cast(QuantizedTensor, tensor).dequantize(self._decode)


def _stored(name: str, tensor: Tensor, scaled: bool) -> Tensor:
    """Return a tensor in the dtype in which llama.cpp wants it.

    ``scaled`` is False if llama.cpp forgets the tensor factors of feed-forward layers.
    """
    if isinstance(tensor, QuantizedTensor):
        if not scaled and ".ffn_" in name and tensor.quantizer.format == "nvfp4":
            _check_factor(name, tensor)
        return tensor
    if not tensor.ndim:
        return tensor.float().reshape(1)
    matrix = tensor.ndim > 1 and name.endswith(".weight")
    if not matrix or name.endswith(("_norm.weight", ".ffn_gate_inp.weight")):
        return tensor.float()
    return tensor.contiguous()


def _check_factor(name: str, tensor: QuantizedTensor) -> None:
    """Refuse a tensor factor that llama.cpp would not multiply by."""
    factors = factor_in(tensor, rowwise_parts(tensor))
    if bool((factors != 1).any()):
        rule = "llama.cpp 0.3.36 forgets the tensor factors of NVFP4 in feed-forward layers here"
        fix = "Quantize these to mxfp4, leave them plain, or pass accept_unscaled=True"
        fail("save_gguf", rule, f"{name} with {factors.tolist()[:4]}", fix, UnsupportedError)


def _metadata(given: Mapping[str, Any] | PathLike | None, size: int) -> dict[str, Any]:
    """Return key-values that the caller passes, or a tokenizer of ``size`` tokens."""
    if given is None or isinstance(given, Mapping):
        return {"tokenizer.ggml.model": "none", **(given or {})}
    if os.path.isdir(given):
        return tokenizer_pairs(given, size)
    with checkpoints.open(given, layout="gguf") as other:
        pairs = other.source.extra["key_values"]
        found = {key: value for key, value in pairs.items() if key.startswith("tokenizer.")}
    if "tokenizer.ggml.model" not in found:
        rule, fix = "the file has a tokenizer", "Pass a file of convert_hf_to_gguf.py --vocab-only"
        fail("save_gguf", rule, os.fspath(given), fix)
    return found
