"""Continue a text and print the likeliest tokens, through /v1/completions: `python examples/openai_completion.py`."""

from openai import OpenAI
from shared import run, server_arguments, serving


def main() -> None:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("--prompt", default="TOTAL")
    args = parser.parse_args()

    with serving(args.model, args.url) as server, OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        found = client.completions.create(model=model, prompt=args.prompt, temperature=0, max_tokens=8, logprobs=2)
    (choice,) = found.choices
    print(f"{args.prompt}{choice.text}")
    for token, likeliest in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        print(f"{token!r}: {', '.join(f'{text!r} {logprob:.2f}' for text, logprob in likeliest.items())}")


if __name__ == "__main__":
    run(main)
