"""DistributedDataParallel on two ranks with weights that are stored quantized, frozen or trained.

A rank is a microbatch: the oracle is one process that takes the mean of the ranks' gradients, so
that the bytes of all parameters are equal after several steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from formats import (
    BY_NAME,
    FORMATS,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    rand,
    refusal,
)
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from training import RECIPES

import qtensor
from qtensor.distributed import broadcast_parameters
from qtensor.optim import quantize_state_
from qtensor.storage.ranks.wire import wire_layout

STORED = ["current", "delayed", "blockwise", "mxfp8", "nvfp4"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.01},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
}
STEPS = 3
State = dict[str, Tensor]


def same_state(got: State, want: State, what: str) -> None:
    assert got.keys() == want.keys(), what
    for key, value in want.items():
        if isinstance(value, qtensor.QuantizedTensor):
            assert_same_tensor(got[key], value)
        else:
            assert_same_bytes(got[key], value, f"{what}: {key}")


def replicated(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Return the model under DDP, with the bytes of rank 0 on every rank."""
    broadcast_parameters(model)
    return DistributedDataParallel(model, init_sync=False, **options)


def parameters(model: nn.Module) -> State:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def mean_gradient(model: nn.Module) -> None:
    """Make the sum of two microbatches' gradients their mean; DDP divides before it adds."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= 2


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(64, 64, generator=g) * (1 + 3 * rank), torch.randn(64, 32, generator=g)


# ---- weights that are trained --------------------------------------------------------------------


def model_of(recipe: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    stored = {"quantized_params": True, "recipe": RECIPES[recipe]()}
    return nn.Sequential(
        qtensor.Linear(64, 96, **stored), nn.ReLU(), qtensor.Linear(96, 32, **stored)
    )


def backward(run: Any, recipe: str, number: int, rank: int, **options: Any) -> None:
    x, target = batch(number, rank)
    torch.manual_seed(10 * number + rank)
    with qtensor.autocast(recipe=RECIPES[recipe](), **options):
        nn.functional.mse_loss(run(x), target).backward()


def train(recipe: str, options: str, optimizer: str, backend: str) -> tuple[State, State]:
    rank = dist.get_rank()
    model = model_of(recipe, seed=rank)  # the ranks differ
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    run = replicated(call, **OPTIONS[options])
    before, step = parameters(model), OPTIMIZERS[optimizer](model.parameters())
    for number in range(STEPS):
        step.zero_grad()
        backward(run, recipe, number, rank, amax_reduction_group=dist.group.WORLD)
        step.step()
    return before, parameters(model)


def train_alone(recipe: str, optimizer: str) -> tuple[State, State]:
    model = model_of(recipe, seed=0)
    before, step = parameters(model), OPTIMIZERS[optimizer](model.parameters())
    for number in range(STEPS):
        step.zero_grad()
        with qtensor.autocast(recipe=RECIPES[recipe]()):  # both microbatches are one step
            for rank in range(2):
                backward(model, recipe, number, rank)
        mean_gradient(model)
        step.step()
    return before, parameters(model)


# torch's optimizer of compiled DDP refuses buckets that are smaller than its first one.
@pytest.mark.parametrize(
    ("options", "backend"), [*((name, "") for name in OPTIONS), ("plain", "aot_eager")]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", STORED)
def test_stored_weights_train_as_in_one_process(
    ranks: Ranks, recipe: str, options: str, optimizer: str, backend: str
) -> None:
    """The ranks begin with different weights, so that rank 0's bytes must have arrived."""
    before, after = train_alone(recipe, optimizer)
    for rank, (start, end) in enumerate(ranks.run(train, recipe, options, optimizer, backend)):
        same_state(start, before, f"rank {rank}, before")
        same_state(end, after, f"rank {rank}, after")
        assert isinstance(end["0.weight"], qtensor.QuantizedTensor)
        assert not torch.equal(end["0.weight"], start["0.weight"])


def accumulate(recipe: str) -> list[State]:
    """Two backward passes a step, of which the first does not communicate."""
    rank = dist.get_rank()
    model = model_of(recipe, seed=rank)
    run = replicated(model)
    step = OPTIMIZERS["SGD"](model.parameters())
    with run.no_sync():
        backward(run, recipe, 0, rank)
    local = {name: p.grad.clone() for name, p in model.named_parameters()}
    backward(run, recipe, 1, rank)
    step.step()
    return [local, parameters(model)]


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_no_sync(ranks: Ranks, recipe: str) -> None:
    model, sums = model_of(recipe, seed=0), []
    for rank in range(2):
        model.zero_grad()
        backward(model, recipe, 0, rank)
        first = {name: p.grad.clone() for name, p in model.named_parameters()}
        backward(model, recipe, 1, rank)
        sums.append((first, [p.grad / 2 for p in model.parameters()]))
    for p, a, b in zip(model.parameters(), sums[0][1], sums[1][1], strict=True):
        p.grad = a + b
    OPTIMIZERS["SGD"](model.parameters()).step()
    for rank, (local, after) in enumerate(ranks.run(accumulate, recipe)):
        same_state(local, sums[rank][0], f"rank {rank}, gradients of its own")
        same_state(after, parameters(model), f"rank {rank}")


