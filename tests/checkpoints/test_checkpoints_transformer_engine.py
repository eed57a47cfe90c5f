"""State dicts of Transformer Engine: every constructor, older forms, and extra states.

Transformer Engine needs a GPU, so that stand-in modules with its names write the pickles.
"""

import copyreg
import io
import os
import pickle
import sys
import types

import pytest
import torch
from checkpoint_cases import assert_same_bytes, assert_same_values, weight

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.containers.safetensors import SafetensorsFile

ROOT = "transformer_engine.pytorch.tensor"
MAKERS = {
    "fp8": (f"{ROOT}.float8_tensor", "_make_float8_tensor_in_reduce_ex", "Float8Tensor"),
    "mxfp8": (f"{ROOT}.mxfp8_tensor", "_make_mxfp8_tensor_in_reduce_ex", "MXFP8Tensor"),
    "nvfp4": (f"{ROOT}.nvfp4_tensor", "_make_nvfp4_tensor_in_reduce_ex", "NVFP4Tensor"),
    "fp8_blockwise": (
        f"{ROOT}.float8_blockwise_tensor",
        "_make_float8_blockwise_tensor_in_reduce_ex",
        "Float8BlockwiseQTensor",
    ),
}


class Calls:
    """Pickles as the call of a function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


class Enum:
    """Pickles as an empty object with a state, as enums of the C++ extension did."""

    def __init__(self, value=None):
        self.value = value

    def __reduce_ex__(self, protocol):
        return (copyreg.__newobj__, (type(self),), self.value)

    def __setstate__(self, state):
        raise AssertionError("a pickle was executed")


@pytest.fixture
def engine(monkeypatch):
    """Stand-in modules; calling any of their functions fails."""

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was executed")

    names = ["transformer_engine", "transformer_engine.pytorch", ROOT, "transformer_engine_torch"]
    names += ["transformer_engine.pytorch.constants", "transformer_engine.common.recipe"]
    names += [module for module, _, _ in MAKERS.values()]
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def function(module, name, owner=None):
        made = types.FunctionType(refuse.__code__, refuse.__globals__, name)
        made.__module__, made.__qualname__ = module, name
        setattr(modules[module], name, made)
        return made

    def cls(module, name, base=object):
        made = type(name, (base,), {"__module__": module})
        setattr(modules[module], name, made)
        return made

    found = types.SimpleNamespace(make={}, cls={})
    for fmt, (module, maker, owner) in MAKERS.items():
        found.make[fmt] = function(module, maker)
        found.cls[fmt] = cls(module, owner)
        name = "_make_in_reduce_ex"
        old = types.FunctionType(refuse.__code__, refuse.__globals__, name)
        setattr(found.cls[fmt], name, classmethod(old))
    found.dtype = function("transformer_engine.pytorch.constants", "DType")
    found.old_dtype = cls("transformer_engine_torch", "DType", Enum)
    found.recipe = cls("transformer_engine.common.recipe", "DelayedScaling")
    found.quantizer = cls(f"{ROOT}.mxfp8_tensor", "MXFP8Quantizer")
    return found


def arguments(engine, tensor, enum=None):
    """The arguments of the constructor of a tensor, in the order of Transformer Engine."""
    q = tensor.quantizer
    held = dict(zip(q.keywords, tensor.buffers(), strict=True))
    code = enum or Calls(engine.dtype, 8 if getattr(q, "dtype", "e4m3") == "e5m2" else 7)
    both = [
        held.get(f"{side}_{part}")
        for side in ("rowwise", "columnwise")
        for part in ("data", "scale_inv")
    ]
    shape, dtype = tensor.shape, tensor.dtype
    if q.format == "fp8":
        return [held.get("data"), code, held["scale_inv"], dtype, shape, held.get("transpose")]
    if q.format == "mxfp8":
        return [*both, code, dtype, shape, engine.quantizer(), q.swizzled]
    if q.format == "fp8_blockwise":
        return [shape, *both, code, dtype, engine.quantizer(), q.block_scaling_dim == 2, None]
    amax = [held.get("amax_rowwise"), held.get("amax_columnwise")]
    last = [q.swizzled, q.row_scaled, q.use_4over6, int(q.e4m3_max)]
    return [shape, *both, *amax, Calls(engine.dtype, 10), dtype, engine.quantizer(), *last]


def save(path, engine, fmt, args, **more):
    torch.save({"fc.weight": Calls(engine.make[fmt], *args), **more}, path)
    return path


FORMATS = [
    ("fp8", {}),
    ("fp8", {"dtype": "e5m2"}),
    ("mxfp8", {}),
    ("mxfp8", {"dtype": "e5m2"}),
    ("mxfp8", {"columnwise": True}),
    ("mxfp8", {"columnwise": True, "rowwise": False}),
    ("mxfp8", {"swizzled": True}),
    ("nvfp4", {}),
    ("nvfp4", {"swizzled": True}),
    ("nvfp4", {"columnwise": True}),
    ("nvfp4", {"columnwise": True, "rowwise": False}),
    ("nvfp4", {"row_scaled": True}),
    ("nvfp4", {"use_4over6": True}),
    ("nvfp4", {"e4m3_max": 256.0}),
    ("fp8_blockwise", {"force_pow_2_scales": False}),
    ("fp8_blockwise", {"force_pow_2_scales": False, "columnwise": True}),
    ("fp8_blockwise", {"force_pow_2_scales": False, "block_scaling_dim": 2}),
    (
        "fp8_blockwise",
        {"force_pow_2_scales": False, "columnwise": True, "rowwise": False},
    ),
    (
        "fp8_blockwise",
        {"force_pow_2_scales": False, "block_scaling_dim": 2, "columnwise": True},
    ),
]


@pytest.mark.parametrize(("fmt", "options"), FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(48, 160), (2, 24, 160)])
def test_constructors(fmt, options, shape, engine, tmp_path):
    """Buffers are ours, one to one; both ways of reading give the same values."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    want = qtensor.quantize(values, fmt, **options)
    path = save(tmp_path / "x.pt", engine, fmt, arguments(engine, want), bias=torch.ones(3))
    with checkpoints.open(path) as checkpoint:
        assert checkpoint.layout == "transformer-engine"
        assert list(checkpoint) == ["fc.weight", "bias"]
        assert_same_bytes(checkpoint["fc.weight"], want)
        for dtype in (torch.bfloat16, torch.float32):
            dense = checkpoint.dense("fc.weight", dtype)
            assert_same_values(dense, want.dequantize(dtype))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("fmt", list(MAKERS))
