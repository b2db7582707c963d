"""Ask a server about an image, streamed, with the `openai` package: `python examples/openai_chat.py [--url URL]`."""

from pathlib import Path

from openai import OpenAI
from shared import ASSETS, data_url, run, server_arguments, serving


def main() -> None:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("--image", type=Path, default=ASSETS / "media" / "receipt1.png")
    parser.add_argument("--question", default="Read the receipt.")
    args = parser.parse_args()

    with serving(args.model, args.url) as server, OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(args.image)}},
            {"type": "text", "text": args.question},
        ]
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": parts}],
            temperature=0,
            max_completion_tokens=256,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
        print(f"\n({chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated)")


if __name__ == "__main__":
    run(main)
