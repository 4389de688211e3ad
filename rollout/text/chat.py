"""Conversion of prompts and conversations to token ids.

The author of a token is decided by its position in the text, never by its id: a padding token may
equal the end of sequence, and a template's marker may occur in a message.
"""

from __future__ import annotations

import copy
import os.path
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.text.interface import Messages, Tokenizer
from rollout.text.spelling import encode_after


class ChatError(ValueError):
    """A conversation that the tokenizer's chat template cannot render as training needs it."""


def render_prompt(
    tokenizer: Tokenizer, prompt: str | Messages, add_generation_prompt: bool = True
) -> list[int]:
    """Converts a prompt to token ids.

    Plain text gets the special tokens that the tokenizer itself puts in front (a beginning of
    sequence, or none) and no end of sequence. Messages are rendered by the chat template, which
    adds its own special tokens.

    Raises ChatError for messages without a chat template, and for two beginnings of sequence.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer.encode(prompt))
        bare = tokenizer.encode(prompt, add_special_tokens=False)
        if len(ids) > len(bare) and ids[-1:] == [tokenizer.eos_token_id]:
            ids.pop()
    else:
        ids = list(
            tokenizer.encode(
                render_text(tokenizer, prompt, add_generation_prompt), add_special_tokens=False
            )
        )
    check_one_beginning(tokenizer, ids)
    return ids


@dataclass(frozen=True)
class Rendered:
    """A conversation, or its beginning, as the chat template writes it.

    spans: first and past-the-end character of each turn of the assistant that is trained on.
    messages: their number.
    """

    text: str
    spans: list[tuple[int, int]]
    messages: int


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant as it was rendered when it was the last one. start, content_end, end:
    the characters of `text` where it begins, where its content ends, and where it ends."""

    number: int
    text: str
    start: int
    content_end: int
    end: int


def render_turns(tokenizer: Tokenizer, messages: Messages, first: int = 0) -> list[Rendered]:
    """Renders a conversation so that each turn of the assistant stands as it did when it was
    sampled.

    One rendering has all turns if the template only appends. If it rewrites earlier turns (drops
    their reasoning, for instance), each turn that the full rendering changes stands in a rendering
    of the conversation up to it, together with the earlier turns that this one does not change. The
    full rendering comes first, if it has such a turn.

    first: the number of the message from which on turns of the assistant count. A turn with
    `weight: 0` does not.

    Raises ChatError if no turn counts, or if the template drops one.
    """
    turns = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= first
    ]
    if not turns:
        raise ChatError("the conversation has no turn of the assistant")
    trained = [number for number in turns if messages[number].get("weight") != 0]
    if not trained:
        raise ChatError(
            "all turns of the assistant have weight 0 (train: false), so none is trained on"
        )
    waiting = [_turn(tokenizer, messages, number) for number in trained]
    text = render_text(tokenizer, messages, False)
    count = len(messages)
    renderings = []
    while waiting:
        ends = [_end_in(text, turn, tokenizer.eos_token) for turn in waiting]
        spans = [
            (turn.start, end) for turn, end in zip(waiting, ends, strict=True) if end is not None
        ]
        if spans:
            renderings.append(Rendered(text, spans, count))
        waiting = [turn for turn, end in zip(waiting, ends, strict=True) if end is None]
        if waiting:
            text = waiting[-1].text
            count = waiting[-1].number + 1
    return renderings


def _end_in(text: str, turn: _Turn, eos: str) -> int | None:
    """Returns where a turn ends in a rendering that leaves it as it was; None if it changes the
    turn.

    Some templates write the end of sequence behind the end of the last turn only (Phi-3); without
    it, the turn is the same.
    """
    turn_text = turn.text[: turn.end]
    if text.startswith(turn_text):
        return turn.end
    shorter = turn_text.removesuffix(eos).rstrip()
    has_own_end = len(shorter) > turn.content_end
    return len(shorter) if has_own_end and text.startswith(shorter) else None


def render_answer(tokenizer: Tokenizer, messages: Messages, first: int) -> Rendered:
    """Renders a prompt of `first` messages with its answer. Raises ChatError as `render_turns`, and
    if the template changes a turn of the answer when it writes the next."""
    renderings = render_turns(tokenizer, messages, first)
    if len(renderings) > 1:
        raise ChatError(
            "the chat template changes a turn of the answer when the next one is added, so no "
            "rendering has both; use answers of one turn, or a template that only appends"
        )
    return renderings[0]


def encode_rendered(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], list[int]]:
    """Converts a rendering to (ids, mask). The mask is 1 on the tokens of its spans.

    Raises ChatError for two beginnings of sequence, and for a tokenizer that does not say where its
    tokens begin.
    """
    try:
        encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError:
        raise ChatError(
            f"a tokenizer of the class {type(tokenizer).__name__} does not say where its tokens "
            "begin, so it cannot be "
            "told which are the assistant's; use one with a tokenizer.json, or plain prompts"
        ) from None
    ids = list(encoded["input_ids"])
    check_one_beginning(tokenizer, ids)
    return ids, mask_of(rendered.spans, (start for start, _ in encoded["offset_mapping"]))


