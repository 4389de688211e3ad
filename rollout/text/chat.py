"""Conversion of prompts and conversations to token ids.

The author of a token is decided by its position in the text, never by its id: a padding token may equal the end of
sequence, and a template's marker may occur in a message.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

Messages = Sequence[dict[str, Any]]


class ChatError(ValueError):
    """A conversation that the tokenizer's chat template cannot render as training needs it."""


def render_prompt(tokenizer: Any, prompt: str | Messages, add_generation_prompt: bool = True) -> list[int]:
    """Converts a prompt to token ids.

    Plain text gets the special tokens that the tokenizer itself puts in front (a beginning of sequence, or none) and no
    end of sequence. Messages are rendered by the chat template, which adds its own special tokens.

    Raises ChatError for messages without a chat template, and for two beginnings of sequence.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer.encode(prompt))
        bare = tokenizer.encode(prompt, add_special_tokens=False)
        if len(ids) > len(bare) and ids[-1:] == [tokenizer.eos_token_id]:
            ids.pop()
    else:
        ids = list(tokenizer.encode(render_text(tokenizer, prompt, add_generation_prompt), add_special_tokens=False))
    check_one_beginning(tokenizer, ids)
    return ids


def render_conversation(tokenizer: Any, messages: Messages, first: int = 0) -> tuple[list[int], list[int]]:
    """Converts a conversation to (ids, mask). The mask is 1 on the tokens of the assistant, its end of turn included.

    first: the number of the message from which on turns of the assistant count. A turn with `weight: 0` does not.

    Raises ChatError if the template drops or rewrites a turn of the assistant.
    """
    text, spans = assistant_spans(tokenizer, messages, first)
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError:
        raise ChatError(
            f"a tokenizer of the class {type(tokenizer).__name__} does not say where its tokens begin, so it cannot be "
            "told which are the assistant's; use one with a tokenizer.json, or plain prompts"
        ) from None
    ids = list(encoded["input_ids"])
    check_one_beginning(tokenizer, ids)
    return ids, mask_of(spans, (start for start, _ in encoded["offset_mapping"]))


def assistant_spans(tokenizer: Any, messages: Messages, first: int = 0) -> tuple[str, list[tuple[int, int]]]:
    """Returns (rendered conversation, first and past-the-end character of each turn of the assistant in it).

    first, errors: as for `render_conversation`.
    """
    text = render_text(tokenizer, messages, False)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number >= first]
    if not turns:
        raise ChatError("the conversation has no turn of the assistant")
    trained = [number for number in turns if messages[number].get("weight") != 0]
    if not trained:
        raise ChatError("all turns of the assistant have weight 0 (train: false), so none is trained on")
    return text, [_span(tokenizer, messages, number, text) for number in trained]


def mask_of(spans: Sequence[tuple[int, int]], starts: Iterable[int]) -> list[int]:
    """Returns 1 for each token that begins in one of the spans, 0 for all others. starts: the character of each.

    A token belongs to the assistant if its first character does; tokens of one character's bytes share its offset.
    """
    return [int(any(a <= start < b for a, b in spans)) for start in starts]


def encode_example(
    tokenizer: Any,
    prompt: str | Messages,
    completion: str | None = None,
    messages: Messages | None = None,
    train_on: str = "assistant",
) -> tuple[list[int], list[int]]:
    """Converts a demonstration to (ids, mask). The mask is 1 on the tokens to train on, the end of sequence included.

    A demonstration is a prompt with a completion, or `messages`. A plain prompt is tokenized exactly as
    `render_prompt` does for sampling, and the mask covers the completion. In a conversation it covers all turns of
    the assistant.

    train_on: "assistant"; "last_turn", the last turn of `messages` only; or "all", every token but the first.

    Raises ValueError without completion and messages, ChatError as render_conversation, and for a turn with
    `weight: 0` where every token is trained on.
    """
    if messages is not None:
        refuse_weights(messages, train_on)
        ids, mask = render_conversation(tokenizer, messages, first=len(messages) - 1 if train_on == "last_turn" else 0)
    elif completion is None:
        raise ValueError("a demonstration needs a completion or messages")
    else:
        ids, mask = encode_answer(tokenizer, prompt, completion)
    return ids, all_but_first(len(ids)) if train_on == "all" else mask


def refuse_weights(messages: Messages, train_on: str) -> None:
    """Raises ChatError for a turn with `weight: 0` under `train_on: all`, which trains on every token."""
    if train_on == "all" and any(message.get("weight") == 0 for message in messages):
        raise ChatError(
            "a turn has weight 0 (train: false), but algorithm.train_on=all trains on every token; set "
            "algorithm.train_on=assistant or remove the weight"
        )


def all_but_first(length: int) -> list[int]:
    """Returns the mask of `train_on: all`: nothing predicts the first token."""
    return [0] + [1] * (length - 1)


def encode_answer(tokenizer: Any, prompt: str | Messages, answer: str | Messages) -> tuple[list[int], list[int]]:
    """Converts a prompt and an answer to (ids, mask). The mask covers the answer; in an answer of messages, the turns
    of the assistant."""
    if not isinstance(prompt, str):
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return render_conversation(tokenizer, [*prompt, *answer], first=len(prompt))
    prompt_ids = render_prompt(tokenizer, prompt)
    answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return prompt_ids + answer_ids, [0] * len(prompt_ids) + [1] * len(answer_ids)


def render_text(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> str:
    """Renders messages as text with the chat template. Raises ChatError without one, and where it refuses the
    messages.
    """
    templates = tokenizer.chat_template
    if not templates:
        raise ChatError("the tokenizer has no chat template; set tokenizer.chat_template=FILE, or use plain prompts")
    if isinstance(templates, dict) and "default" not in templates:
        raise ChatError(
            f"the tokenizer has the chat templates {', '.join(sorted(templates))} and none of the name default; set "
            "tokenizer.chat_template=FILE"
        )
    from jinja2 import TemplateError

    variables = _variables(tokenizer)
    if variables.get("tools") and not _reads_tools(templates):
        raise ChatError(
            "the row has tools, but the chat template does not write them; set tokenizer.chat_template=FILE to one that "
            "does, or give the column another name"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
    except TemplateError as error:
        raise ChatError(f"the chat template refuses the conversation: {error}") from None
    except Exception as error:  # a template is a program, which fails in any way, such as None + "text"
        raise ChatError(f"the chat template fails: {type(error).__name__}: {error}") from None


def with_variables(tokenizer: Any, **variables: Any) -> Any:
    """Returns the tokenizer with variables of its chat template, such as `tools`, besides those that it has."""
    other = copy.copy(tokenizer)
    other.template_variables = {**_variables(tokenizer), **variables}
    return other


def _variables(tokenizer: Any) -> dict[str, Any]:
    return getattr(tokenizer, "template_variables", {})


def _reads_tools(templates: str | dict[str, str]) -> bool:
    """Returns whether the template that transformers takes for a conversation with tools reads the variable `tools`."""
    if isinstance(templates, dict):
        templates = templates.get("tool_use", templates["default"])
    return "tools" in templates


def _span(tokenizer, messages: Messages, turn: int, text: str) -> tuple[int, int]:
    """Returns the first and the past-the-end character of a turn in the rendered conversation."""
    before = render_text(tokenizer, messages[:turn], True) if turn else ""
    if not text.startswith(before):
        raise ChatError(
            f"the chat template rewrites what precedes message {turn}, so it cannot be told which tokens are the "
            "assistant's; use a template that only appends"
        )
    start = len(before)
    through = render_text(tokenizer, messages[: turn + 1], False)
    content = (messages[turn]["content"] or "").strip()  # null: a turn of calls to tools
    if text.startswith(through):
        end = len(through)
    else:
        # Some templates drop the reasoning of earlier turns, so the turn is searched by its content.
        place, last = text.find(content, start), through.rfind(content)
        if place < 0 or last < 0:
            raise ChatError(f"the chat template drops the content of message {turn}")
        closing = through[last + len(content) :]
        end = place + len(content)
        end += len(closing) if text.startswith(closing, end) else 0
    # White space after the end of a turn is never sampled, because generation has stopped.
    end = len(text[:end].rstrip())
    if end <= start:
        raise ChatError(f"the chat template writes nothing for message {turn}")
    return start, end


def check_one_beginning(tokenizer: Any, ids: Sequence[int]) -> None:
    """Raises ChatError for token ids that begin with two beginnings of sequence."""
    beginning = tokenizer.bos_token_id
    if beginning is not None and len(ids) > 1 and ids[0] == ids[1] == beginning:
        raise ChatError(
            "two beginnings of sequence: the chat template or the prompt writes one that the tokenizer adds as well"
        )
