"""Ways to damage safetensors files, JSON files and links of a folder; hostile_cases.py lists them.

A folder is a dict from file names to bytes, or to what stands in place of a file. Each way takes a
folder and a ``random.Random``, changes the folder, and returns a ``Damage``.
"""

import json
from typing import NamedTuple

JUNK = (None, True, -1, 0, 2**70, 1.5, "", "x", "../x", [], [1], [-1, 2], {}, {"a": 1}, "\ud800")
"""The last one is an escape for half a character: then no text of the file is trusted."""
GGUF, INDEX = "model.gguf", "model.safetensors.index.json"
WIDTHS = {
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("I64", "U64", "F64", "C64"),
}
"""Bits -> dtypes of safetensors."""


class Damage(NamedTuple):
    """Say what must come of a damaged folder."""

    refused: bool = False
    """True if no reader may take it for a valid file."""
    tensor: str = ""
    """The tensor whose entry was damaged: the error names a tensor."""
    values: bool = False
    """True if the values themselves were damaged, which no reader can see."""
    kept: bool = False
    """True if every tensor that can still be read must keep its values, however it is described."""


class Link(NamedTuple):
    """Stand for a symbolic link in place of a file."""

    target: str


class Fifo(NamedTuple):
    """Stand for a named pipe in place of a file: opening one waits for ever."""


class Folder(NamedTuple):
    """Stand for a folder in place of a file."""


# ---- safetensors


def parts(data):
    """Return the header and the data of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header, data):
    """Return a safetensors file; a header may also be bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def shard_of(files, chance):
    return chance.choice(sorted(name for name in files if name.endswith(".safetensors")))


def entry_of(header, chance):
    """Return the name of a tensor that has bytes."""
    names = [n for n, e in header.items() if n != "__metadata__" and e["data_offsets"][1]]
    full = [n for n in names if len(set(header[n]["data_offsets"])) == 2]
    return chance.choice(sorted(full))


def edit(change):
    """Return a kind that changes one entry of a header: ``change(entry, chance)``."""

    def damage(files, chance):
        name = shard_of(files, chance)
        header, data = parts(files[name])
        tensor = entry_of(header, chance)
        refused = change(header[tensor], chance)
        files[name] = joined(header, data)
        return Damage(refused, tensor)

    return damage


def product(shape):
    count = 1
    for n in shape:
        count *= n
    return count


def shapes(entry, chance):
    """Another shape: of another size it is refused, of the same size it is another tensor."""
    old = entry["shape"]
    choices = ([*old, 1], [1, *old], old[::-1], [product(old)], [*old, 2], [n + 1 for n in old])
    entry["shape"] = chance.choice([*choices, [-n for n in old], old[1:], *JUNK[:-1]])
    return entry["shape"] != old and not (
        type(entry["shape"]) is list
        and all(type(n) is int and n >= 0 for n in entry["shape"])
        and product(entry["shape"]) == product(old)
    )


def huge(entry, chance):
    old = entry["shape"]
    big = chance.choice([2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 2**70, 10**300])
    kind = chance.randrange(3)
    if kind == 0:
        entry["shape"] = [*old[:-1], big]
    elif kind == 1:
        entry["shape"] = [big, big, *old]
    else:
        entry["data_offsets"] = [entry["data_offsets"][0], big]
    return True


def offsets(entry, chance):
    begin, end = entry["data_offsets"]
    step = chance.choice([1, 2, 4, 16, -1, -4, 2**40])
    entry["data_offsets"] = chance.choice([
        [begin + step, end + step],
        [begin, end + step],
        [begin + step, end],
        [end, begin],
        [begin],
        [begin, end, end],
        [float(begin), end],
        [str(begin), str(end)],
        [begin == 0, end],
        None,
        {},
    ])
    return True


