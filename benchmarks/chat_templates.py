"""Renders conversations with the chat templates that TRL ships, and prints a table of the rows that
SFT makes of them.

    python benchmarks/chat_templates.py

For each template: the rows of a conversation with three answers, and of one with two answers that
have reasoning in `<think>`. `refused` where the template refuses the conversation, `WRONG` where a
row learns anything but its answers (with their reasoning and the end of the turn).
"""

import importlib.resources
from collections.abc import Iterator

from rollout.text import chat
from rollout.text.tokenizer import load_tokenizer


def conversation(
    answers: int, reasoning: bool = False, system: bool = False
) -> list[dict[str, str]]:
    """Returns a conversation with this many questions and answers."""
    messages = [{"role": "system", "content": "SYSTEM"}] if system else []
    for number in range(1, answers + 1):
        thought = f"<think>\nREASON{number}\n</think>\n\n" if reasoning else ""
        messages.append({"role": "user", "content": f"QUESTION{number}"})
        messages.append({"role": "assistant", "content": f"{thought}ANSWER{number}"})
    return messages


def templates() -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each published template that TRL ships, without TRL's own
    variants."""
    folder = importlib.resources.files("trl") / "chat_templates"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".jinja") and not file.name.endswith("_training.jinja"):
            yield file.name.removesuffix(".jinja"), file.read_text(encoding="utf-8")


def learned(template: str, messages: list[dict[str, str]]) -> list[list[str]]:
    """Returns the texts that each row of a conversation trains on. Raises ChatError."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = template
    rows = chat.render_turns(tokenizer, messages)
    return [[row.text[start:end] for start, end in row.spans] for row in rows]


def wrong(rows: list[list[str]], answers: int) -> list[str]:
    """Returns the learned texts that are not one answer with what belongs to it, and answers that
    are not learned once."""
    texts = [text for row in rows for text in row]
    strange = [
        text
        for text in texts
        if "QUESTION" in text or "SYSTEM" in text or text.count("ANSWER") != 1
    ]
    counts = {
        number: sum(f"ANSWER{number}" in text for text in texts) for number in range(1, answers + 1)
    }
    return strange + [
        f"answer {number}: {count} times" for number, count in counts.items() if count != 1
    ]


def verdict(template: str, messages: list[dict[str, str]]) -> str:
    """Returns the number of rows of a conversation, `refused`, or `WRONG`."""
    try:
        rows = learned(template, messages)
    except chat.ChatError:
        return "refused"
    answers = sum(message["role"] == "assistant" for message in messages)
    return "WRONG" if wrong(rows, answers) else str(len(rows))


def main() -> None:
    """Prints the table."""
    print("| template | three answers | two with reasoning | with a system message |")
    print("|---|---|---|---|")
    for name, template in templates():
        talks = (conversation(3), conversation(2, reasoning=True), conversation(2, system=True))
        print(f"| `{name}` | {' | '.join(verdict(template, talk) for talk in talks)} |")


if __name__ == "__main__":
    main()
