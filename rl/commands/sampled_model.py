"""Adds the arguments that `rl generate`, `rl chat`, `rl eval` and `rl serve` share, and loads their
model."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from policy.ops.seeds import SEEDS
from rl.data import models
from rl.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from policy.json_types import JsonObject
    from policy.model import Model
    from rl.run.unfinished.weights import CheckpointWeights
    from rollout import SamplingParams
    from rollout.media.processors import Processors
    from rollout.text.interface import Tokenizer

Dtype = Literal["float32", "bfloat16"]


class ModelFiles:
    """A Hugging Face directory with a tokenizer. Raises ModelError for files that cannot be
    read."""

    def __init__(self, directory: Path):
        from policy.huggingface import sources
        from rollout.text.tokenizer import load_tokenizer, stop_ids

        self.directory = directory
        try:
            self.positions = models.positions_of(sources.read_config(directory))
            texts = models.text_directory(directory)
            self.tokenizer = load_tokenizer(texts)
            self.stop_ids = stop_ids(self.tokenizer, texts)
        except ValueError as error:
            raise ModelError(f"{directory}: {error}") from None

    def processors(self, tokenizer: Tokenizer) -> Processors | None:
        """Returns what reads pictures and sounds; None if the model has no towers."""
        from rl.data.media import processors_of

        return processors_of(models.text_directory(self.directory), tokenizer)

    def load(self, dtype: Dtype, *, media: bool = False) -> Model:
        """Reads the weights. `media`: with the towers of pictures and sounds. Raises ModelError."""
        import policy
        from policy.fields.config_fields import UnsupportedModel
        from policy.huggingface.tensorfiles import ModelFileError
        from policy.mesh.sharding import layout

        try:
            return policy.load(self.directory, dtype=dtype, mesh=layout({"fsdp": -1}), media=media)
        except (ModelFileError, UnsupportedModel, ValueError) as error:
            raise ModelError(f"{self.directory}: {error}") from None


@dataclass(frozen=True)
class SampledModel:
    """The model that the arguments name, before its weights are read.

    tokenizer: with the variables of its chat template. params: the sampling parameters, with the
    stop tokens that the model names.
    """

    source: ModelFiles | CheckpointWeights
    dtype: Dtype
    tokenizer: Tokenizer
    params: SamplingParams

    @property
    def positions(self) -> models.Positions | None:
        """Returns the positions that the model was made for; None: unknown."""
        return self.source.positions

    @property
    def processors(self) -> Processors | None:
        """Returns what reads pictures and sounds; None if the model has no towers."""
        return self.source.processors(self.tokenizer)

    def check_length(self, tokens: int, what: str, change: str) -> None:
        """Warns about more tokens than the model has rotary positions for. `what` they are;
        `change`: what to type. Raises ConfigError where positions are learned."""
        if self.positions is None or (text := self.positions.exceeded_by(tokens)) is None:
            return
        text = f"{what}: {text}. {change}"
        if self.positions.learned:
            raise ConfigError(text)
        print(f"warning: {text}", file=sys.stderr)

    def load(self, *, media: bool = False) -> Model:
        """Reads the weights. `media`: with the towers of pictures and sounds. Raises ModelError."""
        return self.source.load(self.dtype, media=media)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `generate` and `chat` share."""
    add_model(parser)
    _add_sampling(parser)
    add_seed(parser)
    _add_logits_processors(parser)
    add_computation(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model, and the step of a run."""
    parser.add_argument(
        "model",
        type=os.path.expanduser,
        metavar="MODEL",
        help="Hugging Face directory with a tokenizer, folder of a run (its export, or its newest "
        "checkpoint if it has "
        "not ended), or a model on the Hugging Face hub: org/name, hf://org/name@revision",
    )
    parser.add_argument(
        "--step",
        metavar="[STAGE:]N",
        help="of a run: the checkpoint after step N, of the last stage that has one or of STAGE",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds how tokens are drawn, and where completions end."""
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="most tokens of a completion (256)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="0: always the most likely token (1.0)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K most likely tokens; 0: from all",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the fewest tokens with this total probability",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from tokens at least P times as likely as the likeliest",
    )
    add_stop(parser)


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Adds --stop."""
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends a completion; may be given several times",
    )


def add_platform(parser: argparse.ArgumentParser) -> None:
    """Adds --platform."""
    parser.add_argument(
        "--platform",
        choices=("auto", "cpu", "tpu", "gpu"),
        default="auto",
        help="platform of jax (auto)",
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Adds --seed."""
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        metavar="N",
        help="seed of sampling; equal seeds give equal completions (0)",
    )


