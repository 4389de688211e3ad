"""Computes the generation_config.json of an export: where the trained policy stops, and how it was
sampled."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from policy.huggingface import generation_config
from rl.data import models
from rl.errors import ModelError
from rl.stages import kind_of
from rl.stages.sampling.params import sampling_params

if TYPE_CHECKING:
    from rl.config.run import RunConfig
    from rl.config.stage import StageOptions
    from rollout import SamplingParams
    from rollout.text.interface import Tokenizer


class TrainedRun(Protocol):
    """What the keys follow from. stop_ids: token ids that end a completion, where no stage names
    any."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...


def keys(run: TrainedRun) -> dict[str, Any]:
    """Returns the keys of generation_config.json for the policy of a run.

    Stops and sampling parameters come from the last stage that samples, or from the last stage if
    none does. Without a sampling stage, sampling parameters of the model's own file win, because
    training did not use others. All other keys of the model's file are kept.
    """
    config = run.config
    tokenizer = run.tokenizer
    source: dict[str, Any] = {}
    with contextlib.suppress(ModelError):  # the source is gone by now: it has no keys to keep
        directory = models.directory(config.model.source)
        source = generation_config.read(directory) if directory is not None else {}
    sampled = _last_sampled(config)
    params = last_params(config, run.stop_ids)
    sampling = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if not sampled and any(key in source for key in generation_config.SAMPLING):
        sampling = {}
    ids = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "pad_token_id")}
    return generation_config.merged(source, params.stop_token_ids, ids, sampling)


def last_params(config: RunConfig, stop_ids: tuple[int, ...]) -> SamplingParams:
    """Returns how the last stage that samples does so, or the last stage if none does."""
    return sampling_params((_last_sampled(config) or config.stages)[-1].sampling, stop_ids)


def _last_sampled(config: RunConfig) -> list[StageOptions]:
    return [stage for stage in config.stages if kind_of(stage).trains_on_rollouts]
