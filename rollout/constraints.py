"""Constraints on the text of a completion: which tokens may come next under a regular expression, a
JSON schema or a grammar.

llguidance parses the grammar and computes the masks on the host, so while a row is constrained each
call of a decode draws one token. The extra `constraints` installs it.

V vocabulary, W = ceil(V / 32) words of a mask: bit t % 32 of word t // 32 is set if token t may
come next.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from rollout.text.interface import Tokenizer
from rollout.types import Constraint

_LOG = logging.getLogger("duet.generator")
KEPT_GRAMMARS = 64
"""Compiled grammars that are kept for requests with equal constraints."""
MOST_CHARACTERS = 1 << 18
"""Characters of the longest text of a constraint."""
_STACK = 256 << 20  # bytes, of which only those in use are taken from memory
_STACK_LOCK = threading.Lock()
_SPACES = {"whitespace_pattern": r"\n?[ \t]{0,16}"}


def with_few_spaces(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON schema under which a text has at most a line break and 16 blanks between two
    tokens of JSON, unless the schema has options of llguidance (`x-guidance`) itself.

    JSON allows any number of them, and a model that begins to write blanks often goes on to the
    most tokens of a completion.
    """
    return {"x-guidance": _SPACES, **schema}


class Matcher:
    """Where a completion stands in its grammar."""

    def __init__(self, matcher: Any, width: int):
        """matcher: an LLMatcher of llguidance, which this object advances. width: W."""
        self._matcher = matcher
        self._width = width
        self._allowed: np.ndarray | None = None

    def advance(self, tokens: Sequence[int]) -> bool:
        """Takes the next tokens of the completion. Returns whether no token may follow them."""
        self._matcher.consume_tokens(list(tokens))
        self._allowed = None
        nothing = not self.mask().any()
        if error := self._matcher.get_error():
            _LOG.warning("a completion cannot follow its constraint: %s", _first_line(error))
        return nothing or self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the text that the tokens spell is one of the grammar."""
        return self._matcher.is_accepting()

    def mask(self, ends: Collection[int] = ()) -> np.ndarray:
        """Returns uint32[W], the tokens that may come next. `ends` end a completion, so they may
        where the text is complete."""
        if self._allowed is None:
            self._allowed = np.zeros(self._width, np.uint32)
            computed = np.frombuffer(self._matcher.compute_bitmask(), "<u4")[: self._width]
            self._allowed[: len(computed)] = computed
        if not self.complete:
            return self._allowed
        mask = self._allowed.copy()
        for token in ends:
            if 0 <= token < 32 * self._width:
                mask[token // 32] |= np.uint32(1 << token % 32)
        return mask


class Grammars:
    """The grammars of constraints, over the tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """vocab_size: of the model, which may have more tokens than the tokenizer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ready = lru_cache(maxsize=KEPT_GRAMMARS)(self._compiled)

    def matcher(self, constraint: Constraint) -> Matcher:
        """Returns the start of a completion under this constraint. Raises ValueError for a grammar
        that llguidance does not read, for one that no text of the tokenizer can begin and for one
        of more than MOST_CHARACTERS, and if llguidance is not installed."""
        return Matcher(self._ready(constraint).deep_copy(), -(-self._vocab_size // 32))

    def _compiled(self, constraint: Constraint) -> Any:
        _llguidance()
        if len(constraint.text) > MOST_CHARACTERS:
            raise ValueError(
                f"constraint: the {constraint.kind} has {len(constraint.text)} characters, more "
                f"than {MOST_CHARACTERS}"
            )
        grammar = _grammar(constraint)
        return _with_large_stack(partial(self._checked, constraint, grammar, self._tokens))

    def _checked(self, constraint: Constraint, grammar: str, tokens: Any) -> Any:
        llguidance = _llguidance()
        if problem := llguidance.LLMatcher.validate_grammar(grammar, tokens):
            raise ValueError(f"constraint: no {constraint.kind} that can be followed: {problem}")
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
        if not any(matcher.compute_bitmask()) or matcher.is_error():
            raise ValueError(
                f"constraint: no token of this vocabulary begins a text of the {constraint.kind} "
                f"{constraint.text!r:.200}"
            )
        return matcher

    @cached_property
    def _tokens(self) -> Any:
        """Returns the tokens as llguidance reads them. Of a large vocabulary this takes a
        second."""
        from llguidance.hf import from_tokenizer

        tokenizer: Any = self._tokenizer
        try:
            if _decodes_by_joining(tokenizer):
                return _joined_tokens(tokenizer)
            return from_tokenizer(tokenizer, n_vocab=max(self._vocab_size, len(tokenizer)))
        except ValueError as error:
            raise ValueError(
                f"constraint: llguidance cannot read this tokenizer: {error}"
            ) from None


def _with_large_stack(function: Callable[[], Any]) -> Any:
    """Returns the result of a function, called in a thread of its own.

    llguidance follows rules that refer to each other by recursion. On the stack of another thread a
    chain of some thousand would end the process.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _STACK_LOCK:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future.result()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "constraint: llguidance is not installed; pip install 'duet-rl[constraints]'"
        ) from None
    return llguidance


def _grammar(constraint: Constraint) -> str:
    """Returns the grammar in the form that LLMatcher takes."""
    LLMatcher = _llguidance().LLMatcher
    match constraint.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.text)
    try:
        schema = json.loads(constraint.text)
    except RecursionError:
        raise ValueError("constraint: the schema is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"constraint: the schema is no JSON: {error}") from None
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _decodes_by_joining(tokenizer: Any) -> bool:
    """Whether a text is its tokens, one after the other, as those of `characters` are."""
    from tokenizers import decoders

    backend = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "decoder", None), decoders.Fuse)


def _joined_tokens(tokenizer: Any) -> Any:
    """Returns the tokens of a tokenizer whose texts are its tokens. llguidance derives the bytes of
    tokens from the decoder, and does not know this one."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Joined(tokenizer)))


class _Joined:
    """What llguidance asks of a tokenizer that it cannot read itself."""

    def __init__(self, tokenizer: Any):
        special = set(tokenizer.all_special_ids)
        names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.tokens = [b"" if name is None else name.encode() for name in names]
        self.special_token_ids = sorted(special)
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text up to a character that has none."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        unknown = self._tokenizer.unk_token_id
        return ids[: ids.index(unknown)] if unknown in ids else ids
