"""The options of a generator, the parameters of a call, the completions that it returns, and
trajectories: what a stage learns from.

A generator returns a `Completion`, the tokens after a prompt. A stage takes a `Trajectory`: all
tokens of one sample of a prompt, with what is known about each of them, who wrote it first of all.

T tokens of a segment, n those of them that the policy wrote, R repeats of a stack, k experts of a
token or likeliest tokens, I ids that filters left.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

from policy.config import StoredType
from policy.options import option

if TYPE_CHECKING:
    from rollout.media.expand import Expanded


QueueOrder = Literal["longest", "arrival"]


@dataclass(frozen=True)
class GeneratorOptions:
    """Options of a generator. The section `generator` of the YAML schema is made from them.

    Raises ValueError for values out of range and for options that exclude each other.
    """

    cache: Literal["contiguous", "paged"] = option(
        "contiguous",
        description="contiguous: max_length tokens for every slot; paged: pages of page_size "
        "tokens that slots allocate as they need them.",
    )
    page_size: int = option(32, ge=1, description="Tokens of a page.")
    pages: int | None = option(
        None,
        ge=2,
        description="Number of pages; null: as many as full slots need, or as half of the memory "
        "that is left has room for.",
    )
    sliding_window_cache: bool = option(
        False,
        description="Sliding-window cache: layers with a window keep only the tokens that it can "
        "see (docs/caches.md).",
    )
    prefill_chunk: int = option(256, ge=1, description="Prompt tokens of one prefill call.")
    tokens_per_dispatch: int = option(
        128,
        ge=1,
        description="Most decoding steps of one multi-step decode (num_scheduler_steps): the host "
        "looks at the tokens after so many.",
    )
    prefill_budget: int | None = option(
        None,
        ge=1,
        description="Prompt tokens, with padding, prefilled between two multi-step decodes "
        "(max_num_batched_tokens); the last call may exceed it. null: as many as a decode of all "
        "slots samples.",
    )
    batch_sizes: Sequence[int] | None = option(
        None,
        description="Numbers of rows, besides all slots, that a decode program is compiled for; "
        "null: 1, 4, 8, 16 and so on, on one CPU also 24, 48, 96 and so on.",
    )
    speculative: int = option(
        0,
        ge=0,
        description="Tokens that the model's prediction modules draft at each step; 0: no "
        "speculative decoding. Samples stay the same.",
    )
    weights: StoredType | None = option(
        None,
        description="Type in which the weights of matrix products are stored for decoding; null: "
        "as they are trained.",
    )
    kv_cache: StoredType | None = option(
        None,
        description="Type in which keys, values and latents are stored; null: the dtype of the "
        "model.",
    )
    rules: Mapping[str, Sequence[str]] | None = option(
        None,
        description="Mesh axes by logical axis while the generator computes, on top of the rules "
        "of the mesh (docs/meshes.md); weights whose sharding they change are copied when they "
        "have changed. null: the generator reads the model's own arrays.",
    )
    exact: bool = option(
        False,
        description="Completions depend on the weights, the prompt and (seed, prompt id, sample) "
        "only, to the last bit, and log-probabilities equal Model.logprobs: the scoring programs "
        "verify each completion (docs/exact.md).",
    )
    record_routes: bool = option(
        False,
        description="Completions say which experts computed each of their tokens (models with a "
        "mixture of experts only).",
    )
    record_values: bool = option(
        False,
        description="Completions have the value of the state that each token was drawn from, by "
        "the head of Generator.set_value_head.",
    )
    record_kept: int = option(
        0,
        ge=0,
        description="Most ids that the filters of a completion (top_k, top_p, min_p) leave which "
        "it has for each token, and then its log-probability among them; 0: none.",
    )

    queue: QueueOrder = option(
        "longest",
        description="Which request gets the next free slot. longest: the one with the largest "
        "max_new_tokens, so that a batch ends soonest; arrival: the one that came first, so that "
        "none waits for later ones.",
    )

    @property
    def prefills_completions(self) -> bool:
        """Whether a completion may be prefilled like a prompt, after a preemption or after a token
        was replaced."""
        return self.exact or self.cache == "paged"

    def __post_init__(self) -> None:
        for name in ("weights", "kv_cache"):
            if getattr(self, name) not in (None, *get_args(StoredType)):
                raise ValueError(
                    f"GeneratorOptions.{name}: {getattr(self, name)!r} is none of "
                    f"{', '.join(get_args(StoredType))}"
                )
        if self.cache not in ("contiguous", "paged"):
            raise ValueError(
                f"GeneratorOptions.cache: {self.cache!r} is neither 'contiguous' nor 'paged'"
            )
        if self.queue not in get_args(QueueOrder):
            raise ValueError(
                f"GeneratorOptions.queue: {self.queue!r} is neither 'longest' nor 'arrival'"
            )
        if self.page_size < 1 or (self.pages is not None and self.pages < 2):
            raise ValueError("GeneratorOptions: page_size must be at least 1 and pages at least 2")
        if self.prefill_chunk < 1 or self.tokens_per_dispatch < 1:
            raise ValueError(
                "GeneratorOptions: prefill_chunk and tokens_per_dispatch must be at least 1"
            )
        if any(size < 1 for size in self.batch_sizes or ()):
            raise ValueError("GeneratorOptions: batch_sizes must be at least 1 each")
        if self.speculative < 0 or self.record_kept < 0:
            raise ValueError(
                "GeneratorOptions: speculative and record_kept must be 0 (none) or more"
            )
        if self.exact and self.record_routes:
            raise ValueError(
                "GeneratorOptions: exact completions use the model's own routes; leave "
                "record_routes out"
            )
        if self.record_values and (self.exact or self.speculative):
            raise ValueError(
                "GeneratorOptions: record_values goes neither with exact nor with speculative"
            )
        if self.exact and (self.weights or self.kv_cache):
            raise ValueError(
                "GeneratorOptions: exact gives the tokens of the trained weights; leave weights "
                "and kv_cache out"
            )


MOST_TOP_LOGPROBS = 20
"""The most likeliest tokens that are recorded at a token, as in the API of OpenAI."""


ConstraintKind = Literal["regex", "json_schema", "lark"]


@dataclass(frozen=True)
class Constraint:
    """What the text of a completion must be, from its first character to its last.

    kind: "regex", a regular expression of Rust's crate `regex`, without assertions; "json_schema",
    a JSON schema as text of JSON; "lark", a grammar of llguidance in the syntax of Lark, whose rule
    `start` is the text. Raises ValueError for another kind.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise ValueError(
                f"Constraint: {self.kind!r} is none of {', '.join(get_args(ConstraintKind))}"
            )


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one call: how many completions, how long, and how their tokens are drawn.

    The logits of a token become its probability in this order (docs/generator.md): logit_bias,
    constraint, bad_words and min_tokens, repetition_penalty, frequency_penalty, presence_penalty,
    temperature, top_k, top_p, min_p. Raises ValueError for values out of range.
    """

    n: int = option(1, ge=1, description="Completions per prompt (num_generations).")
    max_new_tokens: int = option(64, ge=1, description="Most tokens of a completion.")
    temperature: float = option(
        1.0,
        ge=0.0,
        description="Divides the logits; 0 takes the most likely token, of equal ones the lowest "
        "id.",
    )
    top_k: int = option(0, ge=0, description="Keeps the k most likely tokens; 0: all.")
    top_p: float = option(
        1.0,
        gt=0.0,
        le=1.0,
        description="Keeps the fewest most likely tokens whose probabilities add up to top_p.",
    )
    min_p: float = option(
        0.0,
        ge=0.0,
        le=1.0,
        description="Keeps tokens at least min_p times as likely as the most likely one.",
    )
    stop_token_ids: tuple[int, ...] = option(
        (), description="A completion ends with one of these tokens."
    )
    stop: tuple[str, ...] = option(
        (), description="A completion ends with the token that completes one of these strings."
    )
    min_tokens: int = option(
        0,
        ge=0,
        description="Until a completion has so many tokens, stop_token_ids and the end of sequence "
        "are not drawn, and strings of stop do not count (min_new_tokens).",
    )
    bad_words: tuple[str, ...] = option(
        (),
        description="Texts that a completion does not hold, each with and without a blank in "
        "front: the last token of one is never drawn after its other tokens.",
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        description="Numbers from -100 to 100 that are added to the logits of tokens, by token id.",
    )
    repetition_penalty: float = option(
        1.0,
        gt=0.0,
        description="Logits of tokens in prompt or completion are divided by it where they are "
        "positive, else multiplied; 1: none.",
    )
    presence_penalty: float = option(
        0.0,
        ge=-2.0,
        le=2.0,
        description="Subtracted from the logits of tokens that the completion has.",
    )
    frequency_penalty: float = option(
        0.0,
        ge=-2.0,
        le=2.0,
        description="Subtracted from the logits of tokens as many times as the completion has "
        "them.",
    )

    constraint: Constraint | None = option(
        None,
        description="What the text of a completion must be: a regular expression, a JSON schema or "
        "a grammar.",
    )
    top_logprobs: int | None = option(
        None,
        ge=0,
        le=MOST_TOP_LOGPROBS,
        description="So many of the likeliest tokens are recorded at each token of a completion, "
        "with raw log-probabilities: at temperature 1, before steps that change logits; 0: that "
        "of the token alone; null: nothing.",
    )
    prompt_logprobs: int | None = option(
        None,
        ge=0,
        le=MOST_TOP_LOGPROBS,
        description="The same for the tokens of the prompt.",
    )

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            object.__setattr__(self, name, (texts,) if isinstance(texts, str) else tuple(texts))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        biases = {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", biases or None)
        checks = {
            "n must be at least 1": self.n >= 1,
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "temperature must be a finite number from 0 on": 0 <= self.temperature < math.inf,
            "top_k must be 0 (all) or more": self.top_k >= 0,
            "top_p must lie in (0, 1]": 0 < self.top_p <= 1,
            "min_p must lie in [0, 1]": 0 <= self.min_p <= 1,
            "stop must not hold an empty string": all(self.stop),
            "min_tokens must be 0 or more, and at most max_new_tokens": 0
            <= self.min_tokens
            <= self.max_new_tokens,
            "bad_words must not hold an empty string or blanks alone": all(
                map(str.strip, self.bad_words)
            ),
            "logit_bias must hold numbers from -100 to 100": all(
                -100 <= bias <= 100 for bias in biases.values()
            ),
            "repetition_penalty must be a finite number above 0": 0
            < self.repetition_penalty
            < math.inf,
            f"top_logprobs must be None or 0 to {MOST_TOP_LOGPROBS}": self.top_logprobs is None
            or 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS,
            f"prompt_logprobs must be None or 0 to {MOST_TOP_LOGPROBS}": self.prompt_logprobs
            is None
            or 0 <= self.prompt_logprobs <= MOST_TOP_LOGPROBS,
            "presence_penalty must lie in [-2, 2]": -2 <= self.presence_penalty <= 2,
            "frequency_penalty must lie in [-2, 2]": -2 <= self.frequency_penalty <= 2,
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"SamplingParams: {message}")

    @property
    def has_filter(self) -> bool:
        """Whether tokens are drawn from a part of the distribution."""
        return draws_from_part(self, has_stop_token=bool(self.stop_token_ids))

    @property
    def has_penalty(self) -> bool:
        """Whether a token's logit depends on how often the token occurred."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


