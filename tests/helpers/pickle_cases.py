"""Zips of torch.save around any pickle, for tests: sound ones, hostile ones and bombs."""

import pickle
import struct
import zipfile

import pytest

from qtensor import checkpoints


def torch_zip(path, pickled, storages=None, **entries):
    """Write a zip as torch.save does, around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/data.pkl", pickled)
        for key, data in (storages or {}).items():
            file.writestr(f"model/data/{key}", data)
        for name, data in entries.items():
            file.writestr(f"model/{name}", data)
    return path


def refused(path, message=None):
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.load_state_dict(path)
    assert raised.value.file == str(path)
    assert len(str(raised.value)) < 1500
    return raised.value


def named(module, name, *args, protocol=4):
    """The pickle of {"a": module.name(*args)}, made without importing anything."""
    call = f"c{module}\n{name}\n".encode() + pickle.dumps(args, protocol)[2:-1] + b"R"
    if protocol >= 4:  # without the frame
        call = f"c{module}\n{name}\n".encode() + pickle.dumps(args, 2)[2:-1] + b"R"
    return b"\x80\x02}X\1\0\0\0a" + call + b"s."


def tensor_pickle(
    shape="(4,)", strides="(1,)", offset="0", count=4, kind="FloatStorage", key="0", extra=b""
):
    """The pickle of {"a": a tensor}, with any numbers."""

    def value(text):
        return pickle.dumps(eval(text), 2)[2:-1].replace(b"q\0", b"")

    name = key.encode()
    storage = (
        b"(X\7\0\0\0storagectorch\n" + kind.encode() + b"\nX" + struct.pack("<I", len(name)) + name
    )
    storage += b"X\3\0\0\0cpu" + value(str(count)) + b"tQ"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + value(offset)
    call += value(shape) + value(strides) + b"\x89ccollections\nOrderedDict\n)R" + extra + b"tR"
    return b"\x80\x02}X\1\0\0\0a" + call + b"s."


def bombs(folder):
    """(name, path) of small files that would make another reader slow or large."""

    def put(name, pickled):
        path = f"{folder}/{name.replace(' ', '_')}.pt"
        return name, torch_zip(path, b"\x80\x02" + pickled + b".")

    key, huge = b"X\1\0\0\0a", struct.pack("<Q", 2**50)
    text = b"X" + struct.pack("<I", 10**6) + b"x" * 10**6
    data = b"B" + struct.pack("<I", 10**6) + b"\0" * 10**6
    tuples = b")" + b"".join(b"q\0h\0\x86" for _ in range(200))
    dicts = b"}" + b"".join(b"q\0}(X\1\0\0\0ah\0X\1\0\0\0bh\0u" for _ in range(30))
    yield put("a large memo index", b"}r" + b"\xff" * 4)
    yield put("a large text", b"}" + key + b"\x8d" + huge)
    yield put("large bytes", b"}" + key + b"\x8e" + huge)
    yield put("a large frame", b"\x95" + huge + b"}")
    yield put("a large bytearray", b"}" + key + b"\x96" + huge)
    yield put("a large integer", b"}" + key + b"\x8b" + b"\xff\xff\xff\x7f")
    yield put("tuples in tuples as a key", b"}" + tuples + b"K\1s")
    yield put("tuples in tuples in a set", tuples + b"(h\0\x91")
    yield put("tuples in tuples as a storage", tuples + b"0(X\7\0\0\0storageh\0h\0h\0h\0tQ")
    yield put("tuples in tuples as a function", tuples + b")R")
    yield put("tuples in tuples", b"}" + key + tuples + b"s")
    yield put("dicts in dicts", dicts)
    start = b"c__builtin__\ngetattr\nq\5" + text + b"q\7" + b"ctorchao\nX\n"
    yield put("names of names", start + b"q\0060h\5h\6h\7\x86R" * 10**4)
    yield put("long names of calls", b"ctorchao\n" + b"x" * 10**6 + b"\nq\5" + b"h\5)R" * 10**4)
    yield put("a dict in itself", b"}q\0" + key + b"h\0s")
    yield put("a list in itself", b"}" + key + b"]q\0h\0as")
    yield put("deep lists", b"}" + key + b"]" * 10**5 + b"a" * (10**5 - 1) + b"s")
    yield put("marks", b"}" + b"(" * 10**6)
    yield put("long names", b"}q\0" + text + b"q\1" + b"}h\1}h\1}h\1K\1ssss")
    encode = b"c_codecs\nencode\nq\2" + text + b"q\3X\6\0\0\0latin1q\4\x86R0"
    yield put("encoding again", encode + b"h\2h\3h\4\x86R0" * 20_000 + b"}")
    stream = b"ctorch.storage\n_load_from_bytes\nq\2" + data + b"q\3\x85R0"
    yield put("streams again", stream + b"h\2h\3\x85R0" * 20_000 + b"}")
    inner = b"\x80\x02}."
    for _ in range(50):
        word = b"B" + struct.pack("<I", len(inner)) + inner
        inner = b"\x80\x02ctorch.storage\n_load_from_bytes\n" + word + b"\x85R."
    yield put("streams in streams", inner[2:-1])
