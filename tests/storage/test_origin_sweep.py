"""Each way to come by a quantized tensor, then each operation: quantized tensors are views and
copies of each other where plain tensors are. A write to a part reaches the whole, or raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from origin_operations import CHANGES, OPERATIONS, READS, WRITES, Operation
from origin_sweep import EVERY_ORIGIN, REFUSED, RIGHT, faults, faults_of_format, run, sweep
from origin_worlds import CONFIGS, Config, World, lower
from origins import ORIGINS, Origin
from origins_of_ranks import RANK_ORIGINS
from ranks import Ranks

import qtensor

FORMATS = list(dict.fromkeys(config.format for config in CONFIGS))
ON_RANKS = [Config("fp8", "both"), Config("mxfp8", "both"), Config("nvfp4")]
SHARES = 32
"""The sample runs one of so many shares of the operations on the result of each origin."""
wide = pytest.mark.nightly(reason="the sample has each origin, each operation and each config")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    store: Path = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refuse(text: str) -> None:
    """Fail with the whole text, of which an assert would show the beginning."""
    if text:
        pytest.fail(text, pytrace=False)


@pytest.mark.parametrize("name", EVERY_ORIGIN)
def test_a_sample(group: None, name: str) -> None:
    """Neighbouring origins have other operations and another config."""
    number = list(EVERY_ORIGIN).index(name)
    config = CONFIGS[number % len(CONFIGS)]
    operations = list(OPERATIONS)[number % SHARES :: SHARES]
    refuse(faults(name, config, operations))


@wide
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", EVERY_ORIGIN)
def test_every_operation(group: None, name: str, fmt: str) -> None:
    refuse(faults_of_format(name, fmt))


@wide
@pytest.mark.parametrize("config", ON_RANKS, ids=repr)
@pytest.mark.parametrize("name", RANK_ORIGINS)
def test_every_operation_on_two_ranks(ranks: Ranks, name: str, config: Config) -> None:
    refuse("".join(ranks.run(faults, name, config)))


# ---- the sweep itself

WHOLE = Config("fp8", "both")


def quantized_only(broken: Origin, good: Origin) -> Origin:
    """Return an origin that is broken where tensors are quantized."""
    return lambda w: (good if w.config is None else broken)(w)


def without_a_note(w: World) -> list[Any]:
    """A part that does not know that its factor belongs to other rows too."""
    whole = w.square()
    part = lower(whole)
    return [part.quantizer.assemble(part.buffers(), part.shape, part.dtype), whole]


def with_stale_columnwise_data(w: World) -> list[Any]:
    """An alias whose columnwise data are a copy."""
    whole = w.square()
    buffers = dict(zip(whole.quantizer.slot_names, whole.buffers(), strict=True))
    buffers["_transpose"] = buffers["_transpose"].clone()
    alias = whole.quantizer.assemble([*buffers.values()], whole.shape, whole.dtype)
    return [alias, whole]


def copied(w: World) -> list[Any]:
    whole = w.square()
    return [lower(whole).clone(), whole]


def shared(w: World) -> list[Any]:
    whole = w.square()
    return [lower(whole), whole]


def raising(w: World) -> list[Any]:
    raise AttributeError("_scale_inv")


def detached(w: World) -> list[Any]:
    whole = w.square()
    return [whole.detach(), whole]


BROKEN: dict[str, tuple[Origin, Origin, str, str]] = {
    "a lost write": (copied, shared, "copy_ plain", "after the operation, member 1"),
    "a copy that shares": (shared, copied, "copy_ plain", "after the operation, member 1"),
    "a view that is a copy": (
        copied,
        shared,
        "detach",
        "after a write to result 0, member 1",
    ),
    "a factor that changes": (without_a_note, shared, "mul_", "8192 of 16384 values differ"),
    "a stale usage": (with_stale_columnwise_data, detached, "mul_", "columnwise data"),
    "a raw error": (raising, shared, "detach", "AttributeError: _scale_inv"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_sweep_sees(name: str) -> None:
    broken, good, operation, wanted = BROKEN[name]
    assert run(good, OPERATIONS[operation], WHOLE) == RIGHT
    assert wanted in run(quantized_only(broken, good), OPERATIONS[operation], WHOLE)


def test_the_sweep_sees_a_broken_operation() -> None:
    def wrong_product(w: World, t: Any) -> Any:
        return t * 2 if w.config else t

    def wrong_type(w: World, t: Any) -> Any:
        return t.to(torch.bfloat16) if w.config else t.clone()

    def raw_error(w: World, t: Any) -> Any:
        return t.view(7) if w.config is None else next(iter(()))

    def refused(w: World, t: Any) -> Any:
        t.mul_(0.5)
        raise qtensor.QTensorError("too late")

    def run_on_fresh(operation: Operation) -> str:
        return run(ORIGINS["fresh"], operation, WHOLE)

    assert "values differ" in run_on_fresh(wrong_product)
    assert "wanted torch.float32" in run_on_fresh(wrong_type)
    assert run_on_fresh(raw_error) == REFUSED
    assert "after the operation" in run_on_fresh(refused)


def test_a_fresh_tensor_refuses_few_operations() -> None:
    """A sweep in which all is refused would find nothing."""
    found = sweep("fresh", Config("mxfp8"))
    cuts_a_block = {"t[:, 3:19]", "t[..., 1]"}
    changes_usages = {"drop rowwise", "derive columnwise"}
    assert set(found[REFUSED]) <= {*cuts_a_block, *changes_usages, "t[[1, 0]] ="}
    assert len(READS) + len(WRITES) + len(CHANGES) == len(OPERATIONS) > 80