def test_older_calls(fmt, protocol, engine, tmp_path):
    """getattr(<class>, "_make_in_reduce_ex") with the leading arguments alone."""
    options = {"force_pow_2_scales": False} if fmt == "fp8_blockwise" else {}
    want = weight(fmt, **options)
    counts = {"fp8": 5, "mxfp8": 7, "nvfp4": 10, "fp8_blockwise": 9}
    args = arguments(engine, want, engine.old_dtype(6))[: counts[fmt]]
    call = Calls(engine.cls[fmt]._make_in_reduce_ex, *args)
    torch.save({"fc.weight": call}, tmp_path / "x.pt", pickle_protocol=protocol)
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        assert_same_bytes(checkpoint["fc.weight"], want)


@pytest.mark.parametrize(("value", "element"), [(6, "e4m3"), (7, "e4m3"), (8, "e5m2")])
@pytest.mark.parametrize("old", [True, False])
def test_the_enum_of_elements(value, element, old, engine, tmp_path):
    """e4m3 was 6 and is 7; 7 was e5m2, which weights never are."""
    want = weight("fp8", dtype=element)
    enum = engine.old_dtype(value) if old else Calls(engine.dtype, value)
    path = save(tmp_path / "x.pt", engine, "fp8", arguments(engine, want, enum))
    assert_same_bytes(checkpoints.load_state_dict(path)["fc.weight"], want)


def test_a_shape_that_is_a_list(engine, tmp_path):
    want = weight("mxfp8")
    args = arguments(engine, want)
    args[6] = list(args[6])
    path = save(tmp_path / "x.pt", engine, "mxfp8", args)
    assert_same_bytes(checkpoints.load_state_dict(path)["fc.weight"], want)


def test_only_the_transpose(engine, tmp_path):
    """data may be None; the values are those of data_transpose, (K, N)."""
    want = weight("fp8")
    args = arguments(engine, want)
    args[5], args[0] = args[0].t().contiguous(), None
    path = save(tmp_path / "x.pt", engine, "fp8", args)
    with checkpoints.open(path) as checkpoint:
        assert_same_bytes(checkpoint["fc.weight"], want)
        assert_same_values(checkpoint.dense("fc.weight"), want.dequantize())


