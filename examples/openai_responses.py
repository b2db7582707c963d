"""Ask about an image through /v1/responses: `python examples/openai_responses.py [--model DIR | --url URL] [--image FILE]`."""

import base64
import mimetypes
from pathlib import Path

from openai import OpenAI
from shared import ASSETS, run, server_arguments, serving


def main() -> list[str]:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("--image", type=Path, default=ASSETS / "media" / "receipt1.png")
    parser.add_argument("question", nargs="?", default="Read the receipt.")
    args = parser.parse_args()
    if not args.image.is_file():
        return [f"{args.image} cannot be read: there is no such file"]
    data = base64.b64encode(args.image.read_bytes()).decode()
    url = f"data:{mimetypes.guess_type(args.image)[0]};base64,{data}"
    parts = [{"type": "input_text", "text": args.question}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    with serving(args.model, args.url) as server, OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        question = [{"role": "user", "content": parts}]
        for event in client.responses.create(model=model, input=question, temperature=0, max_output_tokens=96, stream=True):
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            if event.type == "response.failed":
                return [event.response.error.message]
        print()
    return []


if __name__ == "__main__":
    run(main)
