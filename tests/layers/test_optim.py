"""Optimizers whose state is stored quantized, and the seeds of rounding at random."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import BY_NAME, FORMATS, FormatCase, assert_same_bytes, assert_same_tensor, rand
from torch import Tensor, nn

import qtensor
from qtensor.optim import SQUARE_ROOTS, quantize_state_, seed_rounding_
from qtensor.storage.ops.write import round_at_random

STEPS = 3
STORABLE = [case for case in FORMATS if case.name != "fp8_delayed"]
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
    "SGD": (lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, **k), ("momentum_buffer",)),
    "Adam": (
        lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ),
    "AdamW": (lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k), ("exp_avg", "exp_avg_sq")),
    "RMSprop": (lambda p, **k: torch.optim.RMSprop(p, lr=0.1, **k), ("square_avg",)),
}
NO_FUSED = ("RMSprop",)
"""Optimizers of which torch has no fused implementation."""


def saved(value: Any) -> Any:
    """Return ``value`` after ``torch.save`` and a safe ``torch.load``."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return torch.load(data, weights_only=True)


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, seed: int) -> None:
    parameter.grad = rand(*parameter.shape, seed=seed)
    optimizer.step()


def stored(name: str) -> str:
    return name + "_sqrt" * (name in SQUARE_ROOTS)


# ---- one step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [(n, i) for n in OPTIMIZERS for i in IMPLEMENTATIONS if (n, i) != ("RMSprop", "fused")],
)
@pytest.mark.parametrize("case", STORABLE, ids=lambda c: c.name)
def test_a_step_is_torchs_step_on_the_decoded_state(
    case: FormatCase, name: str, implementation: str, quantized: bool
) -> None:
    """The same optimizer without hooks, whose state holds the decoded values before each step."""
    make, entries = OPTIMIZERS[name]
    weight = BY_NAME["mxfp8"].quantize(rand(16, 64)) if quantized else rand(16, 64)
    parameter, beside = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    small = nn.Parameter(rand(8))
    ours = make([parameter, small], **IMPLEMENTATIONS[implementation])
    theirs = make([beside], **IMPLEMENTATIONS[implementation])
    quantize_state_(ours, dict.fromkeys(entries, case.quantizer()), min_numel=64)
    for seed in range(STEPS):
        small.grad = rand(8, seed=seed)
        stepped(ours, parameter, seed)
        stepped(theirs, beside, seed)
        assert_same_tensor(parameter.detach(), beside.detach()) if quantized else assert_same_bytes(
            parameter.detach(), beside.detach()
        )
        state, plain = ours.state[parameter], theirs.state[beside]
        assert set(state) == {stored(k) if k in entries else k for k in plain}
        for entry in entries:
            root = entry in SQUARE_ROOTS
            want = case.quantize(plain[entry].sqrt() if root else plain[entry])
            assert_same_tensor(state[stored(entry)], want)
            values = want.dequantize()
            plain[entry].copy_(values * values if root else values)
    assert all(type(value) is Tensor for value in ours.state[small].values())


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("case", STORABLE, ids=lambda c: c.name)
def test_fused_ops_write_quantized_state(case: FormatCase, name: str) -> None:
    """Without hooks, too: the state is decoded, updated once and quantized in place."""
    make, entries = OPTIMIZERS[name]
    parameter, beside = (nn.Parameter(rand(16, 64)) for _ in range(2))
    ours, theirs = make([parameter], fused=True), make([beside], fused=True)
    for optimizer, p in ((ours, parameter), (theirs, beside)):
        stepped(optimizer, p, 0)
    for entry in entries:
        q = ours.state[parameter][entry] = case.quantize(ours.state[parameter][entry])
        theirs.state[beside][entry].copy_(q.dequantize())
    for optimizer, p in ((ours, parameter), (theirs, beside)):
        stepped(optimizer, p, 1)
    assert_same_bytes(parameter.detach(), beside.detach())
    for entry in entries:
        want = case.quantize(theirs.state[beside][entry])
        assert_same_tensor(ours.state[parameter][entry], want)