def changed(index, value):
    def change(args):
        args[index] = value(args[index]) if callable(value) else value

    return change


REFUSED = [
    ("fp8", changed(0, None), "data_transpose is a tensor"),
    ("fp8", changed(0, lambda t: t[:-1]), r"shape \[48, 160\]; got U8"),
    ("fp8", changed(0, lambda t: t.view(torch.int8)), "got I8"),
    ("fp8", changed(2, None), "scale_inv is a tensor"),
    ("fp8", changed(2, lambda t: t.repeat(2)), r"got F32 of shape \[2\]"),
    ("fp8", changed(2, lambda t: t.double()), "got F64"),
    ("fp8", changed(3, torch.int8), "floating-point dtype"),
    ("fp8", changed(4, torch.Size([48, 161])), "needs U8"),
    ("fp8", changed(4, "48"), "a shape and"),
    ("fp8", changed(1, 5), "fp8_dtype is"),
    ("fp8", changed(1, True), "fp8_dtype is"),
    ("fp8", lambda args: args.append(None), "7 of them"),
    ("fp8", lambda args: args.clear(), "0 of them"),
    ("mxfp8", changed(0, None), "rowwise or columnwise data"),
    ("mxfp8", changed(1, None), "rowwise_scale_inv is a tensor"),
    ("mxfp8", changed(1, lambda t: t[:48]), r"\[128, 8\]; got U8 of shape \[48, 8\]"),
    ("mxfp8", changed(8, 1), "swizzled is True or False"),
    ("nvfp4", changed(5, None), "amax_rowwise is a tensor"),
    ("nvfp4", changed(1, lambda t: t[:, :1]), r"\[48, 80\]"),
    ("nvfp4", changed(13, 300), "e4m3_max is 448 or 256"),
    ("nvfp4", changed(11, True), r"needs F32 of shape \[48\]"),
    ("fp8_blockwise", changed(8, True), "needs F32"),
    ("fp8_blockwise", changed(2, lambda t: t.t()), "needs F32"),
]


@pytest.mark.parametrize(("fmt", "change", "message"), REFUSED)
def test_what_is_refused(fmt, change, message, engine, tmp_path):
    options = {"force_pow_2_scales": False} if fmt == "fp8_blockwise" else {}
    args = arguments(engine, weight(fmt, **options))
    change(args)
    path = save(tmp_path / "x.pt", engine, fmt, args)
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(path)
    assert raised.value.layout == "transformer-engine"
    assert raised.value.file == str(path)
    assert raised.value.tensor.startswith("fc.weight")


def test_an_unknown_constructor_is_named(engine, tmp_path):
    call = Calls(engine.dtype, torch.ones(2))
    torch.save({"fc.weight": call}, tmp_path / "x.pt")
    with pytest.raises(checkpoints.CheckpointError, match=r"got transformer_engine.*DType"):
        checkpoints.open(tmp_path / "x.pt")


def test_a_factor_of_255(engine, tmp_path):
    want = weight("mxfp8")
    want.buffers()[1].fill_(255)
    path = save(tmp_path / "x.pt", engine, "mxfp8", arguments(engine, want))
    with checkpoints.open(path) as checkpoint:
        assert checkpoint["fc.weight"].dequantize().isnan().all()
        with pytest.raises(checkpoints.CheckpointError, match="not 255") as raised:
            checkpoint.dense("fc.weight")
        assert raised.value.tensor == "fc.weight"


def test_only_other_layouts_are_written(engine, tmp_path):
    want = weight("mxfp8")
    path = save(tmp_path / "x.pt", engine, "mxfp8", arguments(engine, want))
    with pytest.raises(checkpoints.CheckpointError, match="must be writable"):
        checkpoints.save({"a": want}, tmp_path / "y", layout="transformer-engine")
    with checkpoints.open(path) as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "y", layout="qtensor")
    assert_same_bytes(checkpoints.load_state_dict(tmp_path / "y")["fc.weight"], want)


# ---- extra states


