"""Checks of rows: 4, 9, 10, 11, 12, 14."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rl.data.encoded import Example, Messages
from rl.data.inspect.stage_rows import Encoded, StageRows, texts_in
from rl.data.limits import outside_vocabulary
from rl.errors import Fault

UNKNOWN_SHARE = 0.01
FEW_TRAINED = 0.02
CONSTANT_ROWS = 10
"""Rows from which on a column with one value is worth a remark."""


def ends_trained(stage: StageRows) -> Iterator[Fault]:
    """4: the end of sequence is trained on, as the last token of the mask."""
    trained = [row for row in stage.rows if 1 in row.mask]
    if stage.samples or not trained:
        return
    endless = [row for row in trained if _last_trained(row) not in stage.stops]
    if not endless:
        return
    last = stage.tokenizer.decode([_last_trained(endless[0])])
    everywhere = len(endless) == len(trained)
    yield Fault(
        f"{len(endless)} of {len(trained)} rows do not train a stop as their last token, but "
        f"{last!r} ({endless[0].example.where})"
        + (": the policy never learns to end" if everywhere else ""),
        "Make the chat template end the assistant's turn with a stop, or add its end to "
        f"{stage.path}.sampling.stop_token_ids",
        level="refuse" if everywhere else "warn",
        check=4,
        stage=stage.name,
    )


def _last_trained(row: Encoded) -> int:
    return row.ids[len(row.mask) - 1 - row.mask[::-1].index(1)]


def vocabulary(stage: StageRows) -> Iterator[Fault]:
    """9: ids lie in the model's vocabulary, and few tokens are unknown."""
    if stage.vocab_size is not None:
        outside = (
            outside_vocabulary(stage.tokenizer, token, row.example.where, stage.vocab_size)
            for row in stage.rows
            for token in row.text_ids
            if token >= stage.vocab_size
        )
        if (fault := next(outside, None)) is not None:
            yield replace(fault, check=9, stage=stage.name)
        elif len(stage.tokenizer) > stage.vocab_size:
            yield Fault(
                f"the tokenizer has {len(stage.tokenizer)} tokens, the model {stage.vocab_size}",
                "Check that they belong together",
                level="warn",
                check=9,
                stage=stage.name,
            )
    unknown = stage.tokenizer.unk_token_id
    if unknown is None or unknown in stage.stops:
        return
    total = sum(len(row.text_ids) for row in stage.rows)
    affected = [row for row in stage.rows if unknown in row.text_ids]
    count = sum(row.text_ids.count(unknown) for row in affected)
    if total and count / total > UNKNOWN_SHARE:
        yield Fault(
            f"{count / total:.1%} of the tokens are unknown to the tokenizer, e.g. in "
            f"{affected[0].example.where}: {_start_of(affected[0].example)!r}",
            "Use a tokenizer that knows these characters",
            level="warn",
            check=9,
            stage=stage.name,
        )


def lengths(stage: StageRows) -> Iterator[Fault]:
    """10: rows fit into max_length, prompts with room for a completion."""
    sizes: dict[str, int] = {}
    for row in stage.rows:
        sizes[row.example.where] = max(len(row.ids), sizes.get(row.example.where, 0))
    if fault := stage.limit.fault(list(sizes.values()), list(sizes)):
        yield replace(fault, check=10, stage=stage.name)
    if stage.effect is not None:
        yield Fault(stage.effect, level="note", check=10, stage=stage.name)


def masks(stage: StageRows) -> Iterator[Fault]:
    """11: every row has tokens that are trained on, and prompts are not."""
    if stage.samples or not stage.rows:
        return
    empty = [row for row in stage.rows if 1 not in row.mask]
    if empty:
        yield Fault(
            f"{len(empty)} of {len(stage.rows)} rows have no token that is trained on, first "
            f"{empty[0].example.where}",
            "Remove them, or check completion and roles",
            check=11,
            stage=stage.name,
        )
    share = sum(sum(row.mask) for row in stage.rows) / max(
        1, sum(len(row.text_ids) for row in stage.rows)
    )
    if stage.train_on == "all" or all(row.n_prompt <= 1 for row in stage.rows):
        yield Fault(
            f"{share:.0%} of the tokens are trained on, prompts too",
            f"Set {stage.path}.algorithm.train_on=assistant to train on answers only",
            level="warn",
            check=11,
            stage=stage.name,
        )
    elif share < FEW_TRAINED:
        text = f"only {share:.1%} of the tokens are trained on"
        yield Fault(
            text,
            "Check that the mask covers the answers (marks +)",
            level="warn",
            check=11,
            stage=stage.name,
        )
    else:
        yield Fault(
            f"{share:.0%} of the tokens are trained on", level="note", check=11, stage=stage.name
        )