def test_compiled_step() -> None:
    parameters = [nn.Parameter(rand(16, 64)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in parameters]
    for optimizer in optimizers:
        quantize_state_(optimizer, {"exp_avg": "mxfp8", "exp_avg_sq": "mxfp8"}, min_numel=64)
    compiled = torch.compile(optimizers[1].step, backend="aot_eager")
    for seed in range(STEPS):
        for parameter in parameters:
            parameter.grad = rand(16, 64, seed=seed)
        optimizers[0].step()
        compiled()
    assert_same_bytes(parameters[1].detach(), parameters[0].detach())
    for entry in ("exp_avg", "exp_avg_sq_sqrt"):
        states = [o.state[p][entry] for o, p in zip(optimizers, parameters, strict=True)]
        assert_same_tensor(states[1], states[0])


# ---- state dicts and memory ----------------------------------------------------------------------


def trained(**options: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(rand(16, 64))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    quantize_state_(optimizer, {"exp_avg": "mxfp6", "exp_avg_sq": "mxfp8"}, min_numel=64, **RANDOM)
    for seed in range(STEPS):
        stepped(optimizer, parameter, seed)
    return parameter, optimizer


def test_a_state_dict_resumes_in_every_bit() -> None:
    parameter, optimizer = trained()
    resumed = nn.Parameter(parameter.detach().clone())
    other = torch.optim.AdamW([resumed], lr=0.1)
    quantize_state_(other, {"exp_avg": "mxfp6", "exp_avg_sq": "mxfp8"}, min_numel=64, **RANDOM)
    other.load_state_dict(saved(optimizer.state_dict()))
    for entry in ("exp_avg", "exp_avg_sq_sqrt"):
        assert_same_tensor(other.state[resumed][entry], optimizer.state[parameter][entry])
    for o, p in ((optimizer, parameter), (other, resumed)):
        stepped(o, p, 9)
    assert_same_bytes(resumed.detach(), parameter.detach())


def test_an_optimizer_without_hooks_does_not_take_roots_for_squares() -> None:
    _, optimizer = trained()
    parameter = nn.Parameter(rand(16, 64))
    other = torch.optim.AdamW([parameter], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    parameter.grad = rand(16, 64)
    with pytest.raises(KeyError, match="exp_avg_sq"):
        other.step()


def test_state_of_an_optimizer_that_has_run() -> None:
    """It is quantized at once, a plain state dict at the next step, and remove() decodes it."""
    parameter, beside = (nn.Parameter(rand(16, 64)) for _ in range(2))
    optimizer, plain = (torch.optim.AdamW([p], lr=0.1) for p in (parameter, beside))
    stepped(optimizer, parameter, 0)
    before = copy.deepcopy(optimizer.state_dict())
    hooks = quantize_state_(optimizer, {"exp_avg": "mxfp8", "exp_avg_sq": "mxfp8"}, min_numel=64)
    assert_same_tensor(
        optimizer.state[parameter]["exp_avg"],
        BY_NAME["mxfp8"].quantize(before["state"][0]["exp_avg"]),
    )
    # load_state_dict takes over the tensors themselves.
    optimizer.load_state_dict(copy.deepcopy(before))
    plain.load_state_dict(before)
    with torch.no_grad():
        beside.copy_(parameter)
    stepped(optimizer, parameter, 1)
    stepped(plain, beside, 1)
    assert_same_bytes(parameter.detach(), beside.detach())
    roots = optimizer.state[parameter]["exp_avg_sq_sqrt"].dequantize()
    hooks.remove()
    assert_same_bytes(optimizer.state[parameter]["exp_avg_sq"], roots * roots)
    stepped(optimizer, parameter, 2)
    assert type(optimizer.state[parameter]["exp_avg"]) is Tensor


@pytest.mark.parametrize(
    ("fmt", "bits"), [("mxfp8", 8 + 8 / 32), ("fp8_blockwise", 8 + 32 / 128), ("nvfp4", 4 + 8 / 16)]
)
def test_memory_of_the_state(fmt: str, bits: float) -> None:
    """Bits of an element and its share of the scale; NVFP4 has 4 bytes more for a tensor."""
    parameter = nn.Parameter(rand(256, 512))
    optimizer = torch.optim.AdamW([parameter])
    quantize_state_(optimizer, {"exp_avg": fmt, "exp_avg_sq": fmt})
    stepped(optimizer, parameter, 0)
    entries = optimizer.state[parameter]
    for entry in ("exp_avg", "exp_avg_sq_sqrt"):
        extra = 4 * (fmt == "nvfp4")
        assert entries[entry].nbytes == parameter.numel() * bits / 8 + extra
    assert type(entries["step"]) is Tensor


# ---- what the formats do to training -------------------------------------------------------------


def largest_step(decades: float, fmt: Any = "mxfp8", **options: Any) -> float:
    """Return the largest change of an element in 100 steps of Adam, in units of lr.

    The sizes of the gradients of one block span ``decades`` powers of ten; for each element Adam's
    steps do not depend on that size.
    """
    parameter = nn.Parameter(torch.zeros(32, 128))
    optimizer = torch.optim.Adam([parameter], lr=1.0)
    if options:
        quantize_state_(optimizer, {"exp_avg": fmt, "exp_avg_sq": fmt}, **options)
    sizes, worst = 0.01 * 10 ** -torch.linspace(0, decades, 32).repeat(4), 0.0
    for seed in range(100):
        before = parameter.detach().clone()
        parameter.grad = rand(32, 128, seed=seed) * sizes
        optimizer.step()
        worst = max(worst, (parameter.detach() - before).abs().max().item())
    return worst


@pytest.mark.parametrize(
    ("fmt", "options", "roots", "squares"),
    [
        ("mxfp8", {}, 1.3, 786),
        ("fp8_blockwise", {}, 1.3, 786),
        ("fp8_blockwise", {"force_pow_2_scales": False}, 1.1, 748),
    ],
)
def test_roots_do_not_underflow_where_squares_do(
    fmt: str, options: dict[str, Any], roots: float, squares: int
) -> None:
    """E4M3 spans 2^17.8 below the block's maximum: 5 decades of gradients, but 2.7 of squares.

    docs/training.md has these figures.
    """
    quantizer = qtensor.quantizer(fmt, **options)
    assert round(largest_step(4), 1) == 1.0
    assert round(largest_step(4, quantizer, square_roots=SQUARE_ROOTS), 1) == roots
    assert round(largest_step(4, quantizer, square_roots=())) == squares


class Model(nn.Module):
    """A causal mixture of the last tokens and an MLP, small enough to train in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.mlp = nn.Sequential(
            nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)
        )
        self.head = nn.Linear(64, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.mlp(torch.cat((x[:, 1:], x[:, :-1]), -1)))


def tokens_of(number: int) -> Tensor:
    """Frequencies fall as 1 / rank; seven of ten tokens follow from the two before them."""
    g = torch.Generator().manual_seed(number)
    drawn = torch.multinomial(1 / torch.arange(1.0, 129), 32 * 32, True, generator=g).view(32, 32)
    for i in range(2, 32):
        follows = torch.rand(32, generator=g) < 0.7
        ruled = (drawn[:, i - 1] * 7 + drawn[:, i - 2] + 3) % 128
        drawn[:, i] = torch.where(follows, ruled, drawn[:, i])
    return drawn


def final_loss(formats: dict[str, Any], steps: int, **options: Any) -> float:
    """Return the mean loss of the last tenth of the steps."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    if formats:
        quantize_state_(optimizer, formats, **options)
    losses = []
    for number in range(steps):
        tokens = tokens_of(number)
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-steps // 10 :]) / (steps // 10)


FINE = qtensor.quantizer("fp8_blockwise", force_pow_2_scales=False)
RANDOM = {"stochastic_rounding": True, "seed": 0}


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        (FINE, {}),
        ("mxfp8", RANDOM),
        pytest.param(
            "mxfp6", RANDOM, marks=pytest.mark.nightly(reason="mxfp8 has the same kind of factors")
        ),
    ],
    ids=["fp8_blockwise", "mxfp8", "mxfp6"],
)
@pytest.mark.parametrize(
    "steps", [60, pytest.param(400, marks=pytest.mark.nightly(reason="10 s a cell"))]
)
def test_training_loss_beside_float32_state(fmt: Any, options: dict[str, Any], steps: int) -> None:
    """The tolerance is about the difference between two seeds of the model; see docs/training.md
    for figures.
    """
    plain = final_loss({}, steps)
    ours = final_loss({"exp_avg": fmt, "exp_avg_sq": fmt}, steps, **options)
    print(f"{steps} steps, {fmt}: {plain:.4f} with float32 state, {ours:.4f}")
    assert abs(ours - plain) < 0.02 * plain


@pytest.mark.parametrize(
    ("fmt", "options", "low", "high"),
    [
        (None, {}, 0.99, 1.01),
        (FINE, {}, 1.0, 1.2),
        ("mxfp8", RANDOM, 0.99, 1.03),
        ("fp8_blockwise", RANDOM, 0.99, 1.03),
        ("mxfp8", {}, 0.3, 0.5),
    ],
    ids=["float32", "fine_scales", "mxfp8-random", "fp8_blockwise-random", "mxfp8-nearest"],
)
def test_slow_averages(fmt: Any, options: dict[str, Any], low: float, high: float) -> None:
    """After 1000 steps with gradients of variance 1, the mean root of the unbiased average is 1.

    A step adds (g^2 - v) / 1000 to v. To nearest, codes of three mantissa bits stay where they are
    if that is below v / 8, which holds from v = 1 / 7 on for g = 1.2. Fine scales change a little
    in each step and take the codes along.
    """
    parameter = nn.Parameter(torch.zeros(32, 128))
    optimizer = torch.optim.Adam([parameter], fused=True)
    if fmt is not None:
        quantize_state_(optimizer, {"exp_avg_sq": fmt}, min_numel=1, **options)
    for seed in range(1000):
        stepped(optimizer, parameter, seed)
    state = optimizer.state[parameter]
    root = state["exp_avg_sq"].sqrt() if fmt is None else state["exp_avg_sq_sqrt"].dequantize()
    assert low < (root / math.sqrt(1 - 0.999**1000)).mean() < high


# ---- random rounding -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mantissa_bits", [1, 3])
def test_each_draw_is_a_neighbour_and_the_mean_is_exact(
    mantissa_bits: int, dtype: torch.dtype
) -> None:
    """5/16 of the way between two neighbours in every binade; five deviations of the mean."""
    below = torch.tensor([1.0, 1.5, 2**-12, -1.0, -1.5 * 2**9], dtype=torch.float64)
    space = 2.0 ** (below.abs().log2().floor() - mantissa_bits) * below.sign()
    values = (below + space * 5 / 16).to(dtype)
    assert torch.equal(values.double(), below + space * 5 / 16)
    generator = torch.Generator().manual_seed(0)
    drawn = round_at_random(values.repeat(10000, 1), mantissa_bits, generator).double()
    assert drawn.dtype == torch.float64
    share = (drawn - below) / space
    assert ((share == 0) | (share == 1)).all()
    assert (share.mean(0) - 5 / 16).abs().max() < 5 * math.sqrt(5 / 16 * 11 / 16 / 10000)


def test_values_that_are_not_finite_stay() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    assert_same_bytes(round_at_random(values, 3, None), values)


def random_nvfp4() -> qtensor.Quantizer:
    return qtensor.quantizer("nvfp4", stochastic_rounding=True)


def run_seeded(global_seed: int, steps: range, state: Any = None, weight: Any = None) -> Any:
    """Steps of a parameter and a state that are rounded at random."""
    torch.manual_seed(global_seed)
    start = random_nvfp4().quantize(rand(16, 64), generator=torch.tensor([1]))
    parameter = nn.Parameter(start if weight is None else weight)
    optimizer = torch.optim.AdamW([parameter], lr=0.01)
    seed_rounding_(optimizer, 5)
    quantize_state_(optimizer, {"exp_avg": random_nvfp4()}, min_numel=64, seed=6)
    if state is not None:
        optimizer.load_state_dict(state)
    before = torch.get_rng_state()
    for seed in steps:
        stepped(optimizer, parameter, seed)
    assert torch.equal(torch.get_rng_state(), before)
    return parameter.detach(), optimizer.state_dict()


def test_steps_draw_from_their_seed() -> None:
    """Whatever the generator's state is, and after a resume."""
    parameter, state = run_seeded(1, range(4))
    same, _ = run_seeded(2, range(4))
    assert_same_tensor(same, parameter)
    half, middle = run_seeded(3, range(2))
    resumed, end = run_seeded(4, range(2, 4), saved(middle), saved(half))
    assert_same_tensor(resumed, parameter)
    assert_same_tensor(end["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert state["param_groups"][0]["rounding_step"] == 4


def test_random_rounding_follows_steps_that_are_lost_otherwise() -> None:
    """Ten steps of 0.02 on a grid whose spaces are 1/12 to 1/3: to nearest, none changes a code.

    A write draws eight bits, which round a probability down in favour of the smaller magnitude, by
    less than a space / 256. The sum over ten writes has a variance below 10 * 0.02 / 3; five
    deviations of the mean.
    """
    moved = {}
    for stochastic in (False, True):
        start = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) / 2 + 0.25
        start[:, ::16] = 1.0  # fixes the scales, together with gradients of 0
        q = qtensor.quantizer("nvfp4", stochastic_rounding=stochastic).quantize(start)
        parameter, first = nn.Parameter(q), q.dequantize()
        grad = torch.ones(64, 64)
        grad[:, ::16] = 0
        optimizer = torch.optim.SGD([parameter], lr=0.02)
        seed_rounding_(optimizer, 0)
        for _ in range(10):
            parameter.grad = grad.clone()
            optimizer.step()
        change = (first - parameter.detach().dequantize())[grad == 1]
        moved[stochastic] = change.mean().item()
    noise = 5 * math.sqrt(10 * 0.02 / 3 / int(grad.sum()))
    assert moved[False] == 0
    assert 0.2 - noise < moved[True] < 0.2 + 10 / 3 / 256 + noise


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: quantize_state_(o, {"exp_avg": "fp9"}), "fp9"),
        (lambda o: quantize_state_(o, {"exp_avg": "fp8_delayed"}), r"exp_avg\].*own scales"),
        (lambda o: quantize_state_(o, {"exp_avg": "fp8"}, seed=1), "seed= needs rounding"),
        (
            lambda o: quantize_state_(o, {"exp_avg": "fp8"}, stochastic_rounding=True),
            "scales are powers of two; got fp8",
        ),
        (lambda o: quantize_state_([], {}), "must be a torch.optim.Optimizer; got list"),
        (lambda o: seed_rounding_(None, 1), "must be a torch.optim.Optimizer; got NoneType"),
    ],
)
def test_bad_calls(call: Callable[[Any], Any], message: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(rand(8))])
    with pytest.raises(qtensor.QTensorError, match=message):
        call(optimizer)
