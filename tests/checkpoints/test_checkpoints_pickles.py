"""Files of torch.save: what they hold is read as torch does, and hostile ones execute nothing."""

import collections
import io
import os
import pickle
import zipfile

import pytest
import torch
from pickle_cases import named, refused, tensor_pickle, torch_zip

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints.containers.torch_zip import pickled_tensors
from qtensor.checkpoints.errors import Place

# ---- sound files


def plain_state():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "bf16": base.bfloat16(),
        "f16": base.half(),
        "f64": base.double(),
        "i64": base.long(),
        "i32": base.int(),
        "i16": base.short(),
        "i8": base.to(torch.int8),
        "u8": base.byte(),
        "u16": base.to(torch.uint16),
        "bool": base > 3,
        "c64": torch.complex(base, base),
        "e4m3": base.to(torch.float8_e4m3fn),
        "e8m0": base.byte().view(torch.float8_e8m0fnu),
        "transposed": base.t(),
        "slice": base[1:3, 2:5],
        "row": base[2],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(base.clone()),
    }


def assert_equal(got, want):
    want = want.detach()
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got, want)]
    assert torch.equal(*raw)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_tensors(protocol, tmp_path):
    state = plain_state()
    torch.save(state, tmp_path / "x.pt", pickle_protocol=protocol)
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.layout == "plain"
        assert list(checkpoint) == list(state)
        for name, want in state.items():
            got = checkpoint[name]
            if name == "e4m3":  # codes without a factor: an fp8 tensor with the factor 1
                assert isinstance(got, qtensor.QuantizedTensor)
                assert got._scale_inv.tolist() == [1.0]
                got = got._data
                want = want.view(torch.uint8)
            assert_equal(got, want)
        repr(checkpoint.table())


def test_modules_and_nested_dicts(tmp_path):
    """Names are joined by dots; numbers and texts are left out."""
    model = torch.nn.Linear(3, 2)
    value = {
        "model": model.state_dict(),
        "step": 7,
        "rate": 0.1,
        "note": "text",
        "none": None,
        "list": [torch.ones(2), (torch.zeros(1),)],
        "ordered": collections.OrderedDict(a=torch.ones(1)),
        3: {"x": torch.ones(3)},
    }
    torch.save(value, tmp_path / "x.pt")
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        names = ["model.weight", "model.bias", "list.0", "list.1.0", "ordered.a", "3.x"]
        assert list(checkpoint) == names
        assert torch.equal(checkpoint["model.weight"], model.weight)


def test_tensors_share_the_mapped_file(tmp_path):
    base = torch.arange(64.0)
    torch.save({"a": base, "b": base[10:20], "c": base}, tmp_path / "x.pt")
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        a, b, c = (checkpoint[name] for name in "abc")
    assert a.data_ptr() == c.data_ptr()
    assert b.data_ptr() == a.data_ptr() + 40
    a.fill_(1)
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        assert torch.equal(checkpoint["a"], base)
    assert b.sum() == 10


def test_large_sizes_and_comments(tmp_path):
    """Sizes in 64 bits, a comment at the end, an open file, and a folder."""
    torch.save({"a": torch.arange(5.0)}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as new:
        new.comment = b"a comment"
        for name, data in entries.items():
            with new.open(name, "w", force_zip64=True) as entry:
                entry.write(data)
    for path in (tmp_path, tmp_path / "model.pt"):
        assert torch.equal(checkpoints.load_state_dict(path)["a"], torch.arange(5.0))
    with (tmp_path / "model.pt").open("rb") as file:
        assert torch.equal(checkpoints.load_state_dict(file)["a"], torch.arange(5.0))
    data = io.BytesIO((tmp_path / "model.pt").read_bytes())
    assert torch.equal(checkpoints.load_state_dict(data)["a"], torch.arange(5.0))


def test_legacy_files_are_named(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "x.pt", "torch.save before 1.6")


@pytest.mark.parametrize("zipped", [True, False])
def test_streams_inside_tensors(zipped):
    """An extra state is a zip of torch.save, a legacy stream, or a pickle around such streams."""
    state = {"scale": torch.arange(3.0), "history": torch.ones(4, 3).t(), "n": 1}
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=zipped)
    for data in (file.getvalue(), pickle.dumps(state)):
        found = pickled_tensors(data, Place("file", "tensor"))
        assert list(found) == ["scale", "history"]
        assert all(torch.equal(found[name], state[name]) for name in found)
    assert pickled_tensors(b"", Place()) == {}


