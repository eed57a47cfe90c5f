"""Sharded layers on a process group that moves no data: shapes, traces, initial values, saved
memory, wrong arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_helpers import Compiled
from formats import assert_same_bytes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import qtensor

SIZE = 4

without_warning = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)
"""Dynamo makes an autograd.Function when it traces one."""
MXFP8 = qtensor.recipes.MXFP8BlockScaling()
modes = pytest.mark.parametrize("mode", ["column", "row"])
sequences = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])


@pytest.fixture
def world() -> Iterator[Any]:
    """Rank 2 of four, of which there is no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=SIZE)
    yield dist.group.WORLD
    dist.destroy_process_group()


def layer(mode: str | None, sequence: bool = False, **options: Any) -> qtensor.Linear:
    options = {"recipe": MXFP8, "tp_group": dist.group.WORLD, **options}
    return qtensor.Linear(256, 512, parallel_mode=mode, sequence_parallel=sequence, **options)


def shapes(mode: str, sequence: bool, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(input, output) on a rank, for ``rows`` on this rank where the input is split and in all
    where it is not.
    """
    if mode == "column":
        return (rows, 3, 256), (rows * SIZE if sequence else rows, 3, 512 // SIZE)
    return (rows, 3, 256 // SIZE), (rows // SIZE if sequence else rows, 3, 512)


def forward_and_gradients(module: qtensor.Linear, x: Tensor) -> list[Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, module.weight, module.bias], torch.ones_like(y))]


@sequences
@modes
def test_fake_tensors(world: Any, mode: str, sequence: bool) -> None:
    given, wanted = shapes(mode, sequence, 16)
    with FakeTensorMode():
        module = layer(mode, sequence)
        x = torch.randn(given, requires_grad=True)
        y, dx, dw, db = forward_and_gradients(module, x)
    weight = (128, 256) if mode == "column" else (512, 64)
    assert [tuple(t.shape) for t in (y, dx, dw, db)] == [wanted, given, weight, weight[:1]]


COLLECTIVES = {
    ("column", False): ["all_reduce"],
    ("column", True): ["all_gather_into_tensor", "reduce_scatter_tensor"],
    ("row", False): ["all_reduce"],
    ("row", True): ["reduce_scatter_tensor", "all_gather_into_tensor"],
}
"""Those of forward, then those of backward."""


@sequences
@modes
def test_a_symbolic_trace(world: Any, mode: str, sequence: bool) -> None:
    """``make_fx`` sees one collective a direction at most, each waited for, and no size of the
    example.
    """
    module = layer(mode, sequence)
    given, _ = shapes(mode, sequence, 16)

    def run(x: Tensor) -> list[Tensor]:
        return forward_and_gradients(module, x)

    graph = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        torch.randn(given, requires_grad=True)
    )
    called = [str(n.target) for n in graph.graph.nodes if "c10d" in str(n.target)]
    names = [c.split(".")[1] for c in called]
    assert [n for n in names if n != "wait_tensor"] == COLLECTIVES[mode, sequence]
    assert names.count("wait_tensor") == len(names) // 2
    for rows in (8, 24):
        given, wanted = shapes(mode, sequence, rows)
        y, dx, *_ = graph(torch.randn(given, requires_grad=True))
        assert (tuple(y.shape), tuple(dx.shape)) == (wanted, given)


@without_warning
@sequences
@modes
def test_one_graph_for_all_lengths(
    world: Any, fresh_dynamo: None, mode: str, sequence: bool
) -> None:
    module = layer(mode, sequence)
    run = Compiled(module)
    for rows in (16, 8, 24):
        given, wanted = shapes(mode, sequence, rows)
        x = torch.randn(given, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        y = run(x)
        y.sum().backward()
        assert tuple(y.shape) == wanted
        assert x.grad.shape == x.shape
    run.check_graphs(1)


# ---- initial values ------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("given", [None, torch.nn.init.xavier_normal_], ids=["default", "own"])
@modes
def test_initial_values_are_parts_of_the_whole(mode: str, given: Any, quantized: bool) -> None:
    options = {"recipe": MXFP8, "init_method": given}
    torch.manual_seed(3)
    whole = qtensor.Linear(256, 512, **options)
    weights, biases = [], []
    for rank in range(SIZE):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
        try:
            torch.manual_seed(3)
            module = layer(
                mode,
                quantized_params=quantized,
                preserve_high_precision_init_val=quantized,
                **options,
            )
        finally:
            dist.destroy_process_group()
        own = module.get_high_precision_init_val() if quantized else module.weight
        assert own.untyped_storage().nbytes() == own.nbytes, "the whole is kept behind the part"
        if quantized:
            assert isinstance(module.weight, qtensor.MXFP8Tensor)
            want = qtensor.quantize(own, "mxfp8", columnwise=True).dequantize()
            assert_same_bytes(module.weight.dequantize(), want)
        weights.append(own)
        biases.append(module.bias)
    assert_same_bytes(torch.cat(weights, 0 if mode == "column" else 1), whole.weight)
    for bias in biases if mode == "row" else [torch.cat(biases)]:
        assert_same_bytes(bias, whole.bias)


@modes
def test_a_meta_layer_gets_the_same_values(world: Any, mode: str) -> None:
    torch.manual_seed(3)
    want = layer(mode)
    module = layer(mode, device="meta").to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    assert_same_bytes(module.weight, want.weight)
    assert_same_bytes(module.bias, want.bias)


# ---- what is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "bytes_of_input"),
    [
        ({"recipe": None}, 16 * 256 * 4),
        # Columnwise codes of the gathered input, and a factor for 32 rows: (256, 2) padded to (256,
        # 4).
        ({}, 64 * 256 + 256 * 4),
        ({"save_original_input": True}, 16 * 256 * 4),
    ],
    ids=["high_precision", "quantized", "original"],
)
def test_saved_bytes_of_a_gathered_input(
    world: Any, options: dict[str, Any], bytes_of_input: int
) -> None:
    module = layer("column", True, bias=False, **options)
    module.weight.requires_grad_()
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x = torch.randn(16, 256)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        module(x)
    assert sum(t.nbytes for t in saved if t is not module.weight) == bytes_of_input


# ---- wrong arguments -----------------------------------------------------------------------------


def refused(message: str) -> Any:
    """Expect an error "op: rule; got"; the rank follows the op."""
    op, _, rest = message.partition(":")
    text = re.escape(f"{op} (rank 2 of 4):{rest}")
    return pytest.raises(qtensor.QTensorError, match=f"^{text}")


def test_a_group_of_one_splits_nothing() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        module = layer("row", True)
    finally:
        dist.destroy_process_group()
    x, plain = torch.randn(33, 256), qtensor.Linear(256, 512, recipe=MXFP8)
    plain.load_state_dict(module.state_dict())
    assert_same_bytes(module(x), plain(x))
    assert "tp_size" not in repr(module)


def test_the_group_without_a_mode_is_not_used(world: Any) -> None:
    assert layer(None).weight.shape == (512, 256)


def test_repr(world: Any) -> None:
    assert repr(layer("row")).endswith(", parallel_mode='row', tp_size=4)")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (256, 510),
            {"parallel_mode": "column"},
            "Linear[up]: out_features must be a multiple of the 4 ranks of tp_group; got 510.",
        ),
        (
            (250, 512),
            {"parallel_mode": "row"},
            "Linear[up]: in_features must be a multiple of the 4 ranks of tp_group; got 250.",
        ),
        (
            (256, 512),
            {"parallel_mode": "rows"},
            "Linear[up]: parallel_mode must be None, 'column' or 'row'; got 'rows'.",
        ),
        (
            (256, 512),
            {"parallel_mode": "row", "tp_group": None},
            "Linear[up]: parallel_mode needs the process group that the weight is split over; got "
            "tp_group=None.",
        ),
        (
            (256, 512),
            {"parallel_mode": "row", "tp_group": "tp"},
            "Linear[up]: tp_group must be a process group that this rank belongs to; got 'tp'.",
        ),
        (
            (256, 512),
            {"sequence_parallel": True},
            "Linear[up]: sequence_parallel needs parallel_mode; got parallel_mode=None.",
        ),
    ],
    ids=["out_features", "in_features", "mode", "no_group", "a_name", "sequence_alone"],
)
def test_wrong_arguments(
    world: Any, arguments: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    with refused(message):
        qtensor.Linear(*arguments, name="up", **{"tp_group": world, **options})


def test_a_group_of_others(world: Any) -> None:
    with refused("Linear: tp_group must be a process group that this rank belongs to"):
        layer("row", tp_group=dist.new_group([0, 1]))


@pytest.mark.parametrize(
    ("mode", "shape", "message"),
    [
        (
            "row",
            (6, 2, 64),
            "Linear[up] output: dim 0 must be a multiple of the 4 ranks of tp_group, which share "
            "it; got (6, 2).",
        ),
        (
            "row",
            (64,),
            "Linear[up] input: sequence_parallel splits dim 0, so there must be one beside the "
            "features; got (64,).",
        ),
        (
            "column",
            (256,),
            "Linear[up] input: sequence_parallel splits dim 0, so there must be one beside the "
            "features; got (256,).",
        ),
        ("column", (8, 64), "Linear[up] input: its last dim must be in_features, 256; got"),
    ],
)
def test_wrong_inputs(world: Any, mode: str, shape: tuple[int, ...], message: str) -> None:
    module = layer(mode, True, name="up")
    with refused(message):
        module(torch.randn(shape))


def test_a_part_that_is_no_whole_block(world: Any) -> None:
    """64 features are two blocks; a fourth of them is half a block."""
    module = qtensor.Linear(64, 256, parallel_mode="row", tp_group=world, recipe=MXFP8, name="up")
    message = (
        "in_features and out_features, of each rank's part, must be multiples of 32; got 16 and "
        "256."
    )
    with refused(f"Linear[up] input[mxfp8]: {message}"):
        module(torch.randn(8, 16))
