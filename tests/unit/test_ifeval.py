"""The 25 rules of IFEval: texts that follow an instruction and texts that do not, and the four ways
to score. The expected values are those of the published checks."""

import pytest

from rewards.benchmarks import ifeval_rules
from rewards.benchmarks.ifeval import ifeval

PARAGRAPHS = "One two.\n\nSecond, three.\n\nThird four."
RULES = {
    "keywords:existence": ({"keywords": ["tea", "cup"]}, ["A TEAcup."], ["Tea only.", ""]),
    "keywords:frequency": (
        {"keyword": "tea", "frequency": 2, "relation": "at least"},
        ["tea, Tea", "steam teams"],
        ["tea", "no drink"],
    ),
    "keywords:forbidden_words": (
        {"forbidden_words": ["tea", "cup"]},
        ["A teacup.", "steam"],
        ["Tea!", "a cup"],
    ),
    "keywords:letter_frequency": (
        {"letter": "E", "let_frequency": 3, "let_relation": "less than"},
        ["eE", "no such letter: b"],
        ["eee", "Every even event"],
    ),
    "language:response_language": (
        {"language": "de"},
        ["Das ist ein schöner Tag, und wir gehen in den Garten.", "42"],
        ["This is a fine day and we go to the garden.", "C'est une belle journée au jardin."],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"},
        ["One. Two!", "Dr. Smith sleeps. He snores.", "It costs 3.50 here. Really.", "no end"],
        ["One. Two! Three?", 'He said "no." Then he left. So did I.'],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["One\n***\nTwo", "***\nOne\n***\nTwo", "One *** Two\n***"],
        ["One", "One\n***\n\n***\nTwo", "One\n\nTwo"],
    ),
    "length_constraints:number_words": (
        {"num_words": 4, "relation": "at least"},
        ["one two three four", "it's a word"],
        ["one two three", "well-known word"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "Second"},
        [PARAGRAPHS, PARAGRAPHS.replace("Second", '"second')],
        [PARAGRAPHS.replace("Second", "Then"), "One\n\nSecond", "One\n\n\n\nSecond\n\nThird"],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        ["[name] at [address]", "[][]"],
        ["[name]", "(name) (address)"],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. Call me", "p. s. call"],
        ["Bye. PS call", "P.P.S"],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "* a\n- b"],
        ["* a", "* a\n* b\n* c", "**a**\n* b"],
    ),
    "detectable_format:constrained_response": (
        {},
        ["My answer is no.", "Well. My answer is maybe. Or not."],
        ["No.", "my answer is no."],
    ),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b*"],
        ["*a*", "** and **", "*a\nb*"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION2 SECTION3"],
        ["SECTION 1\na", "Section 1\nSection 2"],
    ),
    "detectable_format:json_format": (
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "42"],
        ["{a: 1}", 'Here: {"a": 1}'],
    ),
    "detectable_format:title": ({}, ["<<A title>>\nText"], ["<< >>", "<A title>", "<<A\ntitle>>"]),
    "combination:two_responses": (
        {},
        ["One\n******\nTwo", "******One******Two"],
        ["One", "One\n******\nOne", "One******Two******Three", "One************Two"],
    ),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "What is tea?"},
        ["what is TEA? A drink."],
        ["A drink.", "You ask: What is tea?"],
    ),
    "startend:end_checker": (
        {"end_phrase": "Any other questions?"},
        ["Tea. Any other questions?", 'any OTHER questions?"  '],
        ["Any other questions? No.", "Any questions?"],
    ),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA", "I AM here", "X-RAY TEST"],
        ["NASA", "Nasa and Esa", "WELL-KNOWN thing"],
    ),
    "change_case:english_capital": (
        {},
        ["THIS IS A FINE DAY AND WE GO TO THE GARDEN."],
        ["This is a fine day.", "DAS IST EIN TAG UND WIR GEHEN IN DEN GARTEN."],
    ),
    "change_case:english_lowercase": (
        {},
        ["this is a fine day and we go to the garden."],
        ["This is a fine day.", "das ist ein tag und wir gehen in den garten."],
    ),
    "punctuation:no_comma": ({}, ["One; two."], ["One, two."]),
    "startend:quotation": ({}, ['"One."', ' "One" '], ['"One', '"', "'One'"]),
}


