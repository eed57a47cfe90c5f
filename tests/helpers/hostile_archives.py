"""Ways to damage zips of torch.save and GGUF files; hostile_cases.py lists them."""

import io
import pickle
import struct
import zipfile

from hostile_files import GGUF, Damage, spoiled
from pickle_cases import named

from qtensor.checkpoints.containers.gguf import GGUFFile

ARCHIVE = "model.pt"


# ---- zips of torch.save


def unzipped(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def zipped(entries, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return out.getvalue()


def pickle_bytes(files, chance):
    entries = unzipped(files[ARCHIVE])
    entries["model/data.pkl"] = spoiled(entries["model/data.pkl"], chance)
    files[ARCHIVE] = zipped(entries)
    # A changed key or number of a storage describes other values.
    return Damage()


def zip_bytes(files, chance):
    """Damage the local headers and the directory, and not the bytes of the entries."""
    data = files[ARCHIVE]
    at = data.index(b"PK\1\2") if chance.random() < 0.7 else data.rindex(b"PK\5\6")
    files[ARCHIVE] = data[:at] + spoiled(data[at:], chance)
    return Damage()


def zip_names(files, chance):
    """Names of entries that leave the zip, or a name twice."""
    entries = unzipped(files[ARCHIVE])
    names = ("../x", "/x", "model/../../x", "model/./x", "model//x", "..\\x", "C:/x", "x/data.pkl")
    entries[chance.choice(names)] = b"x"
    files[ARCHIVE] = zipped(entries)
    return Damage(True)


def storage_size(files, chance):
    """A storage with fewer bytes than the pickle says."""
    entries = unzipped(files[ARCHIVE])
    name = chance.choice([n for n in sorted(entries) if "/data/" in n and entries[n]])
    entries[name] = entries[name][: chance.randrange(len(entries[name]))]
    files[ARCHIVE] = zipped(entries)
    return Damage(True)


CALLS = (
    ("os", "system", ("touch ../outside/executed",)),
    ("posix", "system", ("touch ../outside/executed",)),
    ("os", "mkdir", ("../outside/executed",)),
    ("builtins", "eval", ("__import__('os').mkdir('../outside/executed')",)),
    ("builtins", "exec", ("open('../outside/executed', 'w')",)),
    ("builtins", "open", ("../outside/executed", "w")),
    ("builtins", "__import__", ("antigravity",)),
    ("subprocess", "Popen", (["touch", "../outside/executed"],)),
    ("importlib", "import_module", ("this",)),
    ("torch", "load", ("../outside/model.pt",)),
    ("torch.hub", "load", ("x", "y")),
    ("torch.jit", "load", ("../outside/model.pt",)),
    ("torch.storage", "_load_from_bytes", (pickle.dumps(print),)),
    ("pickle", "loads", (b"cos\nsystem\n(X\1\0\0\0xtR.",)),
    ("shutil", "rmtree", ("../outside",)),
    ("operator", "attrgetter", ("system",)),
    ("functools", "partial", (len,)),
    ("numpy", "load", ("../outside/x",)),
    ("runpy", "run_path", ("../outside/x.py",)),
    ("webbrowser", "open", ("http://localhost",)),
    ("socket", "create_connection", (("127.0.0.1", 1),)),
    ("code", "interact", ()),
    ("qtensor.checkpoints", "save", ({}, "../outside/executed")),
    ("torchao.quantization", "../../x", ()),
)
"""(module, name, arguments) of calls that a pickle can ask for; all but the last are refused."""


def hostile_pickle(files, chance):
    module, name, args = chance.choice(CALLS)
    files[ARCHIVE] = zipped({"model/data.pkl": named(module, name, *args, protocol=2)})
    return Damage(module != "torchao.quantization")


# ---- GGUF


def gguf_header(data):
    """Return the number of bytes of the header, without the zeros at its end."""
    start = min(info.start for info in GGUFFile(io.BytesIO(data)).infos.values())
    return len(data[:start].rstrip(b"\0"))


def gguf_bytes(files, chance):
    data = files[GGUF]
    end = gguf_header(data)
    files[GGUF] = spoiled(data[:end], chance) + data[end:]
    return Damage()


def gguf_numbers(files, chance):
    """A count, a length, a dim, a type or an offset of the header becomes another number."""
    data = bytearray(files[GGUF])
    at = chance.choice([4, 8, 16, *range(24, gguf_header(data) - 8)])
    wide = at in (8, 16) or chance.random() < 0.5
    number = chance.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1, 3, 255])
    number &= 2 ** (64 if wide else 32) - 1
    struct.pack_into("<Q" if wide else "<I", data, at, number)
    files[GGUF] = bytes(data)
    return Damage()


def gguf_names(files, chance):
    """A name of a tensor is not UTF-8, or is that of another tensor."""
    data = bytearray(files[GGUF])
    at = data.index(b".weight")
    data[at + 1 : at + 4] = chance.choice([b"\xff\xfe\xfd", b"\xc3\x28\xa0", b"\xed\xa0\x80"])
    files[GGUF] = bytes(data)
    return Damage(True)
