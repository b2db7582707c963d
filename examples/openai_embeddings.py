"""Compare a text with images by their vectors: `python examples/openai_embeddings.py [--url URL] [IMAGE ...]`.

The shipped model only shows the calls. Use a model trained for the task, such as Qwen3-VL-Embedding.
"""

from pathlib import Path

import numpy as np
from openai import OpenAI
from shared import ASSETS, data_url, run, server_arguments, serving


def main() -> None:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("--query", default="a receipt")
    parser.add_argument("images", nargs="*", type=Path, default=sorted((ASSETS / "media").glob("*.png")))
    args = parser.parse_args()

    with serving(args.model, args.url) as server, OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        inputs = [args.query, *({"image": data_url(path)} for path in args.images)]
        found = client.embeddings.create(model=model, input=inputs)
    query, *vectors = (np.array(one.embedding) for one in found.data)
    for path, vector in zip(args.images, vectors, strict=True):
        print(f"{path.name}: similarity {query @ vector:.3f}")


if __name__ == "__main__":
    run(main)