class FilterSettings(Protocol):
    """The settings that may leave out tokens of the distribution."""

    @property
    def temperature(self) -> float:
        """Returns what logits are divided by before a draw; 0: the likeliest token is taken."""
        ...

    @property
    def top_k(self) -> int:
        """Returns how many of the likeliest tokens are left; 0: all."""
        ...

    @property
    def top_p(self) -> float:
        """Returns the probability that the likeliest tokens that are left have together; 1: all
        tokens are left."""
        ...

    @property
    def min_p(self) -> float:
        """Returns the least probability of a token that is left, as a share of the largest; 0: all
        tokens are left."""
        ...

    @property
    def bad_words(self) -> Sequence[str]:
        """Returns the texts that no completion may hold; empty: none."""
        ...

    @property
    def min_tokens(self) -> int:
        """Tokens before one that can end the completion."""
        ...


def draws_from_part(settings: FilterSettings, *, has_stop_token: bool) -> bool:
    """Tells whether tokens are drawn from a part of the distribution: top_k, top_p, min_p,
    bad_words or min_tokens leaves out others. Without a stop token min_tokens forbids none."""
    forbids = bool(settings.bad_words or (settings.min_tokens and has_stop_token))
    filtered = settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0
    return settings.temperature > 0 and (filtered or forbids)