# ---- names


class Runs:
    """An object whose pickle asks for a call."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


HOSTILE = [
    ("os", "system", "touch {}"),
    ("posix", "system", "touch {}"),
    ("os", "mkdir", "{}"),
    ("os", "makedirs", "{}"),
    ("pathlib", "Path", "{}"),
    ("builtins", "eval", "__import__('os').mkdir('{}')"),
    ("builtins", "exec", "__import__('os').mkdir('{}')"),
    ("builtins", "open", "{}", "w"),
    ("builtins", "__import__", "os"),
    ("builtins", "getattr", "os", "mkdir"),
    ("__builtin__", "eval", "1"),
    ("subprocess", "Popen", "mkdir {}"),
    ("torch", "load", "{}"),
    ("torch.hub", "load", "a/b", "c"),
    ("torch.serialization", "load", "{}"),
    ("torch.storage", "TypedStorage", 1),
    ("torch", "tensor", 1),
    ("torch", "Tensor", 1),
    ("torch._utils", "_rebuild_qtensor", 1),
    ("torch.jit", "load", "{}"),
    ("numpy.core.multiarray", "_reconstruct", 1),
    ("collections", "defaultdict", 1),
    ("functools", "partial", 1),
    ("operator", "attrgetter", "x"),
    ("copyreg", "_reconstructor", 1),
    ("transformer_engineer", "x", 1),
    ("torchaox.y", "x", 1),
    ("os\ncposix", "system", "touch {}"),
]


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: f"{case[0]}.{case[1]}")
@pytest.mark.parametrize("place", ["file", "stream", "state"])
def test_names_that_are_not_read(case, place, tmp_path):
    """Nothing is imported or called, wherever the name stands."""
    made = tmp_path / "made"
    module, name, *args = case
    args = [a.format(made) if isinstance(a, str) else a for a in args]
    pickled = named(module, name, *args)
    if place == "stream":
        inner = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + b"\x80\x02M\xe9\x03."
        pickled = named("torch.storage", "_load_from_bytes", inner + pickled, protocol=2)
        # Bytes are a call of _codecs.encode in protocol 2.
        assert b"_codecs" in pickled
    elif place == "state":
        call = named(module, name, *args)[len(b"\x80\x02}X\1\0\0\0a") : -2]
        pickled = b"\x80\x02}X\1\0\0\0actorchao\nX\n)\x81" + call + b"bs."
    error = refused(torch_zip(tmp_path / "x.pt", pickled), "names that a pickle may hold|getattr")
    assert "not imported" in str(error) or "getattr" in str(error)
    assert not made.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_reduce_of_real_objects(protocol, tmp_path):
    made = tmp_path / "made"
    value = {"a": torch.ones(2), "b": Runs(os.mkdir, str(made))}
    for i, hostile in enumerate((value, Runs(eval, f"__import__('os').mkdir({str(made)!r})"))):
        path = torch_zip(tmp_path / f"{i}.pt", pickle.dumps(hostile, protocol))
        refused(path)
        assert not made.exists()
    path.write_bytes(pickle.dumps(value, protocol))
    refused(path)
    assert not made.exists()


CALLS = {
    "the result of a call": b"ctorchao\nX\n)R)R",
    "a text": b"X\1\0\0\0a)R",
    "a dtype": b"ctorch\nfloat32\n)R",
    "a storage type": b"ctorch\nFloatStorage\n)R",
    "arguments that are a list": b"ctorchao\nX\n]R",
    "getattr of a dtype": b"c__builtin__\ngetattr\nctorch\nfloat32\nX\1\0\0\0a\x86R",
    "getattr of a list": b"c__builtin__\ngetattr\n]X\1\0\0\0a\x86R",
    "getattr of a number": b"c__builtin__\ngetattr\nctorchao\nX\nK\1\x86R",
    "a state for a list": b"]}b",
    "pairs for a list": b"](K\1K\2u",
    "values for a dict": b"}K\1a",
    "a key that is a tuple": b"}(K\1\x85K\2u",
    "an odd number of values": b"}(K\1u",
    "an empty stack": b"0" * 9,
    "no mark": b"t",
    "a memo that was not written": b"h\7",
    "an unknown opcode": b"\xff",
    "an extension": b"\x82\1",
    "a persistent text": b"Px\n",
    "a persistent number": b"K\1Q",
    "an instance": b"(ios\nsystem\n",
    "a text that is not UTF-8": b"X\2\0\0\0\xff\xfe",
    "a huge integer": b"\x8b\0\0\0\1",
    "a negative size": b"\x8b\xff\xff\xff\xff",
    "codecs with another codec": b"c_codecs\nencode\nX\1\0\0\0aX\4\0\0\0zlib\x86R",
    "a subclass of another package": b"ctorch._tensor\n_rebuild_from_type_v2\n(NNNNtR",
    "no dict": b"0K\1",
}


@pytest.mark.parametrize("case", CALLS)
def test_opcodes_that_are_not_read(case, tmp_path):
    refused(torch_zip(tmp_path / "x.pt", b"\x80\x02}X\1\0\0\0a" + CALLS[case] + b"s."))


# ---- tensors


def test_the_pickles_of_these_tests_are_sound(tmp_path):
    path = torch_zip(tmp_path / "x.pt", tensor_pickle(), {"0": bytes(16)})
    assert torch.equal(checkpoints.load_state_dict(path)["a"], torch.zeros(4))


TENSORS = {
    "a longer shape": ({"shape": "(5,)"}, "no more elements"),
    "an offset behind the end": ({"offset": "1"}, "lies inside it"),
    "a negative offset": ({"offset": "-1"}, "sizes and strides"),
    "a huge offset": ({"offset": "2**62"}, "lies inside it"),
    "an offset that is True": ({"offset": "True"}, "sizes and strides"),
    "a long stride": ({"strides": "(2,)"}, "lies inside it"),
    "a negative stride": ({"strides": "(-1,)"}, "sizes and strides"),
    "a negative size": ({"shape": "(-4,)"}, "sizes and strides"),
    "a size that is True": ({"shape": "(True,)"}, "sizes and strides"),
    "a size that is a float": ({"shape": "(4.0,)"}, "sizes and strides"),
    "a size that is a text": ({"shape": "('4',)"}, "sizes and strides"),
    "a shape that is a number": ({"shape": "4"}, "sizes and strides"),
    "more strides than sizes": ({"strides": "(1, 1)"}, "a stride for each dim"),
    "a huge size": ({"shape": "(2**40,)"}, "no more elements"),
    "a huge size without memory": (
        {"shape": "(2**40,)", "strides": "(0,)"},
        "no more elements",
    ),
    "a huge product": (
        {"shape": "(2**40, 2**40)", "strides": "(0, 0)"},
        "no more elements",
    ),
    "a huge size beside a zero": (
        {"shape": "(0, 2**40, 2**40)", "strides": "(0, 0, 0)"},
        "no more elements",
    ),
    "a size of 70 bits": ({"shape": "(2**70,)"}, "sizes and strides"),
    "65 dims": ({"shape": str((1,) * 65), "strides": str((1,) * 65)}, "at most 64 integers"),
    "a storage that is larger than its entry": ({"count": 5}, "an entry of 20 bytes"),
    "a storage that is smaller than its entry": ({"count": 3, "shape": "(3,)"}, "of 12 bytes"),
    "a negative storage": ({"count": -4}, "a name and a size"),
    "a huge storage": ({"count": 2**62}, "a name and a size"),
    "another type of storage": ({"kind": "LongStorage"}, "of 32 bytes; got one of 16"),
    "a missing entry": ({"key": "1"}, "storage '1' has an entry"),
    "an entry outside": ({"key": "../../data.pkl"}, "has an entry"),
    "an absolute entry": ({"key": "/etc/passwd"}, "has an entry"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_lie_inside_their_storage(case, tmp_path):
    changes, message = TENSORS[case]
    path = torch_zip(tmp_path / "x.pt", tensor_pickle(**changes), {"0": bytes(16)})
    refused(path, message)


def test_a_storage_has_one_type(tmp_path):
    """torch.load would read both tensors with the type that comes first."""
    head = b"\x80\x02}X\1\0\0\0a"
    calls = [tensor_pickle(kind=kind)[len(head) : -2] for kind in ("FloatStorage", "IntStorage")]
    pickled = head.replace(b"}", b"}(") + calls[0] + b"X\1\0\0\0b" + calls[1] + b"u."
    refused(torch_zip(tmp_path / "x.pt", pickled, {"0": bytes(16)}), "one type and size")
