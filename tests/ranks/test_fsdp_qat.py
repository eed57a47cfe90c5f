"""Quantization-aware training under ``fully_shard``: equal to one process, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import GPT, assert_equal, expected, loss_of, plain, shard, train
from ranks import Ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import qtensor


def prepared(activations: bool | str) -> GPT:
    model, formats = plain(), {"head": None, "*": "nvfp4"}
    if activations == "learned":
        found = qtensor.calibrate(model, [torch.arange(64).view(2, 32)], formats)
        qtensor.prepare_qat_(model, formats, activations=found, learned_factors=True)
    else:
        qtensor.prepare_qat_(model, formats, activations=activations)
    return model


def run_training(activations: bool | str, compiled: bool) -> None:
    """Ranks gather plain weights and quantize the whole; the result converts on one of them."""

    def make() -> Any:
        model = prepared(activations)
        if compiled:
            torch._dynamo.reset()
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        return model

    model = shard(make())
    assert_equal(train(model), expected(make))
    with torch.no_grad():
        wanted = loss_of(model, 9, 0)
    with pytest.raises(qtensor.QTensorError, match=r"convert_qat_.*whole; got a sharded model"):
        qtensor.convert_qat_(model)
    with torch.no_grad():
        assert torch.equal(loss_of(model, 9, 0), wanted)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        alone = prepared(activations)
        alone.load_state_dict(state)
        qtensor.convert_qat_(alone)
        assert torch.equal(loss_of(alone, 9, 0), wanted)


WIDE = pytest.mark.nightly(
    reason="4 s; test_fsdp.py compiles blocks, and training is compiled alone"
)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=WIDE)], ids=["eager", "compiled"]
)
@pytest.mark.parametrize(
    "activations", [False, True, "learned"], ids=["weights", "inputs", "learned"]
)
def test_training_equals_one_process(ranks: Ranks, activations: bool | str, compiled: bool) -> None:
    ranks.run(run_training, activations, compiled)


def run_refusal() -> None:
    model = shard(plain())
    with pytest.raises(qtensor.QTensorError, match=r"prepare_qat_.*before it is sharded.*fully_sh"):
        qtensor.prepare_qat_(model, "nvfp4")


def test_a_sharded_model_is_not_prepared(ranks: Ranks) -> None:
    ranks.run(run_refusal)
