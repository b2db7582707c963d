"""Read several images in the background, through /v1/files and /v1/batches: `python examples/openai_batch.py [IMAGE ...]`.

If you give a running server by `--url`, start it with `--data-dir`.
"""

import json
import tempfile
import time
from pathlib import Path

from openai import OpenAI
from shared import ASSETS, data_url, run, server_arguments, serving

ENDPOINT = "/v1/chat/completions"


def request(path: Path) -> str:
    """Return a line of the batch: a request to read one image."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(path)}}, {"type": "text", "text": "Read the text."}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 64}
    return json.dumps({"custom_id": path.name, "method": "POST", "url": ENDPOINT, "body": body})


def error_of(line: dict) -> str:
    """Return why a line has no answer: the batch has ended before it, or the server has refused it."""
    return (line["error"] or line["response"]["body"]["error"])["message"]


def main() -> list[str]:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("images", nargs="*", type=Path, default=sorted((ASSETS / "media").glob("line*.png")))
    args = parser.parse_args()

    with (
        tempfile.TemporaryDirectory() as folder,
        serving(args.model, args.url, "--data-dir", folder) as server,
        OpenAI(base_url=f"{server}/v1", api_key="none") as client,
    ):
        lines = "\n".join(request(path) for path in args.images)
        file = client.files.create(file=("requests.jsonl", lines.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        while batch.status in ("validating", "in_progress", "finalizing"):
            time.sleep(0.2)
            batch = client.batches.retrieve(batch.id)
        failed = [] if batch.error_file_id is None else client.files.content(batch.error_file_id).text.splitlines()
        answers = [] if batch.output_file_id is None else client.files.content(batch.output_file_id).text.splitlines()
    for line in map(json.loads, answers):
        print(f"{line['custom_id']}: {line['response']['body']['choices'][0]['message']['content'].strip()}")
    return [f"{line['custom_id']}: {error_of(line)}" for line in map(json.loads, failed)]


if __name__ == "__main__":
    run(main)
