"""Rewrites an answer so that each thing has one spelling: Unicode signs, LaTeX commands, spaces and
emphasis."""

from __future__ import annotations

import re

THIN = "\u2009"
"""Stands for every space that separates the thousands of a number, and for nothing else."""

_SIGNS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | dict.fromkeys("\u2009\u202f\xa0\u2007\u2006\u2008\u200a", THIN)
    | dict.fromkeys("\u3000\u2002\u2003\u2004\u2005\t", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff")
    | {char: str(digit) for digit, char in enumerate("０１２３４５６７８９")}
    | {
        "×": "*",
        "·": "*",
        "∙": "*",
        "⋅": "*",
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "％": "%",
        "＄": "$",
        "，": ",",
        "．": ".",
    }
    | {
        "（": "(",
        "）": ")",
        "＝": "=",
        "＋": "+",
        "±": r"\pm ",
        "∓": r"\mp ",
        "√": r"\sqrt ",
        "π": r"\pi ",
        '"': " ",
    }
    | {
        "∞": r"\infty ",
        "°": r"^\circ ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∈": r"\in ",
    }
    | {"∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "’": "'", "º": r"^\circ "}
)
_VULGAR = {
    "½": "1/2",
    "¼": "1/4",
    "¾": "3/4",
    "⅓": "1/3",
    "⅔": "2/3",
    "⅕": "1/5",
    "⅖": "2/5",
    "⅗": "3/5",
    "⅘": "4/5",
}
_VULGAR |= {"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_SAME = {  # commands with the same meaning
    "frac": ("dfrac", "tfrac", "cfrac"),
    "le": ("leq", "leqslant"),
    "ge": ("geq", "geqslant"),
    "ne": ("neq",),
    "emptyset": ("varnothing",),
    "circ": ("degree",),
    "to": ("rightarrow",),
}
_COMMANDS = {other: f"\\{name} " for name, others in _SAME.items() for other in others}
_COMMANDS |= {
    "cdot": "*",
    "times": "*",
    "ast": "*",
    "div": "/",
    "thinspace": THIN,
    "lbrace": r"\{",
    "rbrace": r"\}",
}
_SPACES = "quad qquad enspace space newline hfill"
_IGNORED = (
    "left right big Big bigl bigr Bigl Bigr bigg Bigg displaystyle textstyle limits bf rm "
    "it boxed fbox"
)
_COMMANDS |= dict.fromkeys(_SPACES.split(), " ") | dict.fromkeys(_IGNORED.split(), "")
_COMMAND = re.compile(r"\\([A-Za-z]+) ?")
_PUNCTUATION = re.compile(r"\\([,;:! %$&#_()\[\]])|~")
_AFTER_BACKSLASH = {",": THIN, "!": "", "%": "%", "$": "$", "#": "#", "&": "&", "_": "_"}
_TEXT = re.compile(
    r"\\(?:text|mbox|textrm|textnormal|mathrm|operatorname|textsf|mathsf)\*?\s*\{([^{}]*)\}"
)
_STYLE = re.compile(
    r"\\(?:textbf|mathbf|boldsymbol|bm|textit|mathit|emph|underline|mathord)\s*\{([^{}]*)\}"
)
_BOLD = re.compile(r"(?<![\w*])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w*])", re.DOTALL)
_THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:\{,\}\d{3})+(?!\d)")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_LETTERS = re.compile(r"[A-Za-z]")
_BARE_ROOT = re.compile(r"√\s*(\d+)")
_BARE_ARGUMENT = re.compile(
    r"(\\(?:frac|sqrt)|\\frac\s*\{[^{}]*\})(?:\s*(\d)|(?:\s+|(?<=\}))([A-Za-z]))"
)


def uniform(text: str) -> str:
    """Returns the text with one spelling for each sign and command.

    9\\,500 and 9{,}500 become numbers with THIN spaces and without a comma, 0{,}5 becomes 0.5. What
    \\text{...} holds stands in double quotes, unless it has no letters. Signs of mathematics are
    LaTeX commands, -, *, / and %.
    """
    for char, fraction in _VULGAR.items():
        text = text.replace(char, f" {fraction} ")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_LOWERED)}}}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _BOLD.sub(r"\1", text.translate(_SIGNS))
    text = _TEXT.sub(_quoted, _STYLE.sub(r"\1", text))
    text = _THOUSANDS.sub(lambda match: match[0].replace("{,}", ""), text)
    text = _DECIMAL_COMMA.sub(".", text)
    text = _PUNCTUATION.sub(
        lambda match: _AFTER_BACKSLASH.get(match[1], " ") if match[1] else THIN, text
    )
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1], match[0]), text)
    for _ in range(2):  # first \frac1, then \frac{1}2
        text = _BARE_ARGUMENT.sub(lambda match: f"{match[1]}{{{match[2] or match[3]}}}", text)
    return text


def _quoted(match: re.Match) -> str:
    return f'"{match[1].strip()}" ' if _LETTERS.search(match[1]) else match[1]
