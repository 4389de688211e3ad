"""The 25 rules of IFEval (arXiv 2311.07911, table 1): whether a text follows an instruction.

The rules decide as the published checks of the benchmark do. Two of them count with a tokenizer of
nltk, whose data files are a download: here `sentences` and `capital_words` count by rules of their
own, which agree on plain English texts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypedDict, cast


class Arguments(TypedDict):
    """Arguments of instructions, by the names of the benchmark's rows. An instruction has those
    that its rule reads."""

    keyword: str
    keywords: list[str]
    forbidden_words: list[str]
    frequency: int
    relation: str
    letter: str
    let_frequency: int
    let_relation: str
    language: str
    capital_frequency: int
    capital_relation: str
    num_words: int
    num_sentences: int
    num_paragraphs: int
    nth_paragraph: int
    first_word: str
    num_placeholders: int
    postscript_marker: str
    num_bullets: int
    num_highlights: int
    section_spliter: str
    num_sections: int
    prompt_to_repeat: str
    end_phrase: str


Rule = Callable[[str, Arguments], bool]
"""(text, arguments of the instruction) -> whether the text follows it."""

_RULES: dict[str, Rule] = {}
_TITLES = ("mr", "mrs", "ms", "dr", "prof", "st", "gen", "col", "capt", "lt", "sgt", "rev", "hon")
_INSIDE = frozenset((*_TITLES, "gov", "sen", "rep", "vs", "e.g", "i.e", "u.s", "u.k", "approx"))
"""Abbreviations that end no sentence but the last."""
_LAST = frozenset(("jr", "sr", "inc", "ltd", "co", "corp", "etc", "est", "a.m", "p.m", "ph.d"))
"""Abbreviations that end a sentence if a capital letter follows."""
_BEFORE_NUMBERS = frozenset(("no", "fig", "vol", "p", "pp"))
_END = re.compile(r"([.!?]+)([\"')\]”’*]*)(?=\s|$)")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class UnknownRule(ValueError):
    """An instruction that is none of IFEval's, or one without an argument that it needs."""


def follows(instruction: str, text: str, arguments: Mapping[str, object]) -> bool:
    """Returns whether a text follows an instruction of IFEval, as `keywords:existence`. An empty
    text follows none. Raises UnknownRule."""
    if instruction not in _RULES:
        raise UnknownRule(f"{instruction!r} is no instruction of IFEval")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(text.strip()) and _RULES[instruction](text, cast(Arguments, given))
    except KeyError as error:
        raise UnknownRule(f"{instruction} needs the argument {error.args[0]!r}") from None


def names() -> list[str]:
    """Returns the names of all rules."""
    return sorted(_RULES)


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES[name] = rule
        return rule

    return register


def _compared(count: int, relation: str, threshold: int) -> bool:
    """Compares a count as `relation` says. Raises UnknownRule for another relation."""
    if relation == "less than":
        return count < threshold
    if relation == "at least":
        return count >= threshold
    raise UnknownRule(f"the relation is 'less than' or 'at least', not {relation!r}")


# Texts


def language(text: str) -> str | None:
    """Returns the language of a text by its ISO 639-1 code, always the same for the same text; None
    for a text without words."""
    import langdetect  # pyright: ignore[reportMissingImports]

    langdetect.DetectorFactory.seed = 0
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return None


