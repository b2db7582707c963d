"""Nemotron Speech Streaming against transformers; rows of streams against those of whole items, with every head."""

from __future__ import annotations

import pytest
import torch
from family import RATE, make_media
from measured import peak_bytes
from oracle import ensure_torchvision, randomise, sharpen, small_tokenizer
from parakeet import ENCODER, oracle_inputs, prompt, save
from sensorium import LLM, PoolingParams
from sensorium.callers.errors import ConfigError
from sensorium.mm.types import AudioItem
from sensorium.models.audio.cache_aware import cache_aware_spec
from sensorium.models.families.nemotron_asr_streaming.model import CacheAwareParakeet, NemotronAsrStreaming
from sensorium.models.families.nemotron_asr_streaming.processing import NemotronAsrStreamingProcessingInfo
from sensorium.models.families.parakeet.model import ParakeetCtc, ParakeetTdt, ParakeetTransducer
from sensorium.models.interface import StepLimits, SupportsStreams
from sensorium.models.memory_formulas import SMALL
from sensorium.processors import nemo_mel
from sensorium.processors.files import ProcessorFiles
from streams import play

CPU = torch.device("cpu")
SIZES = (12_000, 30_000, 5001, 48_000)
AUDIO = ENCODER | {"subsampling_conv_channels": 12, "sliding_window": 9, "default_num_lookahead_tokens": 3}
HEADS = {"ctc": ParakeetCtc, "rnnt": ParakeetTransducer, "tdt": ParakeetTdt}


