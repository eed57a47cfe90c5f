"""``MultiheadAttention`` and ``TransformerLayer``: projections, rotation, residuals, state."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from attention_module_cases import Mask, PlainCache, attention64, sqnr, table
from formats import assert_same_bytes
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import qtensor
from qtensor import debug, recipes

HIDDEN, HEADS, GROUPS, SIZE, B, S = 64, 4, 2, 16, 2, 32
FLOAT32 = 100.0
"""Decibels: float32 beside float64, over a few products."""
INDUCTOR = pytest.param("inductor", marks=pytest.mark.nightly(reason="inductor compiles C++"))
WIDE = pytest.mark.nightly(reason="compiles for three seconds; a fused layer is compiled")
RECIPES = {
    "plain": lambda: None,
    "delayed": lambda: recipes.DelayedScaling(fp8_dpa=True),
    "mxfp8": recipes.MXFP8BlockScaling,
    "mxfp8 attention": lambda: recipes.MXFP8BlockScaling(fp8_dpa=True),
    "current attention": lambda: recipes.Float8CurrentScaling(fp8_dpa=True),
    "nvfp4": recipes.NVFP4BlockScaling,
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def region(recipe):
    return contextlib.nullcontext() if recipe is None else qtensor.autocast(recipe=recipe)


def make(kind="attention", seed=0, **options):
    torch.manual_seed(seed)
    options = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, **options}
    if kind == "attention":
        return qtensor.MultiheadAttention(HIDDEN, HEADS, **options)
    options = {"hidden_dropout": 0.0, **options}
    return qtensor.TransformerLayer(HIDDEN, 96, HEADS, **options)


def step(call, module, x, recipe=None, seed=0, **options):
    """Output, gradient of the input, gradients of the parameters."""
    torch.manual_seed(seed)
    module.zero_grad()
    x = x.clone().requires_grad_()
    with region(recipe):
        y = call(x, **options)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


def weights(module):
    """(queries, keys, values) weights of self attention in float64."""
    if not module.fuse_qkv_params:
        first = module.get_submodule(module._first)
        return [layer.weight.double() for layer in (first, module.key, module.value)]
    whole = module.get_submodule(module._first).weight.double()
    if not module.qkv_weight_interleaved:
        return list(whole.split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE]))
    parts = [[], [], []]
    for group in whole.chunk(GROUPS):
        rows = group.split(SIZE)
        parts[0] += rows[: HEADS // GROUPS]
        parts[1].append(rows[-2])
        parts[2].append(rows[-1])
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [None, "LayerNorm", "RMSNorm"])
def test_projections(fused, interleaved, norm):
    module = make(
        fuse_qkv_params=fused,
        qkv_weight_interleaved=interleaved,
        input_layernorm=norm is not None,
        normalization=norm or "LayerNorm",
        bias=False,
        qkv_format="bshd",
        return_layernorm_output=norm is not None,
    )
    x = torch.randn(B, S, HIDDEN)
    out, *normed = module(x) if norm else (module(x),)
    source = x.double()
    if norm == "LayerNorm":
        source = nn.functional.layer_norm(source, (HIDDEN,))
    if norm == "RMSNorm":
        source = nn.functional.rms_norm(source, (HIDDEN,), eps=1e-5)
    if norm:
        assert sqnr(normed[0], source) > FLOAT32
    q, k, v = ((source @ w.mT).unflatten(-1, (-1, SIZE)).transpose(1, 2) for w in weights(module))
    seen = table(Mask("causal"), (S, S), [(S, S)] * B)
    context = attention64(q, k, v, seen).transpose(1, 2).flatten(2)
    assert sqnr(out, context @ module.proj.weight.double().mT) > FLOAT32


@pytest.mark.parametrize("fused", [False, True])
def test_cross_attention_reads_another_input(fused):
    options = {"attention_type": "cross", "attn_mask_type": "no_mask", "qkv_format": "bshd"}
    module = make(**options, fuse_qkv_params=fused, bias=False, return_bias=True)
    x, other = torch.randn(B, S, HIDDEN), torch.randn(B, 2 * S, HIDDEN)
    out, bias = module(x, encoder_output=other)
    assert bias is None
    if fused:
        rows = module.key_value.weight.unflatten(0, (GROUPS, 2, SIZE))
        both = [rows[:, i].flatten(0, 1) for i in (0, 1)]
    else:
        both = [module.key.weight, module.value.weight]
    pairs = ((x, module.query.weight), (other, both[0]), (other, both[1]))
    q, k, v = (
        (t.double() @ w.double().mT).unflatten(-1, (-1, SIZE)).transpose(1, 2) for t, w in pairs
    )
    seen = torch.ones(S, 2 * S, dtype=torch.bool)
    context = attention64(q, k, v, seen).transpose(1, 2).flatten(2)
    assert sqnr(out, context @ module.proj.weight.double().mT) > FLOAT32
    with pytest.raises(qtensor.QTensorError, match="encoder_output goes with"):
        module(x)


def rotated(t, positions, channels, interleaved, base=10000.0):
    """(..., S, D) rotated by complex numbers in float64."""
    head, rest = t[..., :channels].double(), t[..., channels:].double()
    half = channels // 2
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).mT
    angle = positions.double()[:, None] / base ** (torch.arange(half).double() * 2 / channels)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    )
    flat = turned if interleaved else turned.mT
    return torch.cat((flat.flatten(-2), rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_rotation(interleaved, share, qkv_format):
    channels = int(SIZE * share)
    rope = qtensor.RotaryPositionEmbedding(SIZE, share, interleaved=interleaved)
    module = make(
        qkv_format=qkv_format, rotary_pos_interleaved=interleaved, bias=False, fuse_qkv_params=True
    )
    x = torch.randn(B, S, HIDDEN)
    given = {"sbhd": x.transpose(0, 1), "bshd": x, "thd": x.flatten(0, 1)}[qkv_format]
    options = {"cu_seqlens_q": torch.arange(B + 1) * S} if qkv_format == "thd" else {}
    out = module(given, rotary_pos_emb=rope(S + 3), **options)
    out = {"sbhd": lambda t: t.transpose(0, 1), "bshd": lambda t: t}.get(
        qkv_format, lambda t: t.unflatten(0, (B, S))
    )(out)
    q, k, v = (
        (x.double() @ w.mT).unflatten(-1, (-1, SIZE)).transpose(1, 2) for w in weights(module)
    )
    q, k = (rotated(t, torch.arange(S), channels, interleaved) for t in (q, k))
    seen = table(Mask("causal"), (S, S), [(S, S)] * B)
    context = attention64(q, k, v, seen).transpose(1, 2).flatten(2)
    assert sqnr(out, context @ module.proj.weight.double().mT) > FLOAT32


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize("before", [False, True])
def test_norms_of_queries_and_keys(kind, before):
    module = make(qkv_format="bshd", qk_norm_type=kind, qk_norm_before_rope=before, bias=False)
    x, rope = torch.randn(B, S, HIDDEN), qtensor.RotaryPositionEmbedding(SIZE)
    normed = {
        "RMSNorm": lambda t: nn.functional.rms_norm(t, (SIZE,), eps=1e-6),
        "LayerNorm": lambda t: nn.functional.layer_norm(t, (SIZE,), eps=1e-6),
        "L2Normalization": lambda t: t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt(),
    }[kind]
    q, k, v = (
        (x.double() @ w.mT).unflatten(-1, (-1, SIZE)).transpose(1, 2) for w in weights(module)
    )
    for function in (normed, None) if before else (None, normed):
        if function is None:
            q, k = (rotated(t, torch.arange(S), SIZE, False) for t in (q, k))
        else:
            q, k = function(q), function(k)
    seen = table(Mask("causal"), (S, S), [(S, S)] * B)
    context = attention64(q, k, v, seen).transpose(1, 2).flatten(2)
    want = context @ module.proj.weight.double().mT
    assert sqnr(module(x, rotary_pos_emb=rope(S)), want) > FLOAT32


def test_a_cache_continues_a_sequence():
    module = make(qkv_format="bshd", window_size=(9, 0)).eval()
    rope, cache, x = qtensor.RotaryPositionEmbedding(SIZE), PlainCache(), torch.randn(B, S, HIDDEN)
    with torch.no_grad():
        whole = module(x, rotary_pos_emb=rope(S))
        for start, stop in ((0, 20), (20, 21), (21, S)):
            angles = rope(stop - start, offset=start)
            part = module(x[:, start:stop], rotary_pos_emb=angles, cache=cache)
            assert sqnr(part, whole[:, start:stop]) > FLOAT32


VARIANTS = {
    "plain": {},
    "parallel": {"parallel_attention_mlp": True},
    "post": {"apply_residual_connection_post_layernorm": True},
    "output": {"output_layernorm": True},
    "decoder": {"layer_type": "decoder", "enc_dec_attn_mask_type": "no_mask"},
    "llama": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_is_its_parts_and_residuals(variant):
    layer = make("layer", attn_input_format="bshd", **VARIANTS[variant])
    x, other = torch.randn(B, S, HIDDEN), torch.randn(B, S, HIDDEN)
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    if variant == "parallel":
        want = x + (attention(x) + mlp(x))
    elif variant == "post":
        out, normed = attention(x)
        want = normed + out
        out, normed = mlp(want)
        want = normed + out
    else:
        want = x + attention(x)
        if variant == "decoder":
            want = want + layer.inter_attention(want, encoder_output=other)
        want = want + mlp(want)
    if variant == "output":
        want = layer.layernorm(want)
        assert not attention.input_layernorm
    got = layer(x, encoder_output=other) if variant == "decoder" else layer(x)
    assert_same_bytes(got.detach(), want.detach(), variant)


@pytest.mark.parametrize("rate", ["hidden_dropout", "drop_path_rate"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_dropout_of_a_layer(rate, layout):
    layer = make("layer", attn_input_format=layout, **{rate: 0.5})
    ones = torch.ones(64, 96, HIDDEN)
    dropped = layer._dropped(ones)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert abs(float(dropped.mean()) - 1) < 0.4
    if rate == "drop_path_rate":
        sample = dropped.movedim(0 if layout == "bshd" else 1, 0).flatten(1)
        assert torch.equal(sample.amin(1), sample.amax(1)), "whole samples"
    assert layer.eval()._dropped(ones) is ones


@pytest.mark.parametrize("kind", ["attention", "layer"])
@every_recipe
def test_a_checkpoint_changes_no_byte(kind, recipe):
    x = torch.randn(S, B, HIDDEN)
    results = []
    for checkpointed in (False, True):
        module = make(kind)
        call = (lambda t: qtensor.checkpoint(module, t)) if checkpointed else module  # noqa: B023
        for seed in (0, 1):
            results.append(step(call, module, x, RECIPES[recipe](), seed))
    for a, b in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("kind", ["attention", "layer"])
@pytest.mark.parametrize("fused", [False, True])
@every_recipe
def test_state_is_saved_and_copied(kind, fused, recipe, tmp_path):
    x, chosen = torch.randn(S, B, HIDDEN), RECIPES[recipe]()
    module = make(kind, fuse_qkv_params=fused)
    step(module, module, x, chosen)
    twin = copy.deepcopy(module)
    torch.save(module.state_dict(), tmp_path / "state")
    other = make(kind, seed=1, fuse_qkv_params=fused)
    other.load_state_dict(torch.load(tmp_path / "state"))
    want = step(module, module, x, chosen)
    for again in (twin, other):
        assert all(map(torch.equal, step(again, again, x, chosen), want))


@pytest.mark.parametrize("kind", ["attention", "layer"])
@pytest.mark.parametrize("idiom", ["to_empty", "assign"])
def test_deferred_initialisation(kind, idiom):
    source, x = make(kind, qk_norm_type="RMSNorm"), torch.randn(S, B, HIDDEN)
    with torch.device("meta"):
        module = make(kind, qk_norm_type="RMSNorm")
    assert all(p.is_meta for p in module.parameters())
    if idiom == "to_empty":
        module.to_empty(device="cpu")
        torch.manual_seed(0)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        assert all(p.isfinite().all() for p in module.parameters())
        module.load_state_dict(source.state_dict())
    else:
        module.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(module(x), source(x))


def test_recordings_conversions_and_microbatches_reach_the_layers():
    layer = make("layer", name="block")
    model = nn.Sequential(layer)
    x = torch.randn(S, B, HIDDEN)
    recipe = recipes.MXFP8BlockScaling(fp8_dpa=True)
    report = qtensor.convert_(model, recipe)
    assert layer.self_attention.core_attention.recipe is recipe
    assert layer.self_attention.proj.name == "block.self_attention.proj"
    assert not report.skipped
    with debug.record(model) as log:
        model(x).sum().backward()
    recorded = {record.layer for record in log.records}
    attention = {f"0.self_attention.{part}" for part in ("layernorm_query", "key", "value", "proj")}
    assert recorded == attention | {f"0.layernorm_mlp.fc{i}_weight" for i in (1, 2)}
    first = layer(x, is_first_microbatch=True)
    assert torch.equal(layer(x, is_first_microbatch=False), first)


@pytest.mark.parametrize("kind", [pytest.param("attention", marks=WIDE), "layer"])
@pytest.mark.parametrize("fused", [pytest.param(False, marks=WIDE), True])
@every_recipe
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_has_one_graph_for_all_sizes(kind, fused, recipe, backend):
    """The softmax of inductor may differ in the last bit, which moves few codes."""
    module = make(kind, fuse_qkv_params=fused)
    traced, chosen = copy.deepcopy(module), RECIPES[recipe]()
    counter = CompileCounterWithBackend(backend)
    call = torch.compile(traced, backend=counter, fullgraph=True, dynamic=True)
    rope = qtensor.RotaryPositionEmbedding(SIZE)
    for number, length in enumerate((24, 40, 57)):
        x, angles = torch.randn(length, B, HIDDEN), rope(length)
        options = {"rotary_pos_emb": angles}
        want = step(module, module, x, chosen, number, **options)
        got = step(call, traced, x, chosen, number, **options)
        for a, b in zip(got, want, strict=True):
            if backend == "aot_eager":
                assert_same_bytes(a, b, f"{length} tokens")
            else:
                assert sqnr(a, b) > 40 or float((a - b).abs().max()) < 1e-6
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_packed_sequences_compile_with_their_greatest_length():
    module = make(qkv_format="thd", attn_mask_type="padding_causal")
    call = torch.compile(module, backend="aot_eager", fullgraph=True)
    x, rope = torch.randn(60, HIDDEN), qtensor.RotaryPositionEmbedding(SIZE)(32)
    options = {
        "cu_seqlens_q": torch.tensor([0, 30, 60]),
        "max_seqlen_q": 30,
        "rotary_pos_emb": rope,
    }
    assert torch.equal(call(x, **options), module(x, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gqa_groups": 3}, "multiple of num_gqa_groups"),
        ({"attention_type": "both"}, "'self' or 'cross'"),
        ({"qk_norm_type": "BatchNorm"}, "qk_norm_type must be one of"),
        ({"return_layernorm_output": True}, "needs input_layernorm"),
        ({"qkv_format": "bhsd"}, "qkv_format must be one of"),
        ({"normalization": "None", "input_layernorm": True}, "normalization must be one of"),
        ({"set_parallel_mode": True}, "needs the process group"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(qtensor.QTensorError, match=message):
        make(**options)


def test_mistakes_of_layers():
    for options in (
        {"layer_type": "both"},
        {"layer_type": "decoder", "parallel_attention_mlp": True},
        {"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
        {"layer_type": "decoder", "attn_input_format": "thd"},
        {"drop_path_rate": 0.1, "attn_input_format": "thd"},
        {"hidden_dropout": 2},
    ):
        with pytest.raises(qtensor.QTensorError):
            make("layer", **options)
    with pytest.raises(qtensor.QTensorError, match="multiple of num_attention_heads"):
        qtensor.MultiheadAttention(30, 4)
    with pytest.raises(qtensor.QTensorError, match="must be even"):
        qtensor.RotaryPositionEmbedding(6, 0.5)
    module = make(qkv_format="bshd")
    with pytest.raises(qtensor.QTensorError, match=r"rotary_pos_emb must be \(32 or more"):
        module(torch.randn(B, S, HIDDEN), rotary_pos_emb=torch.zeros(S - 1, 1, 1, SIZE))


MASKS = [
    Mask("no_mask"),
    Mask("no_mask", (4, 2)),
    Mask("causal", (7, 0)),
    Mask("causal_bottom_right"),
    Mask("padding"),
    Mask("padding_causal", (5, 0)),
]


@pytest.mark.parametrize("kind", ["attention", "layer"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: f"{m.kind}{m.window}")
@pytest.mark.parametrize("at_call", [False, True])
def test_masks_and_windows_reach_the_attention(kind, mask, at_call):
    """Given to the constructor or to the call, by the names of Transformer Engine."""
    names = {"attention": ("attn_mask_type", "qkv_format")}
    of_type, layout = names.get(kind, ("self_attn_mask_type", "attn_input_format"))
    options = {of_type: mask.kind, "window_size": mask.options()["window_size"]}
    module = make(kind, **{layout: "bshd", "bias": False}, **({} if at_call else options))
    lengths = [S, S - 9] if "padding" in mask.kind else [S, S]
    given = dict(options) if at_call else {}
    if "padding" in mask.kind:
        given["attention_mask"] = (torch.arange(S) >= torch.tensor(lengths)[:, None])[:, None, None]
    x = torch.randn(B, S, HIDDEN)
    got = module(x, **given)
    attention = module if kind == "attention" else module.self_attention
    source = x.double()
    if kind == "layer":
        source = nn.functional.layer_norm(source, (HIDDEN,))
    q, k, v = (
        (source @ w.mT).unflatten(-1, (-1, SIZE)).transpose(1, 2) for w in weights(attention)
    )
    context = attention64(q, k, v, table(mask, (S, S), [(n, n) for n in lengths]))
    want = context.transpose(1, 2).flatten(2) @ attention.proj.weight.double().mT
    if kind == "layer":
        hidden = x + want.float()
        want = (hidden + module.layernorm_mlp(hidden)).double()
    for b, length in enumerate(lengths):
        assert sqnr(got[b, :length], want[b, :length]) > FLOAT32 - 10


@pytest.mark.parametrize("recipe", ["plain", "mxfp8", "mxfp8 attention"])
def test_a_layer_takes_packed_sequences(recipe):
    """Each of them has the result that it has alone; blocks of MXFP8 lie within a token."""
    layer, lengths = make("layer", attn_input_format="thd", num_gqa_groups=GROUPS), (32, 64, 32)
    x = torch.randn(sum(lengths), HIDDEN)
    rope = qtensor.RotaryPositionEmbedding(SIZE)(max(lengths))
    sums = torch.tensor([0, *lengths]).cumsum(0)
    with region(RECIPES[recipe]()):
        got = layer(x, cu_seqlens_q=sums, rotary_pos_emb=rope, self_attn_mask_type="padding_causal")
        for part, result in zip(x.split(lengths), got.split(lengths), strict=True):
            alone = layer(
                part,
                cu_seqlens_q=torch.tensor([0, len(part)]),
                rotary_pos_emb=rope,
                self_attn_mask_type="padding_causal",
            )
            assert sqnr(result, alone.double()) > (FLOAT32 if recipe != "mxfp8 attention" else 60)
