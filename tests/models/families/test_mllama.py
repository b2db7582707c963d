"""Cross-attention of Mllama: its weights cannot be returned, and a session keeps its image."""

from __future__ import annotations

import family
import pytest
from sensorium import LLM, PoolingParams, SamplingParams
from sensorium.mm.errors import InputError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("models") / "mllama"
    return LLM(family.save(family.load_rows()["mllama"], folder), max_model_len=64, max_num_seqs=2)


@pytest.fixture
def prompt() -> dict[str, object]:
    image = family.make_media("image", (60, 50), 0)
    return {"prompt": "<bos>def f(x):<|image|> return it", "multi_modal_data": {"image": image}}


def test_cross_attention_weights_are_refused(llm: LLM, prompt: dict[str, object]) -> None:
    (output,) = llm.encode(prompt, PoolingParams(cross_attention=((0, 0),)), use_tqdm=False)
    assert output.error is not None
    assert (output.error.code, output.error.param) == ("invalid_input", "cross_attention")
    assert "leave it out" in output.error.message


def test_a_session_cannot_lose_its_image(llm: LLM, prompt: dict[str, object]) -> None:
    with llm.live(prompt, SamplingParams(temperature=0.0, max_tokens=3)) as session:
        before = session.answer().outputs[0].token_ids
        place = session.token_ids.index(llm.get_tokenizer().encode("<|image|>", False)[0])
        with pytest.raises(InputError, match=f"removes the image; truncate to {place + 1} or more"):
            session.truncate(place)
        assert session.answer().outputs[0].token_ids == before
