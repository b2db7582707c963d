"""The encoder-decoder stack against MBart's decoder: scaled and normed embeddings, key biases."""

from __future__ import annotations

import pytest
import torch
from oracle import randomise
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.models.interface import ForwardBatch
from sensorium.models.text.encoder_decoder import CrossDecoder, CrossDecoderSpec, with_key_biases
from sensorium.models.weights import fill

BLOCK, CPU = 4, torch.device("cpu")
SPEC = CrossDecoderSpec(50, 32, 48, 4, 2, 64, first_position=2, embed_scale=32**0.5, embed_norm=True)


@pytest.fixture(scope="module")
def oracle():
    from transformers import MBartConfig
    from transformers.models.mbart.modeling_mbart import MBartDecoder

    shape = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    config = MBartConfig(vocab_size=50, max_position_embeddings=64, scale_embedding=True, **shape)
    config._attn_implementation = "eager"
    model = MBartDecoder(config).eval()
    randomise(model, 0)
    return model


@pytest.fixture(scope="module")
def ours(oracle) -> CrossDecoder:
    model = CrossDecoder(SPEC, torch.float32, CPU)
    fill(model, oracle.state_dict().items(), ())
    return model


def meta(rows: int, keys: int, written: range, causal: bool) -> AttentionMetadata:
    """Return metadata of one request with blocks in reverse order."""
    blocks = torch.arange(3, 0, -1, dtype=torch.int32)[None]
    token = torch.tensor(list(written), dtype=torch.int64)
    slots = blocks[0].long()[token // BLOCK] * BLOCK + token % BLOCK
    return AttentionMetadata((0, rows), (keys,), blocks, slots, BLOCK, causal)


@pytest.mark.parametrize("chunks", [[9], [4, 5], [1] * 9])
def test_hidden_states_are_the_oracles(oracle, ours: CrossDecoder, chunks: list[int]) -> None:
    """Encoder rows are passed with the first chunk only."""
    ids, rows = torch.randint(0, 50, (9,)), torch.randn(7, 32)
    with torch.inference_mode():
        theirs = oracle(input_ids=ids[None], encoder_hidden_states=rows[None]).last_hidden_state[0]
    caches = [torch.zeros(2, 5, BLOCK, 4, 8) for _ in ours.cache_specs]
    made, start = [], 0
    for count in chunks:
        stop = start + count
        across = meta(count, 7, range(7) if start == 0 else range(0), causal=False)
        attn = [meta(count, stop, range(start, stop), causal=True), across] * 2
        place = torch.arange(start, stop)[None]
        with torch.inference_mode():
            batch = ForwardBatch(ids[start:stop], place, attn, caches, cross_rows=rows if start == 0 else None)
            made.append(ours(batch))
        start = stop
    assert (torch.cat(made) - theirs).abs().max() < 2e-5 * max(1.0, float(theirs.std()))


def test_caches_come_in_pairs(ours: CrossDecoder) -> None:
    assert [spec.kind for spec in ours.cache_specs] == ["full", "cross"] * 2


def test_keys_without_a_bias_get_one_of_zeros() -> None:
    stored = [
        ("a.k_proj.weight", torch.ones(3, 2)),
        ("a.q_proj.weight", torch.ones(3, 2)),
        ("b.k_proj.weight", torch.ones(1, 1)),
    ]
    found = dict(with_key_biases(stored, "a."))
    assert found.keys() == {"a.k_proj.weight", "a.k_proj.bias", "a.q_proj.weight", "b.k_proj.weight"}
    assert torch.equal(found["a.k_proj.bias"], torch.zeros(3))
