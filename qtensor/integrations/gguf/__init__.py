"""Write models of transformers as GGUF files for llama.cpp, and read GGUF files as such models.

``save_gguf`` and ``open_gguf`` translate names, metadata and the order of rows; NVFP4 and MXFP4
weights keep their codes and factors. docs/checkpoints.md shows both. Neither needs a package.
"""

from __future__ import annotations

from qtensor.integrations.gguf.reading import GGUFModel, open_gguf
from qtensor.integrations.gguf.writing import save_gguf

__all__ = ["GGUFModel", "open_gguf", "save_gguf"]
