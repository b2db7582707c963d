"""Train tiny-asr: `python -m training.asr.train --minutes 110`. Resumes from its last checkpoint.

assets/tiny-asr/README.md says how the shipped model was trained.

The loss of a CTC head on the encoder ends the plateau that the loss otherwise has until the decoder attends to the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ..loop import Loss, State, arguments, fit
from .dataset import FRAMES, STAGES, Batch, Sample, collate, length_buckets, read_shard
from .model import Trainee

WHOLE = 0.2  # share of batches padded to the whole window; in the last fifth of the training time, all of them
CTC = 0.5  # weight of the CTC loss


def batches(folder: Path, state: State, size: int, minutes: float) -> Iterator[Batch]:
    """Yield batches of clips from two random shards of the stage. A batch has about as many frames as `size` clips of 4 s."""
    while True:
        rng, stage = np.random.default_rng([3, int(state["step"])]), int(state["stage"])
        paths = sorted(folder.glob(f"{stage}-???.npz"))
        chosen = rng.choice(len(paths), min(2, len(paths)), replace=False)
        samples: list[Sample] = [sample for i in chosen for sample in read_shard(paths[int(i)])]
        full = state["seconds"] > 0.8 * 60 * minutes
        for bucket in length_buckets(samples, rng, size * FRAMES // 2):
            spoken = stage == len(STAGES) - 1
            whole = full or (stage > 0 and rng.random() < WHOLE)
            for part in (bucket[: len(bucket) // 2], bucket[len(bucket) // 2 :]) if whole and len(bucket) > size else (bucket,):
                yield collate(part, rng, whole, previous=0.1 * spoken, timed=0.35 * (stage > 0))
            if state["stage"] != stage:
                break


def main() -> None:
    parser = arguments(__doc__, 110, "out/tiny-asr-training", 12, threads=1)
    parser.add_argument("--data", type=Path, default=Path("out/tiny-asr-training/data"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Trainee()
    state: State = {"stage": 0, "accuracy": 0.0, "since": 0}
    source = batches(args.data, state, args.batch, args.minutes)

    def step_loss(state: State) -> Loss:
        """Compute the loss; advance the curriculum when the running accuracy passes 80 %."""
        if state["accuracy"] > 0.8 and state["since"] > 100 and state["stage"] < len(STAGES) - 1:
            state |= {"stage": state["stage"] + 1, "accuracy": 0.0, "since": 0}
        model.update_average(int(state["step"]))
        batch = next(source)
        with torch.autocast("cpu", torch.bfloat16):
            answer, ctc, right = model.losses(batch)
        state |= {"accuracy": 0.98 * state["accuracy"] + 0.02 * right, "since": state["since"] + 1}
        shape = f"{len(batch.ids)}x{batch.frames.shape[2]}"
        line = f"{shape:8s} answer {answer:.3f} ctc {ctc:.3f} right {right:.3f} running {state['accuracy']:.3f}"
        return Loss(answer + CTC * ctc, len(batch.ids), line)

    fit(model, args, state, step_loss)


if __name__ == "__main__":
    main()