def extra(engine, **tensors):
    recipe = engine.recipe()
    recipe.margin = 0
    state = {"recipe": recipe, **tensors, "extra_fp8_variables": {"num_gemms": 1}}
    return pickle.dumps(state)


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_extra_states(engine, tmp_path):
    """The bytes pass through; the tensors in them are read by name, and not written again."""
    scale, history = torch.rand(3), torch.rand(4, 3)
    data = as_tensor(extra(engine, scale_fwd=scale, amax_history_fwd=history))
    state = {"fc.weight": torch.ones(2), "fc._extra_state": data, "ln._extra_state": data[:0]}
    torch.save(state, tmp_path / "x.pt")
    checkpoints.save(state, tmp_path / "x.safetensors", layout="plain")
    for path in (tmp_path / "x.pt", tmp_path / "x.safetensors"):
        with checkpoints.open(path) as checkpoint:
            assert checkpoint.layout == "transformer-engine"
            assert set(checkpoint) == set(state)
            assert torch.equal(checkpoint["fc._extra_state"], data)
            assert torch.equal(checkpoint["fc._extra_state.scale_fwd"], scale)
            assert torch.equal(checkpoint.dense("fc._extra_state.amax_history_fwd"), history)
            names = ("fc._extra_state.scale_fwd", "fc._extra_state.amax_history_fwd")
            assert checkpoint.inner_names() == names
            for name in ("fc._extra_state.recipe", "fc._extra_state.none", "ln._extra_state.x"):
                with pytest.raises(KeyError):
                    checkpoint[name]
            folder = tmp_path / f"copy of a {path.suffix[1:]}"
            checkpoints.save(checkpoint, folder, layout="plain")
        written = SafetensorsFile(folder / "model.safetensors")
        assert set(written.infos) == set(state)
        assert set(checkpoints.load_state_dict(path)) == set(state)
        assert set(checkpoints.load_state_dict(path, rounding="origin")) == {*state, *names}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("as_object", [True, False])
def test_older_extra_states(zipped, as_object, tmp_path):
    """A BytesIO of torch.save, as an object of the state dict or as a tensor of its bytes."""
    scale = torch.rand(3)
    file = io.BytesIO()
    inner = {"scale_inv_fwd": scale, "extra_fp8_variables": {}}
    torch.save(inner, file, _use_new_zipfile_serialization=zipped)
    held = file if as_object else as_tensor(file.getvalue())
    torch.save({"fc._extra_state": held, "none._extra_state": io.BytesIO()}, tmp_path / "x.pt")
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        assert bytes(checkpoint["fc._extra_state"].numpy()) == file.getvalue()
        assert torch.equal(checkpoint["fc._extra_state.scale_inv_fwd"], scale)
        assert checkpoint["none._extra_state"].shape == (0,)


def test_hostile_extra_states(tmp_path):
    """The bytes are kept, and nothing in them is executed."""
    made = tmp_path / "made"
    hostile = pickle.dumps({"scale": torch.ones(2), "x": Calls(os.mkdir, str(made))})
    zipped = io.BytesIO()
    torch.save({"x": Calls(os.mkdir, str(made))}, zipped)
    states = [hostile, hostile[:50], b"junk", zipped.getvalue(), zipped.getvalue()[:200]]
    for i, data in enumerate(states):
        state = {"fc._extra_state": as_tensor(data), "fc.weight": torch.ones(2)}
        for path in (tmp_path / f"{i}.pt", tmp_path / f"{i}.safetensors"):
            if path.suffix == ".pt":
                torch.save(state, path)
            else:
                checkpoints.save(state, path, layout="plain")
            assert set(checkpoints.load_state_dict(path, rounding="origin")) == set(state)
            with checkpoints.open(path) as checkpoint:
                assert bytes(checkpoint["fc._extra_state"].numpy()) == data
                with pytest.raises(checkpoints.CheckpointError) as raised:
                    checkpoint["fc._extra_state.scale"]
                assert raised.value.file
        assert not made.exists()


def test_extra_states_beside_other_layouts(tmp_path):
    """A file that says how it is quantized keeps its layout."""
    state = {"a.weight": weight("mxfp8"), "a._extra_state": torch.empty(0, dtype=torch.uint8)}
    for layout in ("compressed-tensors", "qtensor", "torchao"):
        checkpoints.save(state, tmp_path / layout, layout=layout)
        with checkpoints.open(tmp_path / layout) as checkpoint:
            assert checkpoint.layout == layout
    path = tmp_path / "codes.safetensors"
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    state = {"a.weight": codes, "a.weight_scale": torch.ones(()), **{"b._extra_state": codes[:0]}}
    checkpoints.save(state, path, layout="plain")
    with pytest.raises(checkpoints.CheckpointError, match="Pass layout="):
        checkpoints.open(path)
