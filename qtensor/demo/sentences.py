"""The sentences of the demo, and the comparison of their embeddings."""

from dataclasses import dataclass

import torch
from torch import Tensor

SENTENCES = (
    "A quantized tensor stores a code and a scale for every block of values.",
    "Compressing the weights of a network makes it smaller and faster.",
    "The cat sleeps on the warm windowsill all afternoon.",
    "A kitten is napping in the sun by the window.",
    "Bake the bread at 220 degrees until the crust is golden brown.",
    "Heavy rain delayed every train between the two cities this morning.",
    "How do I reset the password of my account?",
    "Yes.",
)
"""Similar pairs, different sentences, a question, and a sentence of one word."""


@dataclass(frozen=True)
class SentenceResult:
    """The model's embeddings with weights in one format, compared with float32."""

    format: str
    cosine_min: float
    cosine_mean: float
    worst_sentence: str
    seconds: float
    """Seconds of one forward pass over all sentences."""


def compare_embeddings(
    fmt: str, exact: Tensor, approximate: Tensor, seconds: float
) -> SentenceResult:
    """Return the cosine similarities of two sets of embeddings of ``SENTENCES``, row by row."""
    cosine = torch.nn.functional.cosine_similarity(exact.double(), approximate.double(), dim=1)
    worst = int(cosine.argmin())
    return SentenceResult(
        fmt, float(cosine[worst]), float(cosine.mean()), SENTENCES[worst], seconds
    )
