"""Train a quantized copy of a small GPT on the outputs of the original (distillation).

``python -m examples.small_gpt --output small_gpt.pt`` trains the original. Then

    python -m examples.distill --model small_gpt.pt --format nvfp4 --activations --output nvfp4

prepares a copy with ``qtensor.prepare_qat_``, lets it learn the logits of the original, replaces
its weights by quantized ones with ``qtensor.convert_qat_``, and writes them. The outputs before and
after the conversion are equal in every bit. 200 steps take some minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtensor
from examples import small_gpt

STEPS = 200
LEARNING_RATE = 5e-4


def distill(
    student: nn.Module, teacher: nn.Module, data: Tensor, c: small_gpt.Config, steps: int = STEPS
) -> None:
    """Train a model on the outputs of another one, and set it to eval mode.

    Args:
        student: tokens (B, T) to logits (B, T, V).
        teacher: likewise; it does not change.
        data: uint8 bytes, of which windows are the inputs.
        c: has the sizes of the windows and of the batches.
        steps: of AdamW.
    """

    def losses() -> Iterator[Tensor]:
        for step in range(steps):
            tokens = small_gpt.windows(data, c.batch, c.context, seed=(1 << 22) + step)
            with torch.no_grad():
                wanted = F.log_softmax(teacher(tokens), -1)
            given = F.log_softmax(student(tokens), -1)
            yield F.kl_div(given, wanted, reduction="none", log_target=True).sum(-1).mean()

    # The weights are near a good place already: a small step, and no decay towards zero.
    small_gpt.descend(student, losses(), steps, LEARNING_RATE, weight_decay=0.0)


def main() -> None:
    """Distill, convert, and print perplexities."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("small_gpt.pt"), help="of small_gpt.py")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--activations", action="store_true", help="quantize inputs of layers too")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--windows", type=int, default=256, help="of the perplexity")
    parser.add_argument("--output", type=Path, help="folder for the quantized weights")
    arguments = parser.parse_args()
    data, held_out = small_gpt.corpus()
    teacher, c = small_gpt.load(arguments.model)
    student = copy.deepcopy(teacher)
    print(qtensor.prepare_qat_(student, arguments.format, activations=arguments.activations))

    def score(model: nn.Module) -> float:
        return small_gpt.perplexity(model, held_out, c.context, arguments.windows)

    print(f"perplexity: {score(teacher):.4f} before, {score(student):.4f} rounded", flush=True)
    distill(student, teacher, data, c, arguments.steps)
    tokens = small_gpt.windows(held_out, 4, c.context, seed=0)
    with torch.no_grad():
        trained = student(tokens)
        qtensor.convert_qat_(student)
        print("equal bits:", torch.equal(student(tokens), trained))
    print(f"perplexity: {score(student):.4f} after distillation, with quantized weights")
    if arguments.output is not None:
        qtensor.checkpoints.save(student.state_dict(), str(arguments.output), layout="qtensor")


if __name__ == "__main__":
    main()