def dtypes(entry, chance):
    """Another width is refused; another dtype of the same width is another tensor."""
    width = next(bits for bits, names in WIDTHS.items() if entry["dtype"] in names)
    other = chance.choice([*sum(WIDTHS.values(), ()), "F4", "F7", "f32", "", 7, None, ["F32"]])
    same = type(other) is str and other in WIDTHS[width]
    entry["dtype"] = other
    return not same


def keys(entry, chance):
    if chance.random() < 0.5:
        del entry[chance.choice(sorted(entry))]
    else:
        entry[chance.choice(["strides", "Dtype", "", "../x"])] = chance.choice(JUNK[:-1])
    return True


def header_node(files, chance):
    """Replace or drop a node of the header or of a JSON text in it, and keep its size right."""
    name = shard_of(files, chance)
    header, data = parts(files[name])
    texts = {k: v for k, v in header.get("__metadata__", {}).items() if v[:1] in ("{", "[")}
    if texts and chance.random() < 0.7:
        key = chance.choice(sorted(texts))
        header["__metadata__"][key] = json.dumps(damage_json(json.loads(texts[key]), chance))
    else:
        header = damage_json(header, chance)
    files[name] = joined(header, data)
    return Damage()


def header_bytes(files, chance):
    name = shard_of(files, chance)
    data = files[name]
    end = 8 + int.from_bytes(data[:8], "little")
    files[name] = spoiled(data[:end], chance) + data[end:]
    return Damage()


def header_size(files, chance):
    name = shard_of(files, chance)
    size = chance.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1, 100_000_001, len(files[name])])
    files[name] = size.to_bytes(8, "little") + files[name][8:]
    return Damage(True)


def twice(files, chance):
    """The same name twice in a header: with the same entry, or with another one."""
    name = shard_of(files, chance)
    header, data = parts(files[name])
    tensor = entry_of(header, chance)
    extra = header[tensor] if chance.random() < 0.5 else header[entry_of(header, chance)]
    text = json.dumps(header)[:-1] + f", {json.dumps(tensor)}: {json.dumps(extra)}}}"
    files[name] = joined(text.encode(), data)
    return Damage(True)


def not_utf8(files, chance):
    """Bytes in a name or a key that are not UTF-8, in a header or a JSON file."""
    name = chance.choice([n for n in sorted(files) if n.endswith((".json", ".safetensors"))])
    bad = chance.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\x80"])
    if name.endswith(".json"):
        at = files[name].index(b'"') + 1
        files[name] = files[name][:at] + bad + files[name][at:]
        return Damage(name in ("config.json", "hf_quant_config.json", INDEX))
    data = files[name]
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    rest = data[8 + len(text) :]
    at = text.index(b'"') + 1
    files[name] = joined(text[:at] + bad + text[at:], rest)
    return Damage(True)


def swapped(files, chance):
    """Two tensors change places, or one has another name: another file, and a valid one."""
    name = shard_of(files, chance)
    header, data = parts(files[name])
    one, other = entry_of(header, chance), entry_of(header, chance)
    if chance.random() < 0.5:
        header[one], header[other] = header[other], header[one]
    else:
        header[chance.choice(["x", "../../x", "", "a/b", one + "_scale", "\0"])] = header.pop(one)
    files[name] = joined(header, data)
    return Damage()


def dropped(files, chance):
    """A sound file without one tensor, often a factor."""
    name = shard_of(files, chance)
    header, data = parts(files[name])
    tensor = entry_of(header, chance)
    begin, end = header.pop(tensor)["data_offsets"]
    for about in header.values():
        if "data_offsets" in about and about["data_offsets"][0] >= end:
            about["data_offsets"] = [n - (end - begin) for n in about["data_offsets"]]
    files[name] = joined(header, data[:begin] + data[end:])
    # In old ComfyUI files a weight without factor is a cast of its codes.
    return Damage(kept=not tensor.endswith(".scale_weight"))


def cut(files, chance):
    name = chance.choice([n for n in sorted(files) if not n.endswith(".json")])
    data = files[name]
    left = chance.randrange(len(data)) if chance.random() < 0.7 else len(data) - 1
    files[name] = data[:left]
    # The data of a GGUF file may end in padding.
    return Damage(name != GGUF or len(data) - left > 32)


