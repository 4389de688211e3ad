"""A conversation that is answered: what the chat APIs of OpenAI and Anthropic have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from rl.serve.errors import invalid
from rl.serve.protocol.conversations import Conversation, check_messages, encode_messages
from rl.serve.protocol.tools import CallReading, Reply, Said, reply_format
from rl.serve.sampling import SamplingFields, draw_numbers
from rl.serve.service import Generation, Service
from rollout.calls.formats import ResponseTemplate
from rollout.calls.grammars import call_constraint
from rollout.text.interface import Tokenizer
from rollout.types import Constraint


@dataclass(frozen=True)
class Question:
    """What a client asks.

    max_tokens: None: as many as the prompt leaves. tools: those that the model may call, as chat
    templates read them. variables: others of the template. top_logprobs: likeliest tokens whose
    log-probabilities are named; None: none, and none of the token itself. continued: the last
    message is the beginning of the answer. constraint_field: the field that says what the text must
    be; None: that of `sampling`.
    """

    conversation: Conversation
    sampling: SamplingFields
    max_tokens: int | None = None
    tools: Sequence[dict[str, Any]] = ()
    variables: dict[str, Any] = field(default_factory=dict)
    top_logprobs: int | None = None
    continued: bool = False
    must_call: bool = False
    constraint_field: str | None = None


@dataclass(frozen=True)
class Answering:
    """The completions of a question, before they start, and what reads each of them."""

    generation: Generation
    replies: Sequence[Reply]


async def answering(service: Service, question: Question) -> Answering:
    """Encodes a question. Raises ApiError for one that the model or the server cannot answer."""
    param = question.conversation.param
    check_messages(question.conversation)
    service.check_room(question.sampling.n, "n")
    tools = list(question.tools)
    template = await service.with_tokenizer(partial(reply_format, calls=bool(tools)))
    variables = question.variables | ({"tools": tools} if tools else {})
    rendered = await service.with_tokenizer(
        lambda tokenizer: encode_messages(
            tokenizer,
            question.conversation,
            variables,
            continued=question.continued,
            pictures=service.pictures,
        ),
        param,
    )
    prompts = [rendered.prompt]
    most = service.max_tokens(prompts, question.max_tokens, param)
    params = question.sampling.params(service.bounds, most)
    params = replace(params, top_logprobs=question.top_logprobs)
    if question.must_call:
        constraint = await service.with_tokenizer(partial(_forced_call, template, question))
        params = replace(params, constraint=constraint)
    constraint_field = question.constraint_field or question.sampling.constraint_field
    await service.check_params(params, "tool_choice" if question.must_call else constraint_field)
    if rendered.expanded is not None:
        prompts = [await service.with_pictures(rendered.expanded)]
    reading = None if template is None else CallReading(template, rendered.prefix, tools)
    draws = draw_numbers(question.sampling.seed, len(prompts))
    generation = service.generation(
        prompts, params, draws, model=question.sampling.model, special=reading is not None
    )
    replies = [reading.reply() if reading else Reply() for _ in range(params.n)]
    return Answering(generation, replies)


def _forced_call(
    template: ResponseTemplate | None, question: Question, tokenizer: Tokenizer
) -> Constraint:
    """Returns the constraint under which the answer is a call. Raises ApiError if there are no
    tools, if the answer has another constraint, or if the format of the model has no grammar."""
    if template is None or not question.tools:
        raise invalid("tool_choice", "needs `tools`")
    if question.sampling.constraint is not None:
        raise invalid("tool_choice", "an answer that must be a call has no other constraint")
    constraint = call_constraint(template, question.tools, tokenizer)
    if constraint is None:
        message = "the calls of this model have no grammar; set it to auto or none"
        raise invalid("tool_choice", message, "unsupported_parameter")
    return constraint


BlockKind = Literal["text", "reasoning", "call"]


@dataclass
class Block:
    """A part of an answer: a text, a reasoning, or a call as OpenAI has it. number: that of the
    block in the answer."""

    number: int
    kind: BlockKind
    text: str = ""
    call: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockEvent:
    """What happens to a block: it starts, gets a text, or ends."""

    kind: Literal["start", "delta", "stop"]
    block: Block
    delta: str = ""


class BlockAnswer:
    """The one completion of a question as blocks. finish, tokens, stopped_by: known at the end."""

    def __init__(self, answering: Answering):
        self._generation = answering.generation
        [self._reply] = answering.replies
        self.blocks: list[Block] = []
        self.finish: str | None = None
        self.tokens = 0
        self._open: Block | None = None

    @property
    def prompt_tokens(self) -> int:
        """Returns the tokens of the prompt."""
        return self._generation.prompt_tokens

    @property
    def stopped_by(self) -> str | None:
        """Returns the stop string that ended the answer."""
        return self._generation.streams[0].stopped_by

    async def events(self) -> AsyncIterator[BlockEvent]:
        """Runs the completion and yields what happens to its blocks."""
        async for update in self._generation.updates():
            self.tokens += len(update.tokens)
            for part in self._reply.add(update.text, update.finish):
                for event in self._of(part):
                    yield event
            if update.finish is not None:
                self.finish = self._reply.finish_reason(update.finish)
        if not self.blocks:
            for event in self._of(Said(content="")):
                yield event
        if self._open is not None:
            yield BlockEvent("stop", self._open)

    async def run(self) -> None:
        """Runs the completion to its end."""
        async for _ in self.events():
            pass

    def _of(self, part: Said) -> list[BlockEvent]:
        kind: BlockKind = "text"
        if part.call is not None:
            kind = "call"
        elif part.reasoning is not None:
            kind = "reasoning"
        events = []
        if self._open is None or self._open.kind != kind or kind == "call":
            if self._open is not None:
                events.append(BlockEvent("stop", self._open))
            self._open = Block(len(self.blocks), kind, call=dict(part.call or {}))
            self.blocks.append(self._open)
            events.append(BlockEvent("start", self._open))
        arguments = part.call["function"]["arguments"] if part.call is not None else None
        text = part.content or part.reasoning or arguments or ""
        self._open.text += text
        if text:
            events.append(BlockEvent("delta", self._open, text))
        return events
