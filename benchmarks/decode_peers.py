"""Other ways to multiply a few rows with a weight in 16, 8 or 4 bits on a CPU.

Their weights are random codes: the time does not depend on the values. Each of them says how many
bytes a weight has, factors included.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import decode_llama_cpp

GROUP = 32
"""Elements that share a factor in the 4-bit and 8-bit weights with blocks."""
LEAST_K = 256
"""Columns of a weight are a multiple of this: a block of some types of ggml."""
LLAMA_CPP = {"q8_0": 8, "q6_K": 6, "q4_0": 4, "q4_K": 4, "mxfp4": 4, "nvfp4": 4}
"""Type of ggml -> bits of a code, without factors."""


@dataclass(frozen=True)
class Weight:
    """A weight (N, K) of a peer."""

    nbytes: int
    values: Callable[[], Tensor]
    """Returns (N, K) float32: the values of its codes, for a test."""
    bind: Callable[[Tensor, int], Callable[[], Any]]
    """``bind(x, threads)`` takes (M, K) bfloat16 and returns the call that multiplies."""
    note: str = ""
    """How the library stores the weight, where it can choose."""


@dataclass(frozen=True)
class Way:
    """A peer's kernel."""

    name: str
    bits: int
    make: Callable[[int, int, torch.Generator], Weight]
    """(N, K, generator) -> a random weight."""
    text: str


def _dense(n: int, k: int, generator: torch.Generator) -> Weight:
    weight = torch.randn(n, k, generator=generator).bfloat16()
    return Weight(weight.nbytes, weight.float, lambda x, threads: lambda: F.linear(x, weight))


def _torch_int8(n: int, k: int, generator: torch.Generator) -> Weight:
    codes = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    scales = (torch.rand(n, generator=generator) + 0.5).bfloat16()
    multiply = torch.ops.aten._weight_int8pack_mm.default
    return Weight(
        codes.nbytes + scales.nbytes,
        lambda: codes.float() * scales.float()[:, None],
        lambda x, threads: lambda: multiply(x, codes, scales),
    )


def _torch_int4(n: int, k: int, generator: torch.Generator) -> Weight:
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.int32)
    scales = (torch.rand(k // GROUP, n, generator=generator) + 0.5).bfloat16()
    pairs = torch.stack([scales, torch.zeros_like(scales)], -1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return Weight(
        packed.nbytes + pairs.nbytes,
        lambda: (codes - 8).float() * scales.float().T.repeat_interleave(GROUP, 1),
        lambda x, threads: lambda: multiply(x, packed, GROUP, pairs),
    )


def _onnxruntime(bits: int) -> Callable[[int, int, torch.Generator], Weight]:
    def make(n: int, k: int, generator: torch.Generator) -> Weight:
        codes = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
        scales = torch.rand(n, k // GROUP, generator=generator) + 0.5
        packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
        model = _matmul_nbits(n, k, bits, packed.numpy(), scales.numpy())
        open_session = functools.cache(functools.partial(session, model))
        return Weight(
            packed.nbytes + scales.nbytes,
            lambda: (codes.float() - (1 << (bits - 1))) * scales.repeat_interleave(GROUP, 1),
            lambda x, threads: _run(open_session(threads), x, n),
        )

    return make


def _matmul_nbits(n: int, k: int, bits: int, packed: Any, scales: Any) -> bytes:
    """Return a model of one ``MatMulNBits`` that may compute in 8-bit integers, its fastest way."""
    onnx: Any = importlib.import_module("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    blob = packed.reshape(n, k // GROUP, GROUP * bits // 8)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        **{"K": k, "N": n, "bits": bits, "block_size": GROUP, "accuracy_level": 4},
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", kinds.FLOAT, ["m", k])],
        [helper.make_tensor_value_info("y", kinds.FLOAT, ["m", n])],
        [
            onnx.numpy_helper.from_array(blob, "codes"),
            onnx.numpy_helper.from_array(scales.reshape(-1), "scales"),
        ],
    )
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=sets, ir_version=10).SerializeToString()
    return model


def session(model: bytes, threads: int) -> Any:
    """Return a session of onnxruntime on the CPU."""
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Threads that wait busily would slow down whatever is measured next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _run(session: Any, x: Tensor, n: int) -> Callable[[], Tensor]:
    binding = session.io_binding()
    x, y = x.float(), torch.empty(x.shape[0], n)
    for bind, name, t in ((binding.bind_input, "x", x), (binding.bind_output, "y", y)):
        bind(name, "cpu", 0, "float32", list(t.shape), t.data_ptr())

    def call(memory: tuple[Tensor, Tensor] = (x, y)) -> Tensor:
        session.run_with_iobinding(binding)
        return memory[1]

    return call


def _llama_cpp(name: str) -> Callable[[int, int, torch.Generator], Weight]:
    def make(n: int, k: int, generator: torch.Generator) -> Weight:
        matrix = decode_llama_cpp.Matrix(name, n, k, generator)
        return Weight(matrix.nbytes, matrix.values, matrix.bind, f"stored in `{matrix.memory}`")

    return make


WAYS = (
    Way("bf16", 16, _dense, "`F.linear`"),
    Way("torch int8", 8, _torch_int8, "`_weight_int8pack_mm`, a factor for each row"),
    Way("torch int4", 4, _torch_int4, f"`_weight_int4pack_mm_for_cpu`, groups of {GROUP}"),
    Way("onnxruntime 8", 8, _onnxruntime(8), "`MatMulNBits`, accuracy_level 4, float32 x"),
    Way("onnxruntime 4", 4, _onnxruntime(4), "`MatMulNBits`, accuracy_level 4, float32 x"),
    *(
        Way(f"llama.cpp {name}", bits, _llama_cpp(name), "`ggml_mul_mat`, float32 x")
        for name, bits in LLAMA_CPP.items()
    ),
)


def ways() -> tuple[list[Way], dict[str, str], dict[str, str]]:
    """Return the ways that can run here, versions by library, and missing ones with the reason."""
    found, versions, absent = [], {}, {}
    for way in WAYS:
        try:
            if way.name.startswith("onnxruntime"):
                importlib.import_module("onnx")
                runtime: Any = importlib.import_module("onnxruntime")
                versions["onnxruntime"] = runtime.__version__
            if way.name.startswith("llama.cpp"):
                versions["ggml"] = decode_llama_cpp.library().version().decode()
            weight = way.make(64, LEAST_K, torch.Generator().manual_seed(0))
            weight.bind(torch.zeros(1, LEAST_K).bfloat16(), 1)()
        except (ImportError, AttributeError, RuntimeError) as error:
            absent[way.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        else:
            text = f"{way.text}, {weight.note}" if weight.note else way.text
            found.append(replace(way, text=text))
    return found, versions, absent
