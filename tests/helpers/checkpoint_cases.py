"""Checkpoints for tests: the examples of other libraries, and state dicts of each layout.

``data/checkpoints`` has one folder for each example; its README says who made it.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

import qtensor
from qtensor.checkpoints.containers.opening import open_container
from qtensor.checkpoints.containers.safetensors import SafetensorsFile

EXAMPLES = Path(__file__).parents[1] / "data" / "checkpoints"


@dataclass(frozen=True)
class Example:
    """An example folder: the layout that it has, and what its weights become."""

    folder: str
    layout: str
    formats: tuple[str, ...]
    """Format ids of the quantized weights; () if all of them are dense only."""
    exact: bool = True
    """True if our arithmetic gives the origin's values (class P), so that both ways are equal."""
    copied: str = ""
    """Why the codes of the quantized tensors are copies, or "" if they lie in the file."""

    @property
    def path(self):
        return EXAMPLES / self.folder


TRANSPOSED = "its codes are transposed"
UNALIGNED = "the words of MLX begin at an address that is not a multiple of four"
# One row for each example of a layout that is read.
READ = (
    Example("comfy_fp8", "comfyui", ("fp8",), exact=False),
    Example("comfy_scaled_fp8_old", "comfyui-scaled-fp8", ("fp8",), exact=False),
    Example("comfy_nvfp4", "comfyui", ("nvfp4",), exact=False, copied="its nibbles are swapped"),
    Example("ct_fp8_block", "compressed-tensors", ("fp8_blockwise",)),
    Example("ct_fp8_channel", "compressed-tensors", ("fp8_rowwise",)),
    Example("ct_fp8_tensor", "compressed-tensors", ("fp8",)),
    Example("ct_mxfp4", "compressed-tensors", ("mxfp4",)),
    Example("ct_mxfp8", "compressed-tensors", ("mxfp8",)),
    Example("ct_nvfp4", "compressed-tensors", ("nvfp4",), exact=False),
    Example("deepseek_v3_ragged", "fine-grained-fp8", ("fp8_blockwise",)),
    Example("gguf_mxfp4", "gguf", ("mxfp4",), copied="its nibbles are rearranged"),
    Example("gguf_nvfp4", "gguf", ("nvfp4",), copied="its nibbles are rearranged"),
    Example("hf_fp8_block", "fine-grained-fp8", ("fp8_blockwise",)),
    Example("hf_fp8_experts", "fine-grained-fp8", ()),
    Example("modelopt_fp8", "modelopt", ("fp8",), exact=False),
    Example("modelopt_fp8_kv", "modelopt", ("fp8",), exact=False),
    Example(
        "modelopt_llama4_experts_nvfp4",
        "modelopt",
        ("nvfp4",),
        exact=False,
        copied=TRANSPOSED,
    ),
    Example("modelopt_mxfp8", "modelopt", ("mxfp8",)),
    Example("modelopt_nvfp4", "modelopt", ("nvfp4",), exact=False),
    Example("gptoss_mxfp4", "gpt-oss", ("mxfp4",)),
    Example("fbgemm_fp8", "fbgemm-fp8", ("fp8_rowwise",)),
    Example("quark_fp8", "quark", ("fp8",)),
    Example("quark_mxfp4", "quark", ("mxfp4",)),
    Example("quark_mxfp6_e3m2", "quark", ("mxfp6",)),
    Example("mlx_mxfp4", "mlx", ("mxfp4",), copied=UNALIGNED),
    Example("mlx_nvfp4", "mlx", ("nvfp4",), copied=UNALIGNED),
    Example("te_extra_state_safetensors", "transformer-engine", ()),
    Example("te_float8", "transformer-engine", ("fp8",)),
    Example("te_mxfp8_nvfp4", "transformer-engine", ("mxfp8", "nvfp4")),
    Example("torchao_float8", "torchao", ("fp8", "fp8_rowwise")),
    Example("torchao_mxfp8_swizzled", "torchao", ("mxfp8",)),
    Example("torchao_nvfp4", "torchao", ("nvfp4",), exact=False),
    Example("torchao_pickle", "torchao", ("fp8_rowwise",)),
    Example("torchao_transformers_float8", "torchao", ("fp8_rowwise",)),
)


def expected(example):
    """(logical name, dtype, tensor) of each result that the origin gave."""
    file = SafetensorsFile(example.path / "expected.safetensors")
    for key in file.infos:
        name, _, dtype = key.rpartition("@")
        yield name, getattr(torch, dtype), file.read(key)


def assert_same_values(got, want):
    """Equal dtype, shape and values; NaN beside NaN; the sign of zero does not count."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    different = (got.float() != want.float()) & ~(got.isnan() & want.isnan())
    first = different.nonzero()[:1].tolist()
    assert not different.any(), f"{int(different.sum())} of {want.numel()} differ, first {first}"


def weight(fmt, rows=48, cols=160, seed=0, nominal=torch.bfloat16, **options):
    """A quantized weight (rows, cols) of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=generator).to(nominal)
    return qtensor.quantize(values, fmt, **options)


def assert_same_bytes(got, want):
    """The same class, quantizer, shape, nominal dtype, and bytes of every buffer."""
    assert type(got) is type(want)
    if isinstance(want, qtensor.QuantizedTensor):
        assert got.quantizer.canonical == want.quantizer.canonical
        for one, other in zip(got.buffers(), want.buffers(), strict=True):
            assert_same_bytes(one, other)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if not isinstance(want, qtensor.QuantizedTensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got, want)]
        assert torch.equal(*raw)


def raw_file(path, header, data=b"", size=None):
    """Write a safetensors file from a header (a dict, a text or bytes), however wrong it is."""
    text = header if isinstance(header, bytes) else None
    if text is None:
        text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


def stored_bytes(path):
    """{name: (dtype, shape, bytes)} of a file or of all files of a folder."""
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("model*.safetensors")) + sorted(path.glob("*.gguf"))
    found = {}
    for file in map(open_container, map(str, files)):
        for name, info in file.infos.items():
            data = file.read(name).contiguous().reshape(-1).view(torch.uint8)
            found[name] = (info.dtype, info.shape, bytes(data.numpy()))
    return found