def test_there_are_the_25_rules_of_the_paper():
    assert ifeval_rules.names() == sorted(RULES) and len(RULES) == 25


@pytest.mark.parametrize("name", RULES)
def test_a_rule_tells_texts_that_follow_it(name):
    given, following, others = RULES[name]
    given = given | {"unused": None}
    assert [text for text in following if not ifeval_rules.follows(name, text, given)] == []
    assert [text for text in others if ifeval_rules.follows(name, text, given)] == []
    assert not ifeval_rules.follows(name, " \n", given)


@pytest.mark.parametrize("relation", ["at least", "less than"])
def test_relations_are_opposites(relation):
    given = {"relation": relation, "num_words": 2}
    follows = [
        ifeval_rules.follows("length_constraints:number_words", text, given)
        for text in ("a", "a b", "a b c")
    ]
    assert follows == ([False, True, True] if relation == "at least" else [True, False, False])


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("keywords:exists", {}, "no instruction of IFEval"),
        ("length_constraints:number_words", {"relation": "at least"}, "'num_words'"),
        ("length_constraints:number_words", {"relation": "at most", "num_words": 3}, "at most"),
        ("keywords:frequency", {"keyword": None, "relation": "at least"}, "'keyword'"),
    ],
)
def test_what_no_rule_knows_is_an_error_and_no_success(name, given, message):
    with pytest.raises(ValueError, match=message):
        ifeval([""], ["a text"], [[name]], [[given]])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two. Three.", 3),
        ("What? Really! Yes.", 3),
        ("Mr. Smith met Mrs. Jones at 5 p.m. today.", 1),
        ("J. K. Rowling wrote it.", 1),
        ("Wait... what? No... Yes.", 3),
        ('She said "Stop!" Then she left.', 2),
        ("See e.g. this one. And that.", 2),
        ("no mark\nand a line break", 1),
        ("Pi is 3.14. Euler's number is 2.72.", 2),
        ("It was me and I. So there.", 2),
        ("Buy tea, milk, etc. The shop is open.", 2),
        ("See No. 5 and fig. 2. Say no. Go.", 3),
        ("", 0),
    ],
)
def test_sentences_are_counted(text, count):
    assert len(ifeval_rules.sentences(text)) == count


NO_COMMA = ("punctuation:no_comma", {})
QUOTED = ("startend:quotation", {})


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ('"One two."', (1.0, 1.0), (1.0, 1.0)),
        ('"One, two."', (0.0, 0.5), (0.0, 0.5)),
        ('Sure, here it is:\n"One two."', (0.0, 0.0), (1.0, 1.0)),
        ('"One two."\nDone, bye.', (0.0, 0.0), (1.0, 1.0)),
        ('Hi, it is:\n"One two."\nBye, bye.', (0.0, 0.0), (1.0, 1.0)),
        ('**"One two."**', (0.0, 0.5), (1.0, 1.0)),
        ("", (0.0, 0.0), (0.0, 0.0)),
        ('<think>Well, well.</think>"One two."', (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_prompts_and_instructions_are_scored_strictly_and_loosely(text, strict, loose):
    names, given = ([[each[number] for each in (NO_COMMA, QUOTED)]] for number in (0, 1))
    for mode, expected in (("strict", strict), ("loose", loose)):
        scores = tuple(
            ifeval([""], [text], names, given, level=level, mode=mode)[0]
            for level in ("prompt", "instruction")
        )
        assert scores == expected, mode


def test_a_message_is_read_as_its_text():
    answer = [{"role": "assistant", "content": "One two."}]
    assert ifeval([""], [answer], [[NO_COMMA[0]]], [[None]]) == [1.0]