def longer(files, chance):
    name = shard_of(files, chance)
    files[name] += bytes(chance.choice([1, 8, 4096]))
    return Damage(True)


def data_bytes(files, chance):
    """Flip bits of the values: they decode to others, or a factor is refused."""
    name = shard_of(files, chance)
    data = bytearray(files[name])
    start = 8 + int.from_bytes(data[:8], "little")
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(start, len(data))] ^= 1 << chance.randrange(8)
    files[name] = bytes(data)
    return Damage(values=True)


# ---- JSON files beside the tensors


def damage_json(value, chance):
    """Replace one random node of a JSON value by junk, or drop it."""
    paths = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in list(items):
            paths.append((node, key))
            if isinstance(child, dict | list):
                walk(child)

    walk(value)
    if not paths:
        return value
    node, key = chance.choice(paths)
    if chance.random() < 0.2:
        del node[key]
    else:
        node[key] = chance.choice(JUNK)
    return value


def config_of(files, chance):
    return chance.choice([n for n in sorted(files) if n.endswith("config.json")])


def config_node(files, chance):
    name = config_of(files, chance)
    value = json.loads(files[name])
    entry = value.get("quantization", value.get("quantization_config"))
    damage_json(entry if entry and chance.random() < 0.8 else value, chance)
    files[name] = json.dumps(value).encode()
    return Damage()


def config_bytes(files, chance):
    name = config_of(files, chance)
    files[name] = spoiled(files[name], chance)
    return Damage()


def index_node(files, chance):
    value = json.loads(files[INDEX])
    damage_json(value["weight_map"] if chance.random() < 0.8 else value, chance)
    files[INDEX] = json.dumps(value).encode()
    return Damage()


OUTSIDE = (
    "../outside/model.safetensors",
    "/etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "..",
    ".",
    "",
    "a/b",
    "./x",
    "..\\outside\\model.safetensors",
    "a\0b",
    "C:\\x",
    "//host/share",
    "\ud800",
    "x" * 5000,
)


def traversal(files, chance):
    """A shard whose name leaves the folder."""
    value = json.loads(files[INDEX])
    tensor = chance.choice(sorted(value["weight_map"]))
    value["weight_map"][tensor] = chance.choice(OUTSIDE)
    files[INDEX] = json.dumps(value).encode()
    return Damage(True)


def links(files, chance):
    """A link that leaves the folder, goes in a circle or to nothing, or something else."""
    needed = [n for n in sorted(files) if n != "SHA256SUMS"]
    name = chance.choice(needed)
    others = ["../outside/config.json", "../outside/model.safetensors", "/etc/passwd", "/dev/zero"]
    targets = [*others, "/proc/self/environ", name, "none", "..", "/"]
    files[name] = chance.choice([*map(Link, targets), Fifo(), Folder()])
    return Damage(True)


def checksums(files, chance):
    """A list of checksums, which ``verify`` reads, with names that leave the folder."""
    lines = [f"{chance.randbytes(32).hex()}  {name}" for name in OUTSIDE[:5]]
    files["SHA256SUMS"] = chance.choice([
        "\n".join(lines).encode(),
        chance.randbytes(200),
        Link("../outside/SHA256SUMS"),
        Link("/dev/zero"),
        Fifo(),
    ])
    return Damage()


def spoiled(data, chance):
    """Flip, insert or remove some bytes, or cut the data."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if not data:
            break
        at, kind = chance.randrange(len(data)), chance.randrange(7)
        if kind < 2:
            data[at] ^= 1 << chance.randrange(8)
        elif kind < 4:
            data[at:at] = bytes(
                chance.choices(b'0123456789"[]{},:-e.\xff\0', k=chance.randint(1, 3))
            )
        elif kind < 6:
            del data[at : at + chance.randint(1, 5)]
        else:
            del data[at:]
    return bytes(data)
