"""Train a small Wav2Vec2ForCTC of letters for benchmarks/ctc_alignment.py: `python -m training.asr.ctc`.

It is trained on the speech of tiny-asr's curriculum with the CTC loss alone, resumes from its last checkpoint, and is saved as
the folder `model` in --out. As in the published wav2vec 2.0, a frame has 25 ms of samples, and frames are 20 ms apart. The loss
stays on a plateau for the first five minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..checkpoint import write_json
from ..loop import Loss, State, arguments, fit
from ..reference import transformers
from .dataset import STAGES, draw_clip
from .grammar import Rng
from .speech import RATE, Clip
from .tokens import LETTERS, letters

DRAWN = 256  # clips that are sorted by length at a time
BANDS, TAPS = 40, 240  # filters of the first convolution: bands, samples
VOCABULARY = ("<pad>", *LETTERS.replace(" ", "|").upper())
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "conv_dim": (4 * BANDS, 128),
    "conv_kernel": (TAPS, 2),
    "conv_stride": (160, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 32,
    "num_conv_pos_embedding_groups": 8,
}


def model() -> Any:
    """Return the model. The first convolution is initialised with the filters of `mel_filters`."""
    choices = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True, "apply_spec_augment": False}
    dropouts = ("hidden", "attention", "activation", "feat_proj", "final")
    none = {f"{name}_dropout": 0.0 for name in dropouts} | {"layerdrop": 0.0}
    tf = transformers()
    net = tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(**SIZES, **choices, **none, vocab_size=len(VOCABULARY), pad_token_id=0))
    first = net.wav2vec2.feature_extractor.conv_layers[0].conv
    with torch.no_grad():
        first.weight[:, 0] = mel_filters()
        first.bias.zero_()
    return net


def mel_filters() -> Tensor:
    """Return `[4 * BANDS, TAPS]`: for each mel band a windowed cosine, a sine, and the negatives of both.

    An activation keeps the positive part of each, so that their sum hardly depends on the phase of the samples.
    """
    mel = torch.linspace(2595 * np.log10(1 + 80 / 700), 2595 * np.log10(1 + 7600 / 700), BANDS)
    angle = 2 * torch.pi / RATE * (700 * (10 ** (mel / 2595) - 1))[:, None] * (torch.arange(TAPS) - TAPS / 2)
    waves = torch.stack([angle.cos(), angle.sin(), -angle.cos(), -angle.sin()]) * torch.hann_window(TAPS)
    return waves.flatten(0, 1) * (4 / TAPS)


def batches(state: State, seconds: float) -> Iterator[list[Clip]]:
    """Yield batches of new clips of the current stage. A padded batch has about `seconds` of audio."""
    while True:
        rng, stage = np.random.default_rng([4, int(state["step"])]), int(state["stage"])
        clips = sorted((draw_clip(rng, STAGES[stage]) for _ in range(DRAWN)), key=lambda clip: len(clip.samples))
        found: list[list[Clip]] = [[]]
        for clip in clips:
            if (len(found[-1]) + 1) * len(clip.samples) > seconds * RATE:
                found.append([])
            found[-1].append(clip)
        for i in rng.permutation(len(found)):
            yield found[i]
            if state["stage"] != stage:
                break


def collate(clips: list[Clip], rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
    """Return samples of mean 0 and variance 1, padded with zeros; the letters of all clips, and how many each has."""
    length = max(len(clip.samples) for clip in clips) + int(rng.integers(400, 4000))
    samples = torch.zeros(len(clips), length)
    for row, clip in zip(samples, clips, strict=True):
        row[: len(clip.samples)] = torch.from_numpy((clip.samples - clip.samples.mean()) / (clip.samples.std() + 1e-4))
    spelled = [torch.tensor(letters(clip.text), dtype=torch.long) for clip in clips]
    return samples, torch.cat(spelled), torch.tensor([len(one) for one in spelled])


def share_missed(scores: Tensor, wanted: Tensor, counts: Tensor) -> float:
    """Return the share of clips whose greedy text has a mistake. `scores`: `[frames, clips, letters]`."""
    texts = (torch.unique_consecutive(row) for row in scores.argmax(-1).T)
    right = [torch.equal(text[text > 0], own) for text, own in zip(texts, wanted.split(counts.tolist()), strict=True)]
    return 1 - sum(right) / len(right)


def adamw(net: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return AdamW. On a CPU without bfloat16, a step of Muon takes twice as long as the rest of the training step."""
    return [torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)]


def main() -> None:
    parser = arguments(__doc__, 42, "out/ctc-training", 40, threads=1)
    parser.set_defaults(lr=1.5e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    net = model()
    state: State = {"stage": 0, "missed": 1.0, "since": 0}
    source = batches(state, args.batch)

    def step_loss(state: State) -> Loss:
        """Compute the loss; advance the curriculum when a tenth of the clips is right."""
        if state["missed"] < 0.9 and state["since"] > 50 and state["stage"] < len(STAGES) - 1:
            state |= {"stage": state["stage"] + 1, "missed": 1.0, "since": 0}
        clips = next(source)
        samples, wanted, counts = collate(clips, np.random.default_rng([5, int(state["step"])]))
        scores = net(samples).logits.float().log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(clips),), len(scores))
        ctc = F.ctc_loss(scores, wanted, lengths, counts, reduction="sum", zero_infinity=True) / counts.sum().clamp(min=1)
        missed = share_missed(scores, wanted, counts)
        state |= {"missed": 0.98 * state["missed"] + 0.02 * missed, "since": state["since"] + 1}
        return Loss(
            ctc, len(clips), f"{len(clips)}x{len(scores)} ctc {ctc:.3f} missed {missed:.2f} running {state['missed']:.3f}"
        )

    fit(net, args, state, step_loss, adamw)
    export(net, args.out / "model")


def export(net: Any, folder: Path) -> None:
    """Write the folder that `aligner=` takes, in float16."""
    net.half().save_pretrained(folder)
    write_json(folder / "vocab.json", {token: i for i, token in enumerate(VOCABULARY)})
    transformers().Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)


if __name__ == "__main__":
    main()
