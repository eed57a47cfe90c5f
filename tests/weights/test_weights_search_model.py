"""On a real model, a search finds better formats than any uniform choice of as many bits.

``python tests/weights/test_weights_search_model.py`` prints the table of docs/format_search.md.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import qtensor
from qtensor.demo.model import load_model
from qtensor.demo.sentences import SENTENCES

UNIFORM = (
    "mxfp4",
    "mxfp4(scale_mode=rceil)",
    "mxfp4(scale_mode=ceil)",
    "mxfp4(scale_mode=even)",
    "mxfp4(with_2d_quantization=True)",
    "nvfp4",
    "nvfp4(row_scaled=True)",
    "nvfp4(use_4over6=True)",
    "nvfp4(with_2d_quantization=True)",
)
"""The formats of 5 bits and less, with the options that change their values."""


class Embedding(nn.Module):
    """Token ids to normalized sentence embeddings."""

    def __init__(self, bert):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


def cosine(reference, output):
    return float((reference * output).sum(-1).mean())


@torch.no_grad()
def measure(budgets=(5.0,)):
    """{name: (bits a value, mean cosine of sentences that the search has not seen)}."""
    sentences = load_model()
    model = Embedding(sentences.bert)

    def batch(texts):
        encoded = sentences.tokenizer.encode_batch(texts)
        return {
            "input_ids": torch.tensor([item.ids for item in encoded]),
            "attention_mask": torch.tensor([item.attention_mask for item in encoded]),
        }

    seen, unseen = batch(list(SENTENCES[::2])), batch(list(SENTENCES[1::2]))
    reference = model(**unseen)
    measured = {}

    def add(name, quantized):
        weights = [m.weight for m in quantized.modules() if isinstance(m, nn.Linear)]
        bits = 8 * sum(w.nbytes for w in weights) / sum(w.numel() for w in weights)
        measured[name] = bits, cosine(reference, quantized(**unseen))

    for fmt in (*UNIFORM, "mxfp6(packed=True)"):
        quantized = copy.deepcopy(model)
        qtensor.quantize_(quantized, fmt)
        add(fmt, quantized)
    for budget in budgets:
        result = qtensor.search(
            model, [seen], budget_bits=budget, metric=lambda r, o: 1 - cosine(r, o)
        )
        quantized = copy.deepcopy(model)
        result.apply(quantized)
        add(f"search {budget}", quantized)
    return measured


@pytest.mark.nightly(reason="one hundred runs of a real model")
def test_search_beats_every_uniform_format_at_five_bits():
    measured = measure()
    bits, found = measured["search 5.0"]
    assert bits <= 5.0
    for fmt in UNIFORM:
        assert measured[fmt][0] <= 5.0
        assert found > measured[fmt][1], fmt


if __name__ == "__main__":
    for name, (bits, value) in measure(budgets=(4.5, 5.0, 6.0)).items():
        print(f"| {name} | {bits:.2f} | {value:.4f} |")
