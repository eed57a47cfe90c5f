"""A Llama of Hugging Face transformers, converted: training, generation, and both compiled in one
piece.

Random weights from a small configuration; nothing is downloaded.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compile_helpers import Compiled
from convert_models import convert
from formats import assert_same_bytes
from torch import Tensor, nn

import qtensor
from qtensor.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

transformers = pytest.importorskip(
    "transformers", reason="transformers (extra dev) is not installed"
)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo makes an object of torch.autograd.Function, which torch deprecates.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

VOCABULARY = 128
RECIPES = [
    Float8CurrentScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
    DelayedScaling(),
    Float8BlockScaling(),
]


def name_of(recipe: Recipe) -> str:
    return type(recipe).__name__


each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=name_of)


def llama(layers: int = 1, **options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def tokens(rows: int = 2, columns: int = 16) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, columns))


def step(model: nn.Module, forward: Any, ids: Tensor) -> dict[str, Tensor]:
    """Loss, logits and gradients of a step of training."""
    torch.manual_seed(1)
    model.zero_grad()
    out = forward(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    results = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **results}


def greedy(model: Any, ids: Tensor) -> Tensor:
    return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)


@each_recipe
def test_eager(recipe: Recipe):
    """Every projection is swapped, and the gradients are near those of high precision; a copy
    trains the same.
    """
    model = llama(layers=2)
    ids = tokens()
    plain = step(model, model, ids)
    done = convert(model, recipe)
    assert len(done.swapped) == 15
    assert not done.skipped
    assert "  model.layers.*.self_attn.q_proj " in str(done)
    twin = copy.deepcopy(model)
    quantized = step(model, model, ids)
    for name, want in step(twin, twin, ids).items():
        assert_same_bytes(quantized[name], want, name)
    # No more than the worst case of one product: half a step of each operand, 1/16 (e4m3) or 1/4
    # (e2m1) relative. Layers add errors, but in sums these are random, and root-mean-square far
    # below the worst case.
    error = (quantized["logits"] - plain["logits"]).norm() / plain["logits"].norm()
    assert 0 < error < 2 * (1 / 4 if isinstance(recipe, NVFP4BlockScaling) else 1 / 16)
    qtensor.revert_(model)
    for name, want in step(model, model, ids).items():
        assert_same_bytes(want, plain[name], name)


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=name_of)
def test_compiled_training(recipe: Recipe):
    """One graph; the loss, the logits and every gradient have the bytes of eager mode.

    The backend is aot_eager: it keeps the operators around ours, whose sums inductor orders in its
    own way.
    """
    model = llama()
    convert(model, recipe)
    twin = copy.deepcopy(model)
    compiled = Compiled(model)
    for _ in range(2):
        ids = tokens()
        got, want = step(model, compiled, ids), step(twin, twin, ids)
        for name in want:
            assert_same_bytes(got[name], want[name], name)
    compiled.check_graphs(1)


@pytest.mark.nightly(reason="aot_eager trains the same model in the default tier")
@pytest.mark.slow
def test_inductor():
    """Norms, softmax and loss are inductor's: float32 sums in another order, which can carry a code
    to its neighbour.

    That moves one of at least 2048 elements of an operand by a quarter (e5m2): 2**-2 / 2048**0.5 <
    2**-7.
    """
    model = llama()
    convert(model, Float8CurrentScaling())
    twin = copy.deepcopy(model)
    compiled = Compiled(model, "inductor")
    ids = tokens()
    got, want = step(model, compiled, ids), step(twin, twin, ids)
    compiled.check_graphs(1)
    for name in want:
        error = (got[name] - want[name]).norm() / want[name].norm()
        assert error < 2**-7, name


@each_recipe
@pytest.mark.parametrize("quantized_params", [False, True], ids=["plain", "quantized"])
def test_generate(recipe: Recipe, quantized_params: bool):
    """The whole prompt first, then one token at a time over the cache; the same tokens each
    time.
    """
    model = llama(layers=2).eval()
    convert(model, recipe, quantized_params=quantized_params)
    ids = tokens(2, 5)
    out = greedy(model, ids)
    assert out.shape == (2, 9)
    assert torch.equal(out[:, :5], ids)
    assert torch.equal(greedy(model, ids), out)


@pytest.mark.nightly(reason="generation runs eagerly in the default tier")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [MXFP8BlockScaling()], ids=name_of)
def test_generate_with_a_compiled_forward(recipe: Recipe):
    """The tokens of eager mode, without a graph break."""
    model = llama().eval()
    convert(model, recipe)
    ids = tokens(2, 5)
    want = greedy(model, ids)
    compiled = Compiled(model.forward)
    model.forward = compiled.function
    assert torch.equal(greedy(model, ids), want)
    assert 1 <= compiled.graphs <= 3


def test_tied_embeddings():
    """The head shares its weight with the embedding: swapped with it, and not stored quantized."""
    model = llama(tie_word_embeddings=True)
    embedding = model.model.embed_tokens
    assert model.lm_head.weight is embedding.weight
    (skipped,) = convert(model, MXFP8BlockScaling(), quantized_params=True).skipped
    assert skipped.name == "lm_head"
    assert "tied to model.embed_tokens.weight" in skipped.note
    convert(model, MXFP8BlockScaling())
    assert isinstance(model.lm_head, qtensor.Linear)
    assert model.lm_head.weight is embedding.weight


def test_checkpoints_of_the_original():
    source = llama()
    state = source.state_dict()
    model = llama()
    convert(model, MXFP8BlockScaling())
    model.load_state_dict(state)
    convert(source, MXFP8BlockScaling())
    ids = tokens()
    assert_same_bytes(model(ids).logits.detach(), source(ids).logits.detach())
