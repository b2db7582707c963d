"""Ask about an image through /v1/messages: `python examples/anthropic_messages.py [--model DIR | --url URL] [--image FILE]`."""

import base64
import mimetypes
from pathlib import Path

from anthropic import Anthropic
from shared import ASSETS, run, server_arguments, serving


def main() -> list[str]:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("--image", type=Path, default=ASSETS / "media" / "receipt1.png")
    parser.add_argument("question", nargs="?", default="Read the receipt.")
    args = parser.parse_args()
    if not args.image.is_file():
        return [f"{args.image} cannot be read: there is no such file"]
    data = base64.b64encode(args.image.read_bytes()).decode()
    source = {"type": "base64", "media_type": mimetypes.guess_type(args.image)[0] or "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": args.question}]
    with serving(args.model, args.url) as server, Anthropic(base_url=server, api_key="none") as client:
        model = client.models.list().data[0].id
        question = [{"role": "user", "content": content}]
        greedy = {"temperature": 0}
        with client.messages.stream(model=model, messages=question, max_tokens=96, extra_body=greedy) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
        print()
    return []


if __name__ == "__main__":
    run(main)