def _is_language(text: str, code: str) -> bool:
    """Returns whether a text is in a language; a text without words counts as one that is."""
    detected = language(text)
    return detected is None or detected == code


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text: each ends with . ! ? or with the text.

    A full stop after a title, another abbreviation or an initial ends none, nor do dots before a
    small letter. Line breaks do not count.
    """
    result = []
    start = 0
    for match in _END.finditer(text):
        if _ends(text, match):
            result.append(text[start : match.end()].strip())
            start = match.end()
    return [each for each in [*result, text[start:].strip()] if each]


def _ends(text: str, match: re.Match[str]) -> bool:
    """Returns whether these marks end a sentence."""
    if match[1] != "." and not (len(match[1]) > 1 and set(match[1]) == {"."}):
        return True
    following = text[match.end() :].lstrip()[:1]
    if len(match[1]) > 1:
        return not following or following.isupper()
    words = text[: match.start()].split()
    word = words[-1].lstrip("\"'([“‘*").lower() if words else ""
    if word in _INSIDE:
        return not following
    if word in _LAST:
        return not following or following.isupper()
    if word in _BEFORE_NUMBERS and following.isdigit():
        return False
    is_initial = len(word) == 1 and word.isalpha() and words[-1][-1].isupper()
    return not (is_initial and word != "i" and following.isupper())


def capital_words(text: str) -> int:
    """Returns how many words have no small letter. Words with hyphens count once, and the parts of
    a contraction each."""
    words = re.findall(r"\w(?:[\w.\-/]*\w)?", text)
    return sum(word.isupper() for word in words)


# Keywords


@_rule("keywords:existence")
def _existence(text: str, given: Arguments) -> bool:
    return all(_occurrences(each, text) > 0 for each in given["keywords"])


@_rule("keywords:frequency")
def _frequency(text: str, given: Arguments) -> bool:
    count = _occurrences(given["keyword"].strip(), text)
    return _compared(count, given["relation"], given["frequency"])


@_rule("keywords:forbidden_words")
def _forbidden(text: str, given: Arguments) -> bool:
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)
        for word in given["forbidden_words"]
    )


@_rule("keywords:letter_frequency")
def _letters(text: str, given: Arguments) -> bool:
    """A sign that is no letter, as #, is counted too; the published check draws a random letter in
    its place."""
    count = Counter(text.lower())[given["letter"].strip().lower()]
    return _compared(count, given["let_relation"], given["let_frequency"])


def _occurrences(keyword: str, text: str) -> int:
    """Returns how often a keyword stands in a text, within words too, upper case or not."""
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


# Language and case


@_rule("language:response_language")
def _response_language(text: str, given: Arguments) -> bool:
    return _is_language(text, given["language"])


@_rule("change_case:english_capital")
def _english_capital(text: str, given: Arguments) -> bool:
    return text.isupper() and _is_language(text, "en")


@_rule("change_case:english_lowercase")
def _english_lowercase(text: str, given: Arguments) -> bool:
    return text.islower() and _is_language(text, "en")


@_rule("change_case:capital_word_frequency")
def _capital_words(text: str, given: Arguments) -> bool:
    return _compared(capital_words(text), given["capital_relation"], given["capital_frequency"])


# Length


@_rule("length_constraints:number_words")
def _number_words(text: str, given: Arguments) -> bool:
    return _compared(len(re.findall(r"\w+", text)), given["relation"], given["num_words"])


@_rule("length_constraints:number_sentences")
def _number_sentences(text: str, given: Arguments) -> bool:
    return _compared(len(sentences(text)), given["relation"], given["num_sentences"])


@_rule("length_constraints:number_paragraphs")
def _number_paragraphs(text: str, given: Arguments) -> bool:
    """Paragraphs stand between dividers ***. An empty one may be first or last."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    if not all(parts[1:-1]):
        return False
    return sum(map(bool, parts)) == given["num_paragraphs"]


@_rule("length_constraints:nth_paragraph_first_word")
def _nth_paragraph(text: str, given: Arguments) -> bool:
    """Paragraphs stand between two line breaks. The n-th is counted with empty ones."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    nth = given["nth_paragraph"]
    if nth > count or not parts[nth - 1].strip():
        return False
    word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    first = re.split(r"[.,?!'\"]", word)[0].lower()
    return count == given["num_paragraphs"] and first == given["first_word"].lower()


# Content and form


@_rule("detectable_content:number_placeholders")
def _placeholders(text: str, given: Arguments) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= given["num_placeholders"]


@_rule("detectable_content:postscript")
def _postscript(text: str, given: Arguments) -> bool:
    marker = given["postscript_marker"].strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = patterns[marker] if marker in patterns else re.escape(marker.lower())
    return bool(re.search(pattern, text.lower()))


@_rule("detectable_format:number_bullet_lists")
def _bullets(text: str, given: Arguments) -> bool:
    stars = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == given["num_bullets"]


@_rule("detectable_format:constrained_response")
def _constrained(text: str, given: Arguments) -> bool:
    return any(option in text for option in _CONSTRAINED)


@_rule("detectable_format:number_highlighted_sections")
def _highlights(text: str, given: Arguments) -> bool:
    """Texts in one or two asterisks on each side."""
    single = re.findall(r"\*[^\n*]*\*", text)
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    count = sum(bool(each.strip("*").strip()) for each in single)
    count += sum(bool(each[2:-2].strip()) for each in double)
    return count >= given["num_highlights"]


@_rule("detectable_format:multiple_sections")
def _sections(text: str, given: Arguments) -> bool:
    marker = re.escape(given["section_spliter"].strip())
    return len(re.findall(rf"\s?{marker}\s?\d+\s?", text)) >= given["num_sections"]


@_rule("detectable_format:json_format")
def _json(text: str, given: Arguments) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@_rule("detectable_format:title")
def _title(text: str, given: Arguments) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


# Combinations, start and end, punctuation


@_rule("combination:two_responses")
def _two_responses(text: str, given: Arguments) -> bool:
    """Two different texts stand between ******. An empty one may be first or last."""
    parts = [part.strip() for part in text.split("******")]
    if not all(parts[1:-1]):
        return False
    answers = [part for part in parts if part]
    return len(answers) == 2 and answers[0] != answers[1]


@_rule("combination:repeat_prompt")
def _repeat_prompt(text: str, given: Arguments) -> bool:
    return text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())


@_rule("startend:end_checker")
def _end(text: str, given: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


@_rule("startend:quotation")
def _quotation(text: str, given: Arguments) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@_rule("punctuation:no_comma")
def _no_comma(text: str, given: Arguments) -> bool:
    return "," not in text
