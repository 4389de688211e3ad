"""Checks of tokenizer and chat template: 1, 2, 3, 5, 6, 7, 8."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rl.data.encoded import Example
from rl.data.inspect.stage_rows import SOME, Encoded, StageRows, texts_in
from rl.errors import Fault
from rollout.text import chat
from rollout.text.interface import Tokenizer
from rollout.text.spelling import decode_after, encode_after

_CONTENT = "DuetAnswer"
_MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]")


def beginnings(stage: StageRows) -> Iterator[Fault]:
    """1: one beginning of sequence, at the front, and those with which the chat template opens
    turns.

    Two at the front are refused when the row is encoded.
    """
    bos = stage.tokenizer.bos_token_id
    tokenizer = stage.tokenizer
    if bos is None or bos in stage.stops:
        return
    inside = [row for row in stage.rows if bos in row.ids[1:]]
    beginning: str = tokenizer.bos_token
    openings = _openings(tokenizer, beginning) if inside else ()
    stray = [row for row in inside if _has_stray_beginning(tokenizer, beginning, row, openings)]
    if stray:
        yield Fault(
            f"{len(stray)} of {len(stage.rows)} rows have a beginning of sequence "
            f"({beginning}) after their first token that no chat template wrote, "
            f"first {stray[0].example.where}",
            "Remove it from the text",
            check=1,
            stage=stage.name,
        )


def _has_stray_beginning(
    tokenizer: Tokenizer, beginning: str, row: Encoded, openings: tuple[str, ...]
) -> bool:
    """Tells whether a beginning of sequence after the first token is in a text of the row's author.

    In plain text, those that open a turn as the template does are none: another program has
    rendered the text.
    """
    if not isinstance(row.example.prompt, str) or row.example.messages is not None:
        return any(beginning in text for text in _strings(row.example))
    text = tokenizer.decode(row.ids[1:], skip_special_tokens=False)
    _, *after = text.split(beginning)
    return any(not each.startswith(openings) for each in after)


def _openings(tokenizer: Tokenizer, beginning: str) -> tuple[str, ...]:
    """Returns what the chat template writes between the beginning of sequence that opens a turn and
    its content.

    Empty if the template has no turn after the first that begins so.
    """
    question = {"role": "user", "content": _CONTENT}
    answer = {"role": "assistant", "content": _CONTENT}
    system = {"role": "system", "content": _CONTENT}
    openings: set[str] = set()
    for messages in ([question, answer, question], [system, question, answer, question]):
        try:
            _, *opened = _rendered(tokenizer, messages).split(beginning)
        except chat.ChatError:
            continue  # without a template, or one that refuses a system message
        if len(opened) > 1:
            openings |= {each.partition(_CONTENT)[0] for each in opened if _CONTENT in each}
    return tuple(openings - {""})


def _strings(value: object) -> Iterator[str]:
    """Yields all texts that the author of an example wrote as prompt, completion, messages or
    pair."""
    match value:
        case Example():
            yield from _strings([value.prompt, value.completion, value.messages, value.pair])
        case str():
            yield value
        case Mapping():
            yield from _strings(list(value.values()))
        case list() | tuple():
            for each in value:
                yield from _strings(each)


def end_of_turn(tokenizer: Tokenizer) -> tuple[int | None, str]:
    """Returns (the token that follows the content of an assistant's turn in the chat template, its
    text).

    The token is None where the template writes nothing there but white space. Raises ChatError for
    a template that cannot render a turn.
    """
    messages = [
        {"role": "user", "content": "DuetQuestion"},
        {"role": "assistant", "content": _CONTENT},
    ]
    text = _rendered(tokenizer, messages)
    place = text.rfind(_CONTENT)
    if place < 0:
        raise chat.ChatError("the chat template drops the content of an assistant's turn")
    end = place + len(_CONTENT)
    if not getattr(tokenizer, "is_fast", True):  # it does not say where its tokens begin
        written = (
            (token, decode_after(tokenizer, [token]))
            for token in encode_after(tokenizer, text[end:])
        )
        return next(((token, piece) for token, piece in written if piece.strip()), (None, ""))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if start >= end and text[start:stop].strip():
            return token, text[start:stop]
    return None, ""


def end_of_turn_problem(tokenizer: Tokenizer, stops: Sequence[int]) -> str | None:
    """Returns what is wrong with the end of an assistant's turn and how to mend it, or None.

    A policy that writes the template's end of turn has to stop there, or every completion runs to
    its limit.
    """
    if not tokenizer.chat_template:
        return None
    try:
        token, text = end_of_turn(tokenizer)
    except chat.ChatError as error:
        return str(error)
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in stops)
    if token is None:
        text = (
            "the chat template writes no token after an assistant's turn, so nothing says that "
            "it ends"
        )
        return f"{text} (stops: {names})"
    if token in stops:
        return None
    return (
        f"the chat template ends an assistant's turn with {text!r} ({token}), which is no stop "
        f"of the run ({names})"
    )


def turn_ends(stage: StageRows) -> Iterator[Fault]:
    """2: the token after an assistant's turn is a stop."""
    if not stage.messages or (problem := end_of_turn_problem(stage.tokenizer, stage.stops)) is None:
        return
    try:
        token = end_of_turn(stage.tokenizer)[0]
    except chat.ChatError:
        token = None
    change = (
        f"Set {stage.path}.sampling.stop_token_ids=[{token}]"
        if token is not None
        else "Mend tokenizer.chat_template"
    )
    yield Fault(
        problem, change, level="refuse" if stage.samples else "warn", check=2, stage=stage.name
    )


