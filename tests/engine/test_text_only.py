"""A model without modalities: text is answered and embedded, items and their options are typed errors."""

import pytest
from family import load_rows, save
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError, InputError

IMAGE = Image.new("RGB", (40, 40))
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
ONE = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save(load_rows()["text-llama"], tmp_path_factory.mktemp("text") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, device="cpu", max_model_len=256)


def test_text_is_answered_and_embedded(llm):
    (output,) = llm.chat([{"role": "user", "content": "hello"}], ONE, use_tqdm=False)
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 1
    (pooled,) = llm.embed(["hello"])
    assert pooled is not None


def test_items_are_refused(llm):
    (output,) = llm.generate({"prompt": "hello", "multi_modal_data": {"image": IMAGE}}, ONE, use_tqdm=False)
    assert "this model takes text only" in output.error.message
    message = {"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "hello"}]}
    (output,) = llm.chat([message], ONE, use_tqdm=False)
    assert "the chat template reads texts only" in output.error.message
    with pytest.raises(InputError, match="text only"):
        llm.plan({"prompt": "hello", "multi_modal_data": {"image": IMAGE}})


@pytest.mark.parametrize("options", [{"limit_mm_per_prompt": {"image": 1}}, {"mm_processor_kwargs": {"max_pixels": 9}}])
def test_options_of_items_are_refused(folder, options):
    with pytest.raises(ConfigError, match="text only"):
        LLM(folder, device="cpu", max_model_len=256, **options)


def test_no_memory_is_planned_for_items(llm):
    plan = llm.explain()
    assert (plan.encoder_cache, plan.encoder_step, plan.processor_cache, plan.max_items) == (0, 0, 0, ())
