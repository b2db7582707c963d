"""Errors in the JSON of commands."""

from __future__ import annotations

import json
from argparse import Namespace

from sensorium.callers.errors import ErrorInfo
from sensorium.cli.output import to_json
from sensorium.pipelines.transcribe import WindowResult

ARGS = Namespace(command="chat", dtype="auto", device="auto", max_model_len=None, max_tokens=8)


def test_errors_as_json_have_the_words_of_the_command_line() -> None:
    text = "the checkpoint has no chat template; <<give_template_or_prompt>>"
    error = ErrorInfo("invalid_input", text, param="chat_template", advice="give_template_or_prompt")
    window = WindowResult(0.0, 1.0, "", (), 0, skip_error=error)
    found = json.loads(to_json({"error": error, "window": window}, ARGS))
    for one in found["error"], found["window"]["skip_error"]:
        assert one == {
            "code": "invalid_input",
            "message": "the checkpoint has no chat template; give --chat-template",
            "modality": None,
            "index": None,
            "param": "chat_template",
            "limit": None,
            "value": None,
            "advice": "give_template_or_prompt",
        }
