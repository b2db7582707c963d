"""Train tiny-vl: `python -m training.train --minutes 90`. Resumes from its last checkpoint; see assets/tiny-vl/README.md.

Auxiliary heads predict from each row of the vision tower the characters under it, their column and line. The tower thus
learns letters before the decoder learns to attend to it, which removes the plateau. The heads are not shipped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .batch import STAGES, Batch, make
from .data import PRINTED
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


def optimizers(model: Trainee, lr: float) -> list[torch.optim.Optimizer]:
    """Make the optimisers: Muon for matrices inside the blocks, AdamW for the rest."""
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and ("blocks." in n or "layers." in n or "merger" in n)]
    ids = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(inner, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def save(folder: Path, model: Trainee, opts: list[torch.optim.Optimizer], state: dict[str, float]) -> None:
    tensors = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}
    for i, opt in enumerate(opts):
        for index, slots in opt.state_dict()["state"].items():
            tensors |= {f"opt.{i}.{index}.{k}": torch.as_tensor(v).clone() for k, v in slots.items()}
    save_file(tensors, folder / "new.safetensors", {"state": json.dumps(state)})
    (folder / "new.safetensors").replace(folder / "last.safetensors")
    (folder / "state.json").write_text(json.dumps(state))


def load(folder: Path, model: Trainee, opts: list[torch.optim.Optimizer]) -> dict[str, float]:
    tensors = load_file(folder / "last.safetensors")
    model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
    for i, opt in enumerate(opts):
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith(f"opt.{i}."):
                _, _, index, name = key.split(".", 3)
                slots.setdefault(int(index), {})[name] = value
        opt.load_state_dict({"state": slots, "param_groups": opt.state_dict()["param_groups"]})
    return dict(json.loads((folder / "state.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120, help="training time in all; the last third decays the rate")
    parser.add_argument("--out", type=Path, default=Path("out/tiny-vl-training"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    model = Trainee()
    opts = optimizers(model, args.lr)
    state: dict[str, float] = {"step": 0, "stage": 0, "seconds": 0.0, "seen": 0, "accuracy": 0.0, "since": 0}
    if (args.out / "state.json").exists():
        state = load(args.out, model, opts)
    train(model, opts, state, args)


def train(model: Trainee, opts: list[torch.optim.Optimizer], state: dict[str, float], args: argparse.Namespace) -> None:
    """Train until the time is used up; advance the curriculum when the running accuracy passes 93 %."""
    started, saved, total = time.time() - state["seconds"], time.time(), args.minutes * 60
    while state["seconds"] < total:
        state["seconds"] = time.time() - started
        step = int(state["step"])
        rate = args.lr * min(1.0, (step + 1) / 100, max(0.01, (total - state["seconds"]) / (0.35 * total)))
        batch = make(np.random.default_rng([1, step]), STAGES[int(state["stage"])], args.batch)
        with torch.autocast("cpu", torch.bfloat16):
            answer, aux, right = model.losses(batch)
        (answer + 0.5 * aux).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.param_groups[0]["lr"] = rate
            opt.step()
            opt.zero_grad(set_to_none=True)
        state["step"], state["seen"], state["since"] = step + 1, state["seen"] + len(batch.ids), state["since"] + 1
        if batch.kind == "text":
            state["accuracy"] = 0.97 * state["accuracy"] + 0.03 * right
        if step % 50 == 0:
            where = f"{state['seconds'] / 60:6.1f} min step {step} seen {state['seen']:.0f} stage {state['stage']:.0f}"
            losses = f"answer {answer:.3f} aux {aux:.3f} right {right:.3f} running {state['accuracy']:.3f}"
            print(f"{where} {batch.kind:8s} {losses}", flush=True)
        if state["accuracy"] > 0.93 and state["since"] > 60 and state["stage"] < len(STAGES) - 1:
            state |= {"stage": state["stage"] + 1, "accuracy": 0.0, "since": 0}
        if time.time() - saved > 90 or state["seconds"] >= total:
            save(args.out, model, opts, state)
            saved = time.time()


if __name__ == "__main__":
    main()
