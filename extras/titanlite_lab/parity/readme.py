"""The README.md of a bundle: what its files are, and what another trainer writes."""

from __future__ import annotations

from titanlite_lab.parity.bundle import PROJECTIONS, ZERO, BundleFacts

TEXT = """\
# Parity bundle

What titanlite's plain {family} model computes in {steps} steps, on one process in fp32, with SGD
without momentum, weight decay and clipping. Another trainer that starts from the same weights and
reads the same batches must compute the same.

| file | what |
| --- | --- |
| `weights/` | fp32, a Hugging Face folder: seed {seed}, {parameters:,} parameters |
| `batches/step-N.safetensors` | `tokens`, `labels`, `positions`: int64 [{sequences}, {seq_len}] |
| `losses.json` | of each step: `loss`, `grad_norm`, and `update_norms` by tensor |
| {gradient_file} |
| `tolerances.json` | how far each number may differ, relative |
| `parity.json` | the settings, and the order in which backward completes the gradients |
| `run.toml` | the job |

Data: {data}.

## One step

1. Read the batch of step N, from 1. `labels[b, t]` is the token after `tokens[b, t]`: do not shift
   again. Labels of -100 are not trained on. `positions` count from the start of the sequence. Where
   they restart at 0, another document begins, and attention does not cross that border.
2. Loss: the cross-entropy in nats, summed over all labels but -100, and divided by their number in
   the whole batch. No auxiliary loss.
3. Backward. `grad_norm` is the 2-norm of the gradients of all tensors; a tied tensor counts once.
   Compute it in fp64: torch's fp32 norm of a tensor on a CPU can be off by more than the tolerance.
4. Update: `weight -= {learning_rate:g} * gradient`, for every tensor. `update_norms`, which you may
   leave out, has the 2-norm of the change of each tensor.

Everything is fp32: weights, activations, gradients (on a GPU, also without TF32).

## What to write

A folder with

- `losses.json`: `{{"steps": [{{"step": 1, "loss": 6.2, "grad_norm": 1.5}}, …]}}`, and if you like,
  `"update_norms": {{"lm_head.weight": 0.1, …}}` in each step
- `gradients/step-N/*.safetensors`: the gradient of each tensor of step N, before the update, in
  full, in fp32, under the names and in the shapes of `weights/`. One file or several. A gradient
  that is zero may be left out.

A bundle with its gradients in full is such a folder. Then

    python -m titanlite_lab parity compare BUNDLE YOUR_FOLDER

exits with 0 if both agree, 1 if they differ, 2 if a file is missing or not valid.

## Tolerances

The computation was repeated with the gradients of each sequence added one by one, with the
sequences in reverse order, and with initial weights of which each differs by one rounding unit
(2^-23, relative). A tolerance is {multiple:g} times the largest deviation, and at least {floor:g},
for the loss and the norm of the gradient {scalar_floor:g}.
An error is relative to the {size} of a tensor, but to at least {zero:g} times that of the largest
tensor of the step.
"""
FULL = "`gradients/step-N/model.safetensors` | the gradient of each tensor in step N"
SUMMARIZED = (
    "`gradient_summaries.json` | of the gradient of each tensor, its norm and"
    f" {PROJECTIONS} sums of its values with fixed random signs"
)


def bundle_readme(facts: BundleFacts, multiple: float, floor: float, scalar_floor: float) -> str:
    """The text for one bundle."""
    return TEXT.format(
        **vars(facts),
        gradient_file=FULL if facts.gradients_are_full else SUMMARIZED,
        size="largest value" if facts.gradients_are_full else "norm",
        multiple=multiple,
        floor=floor,
        scalar_floor=scalar_floor,
        zero=ZERO,
    )