def join_uneven(recipe: str, throw: bool) -> str:
    """Rank 0 has one batch, rank 1 has two; join shadows the collectives of the missing one."""
    rank = dist.get_rank()
    model = model_of(recipe, seed=rank)
    run = replicated(model)
    step = OPTIMIZERS["SGD"](model.parameters())

    def train_jointly() -> None:
        with run.join(throw_on_early_termination=throw):
            for number in range(1 + rank):
                step.zero_grad()
                backward(run, recipe, number, rank)
                step.step()

    try:
        return refusal(train_jointly)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_join_is_refused(ranks: Ranks, recipe: str) -> None:
    """At its end, torch joins the parameters of the last rank to broadcast them."""
    for text in ranks.run(join_uneven, recipe, False):
        assert "broadcast_parameters(model) first, and pass init_sync=False" in text
    for text in ranks.run(join_uneven, recipe, True):
        assert "exhausted" in text


def train_with_shared_state(recipe: str, state: bool) -> State:
    """Each rank steps a part of the parameters and broadcasts it."""
    # The import warns that torch's own use of torch.jit.script is deprecated.
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    rank = dist.get_rank()
    model = model_of(recipe, seed=rank)
    run = replicated(model)
    step = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.02, fused=True)
    if state:
        quantize_state_(step.optim, {"exp_avg": "mxfp8", "exp_avg_sq": "mxfp8"}, min_numel=64)
    for number in range(STEPS):
        step.zero_grad()
        backward(run, recipe, number, rank, amax_reduction_group=dist.group.WORLD)
        step.step()
    entries = [e for e in step.optim.state.values() if "exp_avg_sq_sqrt" in e]
    assert bool(entries) == state
    return parameters(model)


@pytest.mark.parametrize("state", [False, True], ids=["plain_state", "quantized_state"])
@pytest.mark.parametrize("recipe", STORED)
def test_zero_redundancy_optimizer(ranks: Ranks, recipe: str, state: bool) -> None:
    """Codes and scales of the stepped weights travel: the bytes of one process."""
    model = model_of(recipe, seed=0)
    step = OPTIMIZERS["AdamW-fused"](model.parameters())
    if state:
        quantize_state_(step, {"exp_avg": "mxfp8", "exp_avg_sq": "mxfp8"}, min_numel=64)
    for number in range(STEPS):
        step.zero_grad()
        with qtensor.autocast(recipe=RECIPES[recipe]()):
            for rank in range(2):
                backward(model, recipe, number, rank)
        mean_gradient(model)
        step.step()
    for rank, after in enumerate(ranks.run(train_with_shared_state, recipe, state)):
        same_state(after, parameters(model), f"rank {rank}")


def bucket_view(name: str, columnwise: bool) -> str:
    """Return the error of an optimizer that puts parameters into buckets, and check the layer."""
    # The import warns that torch's own use of torch.jit.script is deprecated.
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    layer = nn.Linear(64, 32)
    weight = BY_NAME[name].quantize(rand(32, 64), columnwise=columnwise)
    layer.weight = nn.Parameter(weight)
    text = refusal(
        lambda: ZeroRedundancyOptimizer(
            layer.parameters(), torch.optim.SGD, lr=0.1, parameters_as_bucket_view=True
        )
    )
    assert type(layer.weight) is type(weight)
    assert torch.equal(layer.weight, weight)
    return text


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "both"])
@pytest.mark.parametrize("name", BY_NAME)
def test_parameters_as_bucket_view(ranks: Ranks, name: str, columnwise: bool) -> None:
    """On every rank; torch would take a view of its plain bucket for the parameter."""
    for text in ranks.run(bucket_view, name, columnwise):
        assert "eave out parameters_as_bucket_view=True of ZeroRedundancyOptimizer" in text


# ---- a frozen base -------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a quantized weight, and a trained product of low rank beside it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a = nn.Parameter(torch.randn(8, weight.shape[1]) / 8)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + x @ self.a.t() @ self.b.t()


