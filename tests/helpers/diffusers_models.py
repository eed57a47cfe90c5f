"""Small random models of diffusers, their inputs, and their weights under the origin's names."""

import types

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers (extra diffusers) is not installed")

DTYPE = torch.bfloat16
FLUX = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 12, 12),
}
SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 8,
}
UNET = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 64,
    "attention_head_dim": 32,
    "norm_num_groups": 8,
}
KINDS = {
    "flux": ("FluxTransformer2DModel", FLUX),
    "sd3": ("SD3Transformer2DModel", SD3),
    "unet": ("UNet2DConditionModel", UNET),
}
"""Name -> class, and its arguments."""


def kind(name):
    return getattr(diffusers, KINDS[name][0])


def model(name):
    torch.manual_seed(len(name))
    made = kind(name)(**KINDS[name][1]).to(DTYPE).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.08)
    return made


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DTYPE)


@torch.no_grad()
def run(made):
    """The result of a model for fixed inputs."""
    name = next(name for name, (cls, _) in KINDS.items() if type(made).__name__ == cls)
    timestep = torch.tensor([0.5]).to(DTYPE)
    if name == "flux":
        return made(
            hidden_states=_random(1, 16, 16),
            encoder_hidden_states=_random(1, 8, 64),
            pooled_projections=_random(1, 64),
            timestep=timestep,
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(8, 3),
        ).sample
    if name == "sd3":
        return made(
            hidden_states=_random(1, 4, 8, 8),
            encoder_hidden_states=_random(1, 8, 64),
            pooled_projections=_random(1, 64),
            timestep=timestep,
        ).sample
    return made(_random(1, 4, 8, 8), 7, _random(1, 8, 64)).sample


# ---- weights under the names of the origin, as ComfyUI and Black Forest Labs release them


def original(name, state):
    """The tensors of a model under the names of its origin; what diffusers converts back."""
    return _original_flux(state) if name == "flux" else _original_sd3(state)


def _put(found, state, own, theirs):
    for suffix in ("weight", "bias"):
        if f"{theirs}.{suffix}" in state:
            found[f"{own}.{suffix}"] = state[f"{theirs}.{suffix}"]


def _join(found, state, own, theirs):
    for suffix in ("weight", "bias"):
        found[f"{own}.{suffix}"] = torch.cat([state[f"{part}.{suffix}"] for part in theirs])


def _swapped(found, state, own, theirs):
    """Shift and scale are in the other order at the origin."""
    for suffix in ("weight", "bias"):
        scale, shift = state[f"{theirs}.{suffix}"].chunk(2)
        found[f"{own}.{suffix}"] = torch.cat([shift, scale])


def _original_flux(state):
    found = {}
    outer = {
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "txt_in": "context_embedder",
        "img_in": "x_embedder",
        "final_layer.linear": "proj_out",
    }
    for own, theirs in outer.items():
        _put(found, state, own, theirs)
    _swapped(found, state, "final_layer.adaLN_modulation.1", "norm_out.linear")
    block, theirs = "double_blocks.0", "transformer_blocks.0"
    for side, ff, norm in (("img", "ff", "norm1"), ("txt", "ff_context", "norm1_context")):
        _put(found, state, f"{block}.{side}_mod.lin", f"{theirs}.{norm}.linear")
        _put(found, state, f"{block}.{side}_mlp.0", f"{theirs}.{ff}.net.0.proj")
        _put(found, state, f"{block}.{side}_mlp.2", f"{theirs}.{ff}.net.2")
        out = "to_out.0" if side == "img" else "to_add_out"
        _put(found, state, f"{block}.{side}_attn.proj", f"{theirs}.attn.{out}")
        names = ["to_q", "to_k", "to_v"]
        names = names if side == "img" else ["add_q_proj", "add_k_proj", "add_v_proj"]
        parts = [f"{theirs}.attn.{part}" for part in names]
        _join(found, state, f"{block}.{side}_attn.qkv", parts)
        for own, norm in (("query", "q"), ("key", "k")):
            added = "" if side == "img" else "added_"
            key = f"{block}.{side}_attn.norm.{own}_norm.scale"
            found[key] = state[f"{theirs}.attn.norm_{added}{norm}.weight"]
    block, theirs = "single_blocks.0", "single_transformer_blocks.0"
    _put(found, state, f"{block}.modulation.lin", f"{theirs}.norm.linear")
    _put(found, state, f"{block}.linear2", f"{theirs}.proj_out")
    parts = [f"{theirs}.{part}" for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
    _join(found, state, f"{block}.linear1", parts)
    for own, norm in (("query", "q"), ("key", "k")):
        key = f"{block}.norm.{own}_norm.scale"
        found[key] = state[f"{theirs}.attn.norm_{norm}.weight"]
    return found


def _original_sd3(state):
    found = {"pos_embed": state["pos_embed.pos_embed"]}
    outer = {
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "context_embedder": "context_embedder",
        "final_layer.linear": "proj_out",
    }
    for own, theirs in outer.items():
        _put(found, state, own, theirs)
    _swapped(found, state, "final_layer.adaLN_modulation.1", "norm_out.linear")
    for i in range(SD3["num_layers"]):
        last = i == SD3["num_layers"] - 1
        theirs = f"transformer_blocks.{i}"
        for side in ("x", "context"):
            block = f"joint_blocks.{i}.{side}_block"
            names = ["to_q", "to_k", "to_v"]
            names = names if side == "x" else ["add_q_proj", "add_k_proj", "add_v_proj"]
            _join(found, state, f"{block}.attn.qkv", [f"{theirs}.attn.{part}" for part in names])
            ff, norm = ("ff", "norm1") if side == "x" else ("ff_context", "norm1_context")
            out = "to_out.0" if side == "x" else "to_add_out"
            _put(found, state, f"{block}.attn.proj", f"{theirs}.attn.{out}")
            _put(found, state, f"{block}.mlp.fc1", f"{theirs}.{ff}.net.0.proj")
            _put(found, state, f"{block}.mlp.fc2", f"{theirs}.{ff}.net.2")
            put = _swapped if last and side == "context" else _put
            put(found, state, f"{block}.adaLN_modulation.1", f"{theirs}.{norm}.linear")
    return found


def small_flux_converter(monkeypatch):
    """Let diffusers convert FLUX files of this width: its converter has 3072 as a constant."""
    module = diffusers.loaders.single_file_model
    entry = module.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    function = entry["checkpoint_mapping_fn"]
    width = FLUX["attention_head_dim"] * FLUX["num_attention_heads"]
    constants = tuple(width if value == 3072 else value for value in function.__code__.co_consts)
    code = function.__code__.replace(co_consts=constants)
    small = types.FunctionType(code, function.__globals__)
    monkeypatch.setitem(entry, "checkpoint_mapping_fn", small)
