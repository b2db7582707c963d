"""Train tiny-vl: `python -m training.train --minutes 90`. Resumes from its last checkpoint; see assets/tiny-vl/README.md.

Auxiliary heads predict from each row of the vision tower the characters under it, their column and line. The tower thus
learns letters before the decoder learns to attend to it, which removes the plateau. The heads are not shipped.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .batch import STAGES, Batch, make
from .data import PRINTED
from .loop import Loss, State, arguments, fit
from .model import TEXT, TinyVL
from .tokens import tokenizer

AUX = (len(PRINTED) + 1, len(PRINTED) + 1, 16, 16, 7)  # classes of each auxiliary head


class Trainee(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.heads = TinyVL(tokenizer().get_vocab_size()), nn.Linear(TEXT["hidden_size"], sum(AUX))

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, float]:
        """Return answer loss, auxiliary loss, and the share of correct answer tokens."""
        logits, rows = self.net(batch.ids, batch.start, batch.patches, batch.grid)
        wanted = batch.labels[:, 1:]
        mask = wanted >= 0
        chosen = logits[:, :-1][mask].float()
        answer = F.cross_entropy(chosen, wanted[mask])
        right = (chosen.argmax(-1) == wanted[mask]).float().mean().item()
        if batch.aux is None:
            return answer, answer.new_zeros(()), right
        parts = self.heads(rows).float().split(AUX, -1)
        aux = sum(F.cross_entropy(p.flatten(0, 1), t.flatten()) for p, t in zip(parts, batch.aux, strict=True))
        return answer, torch.as_tensor(aux) / len(AUX), right


def main() -> None:
    args = arguments(__doc__, 120, "out/tiny-vl-training", 32, threads=2).parse_args()
    torch.manual_seed(0)
    model = Trainee()

    def step_loss(state: State) -> Loss:
        """Compute the loss; advance the curriculum when the running accuracy passes 93 %."""
        if state["accuracy"] > 0.93 and state["since"] > 60 and state["stage"] < len(STAGES) - 1:
            state |= {"stage": state["stage"] + 1, "accuracy": 0.0, "since": 0}
        batch = make(np.random.default_rng([1, int(state["step"])]), STAGES[int(state["stage"])], args.batch)
        with torch.autocast("cpu", torch.bfloat16):
            answer, aux, right = model.losses(batch)
        if batch.kind == "text":
            state["accuracy"] = 0.97 * state["accuracy"] + 0.03 * right
        state["since"] += 1
        losses = f"answer {answer:.3f} aux {aux:.3f} right {right:.3f} running {state['accuracy']:.3f}"
        return Loss(answer + 0.5 * aux, len(batch.ids), f"{batch.kind:8s} {losses}")

    fit(model, args, {"stage": 0, "accuracy": 0.0, "since": 0}, step_loss)


if __name__ == "__main__":
    main()