def stops_agree(stage: StageRows) -> Iterator[Fault]:
    """3: the stops of tokenizer, config.json, generation_config.json and template are stops of the
    run."""
    declared = dict(stage.declared_stops)
    if stage.messages and stage.tokenizer.chat_template:
        try:
            token = end_of_turn(stage.tokenizer)[0]
        except chat.ChatError:
            token = None
        declared["template"] = [] if token is None else [token]
    missing = {name: ids for name, ids in declared.items() if set(ids) - set(stage.stops)}
    if missing:
        shown = ", ".join(f"{name} {ids}" for name, ids in declared.items())
        yield Fault(
            f"the stops disagree: {shown}; the run stops at {list(stage.stops)}",
            f"Add those that should end a completion to {stage.path}.sampling.stop_token_ids",
            level="warn",
            check=3,
            stage=stage.name,
        )


def rewritten_turns(stage: StageRows) -> Iterator[Fault]:
    """5: the chat template leaves earlier turns as they were when the next message is added."""
    rows = Counter(row.example.where for row in stage.rows if row.example.messages is not None)
    several = {where: count for where, count in rows.items() if count > 1}
    if several and stage.kind == "supervised":
        first = next(iter(several))
        yield Fault(
            f"the chat template rewrites earlier turns: {len(several)} of {len(rows)} "
            f"conversations are {sum(several.values())} rows, so that each turn is learned as it "
            f"was when it was the last (first {first})",
            "To learn only turns that the full conversation leaves as they were, set "
            "tokenizer.chat_template.history=last",
            level="warn",
            check=5,
            stage=stage.name,
        )


def round_trips(stage: StageRows) -> Iterator[Fault]:
    """6: text -> ids -> text gives the text, and markers of the template are single tokens."""
    tokenizer = stage.tokenizer
    unknown = tokenizer.unk_token_id
    for row in stage.rows[:SOME]:
        for text in _texts(row.example):
            ids = tokenizer.encode(text, add_special_tokens=False)
            back = tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if back != text and unknown not in ids:  # check 9 names unknown tokens
                place = next(
                    (n for n, (a, b) in enumerate(zip(text, back, strict=False)) if a != b),
                    min(len(text), len(back)),
                )
                yield Fault(
                    f"{row.example.where}: text -> ids -> text changes the text at character "
                    f"{place}: {text[place : place + 20]!r} becomes {back[place : place + 20]!r}",
                    "Rewards see the decoded text; normalise the data, or use another tokenizer",
                    level="warn",
                    check=6,
                    stage=stage.name,
                )
                break
        else:
            continue
        break
    if stage.messages and tokenizer.chat_template:
        yield from _markers(stage)


