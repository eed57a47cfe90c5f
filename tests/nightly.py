"""Cells of large matrices that `make test` leaves to `make test-all`.

Every test keeps cells in both: each value of each axis is met in `make test`, all pairs of them in `make test-all`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Cell = Mapping[str, Any]

STATE_AND_RANDOM = ("delayed", "nvfp4")
"""Recipes with state and with random numbers: what can differ between eager and compiled code is in these."""


def _modules(cell: Cell) -> bool:
    return cell["module"] not in ("linear", "swiglu_mlp") and cell["recipe"] not in (
        "current",
        "nvfp4",
    )


def _one_recipe(cell: Cell) -> bool:
    return cell["module"] != "linear" and cell["recipe"] != "mxfp8"


def _stateful(cell: Cell) -> bool:
    return cell["module"] != "linear" and cell["recipe"] not in STATE_AND_RANDOM


def _compiled(cell: Cell) -> bool:
    return cell["backend"] == "aot_eager" and cell["recipe"] not in ("delayed", "mxfp8")


def _grouped_ops(cell: Cell) -> bool:
    return "grouped" in cell["name"] and cell["case"].name not in ("fp8_delayed", "mxfp8", "nvfp4")


_ONE_CODE = ("GELU", "QGELU", "ReLU", "SReLU", "SiLU", "GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU")
"""Activations that differ from SwiGLU by a name."""
_BACKWARD = ("Dropout", "ExtraInput", "GroupedLinear", "L2Normalization", "Quantize", "add_rmsnorm")
"""Operations whose backward has something of its own: random numbers, channels, splits, norms, subclasses."""


def _ops(cell: Cell) -> bool:
    """Operations meet every recipe in the MLP block, and each operation one recipe of blocks."""
    block = cell["name"] == "mlp_with_biases"
    return not block and (cell["recipe"] != "mxfp8" or cell["name"] in _ONE_CODE)


def _ops_backward(cell: Cell) -> bool:
    compiled = cell["forward"] == "compiled"
    if cell["name"] == "mlp_with_biases":
        return compiled and cell["recipe"] not in STATE_AND_RANDOM
    return compiled or cell["recipe"] != "mxfp8" or cell["name"] not in _BACKWARD


RULES: dict[str, Callable[[Cell], bool]] = {
    "test_opcheck.py::test_opcheck": _grouped_ops,
    "test_modules_compile.py::test_training_one_graph_for_all_batch_sizes": _modules,
    "test_modules_compile.py::test_inference_one_graph_for_all_batch_sizes": _one_recipe,
    "test_modules_compile.py::test_inductor_gives_the_bytes_of_eager_code": _stateful,
    "test_compiled_autograd_modules.py::test_enabled": lambda c: (
        c["module"] != "linear" and c["recipe"] not in ("current", "delayed")
    ),
    "test_compiled_autograd_modules.py::test_by_config": lambda c: (
        c["recipe"] not in STATE_AND_RANDOM
    ),
    "test_wgrad_scheduling.py::test_main_grad": _compiled,
    "test_wgrad_scheduling.py::test_delayed_wgrad": lambda c: (
        c.get("module") == "swiglu_mlp" and _compiled(c)
    ),
    "test_wgrad_scheduling.py::test_activations_offloaded_to_the_cpu": _compiled,
    "test_wgrad_scheduling.py::test_checkpointing": lambda c: "backend" in c and _compiled(c),
    "test_weight_workspace.py::test_two_graphs_under_compile_and_no_stale_constant": lambda c: (
        c["recipe"] not in STATE_AND_RANDOM
    ),
    "test_ops_compile.py::test_one_graph_for_all_batch_sizes": _ops,
    "test_ops_compile.py::test_compiled_autograd": _ops_backward,
    "test_ops_compile.py::test_inductor_gives_the_bytes_of_eager_code": lambda c: (
        c["name"] not in ("mlp_with_biases", "Dropout")
        or c["recipe"] not in (*STATE_AND_RANDOM, "mxfp8")
    ),
    "test_ops_compile.py::test_inference": lambda c: c["recipe"] not in STATE_AND_RANDOM,
    "test_grouped_linear_compile.py::test_compiled_autograd": lambda c: (
        c["name"] not in STATE_AND_RANDOM
    ),
    "test_grouped_linear_compile.py::test_a_list_of_sizes_is_two_graphs": lambda c: (
        c["name"] not in STATE_AND_RANDOM
    ),
    "test_grouped_linear_compile.py::test_dynamic_batches_are_one_graph": lambda c: (
        c["name"] not in STATE_AND_RANDOM
    ),
}
"""file::test -> whether a cell is left to `make test-all`."""


KEPT: dict[str, int] = {
    "test_tensor_parallel.py": 3,
    "test_tensor_parallel_blocks.py": 2,
    "test_grouped_linear.py": 3,
    "test_grouped_linear_compile.py": 3,
    "test_grouped_linear_state.py": 3,
    "test_compile_autograd.py": 3,
    "test_compile_boundary.py": 3,
    "test_compile_bytes.py": 3,
    "test_compile_dynamic.py": 3,
    "test_compile_ops.py": 3,
    "test_ops_fusions.py": 3,
    "test_ops_parallel.py": 3,
    "test_quantized_parameters.py": 3,
    "test_wgrad_scheduling.py": 3,
    "test_convert_export.py": 3,
    "test_convert_llama.py": 4,
    "test_fused.py": 3,
    "test_native_floats.py": 2,
    "test_triton_floats.py": 2,
    # One kernel an architecture: nvcc takes two minutes for some.
    "test_cutlass_kernels.py": 3,
}
"""File -> n: `make test` runs the first cell of each of its tests and every n-th after that."""


def is_nightly(test: str, cell: Cell) -> bool:
    """Whether a rule leaves a cell of ``file::test`` to `make test-all`."""
    rule = RULES.get(test)
    return rule is not None and rule(cell)


def is_left_out(file: str, place: int) -> bool:
    """Whether the cell at that place among those of its test is left to `make test-all`."""
    return place % KEPT.get(file, 1) != 0
