"""Messages as templates: names in <<...>> are worded by the interface that shows the message.

A name is `param` (the error's parameter), an advice of the table below, or an argument such as max_model_len. With "=" after
it, as in <<max_model_len=>>8, a value follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ADVICE: Mapping[str, str] = {
    "base_with_adapter": "LLM(base, adapter=folder)",
    "beam_search": "beam search is LLM.beam_search(prompts, BeamSearchParams(beam_width=...))",
    "change_template": "pass another chat_template",
    "check_url": "check the URL, or give bytes",
    "convert_audio": "convert it to WAV or FLAC, or give raw PCM as (np.frombuffer(data, np.int16), rate)",
    "fetch_yourself": "fetch it yourself and give bytes",
    "give_folder": "give the path of a folder with the checkpoint; no folder of this name exists here",
    "give_bytes_or_allow": "give bytes, or see media: allow_private_hosts",
    "give_data": "as bytes, a Path or a data: URL",
    "give_item": "give it in multi_modal_data",
    "give_pdf": "give sensorium.pdf_pages(file) in Python, or the file in a part of type file",
    "give_template": "pass chat_template=",
    "give_template_or_prompt": "pass chat_template= or give a rendered prompt",
    "give_url": "give one, or bytes",
    "give_url_or_path": "give http, https, data or file URLs, bytes or a path",
    "items_in_messages": (
        'put each item into its message, as in {"type": "image", "image": item}, or into a prompt\'s multi_modal_data'
    ),
    "load_whole": 'call encode_media, or load the model without parts="encoder"',
    "media_on_gpu": "LLM(..., media_device='cuda') processes them on a GPU",
    "score_needs_one_class": "score needs one; use classify",
    "shrink_item": 'make it smaller (max_pixels, fps, num_frames) or pass fit="context"',
    "transcribe_or_prompt": "call transcribe, or give a rendered prompt",
    "translation": "task='translate'",
    "use_chat": "use generate or chat",
    "use_classify": "use llm.classify",
    "use_embed": "use llm.embed",
    "use_encode": "use llm.encode",
    "use_pooling": "use llm.embed, llm.score or PoolingParams(token_ids=...)",
    "use_score": "use llm.score",
    "use_score_or_logits": "use score, or encode with PoolingParams(token_ids=...) for the logits of single tokens",
    "use_token_classify": 'use encode(..., pooling_task="token_classify")',
    "vector_length": "vectors have length 1 unless pooling_params=PoolingParams(normalize=False)",
    "wake_up": "call wake_up() first",
    "word_times": 'timestamps="word" gives the times of words',
}
"""Name of an advice -> its words in Python. The tables of server and command line hold what they word in another way."""
_NAME = re.compile(r"<<([a-z][a-z0-9_.]*)(=?)>>")


def worded(text: str, words: Mapping[str, str], param: str | None = None) -> str:
    """Return a text with words in place of its names. A name without words stays as it is.

    Args:
        words: name, with or without "=", -> what to write.
        param: the name for which <<param>> stands.
    """
    if "<<" not in text:
        return text

    def word(match: re.Match[str]) -> str:
        name = f"{param or 'it' if match[1] == 'param' else match[1]}{match[2]}"
        return words.get(name, name)

    return _NAME.sub(word, text)


def in_python(text: str) -> str:
    """Return a text in the words of Python, for exceptions that are no errors of ours."""
    return worded(text, ADVICE)


def advice_in(text: str) -> str | None:
    """Return the name of the first advice in a text, or None."""
    names = (match[1] for match in _NAME.finditer(text)) if "<<" in text else ()
    return next((name for name in names if name in ADVICE), None)
