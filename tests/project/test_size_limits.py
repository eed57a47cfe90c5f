"""Files stay under 500 lines; a function over 60 lines or six parameters says why."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]
MAX_FILE = 500
MAX_FUNCTION = 60
MAX_PARAMETERS = 6

CODE = sorted(p for f in ("qtensor", "docs", "benchmarks") for p in (ROOT / f).rglob("*.py"))
FILES = sorted({*CODE, *(ROOT / "tests").rglob("*.py")})

_FLAT = "an op's schema is flat: tensors, strings and numbers, no object that bundles them"
_OPTIONS = "options of a layer, named as users of nn.Linear and Transformer Engine know them"
_COMMAND = "the options of a command line: typer reads each from a parameter"
_BYTES = "each parameter is one number of the contract; a bundle would be built for one caller"

REASONS: dict[str, str] = {
    "qtensor/cli/checkpoints.py::convert": _COMMAND,
    "qtensor/cli/checkpoints.py::dequantize": _COMMAND,
    "qtensor/cli/checkpoints.py::inspect": _COMMAND,
    "qtensor/cli/checkpoints.py::report": _COMMAND,
    "qtensor/debug/recording.py::record": (
        "options of a recording, each with a default, as keywords of one public call"
    ),
    "qtensor/integrations/gguf/writing.py::save_gguf": (
        "public; all but three are keyword-only options"
    ),
    "qtensor/kernels/cpu/floats.py::_fused": "what the C function takes, once for both producers",
    "qtensor/storage/ops/products.py::gemm": (
        "the public product: two operands and what to do with them, by name"
    ),
    "qtensor/modules/dot_product_attention.py::DotProductAttention.__init__": _OPTIONS,
    "qtensor/modules/dot_product_attention.py::DotProductAttention.forward": _OPTIONS,
    "qtensor/storage/ops/attention.py::attention": (
        "the public attention: three tensors, the others are keyword-only options"
    ),
    "qtensor/storage/ops/varlen.py::varlen_attention": "the arguments of torch's varlen_attn",
    "qtensor/storage/ops/whole_attention.py::attend": "the schema of torch's op",
    "qtensor/caches/kv_cache.py::KVCache.__init__": (
        "the sizes of a cache, and keyword-only options with defaults"
    ),
    "qtensor/caches/kv_cache.py::KVCache.attention": "options of the public attention",
    "qtensor/integrations/caches.py::QTensorCache.__init__": (
        "formats of the cache, and keyword-only options with defaults"
    ),
    "qtensor/integrations/caches.py::attend": "the interface of attention in transformers",
    "qtensor/integrations/caches.py::make_mask": "the interface of masks in transformers",
    "qtensor/modules/grouped_linear.py::GroupedLinear.__init__": _OPTIONS,
    "qtensor/functional/norm.py::NormFunction.forward": (
        "autograd hands over tensors and options flat"
    ),
    "qtensor/functional/linear/weight.py::quantize_weight": (
        "the contract of the workspace cache, named as in Transformer Engine"
    ),
    "qtensor/modules/layernorm_linear.py::LayerNormLinear.__init__": _OPTIONS,
    "qtensor/modules/layernorm_mlp.py::LayerNormMLP.__init__": _OPTIONS,
    "qtensor/modules/linear.py::LinearBase.__init__": _OPTIONS,
    "qtensor/modules/multihead_attention.py::MultiheadAttention.__init__": _OPTIONS,
    "qtensor/modules/torch_attention.py::TorchMultiheadAttention.__init__": _OPTIONS,
    "qtensor/modules/torch_attention.py::TorchMultiheadAttention.forward": _OPTIONS,
    "qtensor/modules/transformer_layer.py::TransformerLayer.__init__": _OPTIONS,
    "qtensor/modules/transformer_layer.py::TransformerLayer.forward": _OPTIONS,
    "qtensor/reference/float8.py::quantize_blocks_": _BYTES,
    "qtensor/storage/rebuild.py::part": "how a view relates to the whole, each fact by its name",
    "qtensor/checkpoints/saving.py::save": "public; all but three are keyword-only options",
    "qtensor/weights/activations.py::calibrate": "public; all but three are keyword-only options",
    "qtensor/weights/quantize.py::quantize_": "public; all but three are keyword-only options",
    "qtensor/weights/format_search.py::search": "public; all but two are keyword-only options",
    "qtensor/weights/merging.py::merge_lora_": "public; all but two are keyword-only options",
    "qtensor/storage/serialize.py::rebuild": (
        "what a pickle names, flat, so that old files load by position"
    ),
}
"""``folder/file.py::Class.function`` -> why it is over a limit."""


def functions(tree):
    """(qualified name, node) of every function and method."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    yield name, child
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    yield from walk(tree, "")


def parameters(node):
    """Number of parameters, ``self`` and ``cls`` not counted."""
    arguments = node.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    named = named[1:] if named[:1] in (["self"], ["cls"]) else named
    return len(named) + bool(arguments.vararg) + bool(arguments.kwarg)


def lines(node):
    """Lines of a function from its ``def`` on, without its docstring."""
    total = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        total -= first.end_lineno - first.lineno + 1
    return total


def is_kernel(node):
    """Device functions: pointers, sizes, strides and compile-time constants are flat, there is
    nothing to bundle them.
    """
    return any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)


def over(source):
    """Name -> what is too much."""
    found = {}
    for name, node in functions(ast.parse(source)):
        if lines(node) > MAX_FUNCTION:
            found[name] = f"{lines(node)} lines"
        elif parameters(node) > MAX_PARAMETERS and not is_kernel(node):
            found[name] = f"{parameters(node)} parameters"
    return found


def test_files():
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in FILES}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE} == {}


def test_functions():
    found = {
        f"{path.relative_to(ROOT)}::{name}": what
        for path in CODE
        for name, what in over(path.read_text()).items()
    }
    assert {name: what for name, what in found.items() if name not in REASONS} == {}
    assert set(REASONS) - set(found) == set(), "a reason without a function"


def test_reasons_are_written():
    assert all(len(reason.split()) > 4 for reason in REASONS.values())


def test_the_median_file_is_small():
    sizes = sorted(len(p.read_text().splitlines()) for p in CODE)
    assert sizes[len(sizes) // 2] < 150
