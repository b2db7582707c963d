"""Rank images for a text on a server: `python examples/openai_rerank.py [--url URL]`.

The `openai` package has no method for /rerank, so its client posts the request. The shipped model only shows the calls; use
a model trained for the task, such as Qwen3-VL-Reranker.
"""

from pathlib import Path

from openai import OpenAI
from shared import ASSETS, data_url, run, server_arguments, serving


def main() -> None:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("--query", default="a receipt")
    parser.add_argument("images", nargs="*", type=Path, default=sorted((ASSETS / "media").glob("*.png")))
    args = parser.parse_args()

    with serving(args.model, args.url) as server, OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        documents = [{"image": data_url(path)} for path in args.images]
        body = {"model": model, "query": args.query, "documents": documents, "top_n": 3, "return_documents": False}
        found = client.post("/rerank", cast_to=dict[str, object], body=body)
    for result in found["results"]:
        print(f"{args.images[result['index']].name}: score {result['relevance_score']:.3f}")


if __name__ == "__main__":
    run(main)
