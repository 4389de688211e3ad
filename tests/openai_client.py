"""Asks a server with the `openai` package on the path, whichever version that is: ADDRESS KEY.
Prints what it got as JSON."""

import json
import sys

import openai


def main(address: str, key: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "seed": 4,
    }
    complete = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
    stream = client.chat.completions.create(
        **chat, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    legacy = client.completions.create(model="tiny", prompt=[70, 71], max_tokens=4, seed=4)
    try:
        client.chat.completions.create(**(chat | {"n": 99}))
        error = None
    except openai.BadRequestError as caught:
        error = caught.param
    print(
        json.dumps(
            {
                "version": openai.__version__,
                "models": [model.id for model in client.models.list()],
                "text": complete.choices[0].message.content,
                "streamed": text,
                "logprobs": len(complete.choices[0].logprobs.content),
                "tokens": chunks[-1].usage.completion_tokens,
                "legacy": legacy.choices[0].text,
                "error": error,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
