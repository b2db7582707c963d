"""The messages of `ocr` for its named prompts."""

import re
from types import SimpleNamespace

import pytest
from sensorium.callers.errors import InputError
from sensorium.engine.model_files import resolve
from sensorium.mm.media.policy import DEFAULT_POLICY
from sensorium.models.registry import native_architectures
from sensorium.pipelines.ocr import OcrOptions, ocr_tasks
from sensorium.pipelines.ocr_prompts import PROMPTS

ARCHITECTURES = native_architectures()


class Recorder:
    config = SimpleNamespace(media=DEFAULT_POLICY)

    def __init__(self, *names):
        self.ocr_prompts = names

    def request(self, messages, params, chat_template=None, chat_template_kwargs=None):
        return messages, chat_template_kwargs


def request_for(question):
    (task,) = ocr_tasks(Recorder(*PROMPTS), b"page", OcrOptions(question))
    return task().send(None)


def messages_for(question):
    return request_for(question)[0]


def test_a_question_follows_its_image():
    (user,) = messages_for("What is the total?")
    assert [part["type"] for part in user["content"]] == ["image", "text"]
    assert user["content"][1]["text"] == "What is the total?"


@pytest.mark.parametrize("name", PROMPTS)
def test_a_name_stands_for_its_prompt(name):
    *system, user = messages_for(name)
    kinds = [part["type"] for part in user["content"]]
    assert kinds == (["text", "image"] if name == "olmocr" else ["image", "text"])
    assert user["content"][kinds.index("text")]["text"] == PROMPTS[name].text
    expected = {"mineru": ["You are a helpful assistant."], "hunyuan": [""]}
    assert [one["content"] for one in system] == expected.get(name.partition("-")[0], [])
    assert "\\" not in PROMPTS[name].text


def test_a_name_may_set_variables_of_the_template():
    assert request_for("deepseek-grounding")[1] == {"grounding": True}
    assert request_for("<|grounding|>Read the text.")[1] == {}


@pytest.mark.parametrize(
    ("names", "said"),
    [(("olmocr", "mineru-text"), "give one of olmocr, mineru-text, or a question"), ((), "not trained with; give a question$")],
)
def test_a_name_of_another_models_prompt_is_refused(names, said):
    with pytest.raises(InputError, match="question='docling' names a prompt that models of this architecture") as caught:
        ocr_tasks(Recorder(*names), b"page", OcrOptions("docling"))
    assert re.search(said, str(caught.value))
    assert caught.value.info.param == "question"


def test_every_name_belongs_to_a_family():
    names = {name for row in ARCHITECTURES.values() for name in resolve(row.processing).ocr_prompts}
    assert names == set(PROMPTS)
