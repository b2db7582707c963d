"""Count the tokens of images before they are sent, through /v1/media/plan: `python examples/openai_media_plan.py [IMAGE ...]`.

The server reads the headers of the images only. The `openai` package has no method for this, so its client posts the request.
"""

from pathlib import Path

from openai import OpenAI
from shared import ASSETS, data_url, run, server_arguments, serving


def main() -> list[str]:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("images", nargs="*", type=Path, default=sorted((ASSETS / "media").glob("receipt*.png")))
    args = parser.parse_args()
    if missing := [path for path in args.images if not path.is_file()]:
        return [f"{path} cannot be read: there is no such file" for path in missing]

    with serving(args.model, args.url) as server, OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        parts = [{"type": "image_url", "image_url": {"url": data_url(path)}} for path in args.images]
        body = {"messages": [{"role": "user", "content": parts}]}
        plan = client.post("/media/plan", cast_to=dict[str, object], body=body)
    for path, item in zip(args.images, plan["items"], strict=True):
        height, width = item["size"]
        print(f"{path.name}: {width}x{height} pixels, {item['num_tokens']} tokens")
    print(f"together: {plan['num_tokens']} tokens")
    return []


if __name__ == "__main__":
    run(main)
