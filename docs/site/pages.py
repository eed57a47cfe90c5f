"""Choose the pages of the documentation site; mkdocs calls the functions ``on_*``.

The pages keep the paths that they have in the repository, so a link between two Markdown files
works in both places. The pages of the API are written here: one for each public module, with the
names of its ``__all__``. A public name, method or property without a docstring stops the build.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "docs/*.md",
    "docs/*.png",
    "docs/*.svg",
    "docs/site/*.css",
    "benchmarks/measured.md",
    "benchmarks/results/**/*.md",
    "benchmarks/results/**/*.png",
    "benchmarks/results/**/*.svg",
    "examples/*.py",
]
"""Files of the repository that the site shows or links to."""

API = {
    "qtensor": ["qtensor"],
    "qtensor.recipes": ["qtensor.recipes"],
    "qtensor.ops": ["qtensor.ops"],
    "qtensor.checkpoints": ["qtensor.checkpoints"],
    "qtensor.optim": ["qtensor.optim"],
    "qtensor.distributed": ["qtensor.distributed"],
    "qtensor.debug": ["qtensor.debug"],
    "qtensor.reporting": ["qtensor.reporting"],
    "qtensor.integrations": [
        "qtensor.integrations.transformers",
        "qtensor.integrations.offload",
        "qtensor.integrations.diffusers",
        "qtensor.integrations.gguf",
    ],
}
"""Pages of the API, and the modules that each one shows."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the pages of the repository and of the API, and the theme's own files."""
    kept = [file for file in files if file.src_dir != config.docs_dir]
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            kept.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    package = griffe.load("qtensor", search_paths=[str(ROOT)], resolve_aliases=True)
    for page, modules in API.items():
        text = f"# {page}\n\n" + "\n".join(api_of(package, module) for module in modules)
        kept.append(File.generated(config, f"reference/{page}.md", content=text))
    return Files(kept)


def api_of(package: griffe.Module, module: str) -> str:
    """Return the Markdown that asks mkdocstrings for the public names of a module."""
    parts = module.split(".")[1:]
    source = package[parts] if parts else package
    if source.exports is None:
        raise PluginError(f"{module}: a public module needs __all__")
    members = sorted((source[str(name)] for name in source.exports), key=position)
    if not source.docstring:
        raise PluginError(f"{module}: a public module needs a docstring")
    lines = [f"**{module}**: {source.docstring.value}\n"]
    for member in members:
        if not member.is_module:
            check_docstrings(member)
            lines.append(f"::: {module}.{member.name}\n")
    return "\n".join(lines)


def position(member: griffe.Object | griffe.Alias) -> tuple[int, str]:
    """Return the key that puts functions before classes, and errors last."""
    error = member.is_class and member.name.endswith("Error")
    return (0 if member.is_function else 2 if error else 1, member.name)


def check_docstrings(member: griffe.Object | griffe.Alias) -> None:
    """Stop the build if a public name, method or property has no docstring: the site hides it."""
    methods = [m for m in member.members.values() if m.is_function or "property" in m.labels]
    for each in [member, *methods]:
        if not each.has_docstring and not each.name.startswith("_"):
            raise PluginError(f"{each.canonical_path}: a public name needs a docstring")
