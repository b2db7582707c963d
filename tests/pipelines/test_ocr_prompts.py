"""The messages of `ocr` for its named prompts."""

import pytest
from sensorium.pipelines.ocr import ocr_tasks
from sensorium.pipelines.ocr_prompts import PROMPTS


class Recorder:
    def request(self, messages, params, chat_template=None, chat_template_kwargs=None):
        return messages, chat_template_kwargs


def request_for(question):
    (task,) = ocr_tasks(Recorder(), b"page", question)
    return next(task)


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
