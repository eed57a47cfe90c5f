"""Valid arguments for every raw op of ``torch.ops.qtensor``, and ways to make them wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import layer_weights_cases as layers
import learned_cases
import torch
from attention_cases import MAKERS as ATTENTION
from formats import BY_NAME
from scaled_mm_cases import scaled_grouped_gemm
from torch import Tensor

import qtensor
import qtensor.debug  # noqa: F401 - defines the ops of recordings
from qtensor.core.linear_plans import BackwardPlan, ForwardPlan, plan_text
from qtensor.core.quantizer_registry import parse

Arguments = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ANY_DTYPE = (*DTYPES, torch.float64, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn)
ROWS = (1, 2, 3, 16, 31, 32, 33, 128, 130)
COLUMNS = (16, 32, 64, 128, 130, 160)
BATCHES: tuple[tuple[int, ...], ...] = ((), (), (), (2,), (1, 3))
ACTIVATIONS = ("gelu", "relu", "silu", "swiglu", "clamped_swiglu(alpha=1.5)")


class Maker:
    """Make the arguments of a valid call; the seed is that of every choice and value."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.columns = self.random.choice(ROWS), self.random.choice(COLUMNS)
        self.groups = self.random.choice((1, 2, 4))
        self.dtype = self.random.choice(DTYPES)

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal values of ``shape``."""
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def maybe(self, value: Any) -> Any:
        """Return the value, or None."""
        return self.random.choice((value, None))

    def kind(self) -> str:
        """Return the name of a format."""
        return self.random.choice(sorted(BY_NAME))

    def quantizer(self, **usage: bool) -> Any:
        """Return a quantizer, by default of rowwise data, columnwise data or both."""
        both = ((True, False), (False, True), (True, True))
        rowwise, columnwise = self.random.choice(both)
        usage = {"rowwise": rowwise, "columnwise": columnwise} | usage
        return qtensor.quantizer(self.kind(), **usage)

    def values(self, quantizer: Any) -> Arguments:
        """Return the scale and the seed that a quantizer needs."""
        needed = quantizer.needs_scale
        return {
            "scale": torch.tensor([0.5]) if needed else None,
            "seed": torch.tensor([7]),
        }

    def operand(self, *shape: int, columnwise: bool) -> tuple[list[Tensor], str]:
        """Return (buffers, canonical text) of matrices, or (one plain tensor, "")."""
        if self.random.random() < 0.3:
            return [self.floats(*shape)], ""
        quantizer = self.quantizer(rowwise=not columnwise, columnwise=columnwise)
        x = self.floats(*shape, dtype=torch.float32)
        made = torch.ops.qtensor.quantize(x, quantizer.canonical, **self.values(quantizer))
        return made[: len(quantizer.slots)], quantizer.canonical

    def pair(self, layout: str, m: int, n: int, k: int, batch: Any = ()) -> Arguments:
        """Return both operands of a product in a layout; ``b`` may have no batch."""
        a_shape = (*batch, *((k, m) if layout == "NT" else (m, k)))
        b_shape = (*self.random.choice((batch, batch, ())), *((n, k) if layout == "TN" else (k, n)))
        a, a_quantizer = self.operand(*a_shape, columnwise=layout == "NT")
        b, b_quantizer = self.operand(*b_shape, columnwise=layout != "TN")
        return {
            **{"a": a, "a_quantizer": a_quantizer, "a_shape": a_shape},
            **{"b": b, "b_quantizer": b_quantizer, "b_shape": b_shape},
        }

    def grouping(self) -> Arguments:
        """Return the sizes of groups, as numbers or as a tensor."""
        sizes = [self.rows // self.groups] * self.groups
        sizes[0] += self.rows - sum(sizes)
        as_numbers = self.random.random() < 0.5
        splits = None if as_numbers else torch.tensor(sizes)
        return {"sizes": sizes if as_numbers else [], "splits": splits, "groups": self.groups}

    def ragged(self, columns: int, grouping: Arguments) -> tuple[list[Tensor], str]:
        """Return the flat buffers of groups of rows, and the canonical text."""
        if self.random.random() < 0.3:
            return [self.floats(self.rows, columns)], ""
        quantizer = self.quantizer(rowwise=True, columnwise=True)
        x, count = self.floats(self.rows, columns, dtype=torch.float32), self.groups
        values = {"scale": torch.full((count,), 0.5) if quantizer.needs_scale else None}
        values["seed"] = torch.arange(count)
        made = torch.ops.qtensor.grouped_quantize(x, quantizer.canonical, **grouping, **values)
        return made[: len(quantizer.slots)], quantizer.canonical

    def ragged_pair(self) -> Arguments:
        """Return both ragged operands of a weight gradient, and their grouping."""
        grouping = self.grouping()
        a, a_quantizer = self.ragged(32, grouping)
        b, b_quantizer = self.ragged(64, grouping)
        return {
            **{"a": a, "a_quantizer": a_quantizer, "a_shape": (self.rows, 32)},
            **{"b": b, "b_quantizer": b_quantizer, "b_shape": (self.rows, 64), **grouping},
        }

    def state(self) -> Arguments:
        """Return the history, steps and cell of delayed scaling."""
        columns = self.random.choice((1, 3, 5))
        return {
            "history": torch.rand(4, columns, generator=self.generator),
            "steps": torch.tensor([1, 0]),
            "cell": torch.rand(self.random.choice((0, 1, columns)), generator=self.generator),
            "cell_step": torch.tensor([1]),
        }


# ---- one function for each op --------------------------------------------------------------------


def _quantize(make: Maker) -> Arguments:
    quantizer = make.quantizer()
    x = make.floats(make.rows, make.columns)
    return {"x": x, "quantizer": quantizer.canonical, **make.values(quantizer)}


def _quantize_inplace(make: Maker) -> Arguments:
    arguments = _quantize(make)
    quantizer = parse(arguments["quantizer"])
    out = quantizer.make_empty(tuple(arguments["x"].shape)).buffers()
    if quantizer.returns_amax:
        out.append(torch.zeros(1))
    return {**arguments, "out": out, "noop_flag": make.maybe(torch.zeros(1))}


def _dequantize(make: Maker) -> Arguments:
    quantizer = make.quantizer()
    x = make.floats(make.rows, make.columns, dtype=torch.float32)
    made = torch.ops.qtensor.quantize(x, quantizer.canonical, **make.values(quantizer))
    buffers = made[: len(quantizer.slots)]
    arguments = {"buffers": buffers, "quantizer": quantizer.canonical, "shape": tuple(x.shape)}
    return {**arguments, "dtype": make.dtype}


def _dequantize_inplace(make: Maker) -> Arguments:
    arguments = _dequantize(make)
    dtype = arguments.pop("dtype")
    return {**arguments, "out": torch.zeros(arguments["shape"], dtype=dtype)}


def _gemm(make: Maker) -> Arguments:
    layout, n = make.random.choice(("TN", "NN", "NT")), make.random.choice((32, 48))
    operands = make.pair(layout, make.rows, n, make.columns, make.random.choice(BATCHES))
    backends = ("auto", "auto", "auto", "reference", "dequant", "tiles", "dot_products", "integer")
    return {
        **operands,
        "layout": layout,
        "dtype": make.dtype,
        "bias": make.maybe(make.floats(n)),
        "backend": make.random.choice(backends),
        "fast": make.random.random() < 0.2,
    }


def _weight_gemm(make: Maker) -> Arguments:
    n, layout = make.random.choice((32, 48)), make.random.choice(("TN", "NN"))
    weight, canonical = layers.quantized(make, n, make.columns, layout == "NN")
    return {
        "x": make.floats(make.rows, make.columns),
        "weight": weight,
        "quantizer": canonical,
        "n": n,
        "bias": make.maybe(make.floats(n)),
        "layout": layout,
    }


def _accumulate(make: Maker) -> Arguments:
    operands = make.pair("NT", 32, 48, make.rows)
    return {"out": torch.ones(32, 48), **operands, "layout": "NT", "overwrite": False}


def _forward_plan(make: Maker) -> ForwardPlan:
    quantizers = [make.quantizer(rowwise=True), make.quantizer(rowwise=True)]
    texts = []
    for quantizer in quantizers:
        columnwise = quantizer.with_usage(rowwise=False, columnwise=True).canonical
        kept = columnwise if quantizer.columnwise and make.random.random() < 0.7 else ""
        texts += [quantizer.canonical, kept]
    return ForwardPlan(*texts, make.dtype)


def _linear_forward(make: Maker) -> Arguments:
    return _linear_forward_of(make, _forward_plan(make))


def _linear_forward_of(make: Maker, plan: ForwardPlan) -> Arguments:
    return {
        **{"x": make.floats(make.rows, make.columns), "weight": make.floats(48, make.columns)},
        **{"bias": make.maybe(make.floats(48)), "plan": plan_text(plan)},
        **{"scales": torch.tensor([0.5, 2.0]), "x_seed": torch.tensor([1])},
        **{"weight_seed": torch.tensor([2])},
    }


def _linear_backward(make: Maker) -> Arguments:
    forward = _forward_plan(make)
    made = torch.ops.qtensor.linear_forward(**_linear_forward_of(make, forward))
    kept = (forward.x_kept, forward.weight_kept)
    count = sum(len(parse(text).slots) for text in kept if text)
    quantizer = make.quantizer(rowwise=True, columnwise=True)
    bias = make.random.random() < 0.5
    plan = BackwardPlan(quantizer.canonical, *kept, make.dtype, torch.float32, bias)
    return {
        **{"dy": make.floats(make.rows, 48), "saved": made[1 : 1 + count]},
        **{"columns": make.columns, "plan": plan_text(plan)},
        **{"scales": torch.tensor([0.5, 2.0, 1.0]), "seed": torch.tensor([3])},
    }


def _norm(make: Maker) -> Arguments:
    return {
        **{
            "x": make.floats(make.rows, make.columns),
            "weight": make.maybe(make.floats(make.columns)),
        },
        **{"bias": make.maybe(make.floats(make.columns)), "eps": 1e-5, "dtype": make.dtype},
        **{"kind": make.random.choice(("layernorm", "rmsnorm")), "zero_centered_gamma": False},
    }


def _norm_backward(make: Maker) -> Arguments:
    forward = _norm(make)
    del forward["bias"], forward["dtype"], forward["eps"]
    rows = torch.rand(make.rows, generator=make.generator)
    mean = rows if forward["kind"] == "layernorm" else rows[:0]
    dy = make.floats(make.rows, make.columns)
    return {**forward, "dy": dy, "mean": mean, "rstd": rows + 1, "bias": True}


def _norm_quantize(make: Maker) -> Arguments:
    quantizer = make.quantizer()
    values = make.values(quantizer)
    keep = make.random.random() < 0.5
    return {**_norm(make), "quantizer": quantizer.canonical, **values, "keep": keep}


def _activation_quantize(make: Maker) -> Arguments:
    kind = make.random.choice(ACTIVATIONS)
    return {**_quantize(make), "kind": kind, "keep": make.random.random() < 0.5}


def _activation_backward(make: Maker) -> Arguments:
    kind, columns = make.random.choice(ACTIVATIONS), make.columns
    width = columns // 2 if "swiglu" in kind else columns
    return {"dy": make.floats(make.rows, width), "x": make.floats(make.rows, columns), "kind": kind}


def _grouped_quantize(make: Maker) -> Arguments:
    quantizer = make.quantizer()
    values = {"scale": torch.full((make.groups,), 0.5) if quantizer.needs_scale else None}
    values["seed"] = torch.arange(make.groups)
    x = make.floats(make.rows, make.columns)
    return {"x": x, "quantizer": quantizer.canonical, **make.grouping(), **values}


def _grouped_gemm(make: Maker) -> Arguments:
    grouping = make.grouping()
    a, a_quantizer = make.ragged(make.columns, grouping)
    quantizer = make.quantizer(rowwise=True)
    b, plain = [], make.random.random() < 0.3
    for _ in range(make.groups):
        weight = make.floats(48, make.columns, dtype=torch.float32)
        made = torch.ops.qtensor.quantize(weight, quantizer.canonical, **make.values(quantizer))
        b += [weight] if plain else made[: len(quantizer.slots)]
    return {
        **{"a": a, "a_quantizer": a_quantizer, "a_shape": (make.rows, make.columns), "b": b},
        **{"b_quantizer": "" if plain else quantizer.canonical, "b_shape": (48, make.columns)},
        **{**grouping, "layout": "TN", "dtype": make.dtype},
        "bias": make.maybe([make.floats(48) for _ in range(make.groups)]),
    }


def _grouped_wgrad(make: Maker) -> Arguments:
    wanted = [i for i in range(make.groups) if make.random.random() < 0.7]
    return {**make.ragged_pair(), "wanted": wanted, "dtype": make.dtype}


def _grouped_accumulate(make: Maker) -> Arguments:
    arguments = _grouped_wgrad(make)
    del arguments["dtype"]
    count = len(arguments["wanted"])
    out = [torch.ones(32, 64) for _ in range(count)]
    return {**arguments, "out": out, "overwrite": [False] * count}


def _delayed_begin(make: Maker) -> Arguments:
    state = make.state()
    columns = state["history"].shape[1]
    algorithm = make.random.choice(("max", "most_recent"))
    return {
        **{"scale": torch.ones(columns), **state, "step": torch.tensor([2]), "advance": True},
        **{"length": make.random.randint(1, 4), "algorithm": algorithm, "margin": 0},
        **{"largest": [448.0] * columns, "rows": None, "new_scale": None, "kept": False},
        "report": make.maybe(torch.tensor([-1, 0])),
    }


def _record_gradient(make: Maker) -> Arguments:
    count = make.random.choice((1, 3))
    amax = [torch.ones(1) for _ in range(count)]
    cell = {"cell": torch.zeros(count), "cell_step": torch.tensor([1])}
    return {**cell, "amax": amax, "ticket": torch.tensor([2, 1])}


def _elementwise(*names: str, **fixed: Any) -> Callable[[Maker], Arguments]:
    def arguments(make: Maker) -> Arguments:
        return {name: make.floats(make.rows, make.columns) for name in names} | fixed

    return arguments


MAKERS: dict[str, Callable[[Maker], Arguments]] = {
    **ATTENTION,
    **learned_cases.MAKERS,
    "quantize": _quantize,
    "quantize_": _quantize_inplace,
    "amax": lambda make: {
        "x": make.floats(make.rows, make.columns),
        "quantizer": make.quantizer().canonical,
    },
    "random_seed": _elementwise("like"),
    "draw_seeds_": lambda make: {
        "like": make.floats(2),
        "draws": torch.zeros(1, dtype=torch.int64),
        "count": 2,
    },
    "dequantize": _dequantize,
    "dequantize_": _dequantize_inplace,
    "dequantize_tensor": lambda make: {"x": make.floats(make.rows, 8), "dtype": make.dtype},
    "gemm": _gemm,
    "weight_gemm": _weight_gemm,
    **layers.MAKERS,
    "gemm_tensor": lambda make: {
        **{"a": make.floats(make.rows, 32), "b": make.floats(48, 32), "layout": "TN"},
        **{"dtype": make.maybe(make.dtype), "bias": make.maybe(make.floats(48))},
    },
    "gemm_accumulate_": _accumulate,
    "postpone_wgrad_": lambda make: {"key": -1, **make.pair("NT", 32, 48, make.rows)},
    "report_accumulated_": lambda make: {"report": torch.tensor([-1, 0])},
    "linear_forward": _linear_forward,
    "linear_backward": _linear_backward,
    "norm": _norm,
    "norm_backward": _norm_backward,
    "norm_quantize": _norm_quantize,
    "activation": lambda make: {
        "x": make.floats(make.rows, make.columns),
        "kind": make.random.choice(ACTIVATIONS),
    },
    "activation_backward": _activation_backward,
    "activation_quantize": _activation_quantize,
    "bias_grad": _elementwise("dy"),
    "add": _elementwise("x", "y"),
    "scale": _elementwise("x", factor=2.0),
    "scale_add": _elementwise("x", "y", factor=2.0),
    "bias_add": lambda make: {
        **{"x": make.floats(make.rows, make.columns), "bias": make.floats(make.columns)},
        "dtype": make.dtype,
    },
    "dropout": lambda make: {
        "x": make.floats(make.rows, make.columns),
        **{"p": 0.5, "seed": torch.tensor([5])},
    },
    "l2_norm": _elementwise("x", eps=1e-5),
    "l2_norm_backward": lambda make: {
        **{"dy": make.floats(make.rows, 32), "x": make.floats(make.rows, 32)},
        **{"rnorm": torch.rand(make.rows, generator=make.generator), "eps": 1e-5},
    },
    "split_sizes": lambda make: {"splits": torch.tensor([3, 4]), "rows": 7, "label": "layer"},
    "listed_sizes": lambda make: {"sizes": [3, 4], "groups": 2, "rows": 7, "label": "layer"},
    "same_rows": lambda make: {
        "rows": torch.ones(2, 5, dtype=torch.uint8),
        "message": "the rows differ",
    },
    "grouped_quantize": _grouped_quantize,
    "grouped_gemm": _grouped_gemm,
    "scaled_grouped_gemm": scaled_grouped_gemm,
    "grouped_wgrad": _grouped_wgrad,
    "grouped_wgrad_accumulate_": _grouped_accumulate,
    "postpone_grouped_wgrad_": lambda make: {"key": -1, **make.ragged_pair()},
    "grouped_bias_grad": lambda make: {
        "dy": make.floats(make.rows, make.columns),
        **make.grouping(),
    },
    "merged_history": lambda make: {**make.state(), "length": make.random.randint(1, 4)},
    "delayed_begin_": _delayed_begin,
    "delayed_read": lambda make: {
        **{"scale": torch.ones(3), "steps": torch.tensor([2, 1]), "report": torch.tensor([-1, 0])},
    },
    "record_amax_": lambda make: {
        **{"history": torch.zeros(4, 5), "amax": [torch.ones(1), torch.ones(2)], "first": 1},
    },
    "record_gradient_amax_": _record_gradient,
    "send_gradient_amax_": lambda make: {
        **{"report": torch.tensor([-1, 0]), "amax": [torch.ones(1)], "ticket": torch.ones(2).long()}
    },
    "record_tensor_": lambda make: {
        **{"buffers": [make.floats(make.rows, 32)], "stored": "", "shape": [make.rows, 32]},
        **{"role": "output", "quantizer": "mxfp8"},
        **{"ticket": torch.tensor([-1]), "token": torch.tensor([-1])},
    },
    "record_groups_": lambda make: {
        **{"x": make.floats(make.rows, 32), "role": "output", "quantizer": "mxfp8"},
        **{"token": torch.tensor([-1]), **make.grouping()},
        "ticket": torch.full((make.groups,), -1),
    },
    "begin_recorded_forward_": lambda make: {"token": torch.tensor([-1])},
    "advance_step_": lambda make: {
        **{"step": torch.zeros(1, dtype=torch.int64), "forward_only": False},
        "counter": make.maybe(torch.zeros(1, dtype=torch.int64)),
    },
}
"""Op -> function that makes the arguments of a valid call."""

RANDOM = {"random_seed", "draw_seeds_"}
"""Ops whose results differ from call to call."""


# ---- wrong arguments -----------------------------------------------------------------------------


def spoil_tensor(choose: random.Random, t: Tensor) -> Tensor:
    """Return a tensor with another size, dtype, layout, device or values."""
    ways: list[Callable[[], Tensor]] = [
        lambda: t[:-1] if t.ndim else t.reshape(1),
        lambda: t.repeat(*[2] * t.ndim),
        lambda: t.repeat_interleave(2, -1)[..., ::2] if t.ndim else t,
        lambda: t.unsqueeze(0),
        lambda: t.reshape(-1),
        lambda: t.t() if t.ndim == 2 else t.flip(0) if t.ndim else t,
        lambda: t[..., :1].expand(t.shape) if t.numel() and t.ndim else t,
        lambda: t.to(choose.choice(ANY_DTYPE)),
        lambda: t.to(torch.complex64),
        lambda: t[:0] if t.ndim else t,
        lambda: t[..., :0] if t.ndim else t,
        lambda: t.new_empty(0),
        lambda: t.reshape(-1)[0] if t.numel() else t,
        lambda: t.to("meta"),
        lambda: torch.empty_like(t).fill_(0),
        lambda: t.to(torch.float32).fill_(float("nan")).to(t.dtype),
        lambda: t.clone().fill_(choose.choice((-1, 3, 100))),
        lambda: t.to(torch.float32).to_sparse(),
        lambda: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
        lambda: qtensor.quantize(t.float(), "mxfp8"),
    ]
    return choose.choice(ways)()


def spoil_list(choose: random.Random, values: list[Any]) -> list[Any]:
    """Return a list with other entries, or another number of them."""
    ways: list[Callable[[], list[Any]]] = [
        lambda: [],
        lambda: values[:-1],
        lambda: [*values, *values[-1:]],
        lambda: values[::-1],
        lambda: [*values[:-1], spoil(choose, values[-1])] if values else [],
        lambda: [spoil(choose, values[0]), *values[1:]] if values else [],
    ]
    return choose.choice(ways)()


def spoil(choose: random.Random, value: Any) -> Any:
    """Return another value of the same kind: most are wrong."""
    if isinstance(value, Tensor):
        return spoil_tensor(choose, value)
    if isinstance(value, tuple | list):
        return spoil_list(choose, list(value))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return choose.choice((0, -1, 1, value + 1, 2 * value, 1 << 40, (1 << 62) + 1, -(1 << 62)))
    if isinstance(value, float):
        return choose.choice((0.0, -1.0, 1.5, float("nan"), float("inf"), 1e308, 1e-310))
    if isinstance(value, torch.dtype):
        return choose.choice((*ANY_DTYPE, torch.complex64, torch.int8))
    if isinstance(value, str):
        texts = ("", "bogus", "mxfp8(rowwise=False)", "fp8(", "nvfp4(x=1)", "TN", "NT", "NN")
        more = ("\0", "ü|%", "x" * 2000, "relu", "swiglu", "rmsnorm", "clamped_swiglu(limit=-1)")
        return choose.choice((*texts, *more, *sorted(BY_NAME)))
    return torch.ones(1)
