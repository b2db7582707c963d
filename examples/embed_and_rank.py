"""Find images by a text, then rank them: `python examples/embed_and_rank.py [--model DIR] [--query TEXT] [IMAGE ...]`.

The shipped model only shows the calls. Models trained for the task:

| model | similarity | score |
|---|---|---|
| Qwen/Qwen3-VL-Embedding-2B | cosine | |
| Qwen/Qwen3-VL-Reranker-2B | | probability of "yes" |
| jinaai/jina-embeddings-v4 | cosine | cosine |
| jinaai/jina-reranker-m0 | | probability |
| vidore/colqwen2-v1.0-hf, vidore/colpali-v1.3-hf, ModernVBERT/colmodernvbert-merged | | MaxSim of all tokens |
| google/siglip2-base-patch16-224, google/siglip2-base-patch16-naflex | cosine | probability |
| openai/clip-vit-base-patch32 | cosine | cosine |
"""

import argparse
from pathlib import Path

from sensorium import LLM, SensoriumError
from shared import ASSETS, run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--query", default="a receipt")
    parser.add_argument("images", nargs="*", type=Path, default=sorted((ASSETS / "media").glob("*.png")))
    args = parser.parse_args()

    llm = LLM(args.model)
    query, *found = llm.embed([args.query, *args.images])
    scores = llm.score(args.query, [{"image": path} for path in args.images])
    if query.error:
        raise SensoriumError(str(query.error))
    errors = [one.error or ranked.error for one, ranked in zip(found, scores, strict=True)]
    for path, one, ranked, error in zip(args.images, found, scores, errors, strict=True):
        if not error:
            similarity = "" if llm.pooling == "tokens" else f"similarity {float(query.vector @ one.vector):.3f}, "
            print(f"{path.name}: {similarity}score {ranked.score:.3f}")
    return [f"{path.name}: {error}" for path, error in zip(args.images, errors, strict=True) if error]


if __name__ == "__main__":
    run(main)
