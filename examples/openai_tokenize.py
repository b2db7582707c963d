"""Show the tokens of a text and join them, through /tokenize and /detokenize: `python examples/openai_tokenize.py [TEXT]`.

The `openai` package has no method for either, so its client posts the requests.
"""

from openai import OpenAI
from shared import run, server_arguments, serving


def main() -> None:
    parser = server_arguments(__doc__, "tiny-vl")
    parser.add_argument("text", nargs="?", default="TOTAL 12.50")
    args = parser.parse_args()

    with serving(args.model, args.url) as server, OpenAI(base_url=server, api_key="none") as client:
        body = {"prompt": args.text, "return_token_strs": True}
        found = client.post("/tokenize", cast_to=dict[str, object], body=body)
        joined = client.post("/detokenize", cast_to=dict[str, object], body={"tokens": found["tokens"]})
        messages = [{"role": "user", "content": args.text}]
        conversation = client.post("/tokenize", cast_to=dict[str, object], body={"messages": messages})
    for token, text in zip(found["tokens"], found["token_strs"], strict=True):
        print(f"{token}: {text!r}")
    print(f"joined: {joined['prompt']!r}")
    print(f"as a conversation: {conversation['count']} of {conversation['max_model_len']} tokens")


if __name__ == "__main__":
    run(main)