def duplicates(stage: StageRows) -> Iterator[Fault]:
    """12: prompts that occur twice, and prompts of the training that the evaluation, or `held_out`,
    has too."""
    prompts = Counter(_identity(example) for example in stage.examples)
    repeated = sum(count - 1 for count in prompts.values())
    if repeated and not stage.task:  # a task draws its problems with repetition
        yield Fault(
            f"{repeated} of {len(stage.examples)} prompts occur before",
            "Remove duplicates",
            level="warn",
            check=12,
            stage=stage.name,
        )
    held_out = {_identity(example) for example in stage.held_out}
    if shared := sum(count for prompt, count in prompts.items() if prompt in held_out):
        yield Fault(
            f"{shared} training prompts are in the evaluation ({len(held_out & prompts.keys())} "
            f"of its {len(held_out)})",
            "The evaluation then measures memory; remove them from the training data",
            level="warn",
            check=12,
            stage=stage.name,
        )
    measured = {_identity(example) for example in stage.measured}
    if shared := len(measured & prompts.keys()):
        yield Fault(
            f"{shared} of {len(measured)} prompts of {stage.path}.held_out are among the training "
            "rows",
            "Their loss then measures memory; remove them from one of the two",
            level="warn",
            check=12,
            stage=stage.name,
        )


def _identity(example: Example) -> tuple[str, ...]:
    """Returns what two equal prompts share: the text, and the digests of pictures and sounds."""
    return normalised(example.prompt), *(reference.digest for reference in example.references)


def normalised(prompt: str | Messages) -> str:
    """Returns a prompt as text without differences of case, white space and Unicode form. Of
    messages, the last one."""
    text = prompt if isinstance(prompt, str) else "".join(texts_in(prompt[-1])) if prompt else ""
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text)).strip().casefold()


def columns(stage: StageRows) -> Iterator[Fault]:
    """14: constant columns, empty answers, types that differ between rows, special tokens as
    text."""
    examples = stage.examples
    names = sorted({name for example in examples for name in example.columns})
    for name in names:
        values = [example.columns[name] for example in examples if name in example.columns]
        kinds = Counter(_kind(value) for value in values)
        if len(kinds) > 1:
            shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            yield Fault(
                f"column `{name}` has several types: {shown}",
                "Make them one",
                level="warn",
                check=14,
                stage=stage.name,
            )
        elif (
            len(values) >= CONSTANT_ROWS
            and len({repr(value) for value in values}) == 1
            and not stage.task
        ):
            text = f"column `{name}` is {_short(values[0])} in all {len(values)} rows"
            yield Fault(
                text,
                "A reward cannot tell rows apart by it",
                level="warn",
                check=14,
                stage=stage.name,
            )
        if empty := sum(isinstance(value, str) and not value for value in values):
            yield Fault(
                f"column `{name}` is empty in {empty} of {len(values)} rows",
                level="warn",
                check=14,
                stage=stage.name,
            )
    yield from _special_texts(stage, examples)


def _special_texts(stage: StageRows, examples: Sequence[Example]) -> Iterator[Fault]:
    specials = [text for text in stage.tokenizer.all_special_tokens if len(text) > 2]
    if not specials:
        return
    pattern = re.compile("|".join(re.escape(text) for text in specials))
    hits = [
        (example, match[0]) for example in examples if (match := pattern.search(_text(example)))
    ]
    if hits:
        yield Fault(
            f"{len(hits)} of {len(examples)} rows contain special tokens as text, first "
            f"{hits[0][0].where}: {hits[0][1]!r}",
            "They are read as control tokens; remove them from the text",
            level="warn",
            check=14,
            stage=stage.name,
        )


def _text(example: Example) -> str:
    """Returns all texts of an example that its author wrote."""
    conversations = (
        () if isinstance(example.prompt, str) else example.prompt,
        example.messages or (),
    )
    messages = "\n".join(
        text for each in conversations for message in each for text in texts_in(message)
    )
    prompt = example.prompt if isinstance(example.prompt, str) else ""
    pair = "\n".join(answer if isinstance(answer, str) else "" for answer in example.pair or ())
    return "\n".join((prompt, example.completion or "", messages, pair))


def _kind(value: object) -> str:
    kind = type(value).__name__
    return {"NoneType": "null", "int": "number", "float": "number", "str": "text"}.get(kind, kind)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _start_of(example: Example) -> str:
    return _text(example)[:40]


ROW_CHECKS = (ends_trained, vocabulary, lengths, masks, duplicates, columns)
