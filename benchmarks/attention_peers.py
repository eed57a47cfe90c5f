"""Other ways to compute attention of one query over a cache of keys and values on a CPU.

Their caches hold the tokens that they are given, in formats of their own. Each says how many bytes
it takes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import decode_llama_cpp, decode_peers

Call = Callable[[], Tensor]
"""Returns (B, Hq * D) float32."""
SPREAD = 4.0
"""Keys and values up to this many standard deviations have codes of onnxruntime."""


@dataclass(frozen=True)
class Peer:
    """A library's attention over a cache in one format."""

    name: str
    make: Callable[[Tensor, Tensor, Tensor, int], tuple[int, Call]]
    """(q (B, Hq, 1, D), k (B, H, S, D), v, threads) -> the bytes of the cache, and the call."""
    text: str


# ---- torch


def flex(q: Tensor, causal: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return torch's compiled FlexAttention of keys and values (B, H, S, D).

    Args:
        q: (B, Hq, M, D).
        causal: query m sees the tokens up to m; else all.
    """
    from torch.nn.attention.flex_attention import (  # noqa: PLC0415 - it imports the compiler
        create_block_mask,
        flex_attention,
    )

    mask = None
    if causal:
        count = q.shape[2]
        mask = create_block_mask(
            lambda b, h, query, token: token <= query, None, None, count, count, device="cpu"
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


# ---- onnxruntime


def _onnxruntime(bits: int) -> Callable[[Tensor, Tensor, Tensor, int], tuple[int, Call]]:
    def make(q: Tensor, k: Tensor, v: Tensor, threads: int) -> tuple[int, Call]:
        """The call writes the last token again: the operator appends the tokens it gets."""
        batch, heads, tokens, size = k.shape
        session = _session((q.shape[1], heads, bits, threads))
        caches = [_encoded(t, bits) for t in (k, v)]
        new = [t[:, :, -1].reshape(batch, 1, -1).float().contiguous() for t in (k, v)]
        factor = torch.tensor([SPREAD / ((1 << (bits - 1)) - 1)])
        y = torch.empty(batch, 1, q.shape[1] * size)
        inputs = {
            "q": q.float().reshape(batch, 1, -1).contiguous(),
            **dict(zip(("k", "v"), new, strict=True)),
            **dict(zip(("past_k", "past_v"), caches, strict=True)),
            "lengths": torch.full((batch,), tokens - 1, dtype=torch.int32),
            "total": torch.tensor(tokens, dtype=torch.int32),
            **{"k_factor": factor, "v_factor": factor},
        }
        outputs = {"y": y, "present_k": caches[0], "present_v": caches[1]}
        binding = session.io_binding()
        for bind, named in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, t in named.items():
                kind = str(t.dtype).removeprefix("torch.")
                bind(name, "cpu", 0, kind, list(t.shape), t.data_ptr())

        def call(memory: tuple[Any, ...] = (inputs, outputs)) -> Tensor:
            session.run_with_iobinding(binding)
            return y.flatten(1)

        return sum(t.nbytes for t in caches), call

    return make


def _encoded(t: Tensor, bits: int) -> Tensor:
    """Return the codes of a cache with one factor."""
    top = (1 << (bits - 1)) - 1
    codes = (t.float() * (top / SPREAD)).round_().clamp_(-top, top)
    if bits == 8:
        return codes.to(torch.int8)
    pairs = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


@functools.cache
def _session(options: tuple[int, int, int, int]) -> Any:
    """Return a session of one ``GroupQueryAttention``.

    Args:
        options: heads of queries, heads of keys, bits of a code, threads.
    """
    onnx: Any = importlib.import_module("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    q_heads, heads, bits, threads = options
    node = helper.make_node(
        "GroupQueryAttention",
        # Without rotary embedding, positions, bias and sinks.
        [*"qkv", "past_k", "past_v", "lengths", "total", *[""] * 5, "k_factor", "v_factor"],
        ["y", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=q_heads,
        kv_num_heads=heads,
        kv_cache_bit_width=bits,
        k_quant_type="PER_TENSOR",
        v_quant_type="PER_TENSOR",
    )
    stored = kinds.INT8 if bits == 8 else kinds.UINT8
    row, rows = ["b", 1, None], ["b", heads, None, None]
    inputs = {
        **dict.fromkeys("qkv", (kinds.FLOAT, row)),
        **dict.fromkeys(("past_k", "past_v"), (stored, rows)),
        **{"lengths": (kinds.INT32, ["b"]), "total": (kinds.INT32, [])},
        **dict.fromkeys(("k_factor", "v_factor"), (kinds.FLOAT, [1])),
    }
    outputs = {
        "y": (kinds.FLOAT, row),
        **dict.fromkeys(("present_k", "present_v"), (stored, rows)),
    }
    graph = helper.make_graph(
        [node],
        "attention",
        *(
            [helper.make_tensor_value_info(name, *described) for name, described in named.items()]
            for named in (inputs, outputs)
        ),
    )
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    return decode_peers.session(model.SerializeToString(), threads)


# ---- llama.cpp


def _llama_cpp(name: str) -> Callable[[Tensor, Tensor, Tensor, int], tuple[int, Call]]:
    def make(q: Tensor, k: Tensor, v: Tensor, threads: int) -> tuple[int, Call]:
        ggml = decode_llama_cpp.library()
        owner, kind, f32 = decode_llama_cpp.Owner(ggml), ggml.type_of(name), ggml.type_of("f32")
        q = q.float().contiguous()
        caches = [_stored(ggml, kind, t) for t in (k, v)]
        y = torch.empty(q.shape[0], q.shape[1] * q.shape[3])
        # ggml names the dims from the last one on.
        operands = [
            ggml.new_tensor_4d(owner.context, kind_of, *reversed(t.shape))
            for kind_of, t in ((f32, q), (kind, k), (kind, v))
        ]
        result = ggml.flash_attn_ext(owner.context, *operands, None, q.shape[3] ** -0.5, 0.0, 0.0)
        for tensor, memory in zip((*operands, result), (q, *caches, y), strict=True):
            owner.place(tensor, memory)
        return sum(t.nbytes for t in caches), owner.computing(result, y, threads)

    return make


def _stored(ggml: decode_llama_cpp.Library, kind: int, t: Tensor) -> Tensor:
    """Return the bytes of a cache (B, H, S, D) in a type of ggml."""
    rows, size = t.numel() // t.shape[-1], t.shape[-1]
    t = t.float().contiguous()
    codes = torch.empty(rows, ggml.row_size(kind, size), dtype=torch.uint8)
    ggml.quantize_chunk(kind, t.data_ptr(), codes.data_ptr(), 0, rows, size, None)
    return codes


PEERS = (
    *(
        Peer(
            f"onnxruntime {bits}",
            _onnxruntime(bits),
            f"`GroupQueryAttention`, {bits}-bit integers with one factor, float32 q",
        )
        for bits in (8, 4)
    ),
    *(
        Peer(f"llama.cpp {name}", _llama_cpp(name), "`ggml_flash_attn_ext` without mask, float32 q")
        for name in ("f16", "q8_0", "q4_0")
    ),
)


def peers() -> tuple[list[Peer], dict[str, str], dict[str, str]]:
    """Return the peers that run here, versions by library, and missing ones with the reason.

    A peer runs if it gives the attention of a small cache within the error of its codes.
    """
    found, versions, absent = [], {}, {}
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, m, 64, generator=random) for n, m in ((4, 1), (2, 40), (2, 40)))
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).flatten(1)
    for peer in PEERS:
        try:
            if peer.name.startswith("onnxruntime"):
                importlib.import_module("onnx")
                runtime: Any = importlib.import_module("onnxruntime")
                versions["onnxruntime"] = runtime.__version__
            if peer.name.startswith("llama.cpp"):
                versions["ggml"] = decode_llama_cpp.library().version().decode()
            _, call = peer.make(q, k, v, 1)
            if not (call() - want).abs().max() < 0.4 * want.abs().max():
                raise RuntimeError("another result than torch's")
        except Exception as error:  # noqa: BLE001 - a foreign library may fail in any way
            absent[peer.name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        else:
            found.append(peer)
    return found, versions, absent