def make(seed, **encoder):
    ensure_torchvision()
    import transformers as tf

    made = small_tokenizer(["<unk>", "<pad>", "<blank>"])
    words = tf.ParakeetTokenizer(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")
    blank = words.convert_tokens_to_ids("<blank>")
    sizes = {"vocab_size": len(words), "pad_token_id": words.pad_token_id, "blank_token_id": blank, "decoder_hidden_size": 32}
    audio = tf.NemotronAsrStreamingEncoderConfig(**{**AUDIO, **encoder})
    model = tf.NemotronAsrStreamingForRNNT(tf.NemotronAsrStreamingConfig(**sizes, encoder_config=audio.to_dict())).eval()
    randomise(model, seed)
    sharpen(model.encoder)
    model.decoder.embedding.weight.data.mul_(5)
    model.decoder.decoder_projector.weight.data.mul_(4)
    head = model.joint.head
    head.weight.data.sub_(head.weight.data.mean(1, keepdim=True)).mul_(2)
    head.bias.data[blank] += 5
    features = tf.NemotronAsrStreamingFeatureExtractor(feature_size=audio.num_mel_bins)
    processor = tf.NemotronAsrStreamingProcessor(features, words, blank_token="<blank>")
    spread(model, oracle_inputs(processor, make_media("audio", (48_000,), 0)))
    model.generation_config.decoder_start_token_id = blank
    return model, processor


@torch.inference_mode()
def spread(model, inputs):
    """Scale the rows that the joint network reads, as in tests/helpers/parakeet.py."""
    rows, project = model.get_audio_features(**inputs).pooler_output[0], model.encoder_projector
    factor = 1.5 / rows.std(0).mean()
    project.bias.data.sub_(rows.mean(0)).mul_(factor)
    project.weight.data.mul_(factor)


@pytest.fixture(scope="module", params=[{}, {"attention_bias": False, "convolution_bias": False, "sliding_window": 4}])
def made(request, tmp_path_factory):
    model, processor = make(0, **request.param)
    folder = save(tmp_path_factory.mktemp("nemotron"), model, processor)
    with LLM(folder, max_num_seqs=4, device="cpu", block_size=4) as llm:
        yield model, processor, llm


def test_rows_and_tokens_are_the_oracles(made):
    """Alone and in a batch with equal bits."""
    model, processor, llm = made
    audio = [make_media("audio", (size,), seed) for seed, size in enumerate(SIZES)]
    tokens = PoolingParams(pooling="tokens")
    together = llm.encode([prompt(one) for one in audio], tokens, use_tqdm=False)
    again = llm.encode([prompt(one) for one in reversed(audio)], tokens, use_tqdm=False)[::-1]
    ours = llm.engine.loop.core.executor.runner.model
    assert isinstance(ours, SupportsStreams)
    found = set()
    for samples, first, second in zip(audio, together, again, strict=True):
        assert first.error is None
        assert first.data.equal(second.data)
        given = oracle_inputs(processor, samples)
        with torch.inference_mode():
            theirs = model.encoder(**given)
            valid = theirs.attention_mask[0].bool()
            count = int(given["attention_mask"].sum())
            rows = ours.encoder(given["input_features"][0, :count], [count])
            expected = theirs.last_hidden_state[0][valid]
            assert rows.shape == expected.shape
            torch.testing.assert_close(rows, expected, rtol=0, atol=2e-4 * max(1.0, float(expected.std())))
            generated = model.generate(**given, max_new_tokens=2000).sequences[0].tolist()
        spoken = [token for token in generated if token != model.config.blank_token_id]
        assert first.data[:, 0].long().tolist() == spoken
        found |= set(spoken)
    assert len(found) > 5


@pytest.mark.parametrize("head", HEADS)
@torch.inference_mode()
def test_rows_and_tokens_of_a_stream_have_the_bits_of_the_whole(head):
    """Frames arrive in uneven parts, of which the last ones change when more arrive. Each final row is computed once."""
    config = {"encoder_config": AUDIO, "vocab_size": 40, "pad_token_id": 0, "blank_token_id": 39, "decoder_hidden_size": 32}
    kind = type("Streaming", (CacheAwareParakeet, HEADS[head]), {})
    model = kind(config, torch.float32, CPU)
    fill_randomly(model, 5)
    frames = torch.randn(403, AUDIO["num_mel_bins"], generator=torch.Generator().manual_seed(1))
    (whole,) = model.embed_multimodal("audio", {"input_features": frames, "audio_frames": torch.tensor([403])})
    merged = []
    for count in (9, 40, 41, 130, 131, 290, 403):
        is_last, final = count == 403, max(0, count - 2)
        given = frames[:count].clone()
        if not is_last:
            given[final:] = 7.0  # frames that will be others
        stream = torch.tensor([[12, is_last, final]])
        tensors = {"input_features": given, "audio_frames": torch.tensor([count]), "audio_stream": stream}
        (rows,) = model.embed_multimodal("audio", tensors)
        closed = model.encoder.spec.final_rows(final) // 4 * 4
        assert rows[:closed].equal(whole[:closed])
        merged.append(closed)
        assert len(model._windows._states) == (not is_last)
    assert merged == sorted(merged)
    assert rows.equal(whole)
    if head == "ctc":
        assert model.project_hidden(rows, True).equal(model.project_hidden(whole, True))
    else:
        (alone,), (streamed,) = (model.decode_rows([part], [None], [None]) for part in (whole, rows))
        parts, state = rows.split(17), None
        for part in parts:
            (state,) = model.decode_rows([part], [state], [None])
        assert alone.tokens == streamed.tokens == state.tokens
        assert alone.tokens


@torch.inference_mode()
def test_blocks_of_an_open_window_are_decoded_once(monkeypatch):
    """A later pass has the same rows at first. Their tokens are those of all rows at once; rules have states of their own."""
    config = {"encoder_config": AUDIO, "vocab_size": 40, "pad_token_id": 0, "blank_token_id": 39, "decoder_hidden_size": 32}
    model = NemotronAsrStreaming(config, torch.float32, CPU)
    fill_randomly(model, 5)
    rows, decode, counts = (
        torch.randn(200, model.row_size, generator=torch.Generator().manual_seed(2)),
        model.transducer.decode,
        [],
    )

    def counted(given, before, rules):
        counts.append(sum(map(len, given)))
        return decode(given, before, rules)

    def decoded(given, rule=None):
        state = None
        for part in given.split(model.step_rows):
            (state,) = model.decode_rows([part], [state], [rule])
        return state.tokens

    monkeypatch.setattr(model.transducer, "decode", counted)
    alone = decoded(rows)
    assert decoded(rows) == alone
    assert counts == [64, 64, 64, 8] * 2  # nothing is kept without a stream
    open_window = torch.tensor([[3, 0, 38]])
    features = {"input_features": torch.randn(40, AUDIO["num_mel_bins"]), "audio_frames": torch.tensor([40])}
    model.embed_multimodal("audio", {**features, "audio_stream": open_window})
    counts.clear()
    decoded(rows[:150])
    assert decoded(rows) == alone
    assert counts == [64, 64, 22, 64, 8]
    counts.clear()
    ruled = decoded(rows, lambda tokens, logits: logits[:, alone[0][0]].fill_(-torch.inf))
    assert counts == [64, 64, 64, 8]
    assert ruled != alone
    for seed in range(20):
        decoded(torch.randn(64, model.row_size, generator=torch.Generator().manual_seed(seed)))
    assert len(model._states) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frames_of_an_open_window_are_computed_once(monkeypatch, dtype):
    """They have the bits of those of the whole window, also if it ends before the last pass did. There is no dither."""
    info = NemotronAsrStreamingProcessingInfo(ProcessorFiles(audio={"dither": 1e-2}))
    samples, earlier, counts, bands = make_media("audio", (RATE * 9,), 3), None, [], nemo_mel._bands
    monkeypatch.setattr(nemo_mel, "_bands", lambda *given: counts.append(1) or bands(*given))
    for size in (4_000, 30_000, 60_000, len(samples), 100_000):
        counts.clear()
        earlier = info.open_window(torch.as_tensor(samples[:size]), 7, False, dtype, earlier)
        computed = len(counts)
        whole = info.process(AudioItem(torch.as_tensor(samples[:size]), RATE), dtype)[0]
        for name, elem in whole.items():
            assert earlier.kwargs[name].data.equal(elem.data)
        assert computed < len(counts) - computed or size <= 30_000


def fill_randomly(model, seed):
    from sensorium.models.weights import named_layers

    draw, weights = torch.Generator().manual_seed(seed), {}
    for name, (_, views) in named_layers(model).items():
        values = torch.randn(views[name].shape, generator=draw)
        fan = max(1, views[name].shape[-1] if values.dim() < 3 else values[0].numel())
        weights[name] = 0.2 * values + float("norm" in name and "weight" in name) if values.dim() == 1 else values / fan**0.5
    model.prefixes = ()
    model.load_weights(weights.items())


def test_live_text_is_the_text_of_the_whole(made, monkeypatch):
    """A stream in blocks of 0.1 s, whose windows are encoded piece by piece: each pass goes on from the one before."""
    _, _, llm = made
    samples = make_media("audio", (64_000,), 9)
    (whole,) = llm.transcribe((samples, RATE), vad=False, compression_ratio_threshold=None)
    encoder = llm.engine.loop.core.executor.runner.model.encoder
    extend, earlier_rows = encoder.extend, []

    def counted(features, final, earlier):
        earlier_rows.append(0 if earlier is None else len(earlier.rows))
        return extend(features, final, earlier)

    monkeypatch.setattr(encoder, "extend", counted)
    events = play(llm, samples, vad=False, min_chunk=0.5, max_window=30.0, sampling_params=None, language=None)
    finals = [event for event in events if event.kind == "final"]
    assert " ".join(event.text for event in finals).split() == whole.text.split()
    assert whole.text
    assert earlier_rows.count(0) <= len(finals) + 1  # a first pass may be too short for a complete chunk
    assert len(earlier_rows) > 3


@pytest.mark.parametrize("rows", [13, 128, 300])
def test_memory_is_planned(made, rows):
    model, mels = made[2].engine.loop.core.executor.runner.model, AUDIO["num_mel_bins"]
    given = {"input_features": torch.randn(8 * rows - 1, mels), "audio_frames": torch.tensor([8 * rows - 1])}
    live = given["input_features"].nbytes + peak_bytes(lambda: model.embed_multimodal("audio", given))
    planned = model.encoder_bytes("audio", rows, StepLimits(1, 1, 1, CPU))
    assert live <= planned <= 1.3 * live + SMALL


def test_states_are_as_large_as_planned(made):
    """And none is left when a window is closed or freed."""
    model = made[2].engine.loop.core.executor.runner.model
    features = torch.randn(320, AUDIO["num_mel_bins"])
    tensors = {"input_features": features, "audio_frames": torch.tensor([320]), "audio_stream": torch.tensor([[5, 0, 318]])}
    with torch.inference_mode():
        (rows,) = model.embed_multimodal("audio", tensors)
    (state,) = model._windows._states.values()
    held = state.rows.nbytes + sum(part.nbytes for cache in state.caches for part in (cache.keys_values, cache.inputs))
    assert 0.5 * held < model.stream_bytes(len(rows)) >= held
    model.free_stream(5)
    assert not model._windows._states


@pytest.mark.parametrize("wrong", [{"default_num_lookahead_tokens": -1}, {"sliding_window": 0}])
def test_wrong_sizes(wrong):
    with pytest.raises(ConfigError) as caught:
        cache_aware_spec({**AUDIO, **wrong})
    assert next(iter(wrong)) in str(caught.value)