def mask_of(spans: Sequence[tuple[int, int]], starts: Iterable[int]) -> list[int]:
    """Returns 1 for each token that begins in one of the spans, 0 for all others. starts: the
    character of each.

    A token belongs to the assistant if its first character does; tokens of one character's bytes
    share its offset.
    """
    return [int(any(a <= start < b for a, b in spans)) for start in starts]


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Messages,
    train_on: str = "assistant",
    history: str = "template",
    first: int = 0,
) -> list[tuple[list[int], list[int]]]:
    """Converts a conversation to rows (ids, mask), in the order of `render_turns`.

    train_on: "assistant", all turns of the assistant; "last_turn", the last message only; or "all",
    every token of the
        full conversation but the first.
    history: "template", a row for each rendering of `render_turns`; "last", only the full one,
    without the turns that
        it changes.
    first: the number of the message from which on turns count, as for `render_turns`.

    Raises ChatError as `render_turns`, and for a turn with `weight: 0` where every token is trained
    on.
    """
    rendered = trained_renderings(tokenizer, messages, train_on, history, first)
    rows = [encode_rendered(tokenizer, each) for each in rendered]
    if train_on != "all":
        return rows
    return [(ids, all_but_first(len(ids))) for ids, _ in rows]


def trained_renderings(
    tokenizer: Tokenizer, messages: Messages, train_on: str, history: str, first: int = 0
) -> list[Rendered]:
    """Returns the renderings of a conversation that are trained on; arguments and errors as
    `encode_conversation`."""
    refuse_weights(messages, train_on)
    if train_on == "all":
        return [Rendered(render_text(tokenizer, messages, False), [], len(messages))]
    renderings = render_turns(
        tokenizer, messages, len(messages) - 1 if train_on == "last_turn" else first
    )
    if history == "template":
        return renderings
    full = [rendered for rendered in renderings if rendered.messages == len(messages)]
    if not full:
        raise ChatError(
            "the chat template changes every turn that is trained on; set "
            "tokenizer.chat_template.history=template"
        )
    return full


def encode_completion(
    tokenizer: Tokenizer, prompt: str | Messages, completion: str, train_on: str = "assistant"
) -> tuple[list[int], list[int]]:
    """Converts a prompt and its completion to (ids, mask). A plain prompt is tokenized exactly as
    `render_prompt` does for sampling. The mask covers the completion with its end of sequence;
    under `train_on: all` all tokens but the first."""
    if not isinstance(prompt, str):
        refuse_weights(prompt, train_on)
    ids, mask = encode_answer(tokenizer, prompt, completion)
    return ids, all_but_first(len(ids)) if train_on == "all" else mask


def refuse_weights(messages: Messages, train_on: str) -> None:
    """Raises ChatError for a turn with `weight: 0` under `train_on: all`, which trains on every
    token."""
    if train_on == "all" and any(message.get("weight") == 0 for message in messages):
        raise ChatError(
            "a turn has weight 0 (train: false), but algorithm.train_on=all trains on every "
            "token; set algorithm.train_on=assistant or remove the weight"
        )


def all_but_first(length: int) -> list[int]:
    """Returns the mask of `train_on: all`: nothing predicts the first token."""
    return [0] + [1] * (length - 1)


def encode_answer(
    tokenizer: Tokenizer, prompt: str | Messages, answer: str | Messages
) -> tuple[list[int], list[int]]:
    """Converts a prompt and an answer to (ids, mask). The mask covers the answer; in an answer of
    messages, the turns of the assistant."""
    if not isinstance(prompt, str):
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return encode_rendered(tokenizer, render_answer(tokenizer, [*prompt, *answer], len(prompt)))
    if not isinstance(answer, str):
        raise ChatError("a plain prompt has a plain answer; give both as messages")
    prompt_ids = render_prompt(tokenizer, prompt)
    answer_ids = [*encode_after(tokenizer, answer), tokenizer.eos_token_id]
    return prompt_ids + answer_ids, [0] * len(prompt_ids) + [1] * len(answer_ids)


def render_text(tokenizer: Tokenizer, messages: Messages, add_generation_prompt: bool) -> str:
    """Renders messages as text with the chat template. Raises ChatError without one, and where it
    refuses the messages.
    """
    templates = tokenizer.chat_template
    if not templates:
        raise ChatError(
            "the tokenizer has no chat template; set tokenizer.chat_template=FILE, or use plain "
            "prompts"
        )
    if isinstance(templates, dict) and "default" not in templates:
        raise ChatError(
            f"the tokenizer has the chat templates {', '.join(sorted(templates))} and none of the "
            "name default; set tokenizer.chat_template=FILE"
        )
    from jinja2 import TemplateError

    variables = _variables(tokenizer)
    if variables.get("tools") and not _reads_tools(templates):
        raise ChatError(
            "the row has tools, but the chat template does not write them; set "
            "tokenizer.chat_template=FILE to one that does, or give the column another name"
        )
    messages = _in_parts(messages) if _wants_parts(tokenizer) else list(messages)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
    except TemplateError as error:
        raise ChatError(f"the chat template refuses the conversation: {error}") from None
    except (
        Exception
    ) as error:  # a template is a program, which fails in any way, such as None + "text"
        raise ChatError(f"the chat template fails: {type(error).__name__}: {error}") from None