def _add_logits_processors(parser: argparse.ArgumentParser) -> None:
    """Adds penalties, biases and forbidden tokens."""
    parser.add_argument(
        "--min-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a completion before one that can end it (0)",
    )
    parser.add_argument(
        "--bad-words",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that no completion holds; may be given several times",
    )
    parser.add_argument(
        "--logit-bias",
        type=_logit_bias,
        metavar="YAML",
        help="numbers from -100 to 100 to add to the logits of tokens, e.g. '{198: -100, 40: 2.5}'",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides positive logits of tokens in prompt or completion, and multiplies others "
        "(1.0: none)",
    )
    parser.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtracted from the logits of tokens in the completion, from -2 to 2 (0.0)",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtracted from the logits of tokens as many times as they are in the completion, "
        "from -2 to 2 (0.0)",
    )


def add_computation(parser: argparse.ArgumentParser) -> None:
    """Adds how the model computes, and how prompts become text."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of weights and matrix products (float32)",
    )
    parser.add_argument(
        "--template-variables",
        metavar="YAML",
        help="variables of the chat template, e.g. '{enable_thinking: false}' (of a run: those "
        "that it was trained with)",
    )
    add_platform(parser)


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < SEEDS):
        raise argparse.ArgumentTypeError(f"{text}: a seed is a number from 0 to {SEEDS - 1}")
    return int(text)


def find(arguments: argparse.Namespace, **changes: Any) -> SampledModel:
    """Returns the model that the arguments name. `changes` override sampling parameters.

    Raises ModelError for a name or directory without a readable tokenizer, ConfigError for invalid
    sampling parameters.
    """
    from rollout import SamplingParams
    from rollout.text.chat import with_variables_alone
    from rollout.text.tokenizer import bad_word_tokens

    names = {field.name for field in fields(SamplingParams)}
    options = {name: value for name, value in vars(arguments).items() if name in names}
    try:
        params = SamplingParams(**options | changes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    variables = _template_variables(Path(arguments.model), arguments.template_variables)
    source = _source(arguments.model, vars(arguments).get("step"))
    tokenizer = with_variables_alone(source.tokenizer, variables)
    try:
        bad_word_tokens(tokenizer, params.bad_words)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return SampledModel(
        source, arguments.dtype, tokenizer, replace(params, stop_token_ids=source.stop_ids)
    )


def _template_variables(run: Path, text: str | None) -> JsonObject:
    """Returns the variables of the chat template: those of the text, a YAML mapping, else those of
    a run. Raises ConfigError for a text that is no mapping."""
    from rl.config import yaml_tree
    from rl.config.files import RESOLVED

    if text is not None:
        values = yaml_tree.plain(yaml_tree.parse(text, lambda line: "--template-variables"))
        if not isinstance(values, dict):
            raise ConfigError(
                f"--template-variables: must be a mapping such as {{enable_thinking: false}}, got "
                f"{text!r}"
            )
        return values
    file = run / RESOLVED
    if not file.is_file():
        return {}
    saved = yaml_tree.plain(
        yaml_tree.parse(file.read_text(encoding="utf-8"), lambda line: f"{file}:{line}")
    )
    options = (saved.get("tokenizer") or {}).get("chat_template")
    return options.get("variables", {}) if isinstance(options, dict) else {}


def _logit_bias(text: str) -> dict[int, float]:
    """Reads biases by token id, a YAML mapping. Raises ArgumentTypeError."""
    from rl.config import yaml_tree

    try:
        values = yaml_tree.plain(yaml_tree.parse(text, lambda line: "--logit-bias"))
        return {int(token): float(bias) for token, bias in values.items()}
    except (AttributeError, ConfigError, TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"must be a mapping of token ids to numbers such as {{198: -100, 40: 2.5}}, with a "
            f"blank after each colon, got {text!r}"
        ) from None


def _source(name: str, step: str | None) -> ModelFiles | CheckpointWeights:
    """Returns the files of MODEL: of a run its export, or a checkpoint if it has none or a step is
    given.

    Raises ModelError if there are none, ConfigError for a step of what is no run.
    """
    from policy.huggingface import sources
    from rl.config.files import RESOLVED

    run = Path(name)
    exported = run / "export"
    is_run = (run / RESOLVED).is_file()
    if step is not None and not is_run:
        raise ConfigError(f"--step {step}: {name} is no folder of a run, which has a {RESOLVED}")
    if step is None and sources.is_model(exported):
        return ModelFiles(exported)
    if is_run and not sources.is_model(run):
        from rl.run.unfinished.weights import CheckpointWeights

        return CheckpointWeights(run, step)
    directory = models.directory(name, weights=True)
    if directory is None or not sources.is_model(directory):
        raise models.missing(name)
    return ModelFiles(directory)