def _markers(stage: StageRows) -> Iterator[Fault]:
    prompt = next(each.prompt for each in stage.some_examples if not isinstance(each.prompt, str))
    text = _rendered(stage.tokenizer, prompt, generation=True)
    several = sorted(
        {
            marker
            for marker in _MARKER.findall(text)
            if len(stage.tokenizer.encode(marker, add_special_tokens=False)) > 1
        }
    )
    if several:
        yield Fault(
            f"markers of the chat template are no single tokens: {', '.join(several)}",
            "The template belongs to another tokenizer; set tokenizer.chat_template=FILE or "
            "tokenizer.source=DIRECTORY",
            level="warn",
            check=6,
            stage=stage.name,
        )


def sampled_form(stage: StageRows) -> Iterator[Fault]:
    """7: the generation prompt with the answer as sampled is the template's own conversation, token
    by token."""
    tokenizer = stage.tokenizer
    for row in stage.rows[:SOME]:
        messages = _messages(row.example)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            continue
        try:
            prompt = chat.render_prompt(tokenizer, messages[:-1])
            full_text = _rendered(tokenizer, messages)
        except chat.ChatError:
            continue
        ids = tokenizer.encode(full_text, add_special_tokens=False)
        answer = encode_after(tokenizer, messages[-1]["content"])
        sampled = [*prompt, *answer]
        place = next(
            (n for n, (a, b) in enumerate(zip(sampled, ids, strict=False)) if a != b), None
        )
        if place is None and len(ids) >= len(sampled):
            continue
        place = len(ids) if place is None else place
        ours, theirs = (_token(tokenizer, each, place) for each in (sampled, ids))
        yield Fault(
            f"{row.example.where}: the answer as sampled differs from the template's conversation "
            f"at token {place}: {ours} when sampled, {theirs} in the conversation",
            "The template adds or changes something around the answer (a space, an empty think "
            "block); make its generation prompt the same",
            level="warn",
            check=7,
            stage=stage.name,
        )
        return


def plain_prompts(stage: StageRows) -> Iterator[Fault]:
    """8: plain prompts with a tokenizer that has a chat template. (Messages without one are refused
    when encoded.)"""
    if stage.built_in or not stage.tokenizer.chat_template or stage.messages or not stage.rows:
        return
    yield Fault(
        "the prompts are plain text, but the tokenizer has a chat template",
        "A chat model expects its template: set data.chat: true; leave it for a base model",
        level="warn",
        check=8,
        stage=stage.name,
    )


def _rendered(tokenizer: Tokenizer, messages: Sequence[dict], generation: bool = False) -> str:
    return chat.render_text(tokenizer, messages, generation)


def _messages(example: Example) -> list[dict]:
    """Returns the conversation of an example; [] for plain texts."""
    if example.messages is not None:
        return list(example.messages)
    if isinstance(example.prompt, str):
        return []
    answer = [{"role": "assistant", "content": example.completion}] if example.completion else []
    return [*example.prompt, *answer]


def _texts(example: Example) -> list[str]:
    """Returns the plain texts of an example."""
    if not isinstance(example.prompt, str):
        return [text for message in _messages(example) for text in texts_in(message)]
    return [example.prompt, *([example.completion] if example.completion else [])]


def _token(tokenizer: Tokenizer, ids: Sequence[int], place: int) -> str:
    return (
        f"{tokenizer.decode(ids[place : place + 1])!r} ({ids[place]})"
        if place < len(ids)
        else "nothing"
    )


TEMPLATE_CHECKS = (
    beginnings,
    turn_ends,
    stops_agree,
    rewritten_turns,
    round_trips,
    sampled_form,
    plain_prompts,
)
