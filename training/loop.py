"""The training loop of the shipped models: optimisers, rate, checkpoints from which a run resumes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

State = dict[str, float]


@dataclass(frozen=True)
class Loss:
    """Loss of one step, the samples it saw, and its line in the log."""

    value: Tensor
    samples: int
    line: str


def arguments(description: str | None, minutes: float, out: str, batch: int, threads: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, default=minutes, help="training time in all; the last third decays the rate")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=threads)
    return parser


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Make the optimisers: Muon for matrices inside the blocks, AdamW for the rest."""
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and ("blocks." in n or "layers." in n or "merger" in n)]
    ids = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(inner, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def save(folder: Path, model: nn.Module, opts: list[torch.optim.Optimizer], state: State) -> None:
    tensors = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}
    for i, opt in enumerate(opts):
        for index, slots in opt.state_dict()["state"].items():
            tensors |= {f"opt.{i}.{index}.{k}": torch.as_tensor(v).clone() for k, v in slots.items()}
    save_file(tensors, folder / "new.safetensors", {"state": json.dumps(state)})
    (folder / "new.safetensors").replace(folder / "last.safetensors")
    (folder / "state.json").write_text(json.dumps(state))


def load(folder: Path, model: nn.Module, opts: list[torch.optim.Optimizer]) -> State:
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


def fit(
    model: nn.Module,
    args: argparse.Namespace,
    state: State,
    step_loss: Callable[[State], Loss],
    make: Callable[[nn.Module, float], list[torch.optim.Optimizer]] = optimizers,
) -> None:
    """Train until `args.minutes` are used up, from the last checkpoint in `args.out` if there is one.

    `step_loss` computes the loss of the step `state["step"]`, and advances the curriculum in `state`.
    """
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    opts = make(model, args.lr)
    state |= {"step": 0, "seconds": 0.0, "seen": 0}
    if (args.out / "state.json").exists():
        state |= load(args.out, model, opts)
    started, saved, total = time.time() - state["seconds"], time.time(), args.minutes * 60
    while state["seconds"] < total:
        state["seconds"] = time.time() - started
        step = int(state["step"])
        rate = args.lr * min(1.0, (step + 1) / 100, max(0.01, (total - state["seconds"]) / (0.35 * total)))
        loss = step_loss(state)
        loss.value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.param_groups[0]["lr"] = rate
            opt.step()
            opt.zero_grad(set_to_none=True)
        state |= {"step": step + 1, "seen": state["seen"] + loss.samples}
        if step % 50 == 0:
            where = f"{state['seconds'] / 60:6.1f} min step {step} seen {state['seen']:.0f} stage {state['stage']:.0f}"
            print(f"{where} {loss.line}", flush=True)
        if time.time() - saved > 90 or state["seconds"] >= total:
            save(args.out, model, opts, state)
            saved = time.time()