_PROBE = [{"role": "user", "content": "DuetProbe"}]


def _wants_parts(tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template writes contents only as lists of parts (Idefics 3,
    LLaVA)."""
    template = tokenizer.chat_template
    if isinstance(template, str) and "type" not in template:
        return False
    asked, answer = getattr(tokenizer, "wants_parts", (None, False))
    if asked != template:
        answer = not _writes_probe(tokenizer, _PROBE) and _writes_probe(
            tokenizer, _in_parts(_PROBE)
        )
        vars(tokenizer)["wants_parts"] = (template, answer)
    return answer


def _writes_probe(tokenizer: Tokenizer, messages: Messages) -> bool:
    try:
        return "DuetProbe" in tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program, which fails in any way
        return False


def _in_parts(messages: Messages) -> list[dict[str, Any]]:
    def parts(content: object) -> object:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    return [{**message, "content": parts(message["content"])} for message in messages]


def with_variables(tokenizer: Tokenizer, /, **variables: object) -> Tokenizer:
    """Returns the tokenizer with variables of its chat template, such as `tools`, besides those
    that it has."""
    return with_variables_alone(tokenizer, {**_variables(tokenizer), **variables})


def with_variables_alone(tokenizer: Tokenizer, variables: Mapping[str, object]) -> Tokenizer:
    """Returns the tokenizer with these variables of its chat template, and no others."""
    other: Any = copy.copy(tokenizer)  # which gets an attribute of its own
    other.template_variables = dict(variables)
    return other


def _variables(tokenizer: Tokenizer) -> dict[str, Any]:
    return getattr(tokenizer, "template_variables", {})


def _reads_tools(templates: str | dict[str, str]) -> bool:
    """Returns whether the template that transformers takes for a conversation with tools reads the
    variable `tools`."""
    if isinstance(templates, dict):
        templates = templates.get("tool_use", templates["default"])
    return "tools" in templates


def _turn(tokenizer: Tokenizer, messages: Messages, number: int) -> _Turn:
    """Renders the conversation up to a turn of the assistant, and finds the turn in it."""
    prompted = render_text(tokenizer, messages[:number], True) if number else ""
    text = render_text(tokenizer, messages[: number + 1], False)
    content = _last_text(messages[number]["content"])
    # A rendering of the question alone is needed only where the conversation does not go on as its
    # prompt begins.
    appends = text.startswith(prompted)
    question = prompted if appends else render_text(tokenizer, messages[:number], False).rstrip()
    place = _place_of(content, text, prompted, question)
    if place < 0 and appends:
        place = text.rfind(content)
    if place < 0:
        raise ChatError(f"the chat template drops the content of message {number}")
    start = len(prompted)
    if not appends:
        # The prompt ends otherwise than the conversation, with the beginning of a thought, for
        # instance.
        if not content:
            raise ChatError(
                f"the chat template rewrites what precedes message {number}, which has no content "
                "to find"
            )
        start = place
    # White space after the end of a turn is never sampled, because generation has stopped.
    end = len(text.rstrip())
    if end <= start:
        raise ChatError(f"the chat template writes nothing for message {number}")
    return _Turn(number, text, start, place + len(content), end)


def _place_of(content: str, text: str, prompted: str, question: str) -> int:
    """Returns the character of a rendered conversation at which the content of its last turn
    begins, -1 without it.

    text: the conversation. prompted, question: what precedes the turn, with and without the
    beginning of a turn that the assistant goes on with.
    """
    if not text.startswith(
        question
    ):  # the template rewrites what precedes the turn, which is the last in any case
        return text.rfind(content)
    # Before the end of what both have in common, the same letters are the header's of the turn ("a"
    # in "assistant"); behind the content, they may be a part of the end of the turn.
    place = text.find(content, len(os.path.commonprefix([text, prompted])))
    # A content that begins as the prompt ends, with the mark of a thought, begins in the common
    # part.
    return text.find(content, len(question)) if place < 0 else place


def _last_text(content: str | list | None) -> str:
    """Returns the text of a content behind its reasoning, which templates may drop."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return (content or "").rpartition("</think>")[2].strip()


def check_one_beginning(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Raises ChatError for token ids that begin with two beginnings of sequence."""
    beginning = tokenizer.bos_token_id
    if beginning is not None and len(ids) > 1 and ids[0] == ids[1] == beginning:
        raise ChatError(
            "two beginnings of sequence: the chat template or the prompt writes one that the "
            "tokenizer adds as well"
        )
