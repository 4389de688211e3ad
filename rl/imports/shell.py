"""Reads a script of a shell without running it: the commands, with the values of their variables.

It knows what scripts that start a training have: quotes, comments, continued lines, variables with
defaults, arrays, integers in `$(( ))`, documents after `<<`, texts that `bash -c` runs, and
branches that compare texts and numbers, also after `&&` and `||`. In a loop, and in a branch that
depends on something else, an assignment gives a value only to a variable that has none. What
another program would have to compute (`$(date)`) and arguments of the script stay in the text and
are named in `ShellWord.unresolved`.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rl.errors import ConfigError

_SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_COUNT = re.compile(r"\d{1,12}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_OPENING = {"if", "for", "while", "until", "case", "{"}
_CLOSING = {"fi", "done", "esac", "}"}
_WORDS_OF_BLOCKS = {"then", "else", "elif", "do", "!", "time", "exec"}
_GOES_ON = {"&&", "||", "|"}
_SUCCEEDS = {":", ".", "cd", "echo", "mkdir", "pushd", "set", "source", "true"}
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda text, pattern: fnmatch.fnmatchcase(text, pattern),
    "==": lambda text, pattern: fnmatch.fnmatchcase(text, pattern),
    "!=": lambda text, pattern: not fnmatch.fnmatchcase(text, pattern),
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_OPERATORS = re.compile(r"\n|;;|;|&&|\|\||\|&?|&>>?|&|\(|\)")
_REDIRECTION = re.compile(r"\d*(?:>>|>&|<&|<>|>\||<|>)")
_DOCUMENT = re.compile(r"<<(-?)[ \t]*(['\"]?)([A-Za-z_]\w*)\2")
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST = 2**63
_EXPORTABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=?].*)?\})", re.DOTALL)
_SHELL = re.compile(r"(?:.*/)?(?:ba|z|da)?sh")
_RUNS_TEXT = re.compile(r"-[a-z]*c")


@dataclass(frozen=True)
class ShellWord:
    """A word after expansion. unresolved: variables without a value, and commands that it needs."""

    text: str
    line: int
    unresolved: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Part:
    """A part of a word. expands: whether `$` is special. quoted: whether blanks split it."""

    text: str
    expands: bool
    quoted: bool


@dataclass
class _Word:
    line: int
    parts: list[_Part] = field(default_factory=list)
    array: list[_Word] | None = None

    @property
    def plain(self) -> str:
        """Its text before expansion; an unquoted one can be a keyword or begin an assignment."""
        return "".join(part.text for part in self.parts)


@dataclass
class _Command:
    """Words between two operators. before, after: these operators, "" at the ends."""

    words: list[_Word] = field(default_factory=list)
    document: _Word | None = None
    before: str = ""
    after: str = ""


@dataclass
class _Block:
    """A block that is open. taken: whether its commands count, None if nobody can tell. done:
    whether a branch before was taken. subject: of `case`. in_condition: before `then`, or in the
    patterns of a branch of `case`."""

    kind: str
    taken: bool | None
    done: bool = False
    subject: ShellWord | None = None
    in_condition: bool = False


def commands(text: str, name: str, environment: Mapping[str, str]) -> list[list[ShellWord]]:
    """Returns the words of each command of a script, in the order in which they stand there.

    environment: variables that the script does not set; those with a secret name have no value.
    Raises ConfigError for a quote, bracket or document that does not end.
    """
    return _commands(ShellWord(text.replace("\r\n", "\n"), 1), name, _Script(name, environment))


def is_secret(name: str, value: str = "") -> bool:
    """Tells whether a variable of the environment may be a secret; a number of tokens is none."""
    counts = "TOKENS" in name.upper() and _COUNT.fullmatch(value)
    return bool(_SECRET.search(name)) and not counts


def name_of(text: str) -> str:
    """Returns the name of the variable in `$NAME`, `${NAME}` or `${NAME:?text}`; "" if another
    program or an operation of the shell gives the value."""
    match = _EXPORTABLE.fullmatch(text)
    return match[1] or match[2] if match else ""


def _commands(text: ShellWord, name: str, script: _Script) -> list[list[ShellWord]]:
    reader = _Reader(text, name)
    result: list[list[ShellWord]] = []
    while (command := reader.command()) is not None:
        if words := script.run(command):
            result.append(words)
            for inner in _scripts_of(words):
                with suppress(ConfigError):  # a text of another shell, or for another machine
                    result += _commands(inner, name, script)
    return result


def _scripts_of(words: Sequence[ShellWord]) -> list[ShellWord]:
    """Returns the texts that a command gives to a shell: of `srun bash -c TEXT`."""
    return [
        text
        for program, option, text in zip(words, words[1:], words[2:], strict=False)
        if _SHELL.fullmatch(program.text) and _RUNS_TEXT.fullmatch(option.text)
    ]


class _Reader:
    """Cuts a script into commands and their words."""

    def __init__(self, text: ShellWord, name: str):
        self._text = text.text
        self._name = name
        self._at = 0
        self._line = text.line
        self._documents: list[tuple[_Command, re.Match[str]]] = []
        self._operator = ""

    def command(self) -> _Command | None:
        """Returns the next command, or None at the end. A command can have no words."""
        if self._at >= len(self._text):
            return None
        command = _Command(before=self._operator)
        self._operator = ""
        while self._at < len(self._text):
            self._skip_blanks()
            if match := self._match(_DOCUMENT):
                self._documents.append((command, match))
            elif match := self._match(_OPERATORS):
                if match[0] == "\n":
                    self._line += 1
                    self._read_documents()
                    if command.before in _GOES_ON and not command.words:
                        continue
                self._operator = command.after = match[0]
                break
            elif self._match(_REDIRECTION):
                self._skip_blanks()
                self._word()
            elif self._at < len(self._text):
                word = self._word()
                if _ASSIGNMENT.fullmatch(word.plain) and self._text.startswith("(", self._at):
                    word.array = self._array()
                command.words.append(word)
        return command

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match:
            self._at = match.end()
        return match

    def _skip_blanks(self) -> None:
        while self._at < len(self._text):
            if self._text.startswith("\\\n", self._at):
                self._line += 1
                self._at += 2
            elif self._text[self._at] in " \t":
                self._at += 1
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = end if end >= 0 else len(self._text)
            else:
                return

    def _array(self) -> list[_Word]:
        start = self._line
        self._at += 1
        words = []
        while True:
            self._skip_blanks()
            if self._at >= len(self._text):
                raise ConfigError(f"{self._name}:{start}: the array `(` has no end")
            if self._text[self._at] == ")":
                self._at += 1
                return words
            if self._text[self._at] == "\n":
                self._line += 1
                self._at += 1
            else:
                before = self._at
                words.append(self._word())
                self._at += self._at == before

    def _word(self) -> _Word:
        word = _Word(self._line)
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\n;&|()<>":
                break
            if character == "\\":
                self._escape(word)
            elif character == "'":
                word.parts.append(_Part(self._until("'", "'"), False, True))
            elif self._text.startswith("$'", self._at):
                self._at += 1
                quoted = self._until("'", "$'", escapes=True)
                word.parts.append(_Part(_unescaped(quoted), False, True))
            elif character == '"':
                word.parts.append(_Part(self._until('"', '"', escapes=True), True, True))
            elif character in "$`":
                word.parts.append(_Part(self._expansion(), True, False))
            else:
                end = re.compile(r"[ \t\n;&|()<>\\'\"$`]").search(self._text, self._at)
                stop = end.start() if end else len(self._text)
                word.parts.append(_Part(self._text[self._at : stop], False, False))
                self._at = stop
        return word

    def _escape(self, word: _Word) -> None:
        following = self._text[self._at + 1 : self._at + 2]
        if following == "\n":
            self._line += 1
        elif following:
            word.parts.append(_Part(following, False, True))
        self._at += 2

    def _until(self, end: str, opening: str, escapes: bool = False) -> str:
        """Returns what stands in quotes, which begin here, and goes behind them."""
        start = self._at + 1
        line = self._line
        at = start
        while at < len(self._text) and self._text[at] != end:
            if escapes and self._text.startswith(("$(", "${"), at) and end == '"':
                at = self._closed(at)
            else:
                at += 2 if escapes and self._text[at] == "\\" else 1
        if at >= len(self._text):
            raise ConfigError(f"{self._name}:{line}: the quote {opening} has no end")
        self._line += self._text.count("\n", start, at)
        self._at = at + 1
        return self._text[start:at]

    def _expansion(self) -> str:
        start = self._at
        if self._text.startswith(("$(", "${"), start):
            self._at = self._closed(start)
        elif self._text[start] == "`":
            end = self._text.find("`", start + 1)
            if end < 0:
                raise ConfigError(f"{self._name}:{self._line}: the quote ` has no end")
            self._at = end + 1
        else:
            match = re.compile(r"\$(?:\w+|.|$)", re.DOTALL).match(self._text, start)
            self._at = match.end() if match else start + 1
        self._line += self._text.count("\n", start, self._at)
        return self._text[start : self._at]

    def _closed(self, at: int) -> int:
        """Returns the place behind the bracket that `$(` or `${` at `at` opens."""
        opening = self._text[at + 1]
        closing = {"(": ")", "{": "}"}[opening]
        depth = 0
        place = at + 1
        while place < len(self._text):
            character = self._text[place]
            if character == "\\":
                place += 1
            depth += (character == opening) - (character == closing)
            place += 1
            if depth == 0:
                return place
        raise ConfigError(f"{self._name}:{self._line}: the bracket ${opening} has no end")

    def _read_documents(self) -> None:
        for command, match in self._documents:
            start = self._at
            line = self._line
            indent, quote, end = match.groups()
            while True:
                if self._at >= len(self._text):
                    raise ConfigError(f"{self._name}:{line}: the document <<{end} has no end")
                stop = self._text.find("\n", self._at)
                stop = stop if stop >= 0 else len(self._text)
                current = self._text[self._at : stop]
                self._line += 1
                body_end, self._at = self._at, stop + 1
                if (current.lstrip("\t") if indent else current) == end:
                    break
            body = self._text[start:body_end]
            body = body if quote else body.replace("\\\n", " ")
            command.document = _Word(line, [_Part(body, not quote, True)])
        self._documents = []


def _unescaped(text: str) -> str:
    escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[0]), text)


class _Script:
    """Keeps the variables while the commands of a script go by."""

    def __init__(self, name: str, environment: Mapping[str, str]):
        self._name = name
        self._environment = environment
        self._variables: dict[str, list[ShellWord]] = {}
        self._blocks: list[_Block] = []
        self._succeeded: bool | None = True
        """Whether the last command succeeded, None if nobody can tell."""

    def run(self, command: _Command) -> list[ShellWord]:
        """Makes the assignments of a command. Returns its other words, expanded."""
        words = self._in_blocks(command)
        taken = [*(block.taken for block in self._blocks), self._reached(command)]
        if False in taken or not words:
            return []
        declares = words[0].plain in _DECLARING
        assignments = words[1:] if declares else words
        if declares:  # also `declare -a NAME=(...)` and `export NAME OTHER=value`
            assignments = list(filter(self._assigns, assignments))
        while assignments and self._assigns(assignments[0]):
            self._assign(assignments.pop(0), None in taken)
        if declares or not assignments:
            self._succeeded = True
            return []
        name = assignments[0].plain
        if name == "read" and command.document is not None:
            self._variables[assignments[-1].plain] = self._fields(command.document)
            return []
        self._succeeded = True if name in _SUCCEEDS else self._truth(assignments)
        return [text for word in assignments for text in self._fields(word)]

    def _reached(self, command: _Command) -> bool | None:
        """Tells whether a command runs after the one before, None if nobody can tell."""
        if command.before == "&&":
            return self._succeeded
        if command.before == "||" and self._succeeded is not None:
            return not self._succeeded
        return None if command.before == "||" else True

    def _in_blocks(self, command: _Command) -> list[_Word]:
        """Opens and closes blocks. Returns the words of the command itself."""
        words = list(command.words)
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.kind == "case":
            block.in_condition = block.in_condition or command.before == ";;"
            if block.in_condition and command.after in (")", "|"):
                self._pattern(block, words, command)
                return []
        while words and (plain := self._keyword(words[0])) is not None:
            words.pop(0)
            block = self._blocks[-1] if self._blocks else None
            if plain == "case":
                subject = self._joined(self._fields(words[0]), 0) if words else ShellWord("", 0)
                block = _Block("case", False, subject=subject, in_condition=True)
                self._blocks.append(block)
                if command.after in (")", "|"):
                    self._pattern(block, words[2:], command)
                return []
            if plain == "{":
                self._blocks.append(_Block("{", self._reached(command)))
                continue
            if plain == "if":
                self._blocks.append(_Block("if", self._truth(words), in_condition=True))
                return []
            if plain in _OPENING:
                self._blocks.append(_Block(plain, None))
                return []
            if plain in _CLOSING and block is not None:
                if (plain == "}") == (block.kind == "{"):
                    self._blocks.pop()
            elif plain == "then" and block is not None:
                block.in_condition = False
            elif plain in ("else", "elif") and block is not None:
                block.done = block.done or bool(block.taken)
                known = block.taken is not None
                block.taken = False if block.done else True if known else None
                if plain == "elif":
                    block.in_condition = True
                    if block.taken is not False:
                        block.taken = self._truth(words)
                    return []
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.kind == "if" and block.in_condition:
            self._combine(block, command, words)
            return []
        return words

    def _combine(self, block: _Block, command: _Command, words: list[_Word]) -> None:
        """Takes a further part of a condition: of `[ a ] && [ b ]`."""
        if not words:
            return
        other = self._truth(words)
        both = (block.taken, other)
        if command.before == "&&":
            block.taken = False if False in both else None if None in both else True
        elif command.before == "||":
            block.taken = True if True in both else None if None in both else False
        else:
            block.taken = None

    def _pattern(self, block: _Block, words: list[_Word], command: _Command) -> None:
        """Takes one of the patterns of a branch of `case`, between `|`; the last one ends at `)`."""
        block.in_condition = command.after == "|"
        goes_on = command.before == "|"
        subject = block.subject
        if subject is None or subject.unresolved:
            block.taken = None
            return
        if goes_on and block.taken:
            return
        block.done = block.done or bool(block.taken)
        patterns = [text.text for word in words for text in self._fields(word)]
        matches = any(fnmatch.fnmatchcase(subject.text, pattern) for pattern in patterns)
        block.taken = matches and not block.done

    def _truth(self, words: list[_Word]) -> bool | None:
        """Returns what a test says, None if it is no comparison of known values."""
        texts = [
            text for word in words for text in self._fields(word) or [ShellWord("", word.line)]
        ]
        if not texts or any(text.unresolved for text in texts):
            return None
        first, *values = [text.text for text in texts]
        if first not in ("[", "[[", "test"):
            return None
        values = values[:-1] if values and values[-1] in ("]", "]]") else values
        negated = values[:1] == ["!"]
        values = values[1:] if negated else values
        result = self._compared(values)
        return None if result is None else result != negated

    @staticmethod
    def _compared(values: list[str]) -> bool | None:
        if len(values) == 1:
            return bool(values[0])
        if len(values) == 2 and values[0] in ("-z", "-n"):
            return (values[0] == "-n") == bool(values[1])
        if len(values) != 3 or values[1] not in _COMPARED:
            return None
        compare = _COMPARED[values[1]]
        if not values[1].startswith("-"):
            return compare(values[0], values[2])
        numbers = [value for value in (values[0], values[2]) if re.fullmatch(r"-?\d{1,18}", value)]
        return compare(*map(int, numbers)) if len(numbers) == 2 else None

    @staticmethod
    def _keyword(word: _Word) -> str | None:
        is_bare = all(not part.quoted and not part.expands for part in word.parts)
        known = word.plain in _OPENING | _CLOSING | _WORDS_OF_BLOCKS
        return word.plain if is_bare and known and word.array is None else None

    @staticmethod
    def _assigns(word: _Word) -> bool:
        first = word.parts[0] if word.parts else None
        return first is not None and not first.quoted and bool(_ASSIGNMENT.match(first.text))

    def _assign(self, word: _Word, only_new: bool) -> None:
        first = word.parts[0]
        match = _ASSIGNMENT.match(first.text)
        assert match is not None
        name = match[1]
        adds = bool(match[2])
        if only_new and name in self._variables:
            return
        if word.array is not None:
            values = [text for each in word.array for text in self._fields(each)]
            self._variables[name] = [*self._variables.get(name, []), *values] if adds else values
            return
        rest = [replace(first, text=first.text[match.end() :]), *word.parts[1:]]
        quoted = [replace(part, quoted=True) for part in rest]
        value = self._joined(self._fields(_Word(word.line, quoted)), word.line)
        if adds:
            value = self._joined([*self._variables.get(name, []), value], word.line, "")
        self._variables[name] = [value]

    @staticmethod
    def _joined(texts: list[ShellWord], line: int, between: str = " ") -> ShellWord:
        unresolved = tuple(name for text in texts for name in text.unresolved)
        return ShellWord(between.join(text.text for text in texts), line, unresolved)

    def _fields(self, word: _Word) -> list[ShellWord]:
        """Returns what a word expands to: no text, one, or several."""
        done: list[ShellWord] = []
        current: ShellWord | None = None
        for part in word.parts:
            pieces = self._expanded(part, word.line)
            if part.quoted and not pieces and not _is_list(part.text):
                pieces = [[ShellWord("", word.line)]]
            for number, piece in enumerate(pieces):
                if number and current is not None:
                    done.append(current)
                    current = None
                for text in piece:
                    place = current.line if current else text.line
                    before = current or ShellWord("", place)
                    current = ShellWord(
                        before.text + text.text, place, before.unresolved + text.unresolved
                    )
        return [*done, current] if current is not None else done

    def _expanded(self, part: _Part, line: int) -> list[list[ShellWord]]:
        """Returns the fields of a part, each a list of texts that follow each other."""
        if not part.expands:
            return [[ShellWord(part.text, line)]]
        fields: list[list[ShellWord]] = [[]]
        at = 0
        for start, end in _dollars(part.text):
            if start > at:
                fields[-1].append(ShellWord(_plain(part, part.text[at:start]), line))
            values = self._value(part.text[start:end], line)
            at = end
            if not part.quoted:
                values = [
                    replace(value, text=word)
                    for value in values
                    for word in ([value.text] if value.unresolved else value.text.split())
                ]
            for number, value in enumerate(values):
                if number:
                    fields.append([])
                fields[-1].append(value)
        if at < len(part.text):
            fields[-1].append(ShellWord(_plain(part, part.text[at:]), line))
        return [each for each in fields if each]

    def _value(self, text: str, line: int) -> list[ShellWord]:
        """Returns the values of one `$` expression."""
        if text.startswith("$(("):
            return [self._arithmetic(text, line)]
        if text.startswith(("$(", "`")):
            return [ShellWord(text, line, (text,))]
        if not text.startswith("${"):
            return self._variable(text[1:], text, line)
        inner = text[2:-1]
        match = re.match(r"([A-Za-z_]\w*|[\d@*#?!-])(\[[@*\w]+\])?(.*)", inner, re.DOTALL)
        if match is None:
            return [ShellWord(text, line, (text,))]
        name, index, rest = match.groups()
        default = re.match(r":?([-=?+])(.*)", rest, re.DOTALL)
        if rest and default is None:
            return [ShellWord(text, line, (text,))]
        values = self._variable(name, text, line)
        if index and index[1:-1].isdecimal():
            values = values[int(index[1:-1]) :][:1]
        has_value = any(value.text for value in values) and not any(v.unresolved for v in values)
        if default is not None and default[1] == "?" and not has_value:
            return [ShellWord(text, line, (text,))]
        if default is not None and (default[1] == "+") == has_value:
            word = _Word(line, [_Part(_unquoted(default[2]), True, True)])
            fields = self._fields(word)
            if default[1] == "=":
                self._variables[name] = fields
            return fields
        if default is not None and default[1] == "+":
            return []
        return values

    def _variable(self, name: str, text: str, line: int) -> list[ShellWord]:
        if name in "@*":
            return []
        if name in self._variables:
            return self._variables[name]
        if name == "HOME":
            return [ShellWord("~", line)]
        value = self._environment.get(name) if _NAME.fullmatch(name) else None
        if value is not None and not is_secret(name, value):
            return [ShellWord(value, line)]
        return [ShellWord(text, line, (text,))]

    def _arithmetic(self, text: str, line: int) -> ShellWord:
        inner = text[3:-2]
        names = re.sub(
            r"\$\{(\w+)\}|\$(\w+)|([A-Za-z_]\w*)",
            lambda match: self._number(next(filter(None, match.groups()))),
            inner,
        )
        try:
            return ShellWord(str(_integer_value(ast.parse(names.strip(), mode="eval").body)), line)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return ShellWord(text, line, (text,))

    def _number(self, name: str) -> str:
        value = self._joined(self._variable(name, f"${name}", 0), 0)
        return value.text if re.fullmatch(r"-?\d{1,18}", value.text) else "unknown"


def _integer_value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        result = -_integer_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        result = _BINARY[type(node.op)](_integer_value(node.left), _integer_value(node.right))
    else:
        raise ValueError("not integers")
    if abs(result) >= _LARGEST:
        raise ValueError("too large")
    return result


def _dollars(text: str) -> list[tuple[int, int]]:
    """Returns the start and end of each `$` expression of a text."""
    places = []
    at = 0
    pattern = re.compile(r"\\.|`[^`]*`|\$(?=[\w{(@*?#!$-])", re.DOTALL)
    while match := pattern.search(text, at):
        at = match.end()
        if match[0].startswith("\\"):
            continue
        start = match.start()
        if match[0] == "$" and text[at] in "({":
            closing = {"(": ")", "{": "}"}[text[at]]
            depth = 0
            while at < len(text):
                depth += (text[at] == text[start + 1]) - (text[at] == closing)
                at += 1
                if depth == 0:
                    break
        elif match[0] == "$":
            name = re.compile(r"[A-Za-z_]\w*|.", re.DOTALL).match(text, at)
            at = name.end() if name else at
        places.append((start, at))
    return places


def _plain(part: _Part, text: str) -> str:
    """Returns the text between `$` expressions: in double quotes some characters are escaped."""
    return re.sub(r'\\([$`"\\\n])', lambda match: match[1].strip("\n"), text)


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _is_list(text: str) -> bool:
    return bool(re.fullmatch(r"\$\{\w+\[[@*]\]\}|\$[@*]|\$\{[@*]\}", text))