OF_REQUESTS = ("constraint", "top_logprobs", "prompt_logprobs")
"""The fields of SamplingParams that a configuration of a run does not have: a constraint, and what
is recorded of tokens."""
CHANGES_OF_RATIOS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""The fields of SamplingParams that change ratios of probabilities of tokens."""
LOGITS_PROCESSORS = ("min_tokens", "bad_words", *CHANGES_OF_RATIOS)
"""The fields of SamplingParams that change the logits of a token (rollout/logits_processors.py)."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Raw log-probabilities of n tokens: of log softmax(logits), without temperature, logits
    processors and filters.

    logprobs: float32[n]. top_ids: int32[n, k], the likeliest tokens in their places, likeliest
    first, lowest id first among equals. top_logprobs: float32[n, k]. A token that is among the
    likeliest has the same float in both lists. What nothing predicts, the first token of a prompt
    and placeholders of pictures and sounds, has the log-probability nan and ids of -1.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def part(self, start: int, end: int | None, k: int) -> TokenScores:
        """Returns those of the tokens `start` up to `end`, with k likeliest tokens."""
        return TokenScores(
            self.logprobs[start:end], self.top_ids[start:end, :k], self.top_logprobs[start:end, :k]
        )


@dataclass(frozen=True)
class Completion:
    """A sampled completion.

    tokens: without the prompt, with the stop token. logprobs: log softmax(logits / temperature) of
    each token, of the model's own logits: before penalties, biases and forbidden tokens, and before
    any filter. (vLLM's default, `raw_logprobs`, is before the temperature too.) Under temperature
    0: log softmax(logits).
    finish: "stop" or "length". "length" also if no token continues the text under its constraint.
    text: with a tokenizer, without special tokens; else None.
    raw: the text with its special tokens, but for the one that ended the completion; None without a
    tokenizer. steps: decoder passes that produced it: fewer than tokens if drafts were accepted.
    routes: under GeneratorOptions.record_routes, the experts of each token of prompt and completion
    except the last, which is never fed: int[tokens, R, k] by path of the layer, for the R repeats
    of its stack.
    values: under GeneratorOptions.record_values, the value of the state that each token was drawn
    from. filtered_logprobs, kept, kept_counts: under GeneratorOptions.record_kept, of a completion
    that was sampled with a filter, bad_words or min_tokens, else None: the log-probability of each
    token in the distribution that they left; the ids that they left, int32[tokens, I] in ascending
    order, padded with -1; and how many they were. Of more than record_kept ids only the first are
    in `kept`; or, where bad_words or min_tokens leave out at most record_kept ids, those, id i as
    -2 - i.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str
    text: str | None
    steps: int = 0
    routes: dict[str, np.ndarray] | None = None
    values: list[float] | None = None
    raw: str | None = None
    filtered_logprobs: list[float] | None = None
    kept: np.ndarray | None = None
    kept_counts: list[int] | None = None
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None


@dataclass(frozen=True)
class Turn:
    """What the policy wrote before it was somebody else's turn: the tokens from `start` up to but
    not including `end` of a segment.

    finish: "stop", if its last token ended it, or "length". text, raw and steps: as in
    `Completion`.
    """

    start: int
    end: int
    finish: str
    text: str | None = None
    raw: str | None = None
    steps: int = 0


LEFT_OUT = -2
"""In `Completion.kept`, id i that was left out is LEFT_OUT - i. -1 is padding."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What filters of the sampler left at each of the n tokens that the policy wrote in a segment,
    in their order (GeneratorOptions.record_kept).

    ids: int32[n, I], as `Completion.kept`. counts: int32[n], how many ids they left. logprobs:
    float32[n], the log-probability of the token among these.
    """

    ids: np.ndarray
    counts: np.ndarray
    logprobs: np.ndarray

    @property
    def names_left_out(self) -> np.ndarray:
        """Returns bool[n]: whether the ids of a token are those that were left out."""
        if not self.ids.size:
            return np.zeros(len(self.counts), bool)
        return self.ids[:, 0] <= LEFT_OUT

    def to_json(self) -> dict[str, Any]:
        """Returns the record as values that JSON can hold; the ids as compressed text, since they
        are many."""
        ids = zlib.compress(np.ascontiguousarray(self.ids, "<i4").tobytes())
        return {
            "ids": base64.b64encode(ids).decode(),
            "counts": self.counts.tolist(),
            "logprobs": self.logprobs.tolist(),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Kept:
        """Returns the record that `to_json` wrote."""
        return cls(
            cls.ids_from_json(plain["ids"], len(plain["counts"])),
            np.asarray(plain["counts"], np.int32),
            np.asarray(plain["logprobs"], np.float32),
        )

    @staticmethod
    def ids_from_json(text: str, count: int) -> np.ndarray:
        """Returns int32[count, I], the ids of so many tokens, from compressed text."""
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4").reshape(count, -1)


@dataclass(frozen=True, eq=False)
class Segment:
    """Token ids that only grow, with what is known about each of its T tokens; n of them are the
    policy's. A segment is a row of a batch.

    tokens: int32[T], the prompt included. policy: bool[T], whether the policy wrote the token; the
    others are of the prompt, of a template or of an environment. logprobs: float32[T], as in
    `Completion`, 0 where the policy did not write. versions: int32[T], the version (number of
    updates) of the weights that drew the token, 0 where none did. turns: in their order.
    values: float32[T], of the state that the token was drawn from, 0 where none was; None: not
    recorded. routes: int[T', R, k] by path of the layer, the experts of the first T' tokens; the
    last token of a segment was never fed, so T' is T - 1. kept: what filters left.
    Raises ValueError for arrays of several lengths.
    """

    tokens: np.ndarray
    policy: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    turns: tuple[Turn, ...]
    values: np.ndarray | None = None
    routes: Mapping[str, np.ndarray] | None = None
    kept: Kept | None = None

    def __post_init__(self) -> None:
        shapes = {np.shape(a) for a in (self.tokens, self.policy, self.logprobs, self.versions)}
        if len(shapes) > 1:
            raise ValueError(f"Segment: arrays of several shapes, {sorted(shapes)}")
        if self.kept is not None and len(self.kept.ids) != np.count_nonzero(self.policy):
            raise ValueError(
                f"Segment: the policy wrote {np.count_nonzero(self.policy)} tokens, and kept has "
                f"{len(self.kept.ids)}"
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the segment as values that JSON can hold, without routes, which are large."""
        result = {
            "tokens": self.tokens.tolist(),
            "policy": _spans(self.policy),
            "logprobs": self.logprobs[self.policy].tolist(),
            "versions": as_versions(self.policy, self.versions),
            "turns": [asdict(turn) for turn in self.turns],
        }
        if self.values is not None:
            result["values"] = self.values[self.policy].tolist()
        if self.kept is not None:
            result["kept"] = self.kept.to_json()
        return result

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Segment:
        """Returns the segment that `to_json` wrote. Raises KeyError, TypeError or ValueError for
        another value."""
        tokens = np.asarray(plain["tokens"], np.int32)
        policy = np.zeros(len(tokens), bool)
        for start, end in plain["policy"]:
            policy[start:end] = True

        return cls(
            tokens=tokens,
            policy=policy,
            logprobs=_where(policy, plain["logprobs"]),
            versions=from_versions(policy, plain["versions"]),
            turns=tuple(Turn(**turn) for turn in plain["turns"]),
            values=_where(policy, plain["values"]) if "values" in plain else None,
            kept=Kept.from_json(plain["kept"]) if "kept" in plain else None,
        )


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One sample of a prompt, from the first token of the prompt to its end.

    segments: one, and a further one wherever the history before a turn was rewritten, so that the
    ids did not only grow. finish: why it ended: "stop" or "length", as in `Completion`, or the word
    of an environment. rewards: what the environment itself gave after each turn, None for nothing;
    (): there is no environment.
    """

    segments: tuple[Segment, ...]
    finish: str
    rewards: tuple[float | None, ...] = ()

    @classmethod
    def of_completion(
        cls, prompt: Sequence[int], completion: Completion, version: int = 0
    ) -> Trajectory:
        """Returns the trajectory of one turn: a completion that weights of this version drew after
        a prompt."""
        start = len(prompt)
        T = start + len(completion.tokens)
        policy = np.arange(T) >= start

        kept = None
        if completion.kept is not None:
            kept = Kept(
                np.asarray(completion.kept, np.int32),
                np.asarray(completion.kept_counts, np.int32),
                np.asarray(completion.filtered_logprobs, np.float32),
            )
        turn = Turn(start, T, completion.finish, completion.text, completion.raw, completion.steps)
        segment = Segment(
            tokens=np.asarray([*prompt, *completion.tokens], np.int32),
            policy=policy,
            logprobs=_where(policy, completion.logprobs),
            versions=np.where(policy, version, 0).astype(np.int32),
            turns=(turn,),
            values=None if completion.values is None else _where(policy, completion.values),
            routes=completion.routes,
            kept=kept,
        )
        return cls((segment,), completion.finish)

    @property
    def turns(self) -> list[Turn]:
        """Returns the turns of all segments in their order."""
        return [turn for segment in self.segments for turn in segment.turns]

    @property
    def prompt_length(self) -> int:
        """Returns how many tokens stand before the first turn."""
        return self.segments[0].turns[0].start

    @property
    def length(self) -> int:
        """Returns how many tokens the policy wrote."""
        return sum(int(np.count_nonzero(segment.policy)) for segment in self.segments)

    @property
    def new_tokens(self) -> list[int]:
        """Returns all tokens after the prompt, those of an environment and of further segments
        included."""
        every = np.concatenate([segment.tokens for segment in self.segments])
        return every[self.prompt_length :].tolist()

    @property
    def truncated(self) -> bool:
        """Returns whether a limit of length cut it off."""
        return self.finish == "length"

    @property
    def steps(self) -> int:
        """Returns how many decoder passes wrote it."""
        return sum(turn.steps for turn in self.turns)

    @property
    def text(self) -> str | None:
        """Returns the texts of its turns, one after the other; None without a tokenizer."""
        texts = [turn.text for turn in self.turns]
        return None if None in texts else "".join(filter(None, texts))

    @property
    def raw(self) -> str | None:
        """Returns the texts of its turns with special tokens, one after the other; of a turn that
        has none recorded the text. None if no turn has."""
        if all(turn.raw is None for turn in self.turns):
            return None
        return "".join((turn.text if turn.raw is None else turn.raw) or "" for turn in self.turns)

    @property
    def versions(self) -> int | list[list[int]]:
        """Returns the version of the weights that drew its tokens, or [first token, version] pairs
        where it changes; tokens are counted over all segments, the prompt included."""
        return as_versions(
            np.concatenate([segment.policy for segment in self.segments]),
            np.concatenate([segment.versions for segment in self.segments]),
        )

    def only_segment(self, reader: str) -> Segment:
        """Returns its segment. Raises ValueError, which names the reader, if it has several."""
        if len(self.segments) != 1:
            raise ValueError(
                f"{reader} reads one segment of a trajectory, and this one has {len(self.segments)}"
            )
        return self.segments[0]

    def to_json(self) -> dict[str, Any]:
        """Returns the trajectory as values that JSON can hold, without routes."""
        return {
            "segments": [segment.to_json() for segment in self.segments],
            "finish": self.finish,
            "rewards": list(self.rewards),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Trajectory:
        """Returns the trajectory that `to_json` wrote. Raises as `Segment.from_json`."""
        segments = tuple(Segment.from_json(segment) for segment in plain["segments"])
        return cls(segments, plain["finish"], tuple(plain["rewards"]))


def as_versions(policy: np.ndarray, versions: np.ndarray) -> int | list[list[int]]:
    """Returns the version of the tokens that the policy wrote: one number, or [first token,
    version] pairs where it changes. policy: bool[T]. versions: int[T]."""
    places = np.flatnonzero(policy)
    drawn = versions[places]
    changes = np.flatnonzero(np.diff(drawn, prepend=-1))
    pairs = [[int(places[each]), int(drawn[each])] for each in changes]
    if len(pairs) > 1:
        return pairs
    return pairs[0][1] if pairs else 0


def from_versions(policy: np.ndarray, plain: int | Sequence[Sequence[int]]) -> np.ndarray:
    """Returns int32[T], the versions that `as_versions` wrote for these tokens."""
    if isinstance(plain, int):
        return np.where(policy, plain, 0).astype(np.int32)
    versions = np.zeros(len(policy), np.int32)
    for first, version in plain:
        versions[first:] = version
    return np.where(policy, versions, 0).astype(np.int32)


def _where(policy: np.ndarray, numbers: Sequence[float]) -> np.ndarray:
    """Returns float32[T]: the numbers, in their order, of the tokens that the policy wrote; 0
    elsewhere."""
    array = np.zeros(len(policy), np.float32)
    array[policy] = numbers
    return array


def _spans(policy: np.ndarray) -> list[list[int]]:
    """Returns the [start, end] of each run of True in bool[T]."""
    edges = np.flatnonzero(np.diff(policy, prepend=False, append=False))
    return edges.reshape(-1, 2).tolist()


class ExampleLike(Protocol):
    """A row of data: its prompt, as text or as messages, and its other columns, which rewards may
    take."""

    @property
    def prompt(self) -> Any:
        """Text, or messages of a chat."""
        ...

    @property
    def columns(self) -> Mapping[str, Any]:
        """The values of all columns but the prompt, by the name of the column."""
        ...

    @property
    def source(self) -> str | None:
        """The name of the dataset that it is from; None: it has no name."""
        ...


class ProblemLike(Protocol):
    """A prompt to complete, with its row of data. (A task of rl/tasks makes problems; here a
    problem can be any row.)"""

    @property
    def example(self) -> ExampleLike:
        """The row of data that the problem was made from."""
        ...

    @property
    def ids(self) -> list[int]:
        """The token ids of the prompt, as its template writes it."""
        ...

    @property
    def expanded(self) -> Expanded | None:
        """Its pictures and sounds; None: it has none."""
        ...


@dataclass(frozen=True, eq=False)
class Group:
    """The trajectories of one prompt.

    problem: the prompt with its row of data. prompt_id: the running number of the prompt in the
    run, for the random draws. row: index of the prompt in the data of the stage; None: it is not of
    that data.
    """

    problem: ProblemLike
    prompt_id: int
    trajectories: Sequence[Trajectory]
    row: int | None = None
