"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer of the model, under vLLM's
names, which lm-eval reads."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rl.serve.bodies import Body, Items, read_json
from rl.serve.errors import invalid
from rl.serve.pictures import Pictures
from rl.serve.protocol.conversations import (
    Conversation,
    Message,
    check_messages,
    encode_messages,
)
from rl.serve.service import Service
from rollout.text.interface import Tokenizer


class TokenizeBody(Body):
    """The body of `/tokenize`: a text or a conversation."""

    neutral = {"add_generation_prompt": (True,)}
    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Items[int]


async def tokenize(request: Request) -> Response:
    """Returns the tokens of a text or of a conversation."""
    service: Service = request.app.state.service
    body = TokenizeBody.read(await read_json(request, service.limits))
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give `prompt` or `messages`", "missing_required_parameter")
    check_messages(Conversation.of(body.messages or ()))
    answer = await service.with_tokenizer(
        lambda tokenizer: _tokenized(tokenizer, body, service.pictures),
        "prompt" if body.messages is None else "messages",
    )
    return JSONResponse(answer | {"max_model_len": service.max_length})


def _tokenized(
    tokenizer: Tokenizer, body: TokenizeBody, pictures: Pictures | None
) -> dict[str, Any]:
    if body.prompt is not None:
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        conversation = Conversation.of(body.messages or ())
        ids = list(encode_messages(tokenizer, conversation, {}, pictures=pictures).prompt.tokens)
    strings = [tokenizer.convert_ids_to_tokens(token) for token in ids]
    shown = {"token_strs": strings} if body.return_token_strs else {}
    return {"tokens": ids, "count": len(ids), **shown}


async def detokenize(request: Request) -> Response:
    """Returns the text of tokens."""
    service: Service = request.app.state.service
    body = DetokenizeBody.read(await read_json(request, service.limits))
    service.check_model(body.model)
    last = service.bounds.vocab_size - 1
    for number, token in enumerate(body.tokens):
        if not 0 <= token <= last:
            raise invalid(f"tokens[{number}]", f"token {token} is outside 0..{last}")
    text = await service.with_tokenizer(lambda tokenizer: tokenizer.decode(body.tokens))
    return JSONResponse({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """Returns the class, the special tokens and the chat template of the tokenizer."""
    service: Service = request.app.state.service
    return JSONResponse(await service.with_tokenizer(_info) | {"max_model_len": service.max_length})


def _info(tokenizer: Any) -> dict[str, Any]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        **{name: getattr(tokenizer, name) for name in names},
    }
