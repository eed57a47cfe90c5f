"""Name the tensors of model families in transformers and in llama.cpp.

The names and what happens to values are those of llama.cpp's own converter; the tests compare the
names with the maps of the package ``gguf``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qtensor.core.errors import UnsupportedError, fail

ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
FFN = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
LLAMA = {**ATTENTION, **FFN, "post_attention_layernorm": "ffn_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA2 = {
    **ATTENTION,
    **FFN,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
"""Modules outside of the layers."""


@dataclass(frozen=True)
class Experts:
    """Name the experts of a layer.

    Attributes:
        module: name of the module in a layer: ``"mlp.experts"``.
        projections: name of a matrix of one expert -> that of the stack of all experts.
        interleaved: True for gpt-oss: ``gate_up_proj`` (E, N, K) holds gate and up in turns of
            rows, and experts have biases. Otherwise every expert has tensors of its own.
        stacked: True if some checkpoints hold a stack ``gate_up_proj`` (E, 2N, K), with gate first.
    """

    module: str
    projections: Mapping[str, str]
    interleaved: bool = False
    stacked: bool = False


GATED = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


@dataclass(frozen=True)
class Family:
    """Describe how a family of models lies in a GGUF file.

    Attributes:
        architecture: ``general.architecture``.
        model_types: values of ``model_type`` in config.json; the first is that of a file.
        block: module of a layer in transformers -> in llama.cpp.
        experts: names of stacked experts.
        pairs: True if llama.cpp rotates neighbouring rows of q and k as a pair. transformers
            rotates row i of a head with row i + half.
        norm_offset: what a stored norm has beyond that of transformers: Gemma multiplies by 1 + w.
        needs: entries of the config that llama.cpp takes for granted.
        scaled: True if llama.cpp (0.3.36 of its Python package) multiplies by the factors of NVFP4
            weights in feed-forward layers; it does so in attention in all families.
        pattern: n if every n-th layer attends to all positions and the others to a window, in files
            that do not name the layers; 0 if there is no window.
    """

    architecture: str
    model_types: tuple[str, ...]
    block: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    experts: Experts | None = None
    pairs: bool = False
    norm_offset: float = 0.0
    needs: Mapping[str, Any] = field(default_factory=dict)
    scaled: bool = False
    pattern: int = 0


_SILU = {"hidden_act": "silu"}
_TIED = {"tie_word_embeddings": True}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
FAMILIES = (
    Family("llama", ("llama", "mistral"), pairs=True, needs=_SILU, scaled=True),
    Family(
        "llama",
        ("mixtral",),
        {
            **ATTENTION,
            "post_attention_layernorm": "ffn_norm",
            "block_sparse_moe.gate": "ffn_gate_inp",
        },
        Experts(
            "block_sparse_moe.experts",
            {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
        ),
        pairs=True,
        needs=_SILU,
        scaled=True,
    ),
    Family("qwen2", ("qwen2",), needs={**_SILU, "use_sliding_window": False}),
    Family(
        "qwen3",
        ("qwen3",),
        {**LLAMA, **HEAD_NORMS},
        needs={**_SILU, "use_sliding_window": False},
        scaled=True,
    ),
    Family(
        "qwen3moe",
        ("qwen3_moe",),
        {
            **ATTENTION,
            **HEAD_NORMS,
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate": "ffn_gate_inp",
        },
        Experts("mlp.experts", GATED, stacked=True),
        needs={
            **_SILU,
            "use_sliding_window": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        scaled=True,
    ),
    Family("gemma", ("gemma",), norm_offset=1.0, needs=_TIED),
    Family("gemma2", ("gemma2",), GEMMA2, norm_offset=1.0, needs={**_GELU, **_TIED}, pattern=2),
    Family(
        "gemma3",
        ("gemma3_text", "gemma3"),
        {**GEMMA2, **HEAD_NORMS},
        norm_offset=1.0,
        needs={**_GELU, "use_bidirectional_attention": False},
        pattern=6,
    ),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        {
            **ATTENTION,
            "self_attn.sinks": "attn_sinks",
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
        },
        Experts("mlp.experts", GATED, interleaved=True),
        needs={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        pattern=2,
    ),
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a model by its config.

    Raises:
        UnsupportedError: no family has its ``model_type``, or llama.cpp computes something else
            than an entry of the config says.
    """
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            _check(family, config)
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    fix = "Write it with llama.cpp's convert_hf_to_gguf.py, or name its tensors yourself"
    fail("gguf", f"the config has a model_type of {known}", repr(kind), fix, UnsupportedError)


def family_in(architecture: object, experts: bool) -> Family:
    """Return the family of a file by ``general.architecture``, and whether it has experts."""
    for family in FAMILIES:
        if family.architecture == architecture and experts == (family.experts is not None):
            return family
    known = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES))
    fix = "Read it with qtensor.checkpoints.open, which keeps the names of the file"
    rule = f"general.architecture is one of {known}"
    fail("gguf", rule, repr(architecture), fix, UnsupportedError)


def _check(family: Family, config: Mapping[str, Any]) -> None:
    """Refuse what llama.cpp computes in another way."""
    for key, value in family.needs.items():
        if config.get(key, value) not in (value, None):
            rule = f"llama.cpp computes {family.architecture} with {key} = {value!r}"
            fix = "Such a model gives other results there"
            fail("gguf", rule, repr(config[key]), fix, UnsupportedError)


def layer_types(family: Family, layers: int) -> list[str]:
    """Return ``layer_types`` of a config that llama.cpp takes if a file does not name them."""
    last = family.pattern - 1
    kinds = ("sliding_attention", "full_attention")
    return [kinds[i % family.pattern == last] for i in range(layers)]
