"""Write a byte-level BPE tokenizer, as the tokenizer.json of a folder holds it, for llama.cpp."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

from qtensor.checkpoints.containers.gguf import ARRAY, INT32, GGUFValue
from qtensor.checkpoints.containers.shard_files import read_json
from qtensor.core.errors import UnsupportedError, fail

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens in llama.cpp."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "gpt-4o",
}
"""Regular expression that splits texts before BPE -> ``tokenizer.ggml.pre``, the name of that rule
in llama.cpp: of Llama 3, Qwen 2 and 3, and gpt-oss."""


def tokenizer_pairs(folder: str | os.PathLike[str], size: int) -> dict[str, Any]:
    """Return the key-values of a tokenizer with ``size`` tokens.

    Raises:
        CheckpointError: a file is missing or is not JSON.
        UnsupportedError: llama.cpp has no name for its rules, or it has more tokens.
    """
    about = read_json(os.path.join(folder, "tokenizer.json"))
    model = about.get("model") or {}
    pre = PATTERNS.get(_pattern(about), "")
    if model.get("type") != "BPE" or not pre:
        rule = "tokenizer.json has the byte-level BPE of Llama 3, Qwen or gpt-oss"
        fix = "Pass a GGUF file of convert_hf_to_gguf.py --vocab-only"
        got = f"{model.get('type')} with another expression"
        fail("save_gguf", rule, got, fix, UnsupportedError)
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    added = {token["id"]: token for token in about.get("added_tokens", ())}
    named = {number: text for text, number in model["vocab"].items()}
    named |= {number: token["content"] for number, token in added.items()}
    if max(named) >= size:
        rule = f"the tokenizer has at most {size} tokens, as the config says"
        fail("save_gguf", rule, max(named) + 1, "Pass the folder of the model", UnsupportedError)
    for number, text in named.items():
        tokens[number], kinds[number] = text, NORMAL
        if number in added:
            kinds[number] = CONTROL if added[number].get("special") else USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": _signed(kinds),
        "tokenizer.ggml.merges": merges,
        **_further(folder),
    }


def _signed(numbers: list[int]) -> GGUFValue:
    """Return an array of INT32, the one type that llama.cpp takes for kinds of tokens."""
    head = struct.pack("<IQ", INT32, len(numbers))
    return GGUFValue(ARRAY, head + struct.pack(f"<{len(numbers)}i", *numbers))


def _pattern(about: Mapping[str, Any]) -> str:
    """Return the regular expression that splits texts, or ""."""
    pre = about.get("pre_tokenizer") or {}
    for part in pre.get("pretokenizers", [pre]):
        if part.get("type") == "Split":
            return str(part["pattern"].get("Regex", ""))
    return ""


def _further(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what tokenizer_config.json adds: a first token, and the template of chats."""
    found: dict[str, Any] = {}
    path = os.path.join(folder, "tokenizer_config.json")
    config = read_json(path) if os.path.isfile(path) else {}
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(config.get(key), bool):
            found[f"tokenizer.ggml.{key}"] = config[key]
    template = config.get("chat_template")
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            template = file.read()
    if isinstance(template, str):
        found["tokenizer.chat_template"] = template
    return found
