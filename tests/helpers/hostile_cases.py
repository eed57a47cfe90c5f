"""Damaged checkpoints for tests: the kinds of damage, and the cases that they make."""

import random

import hostile_archives as archives
import hostile_files as damage
from hostile_archives import ARCHIVE
from hostile_files import GGUF, INDEX

SAFETENSORS, SHARDED, CONFIG, ZIP, GGUF_FILE = "safetensors", "sharded", "config", "zip", "gguf"
KINDS = {
    "shape": (damage.edit(damage.shapes), SAFETENSORS),
    "huge size": (damage.edit(damage.huge), SAFETENSORS),
    "offset": (damage.edit(damage.offsets), SAFETENSORS),
    "dtype": (damage.edit(damage.dtypes), SAFETENSORS),
    "key of an entry": (damage.edit(damage.keys), SAFETENSORS),
    "node of a header": (damage.header_node, SAFETENSORS),
    "bytes of a header": (damage.header_bytes, SAFETENSORS),
    "size of a header": (damage.header_size, SAFETENSORS),
    "duplicate name": (damage.twice, SAFETENSORS),
    "not UTF-8": (damage.not_utf8, SAFETENSORS),
    "swapped or renamed": (damage.swapped, SAFETENSORS),
    "missing tensor": (damage.dropped, SAFETENSORS),
    "truncated": (damage.cut, SAFETENSORS),
    "truncated shard": (damage.cut, SHARDED),
    "longer": (damage.longer, SAFETENSORS),
    "bits of the values": (damage.data_bytes, SAFETENSORS),
    "node of a config": (damage.config_node, CONFIG),
    "bytes of a config": (damage.config_bytes, CONFIG),
    "node of an index": (damage.index_node, SHARDED),
    "path that leaves the folder": (damage.traversal, SHARDED),
    "link": (damage.links, SAFETENSORS),
    "link of a shard": (damage.links, SHARDED),
    "list of checksums": (damage.checksums, SAFETENSORS),
    "bytes of a pickle": (archives.pickle_bytes, ZIP),
    "bytes of a zip": (archives.zip_bytes, ZIP),
    "names of a zip": (archives.zip_names, ZIP),
    "short storage": (archives.storage_size, ZIP),
    "truncated zip": (damage.cut, ZIP),
    "pickle that calls": (archives.hostile_pickle, ZIP),
    "bytes of a GGUF header": (archives.gguf_bytes, GGUF_FILE),
    "numbers of a GGUF header": (archives.gguf_numbers, GGUF_FILE),
    "names of a GGUF file": (archives.gguf_names, GGUF_FILE),
    "truncated GGUF file": (damage.cut, GGUF_FILE),
}
"""Kind -> how to damage, and which folders it fits."""


def fits(files, what):
    """Return whether a kind of damage is for such a folder."""
    return {
        SAFETENSORS: any(name.endswith(".safetensors") for name in files),
        SHARDED: INDEX in files,
        CONFIG: any(name.endswith("config.json") for name in files),
        ZIP: ARCHIVE in files,
        GGUF_FILE: GGUF in files,
    }[what]


def case(number, folders):
    """Return kind, name of the folder, damaged files and ``Damage`` of a case.

    Args:
        number: index of the case; it decides everything.
        folders: name -> files.
    """
    chance = random.Random(f"hostile {number}")
    kinds = list(KINDS)
    kind = kinds[number % len(kinds)]
    make, what = KINDS[kind]
    name = chance.choice(sorted(name for name, files in folders.items() if fits(files, what)))
    files = dict(folders[name])
    return kind, name, files, make(files, chance)
