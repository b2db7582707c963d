"""Parakeet with a transducer: tokens, durations, times and texts against transformers' generate, alone and batched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from family import RATE, make_media
from measured import peak_bytes
from parakeet import make_transducer, oracle_inputs, prompt, save
from safetensors.torch import load_file, save_file
from sensorium import LLM, PoolingParams
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.models.audio.transducer import STEP_ROWS, transducer_bytes

SIZES = (12_000, 30_000, 5001, 48_000)
TOKENS = PoolingParams(pooling="tokens")
Made = tuple[Any, Any, Path, LLM]


@pytest.fixture(scope="module", params=["tdt", "rnnt"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, processor = make_transducer(0, request.param)
    folder = save(tmp_path_factory.mktemp(request.param), model, processor)
    with LLM(folder, max_num_seqs=4, device="cpu", block_size=4) as llm:
        yield model, processor, folder, llm


def check_tokens(model: Any, processor: Any, samples: Any, found: torch.Tensor) -> torch.Tensor:
    """Compare `[tokens, 4]` with generate, and its log probabilities with those of the whole sequence. Return the tokens."""
    given = oracle_inputs(processor, samples)
    with torch.inference_mode():
        theirs = model.generate(**given, max_new_tokens=2000)  # the default is one too few at the limit of tokens per row
        tokens, steps = theirs.sequences[0], theirs.durations[0]
        spoken = tokens != model.config.blank_token_id
        frames = (steps.cumsum(0) - steps)[spoken]
        assert torch.equal(found[:, 0].long(), tokens[spoken])
        assert torch.equal(found[:, 1].long(), frames)
        spans = steps[spoken] if processor.decoder_type == "tdt" else torch.ones_like(frames)
        assert torch.equal(found[:, 2].long(), spans)
        rows = model.get_audio_features(**given).pooler_output[0, frames]
        predicted = model.decoder(torch.cat((tokens[:1], tokens[spoken]))[None])[0, :-1]
        logits = model.joint(predicted, rows)[:, : model.config.vocab_size]
    expected = logits.log_softmax(-1).gather(1, tokens[spoken][:, None])[:, 0]
    assert (found[:, 3] - expected).abs().max() < 2e-4
    return tokens[spoken]


def test_tokens_are_the_oracles(made: Made) -> None:
    """Alone, in a batch, and in chunks, with equal bits."""
    model, processor, folder, llm = made
    audio = [make_media("audio", (size,), seed) for seed, size in enumerate(SIZES)]
    together = llm.encode([prompt(one) for one in audio], TOKENS, use_tqdm=False)
    again = llm.encode([prompt(one) for one in reversed(audio)], TOKENS, use_tqdm=False)[::-1]
    with LLM(folder, max_num_seqs=1, device="cpu", block_size=4, max_num_batched_tokens=16) as other:
        chunked = other.encode([prompt(one) for one in audio], TOKENS, use_tqdm=False)
    kinds = set()
    for samples, first, second, third in zip(audio, together, again, chunked, strict=True):
        assert first.error is None
        assert torch.equal(first.data, second.data)
        assert torch.equal(first.data, third.data)
        kinds |= set(check_tokens(model, processor, samples, first.data).tolist())
    assert len(kinds) > 10  # the prediction network matters


def test_texts_and_times_of_words(made: Made) -> None:
    model, processor, _, llm = made
    audio = [make_media("audio", (size,), seed) for seed, size in enumerate(SIZES)]
    found = llm.transcribe([(one, RATE) for one in audio], vad=False, timestamps="word", compression_ratio_threshold=None)
    for samples, one in zip(audio, found, strict=True):
        assert one.error is None
        with torch.inference_mode():
            theirs = model.generate(**oracle_inputs(processor, samples))
        (expected,), (stamps,) = processor.decode(theirs.sequences, durations=theirs.durations, skip_special_tokens=True)
        assert one.text.split() == expected.split()
        words = [word for part in one.segments for word in part.words]
        assert "".join(word.word for word in words).split() == expected.split()
        rows = torch.stack((theirs.durations.cumsum(1) - theirs.durations, theirs.durations.cumsum(1)))
        if processor.decoder_type == "rnnt":
            rows[1] = rows[0] + 1
        known = {round(row * 0.08, 3) for row in rows.flatten().tolist()} | {round(len(samples) / RATE, 3)}
        assert {round(stamp["start"], 3) for stamp in stamps} <= known
        assert {time for word in words for time in (word.start, word.end)} <= known
        times = [time for word in words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert all(0 < word.probability <= 1 for word in words)


def edited(folder: Path, target: Path, file: str, **changes: Any) -> Path:
    for one in folder.iterdir():
        (target / one.name).write_bytes(one.read_bytes())
    content = json.loads((folder / file).read_text())
    (target / file).write_text(json.dumps(content | changes))
    return target


def test_long_files_are_cut_into_windows(made: Made, tmp_path: Path) -> None:
    short = edited(made[2], tmp_path, "preprocessor_config.json", max_audio_clip_s=2)
    with LLM(short, device="cpu", block_size=4) as llm:
        (found,) = llm.transcribe(
            (make_media("audio", (80_000,), 3), RATE), vad=False, timestamps="word", compression_ratio_threshold=None
        )
    assert found.error is None
    assert len(found.windows) > 2
    starts = [word.start for part in found.segments for word in part.words]
    assert starts == sorted(starts)
    assert starts[-1] > 3


def shifted(folder: Path, target: Path, shifts: dict[int, float], **changes: Any) -> Path:
    """Copy a checkpoint and add to the biases of these outputs of the joint network."""
    tensors = load_file(edited(folder, target, "config.json", **changes) / "model.safetensors")
    for output, shift in shifts.items():
        tensors["joint.head.bias"][output] += shift
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_tokens_per_row_are_limited(made: Made, tmp_path: Path) -> None:
    """RNN-T as transformers. With durations of 0 alone transformers does not reach the next row."""
    model, processor, folder, _ = made
    blank, samples = model.config.blank_token_id, make_media("audio", (12_000,), 0)
    shifts = {blank: -100.0} | ({} if processor.decoder_type == "rnnt" else {model.config.vocab_size: 100.0})
    limited = shifted(folder, tmp_path, shifts, max_symbols_per_step=3)
    with LLM(limited, device="cpu", block_size=4) as llm:
        (found,) = llm.encode(prompt(samples), TOKENS, use_tqdm=False)
    assert found.data[:, 1].tolist() == [row for row in range(10) for _ in range(3)]
    if processor.decoder_type == "rnnt":
        check_tokens(type(model).from_pretrained(limited).eval(), processor, samples, found.data)


def test_durations_with_gaps(made: Made, tmp_path: Path) -> None:
    """The text equals that of durations without gaps, of which the added ones are never chosen.

    transformers is no oracle here: it takes a duration's index for the duration.
    """
    model, processor, folder, _ = made
    if processor.decoder_type == "rnnt":
        pytest.skip("it predicts no durations")
    vocab, kept = model.config.vocab_size, [0, 2, 4]
    samples = make_media("audio", (48_000,), 0)
    (tmp_path / "all").mkdir()
    (tmp_path / "gaps").mkdir()
    every = shifted(folder, tmp_path / "all", {vocab + 1: -100.0, vocab + 3: -100.0})
    edited(folder, tmp_path / "gaps", "config.json", durations=kept)
    tensors = load_file(every / "model.safetensors")
    for part in ("weight", "bias"):
        head = tensors[f"joint.head.{part}"]
        tensors[f"joint.head.{part}"] = head[[*range(vocab), *(vocab + rows for rows in kept)]].contiguous()
    save_file(tensors, tmp_path / "gaps" / "model.safetensors", metadata={"format": "pt"})
    decoded = []
    for name in ("all", "gaps"):
        with LLM(tmp_path / name, device="cpu", block_size=4) as llm:
            (found,) = llm.encode(prompt(samples), TOKENS, use_tqdm=False)
            decoded.append(found.data)
    assert torch.equal(*decoded)
    assert set(decoded[0][:, 2].tolist()) >= {2, 4}


def test_silence_has_no_tokens(made: Made, tmp_path: Path) -> None:
    quiet = shifted(made[2], tmp_path, {made[0].config.blank_token_id: 100.0})
    with LLM(quiet, device="cpu", block_size=4) as llm:
        audio = make_media("audio", (30_000,), 0)
        (found,) = llm.encode(prompt(audio), TOKENS, use_tqdm=False)
        (text,) = llm.transcribe((audio, RATE), vad=False, timestamps="word")
    assert found.data.shape == (0, 4)
    assert (text.error, text.text) == (None, "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"durations": [0, 2, -4]}, r"\[0, 2, -4\]; it must list numbers of rows from 0 to 1000"),
        ({"durations": [0]}, "one of them above 0"),
        ({"durations": 4}, "durations in config.json is 4; it must list"),
        ({"blank_token_id": 4000}, "blank_token_id"),
        ({"max_symbols_per_step": 0}, "max_symbols_per_step"),
        ({"num_decoder_layers": "two"}, "num_decoder_layers"),
        ({"hidden_act": "tan"}, "hidden_act"),
        ({"pad_token_id": -3}, "pad_token_id"),
    ],
)
def test_wrong_configs_are_named(made: Made, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    if "durations" in changes and made[1].decoder_type == "rnnt":
        changes = {"decoder_hidden_size": 0}
        reason = "decoder_hidden_size"
    with pytest.raises(ConfigError, match=reason):
        LLM(edited(made[2], tmp_path, "config.json", **changes), device="cpu")


def test_wrong_weights_are_named(made: Made, tmp_path: Path) -> None:
    target = edited(made[2], tmp_path, "config.json")
    tensors = load_file(target / "model.safetensors")
    tensors.pop("decoder.lstm.weight_hh_l1")
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"transducer\.hh_l1\.weight"):
        LLM(target, device="cpu")


def test_items_are_decoded_together(made: Made) -> None:
    """In as many calls as the longest needs, with the bits of each alone and of any parts."""
    model = made[3].engine.loop.core.executor.runner.model
    hidden = [torch.randn(count, model.row_size) * 3 for count in (70, 9, 64, 33, 1)]
    with torch.inference_mode(), counted_joins(model) as calls:
        together = model.decode_rows(hidden, [None] * len(hidden), [None] * len(hidden))
        joins, most = len(calls), 0
        for rows, whole in zip(hidden, together, strict=True):
            calls.clear()
            (alone,) = model.decode_rows([rows], [None], [None])
            most = max(most, len(calls))
            assert alone.tokens == whole.tokens
            state, lengths = None, (1, 5, 16, 2, 40, 6)
            for part in rows.split([min(n, max(0, len(rows) - sum(lengths[:i]))) for i, n in enumerate(lengths)]):
                (state,) = model.decode_rows([part], [state], [None])
            assert state.tokens == whole.tokens
            assert state.given == len(rows) <= state.row
    assert len(together[0].tokens) > 20
    assert joins == most


@contextmanager
def counted_joins(model: Any) -> Iterator[list[int]]:
    calls, join = list[int](), model.transducer._join

    def spy(parts: Any, *rest: Any) -> Any:
        calls.append(len(parts))
        return join(parts, *rest)

    model.transducer._join = spy
    try:
        yield calls
    finally:
        del model.transducer._join


def test_a_step_decodes_few_rows(made: Made) -> None:
    """A long item is decoded over several steps, beside others."""
    model, processor, _, llm = made
    audio = [make_media("audio", (size,), 1) for size in (170_000, 12_000)]
    ours, steps = llm.engine.loop.core.executor.runner.model, list[list[int]]()
    real = ours.decode_rows
    ours.decode_rows = lambda hidden, *rest: steps.append(list(map(len, hidden))) or real(hidden, *rest)
    try:
        found = llm.encode([prompt(one) for one in audio], TOKENS, use_tqdm=False)
    finally:
        del ours.decode_rows
    assert [one.error for one in found] == [None, None]
    assert max(map(max, steps)) == STEP_ROWS
    assert len(steps) >= 3
    (alone,) = llm.encode([prompt(audio[0])], TOKENS, use_tqdm=False)
    assert torch.equal(found[0].data, alone.data)
    if processor.decoder_type == "rnnt":  # transformers' TDT does not leave a row whose tokens last no rows
        check_tokens(model, processor, audio[0], alone.data)


def test_memory_is_planned(made: Made) -> None:
    model = made[3].engine.loop.core.executor.runner.model
    hidden = [torch.randn(60, model.row_size) for _ in range(5)]
    limit = transducer_bytes(model.transducer.spec, 300, 5, torch.float32)
    with torch.inference_mode():
        assert peak_bytes(lambda: model.decode_rows(hidden, [None] * 5, [None] * 5)) <= limit


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tdt", "rnnt"])
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_of_other_checkpoints(tmp_path: Path, kind: str, seed: int) -> None:
    model, processor = make_transducer(seed, kind, num_decoder_layers=seed)
    samples = make_media("audio", (48_000,), seed)
    with LLM(save(tmp_path, model, processor), device="cpu", block_size=4) as llm:
        (found,) = llm.encode(prompt(samples), TOKENS, use_tqdm=False)
    check_tokens(model, processor, samples, found.data)


@pytest.mark.full
def test_every_tensor_has_a_say(made: Made, tmp_path: Path) -> None:
    *_, folder, llm = made
    samples = make_media("audio", (30_000,), 1)
    (whole,) = llm.encode(prompt(samples), TOKENS, use_tqdm=False)
    target, tensors = edited(folder, tmp_path, "config.json"), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if not name.startswith("encoder."):  # whose tensors the tests of the CTC head zero
            save_file({**tensors, name: torch.zeros_like(tensor)}, target / "model.safetensors")
            with LLM(target, device="cpu", block_size=4) as other:
                (found,) = other.encode(prompt(samples), TOKENS, use_tqdm=False)
            same = found.data.shape == whole.data.shape and torch.allclose(found.data, whole.data, atol=1e-3)
            assert not same, name