def adapted(case: FormatCase, options: dict[str, Any], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    weights = [case.quantize(torch.randn(*shape), **options) for shape in ((128, 64), (32, 128))]
    return nn.Sequential(Adapted(weights[0]), nn.ReLU(), Adapted(weights[1]))


class Broadcasts(TorchDispatchMode):
    """Count the bytes of ``c10d.broadcast_`` by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.broadcast_.default:
            if any(isinstance(t, qtensor.QuantizedTensor) for t in args[0]):
                return NotImplemented  # the subclass broadcasts plain tensors, which come here
            for t in args[0]:
                self.bytes[t.dtype] = self.bytes.get(t.dtype, 0) + t.nbytes
        return func(*args, **(kwargs or {}))


def adapt(case: str, options: dict[str, Any]) -> tuple[dict[torch.dtype, int], State]:
    rank = dist.get_rank()
    model = adapted(BY_NAME[case], options, seed=rank)
    with Broadcasts() as seen:
        run = replicated(model)
    step = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    for number in range(STEPS):
        step.zero_grad()
        x, target = batch(number, rank)
        nn.functional.mse_loss(run(x), target).backward()
        step.step()
    return seen.bytes, parameters(model)


@pytest.mark.parametrize("options", [{}, {"columnwise": True}], ids=["rowwise", "both"])
@pytest.mark.parametrize("case", FORMATS, ids=lambda c: c.name)
def test_the_bytes_of_rank_0_travel(
    ranks: Ranks, case: FormatCase, options: dict[str, Any]
) -> None:
    """Codes and scales are broadcast once, as bytes, and nothing is dequantized."""
    model = adapted(case, options, seed=0)
    want = {torch.uint8: 0, torch.float32: 0}
    for p in model.parameters():
        if isinstance(p, qtensor.QuantizedTensor):
            nbytes = wire_layout(p._quantizer, p.shape).nbytes
            assert 0 < nbytes - p.nbytes < 64  # a hash and padding
            want[torch.uint8] += nbytes
        else:
            want[torch.float32] += p.nbytes
    step = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    for number in range(STEPS):
        step.zero_grad()
        for rank in range(2):
            x, target = batch(number, rank)
            nn.functional.mse_loss(model(x), target).backward()
        mean_gradient(model)
        step.step()
    for rank, (sent, after) in enumerate(ranks.run(adapt, case.name, options)):
        assert sent == want
        same_state(after, parameters(model), f"rank {rank}")


@pytest.mark.parametrize("options", [{}, {"columnwise": True}], ids=["rowwise", "both"])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_missing_line_is_named(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    line = "qtensor.distributed.broadcast_parameters(model) first, and pass init_sync=False"
    for text in ranks.run(without_the_line, name, options):
        assert line in text


def without_the_line(name: str, options: dict[str, Any]) -> str:
    model = adapted(BY_NAME[name], options, seed=dist.get_rank())
    before = parameters(model)
    text = refusal(lambda: DistributedDataParallel(model))
    same_state(parameters(model), before, "after the error")
    return text


def forward_with_buffers(name: str, columnwise: bool) -> str:
    model = nn.Linear(64, 64)
    whole = [BY_NAME[name].quantize(rand(64, 64, seed=n), columnwise=columnwise) for n in range(2)]
    model.register_buffer("table", whole[dist.get_rank()].clone())
    model.register_buffer("plain", torch.ones(8))
    text = refusal(lambda: DistributedDataParallel(model, init_sync=False)(torch.randn(4, 64)))
    replicated(model, broadcast_buffers=False)(torch.randn(4, 64))
    assert_same_tensor(model.table, whole[0])
    return text


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "both"])
@pytest.mark.parametrize("name", BY_NAME)
def test_quantized_buffers(ranks: Ranks, name: str, columnwise: bool) -> None:
    """A forward of DDP joins the buffers of the model, unless it is told not to."""
    for text in ranks.run(forward_with_buffers, name, columnwise):
        assert "quantized buffers also need broadcast_buffers=False" in text


def layers_alone(name: str, count: int) -> bool:
    """Return whether DDP takes layers without biases, whose parameters it can join exactly."""
    torch.manual_seed(dist.get_rank())
    weights = [BY_NAME[name].quantize(torch.randn(64, 64)) for _ in range(count)]
    model = nn.ParameterList([nn.Parameter(w, requires_grad=False) for w in weights])
    model.append(nn.Parameter(torch.ones(1, dtype=torch.float64)))  # in a bucket of its own
    try:
        DistributedDataParallel(model)
    except qtensor.QTensorError:
        return False
    torch.manual_seed(0)
    for p in list(model)[:-1]:
        assert_same_tensor(p.detach(), BY_NAME[name].quantize(torch.randn(64, 64)))
    return True


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", BY_NAME)
def test_layers_alone_have_the_bytes_of_rank_0_or_raise(
    ranks: Ranks, name: str, count: int
) -> None:
    assert len(set(ranks.run(layers_alone, name, count))) == 1


FORMS = [f"0.weight: {name} (128, 64) torch.float32" for name in ("mxfp8", "mxfp4")]


def formats_that_differ() -> str:
    case = BY_NAME["mxfp8" if dist.get_rank() == 0 else "mxfp4"]
    model = adapted(case, {}, seed=0)
    before = parameters(model)
    text = refusal(lambda: broadcast_parameters(model))
    same_state(parameters(model), before, "after the error")
    return text


def test_ranks_with_other_formats_are_refused(ranks: Ranks) -> None:
    """Every rank raises, so that none waits for bytes of another layout."""
    messages = ranks.run(formats_that_differ)
    for rank, message in enumerate(messages):
        assert message.startswith(f"broadcast_parameters (rank {rank} of 2): all ranks must have")
        assert f"{FORMS[rank]} on this rank, and {FORMS[1 - rank]} on rank {1 - rank}" in message
