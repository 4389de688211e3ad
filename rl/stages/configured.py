"""A stage as its configuration describes it: its options and what is wrong with them. Free of
jax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from policy.adapter_spec import FULL_TRAINING_RATE
from rl.config.data import datasets_of
from rl.config.stage import PRODUCER_OPTIONS
from rl.data import models, towers
from rl.data.datasets import has_sources
from rl.errors import Fault
from rl.records.run_files import EVENTS
from rl.stages import algorithm_of
from rl.stages.curriculum import named
from rl.stages.sampling import filters
from rollout.types import SamplingParams

if TYPE_CHECKING:
    from rl.config.data import DataOptions
    from rl.config.run import RunConfig
    from rl.config.stage import CurriculumOptions


@dataclass(frozen=True)
class LargestGroup:
    """The largest group of sequences of a stage that share a beginning.

    sequences: how many. shared, own: tokens of the beginning, and of a sequence after it.
    """

    sequences: int
    shared: int
    own: int

    @property
    def tokens(self) -> int:
        """Returns the tokens of all sequences."""
        return self.sequences * (self.shared + self.own)

    def packed_length(self, most: int) -> int:
        """Returns the tokens of packed rows. A group of more than `most` tokens is cut into the
        fewest equal parts that fit, each with the beginning; one sequence is never cut."""
        return self.shared + -(-self.sequences // self.parts(most)) * self.own

    def parts(self, length: int) -> int:
        """Returns how many packed rows of so many tokens hold the group."""
        return -(-self.sequences // max(1, (length - self.shared) // self.own))


class ConfiguredStage:
    """A stage as its configuration describes it. Free of jax."""

    trains_on_rollouts: ClassVar[bool] = False
    """Whether a step trains on completions of prompts that a policy sampled, in this run or in an
    earlier one."""
    trains_policy: ClassVar[bool] = True
    """Whether a step changes the policy, which is then evaluated."""
    sequences_per_row: ClassVar[int] = 1
    """Sequences of at most `max_length` tokens in one row of a batch, before rows are packed."""
    answers_share_prompts: ClassVar[bool] = False
    """Whether the two sequences of a row are answers to one prompt."""

    def __init__(self, config: RunConfig, index: int):
        """Reads only the configuration. `index`: index of the stage in the run."""
        self.config = config
        self.index = index
        self.name = config.stage_names[index]
        self.options = config.stages[index]
        self.algorithm = algorithm_of(self.options)
        self.path = ("stages", index)

    @property
    def trains_adapter(self) -> bool:
        """Whether updates change the adapter of the model, or copies of it, and no weights."""
        return self.config.model.adapter is not None and self.options.trains != "weights"

    @property
    def inputs(self) -> frozenset[str]:
        """Names of rl/stages/inputs.py that a step provides to the algorithm."""
        repeated = (
            self.algorithm.repeated_inputs if self.options.updates_per_step > 1 else frozenset()
        )
        return self.algorithm.inputs | repeated

    @property
    def calls_generator(self) -> bool:
        """Whether a step calls the generator: it does not where all its rollouts are recorded."""
        return False

    @property
    def samples_for_inputs(self) -> bool:
        """Whether a step samples completions for an input of the algorithm, besides its groups:
        those of rl/stages/inputs.py with `when=SAMPLING`."""
        return False

    @property
    def datasets(self) -> list[DataOptions]:
        """Returns the datasets of the stage, or of the run; [] without one."""
        return datasets_of(self.options.data or self.config.data)

    @property
    def has_sources(self) -> bool:
        """Whether rows of the stage know where they came from."""
        return any(map(has_sources, self.datasets))

    @property
    def rewards(self) -> Any:
        """Returns the RewardSettings of the stage, or of the run; None where nothing is scored."""
        rewarded = self.trains_on_rollouts or (
            self.config.evaluation is not None and self.trains_policy
        )
        return self.config.rewards_of(self.options) if rewarded else None

    @property
    def teacher(self) -> Any:
        """Returns the TeacherOptions of the stage, or of the run; None where the algorithm has no
        teacher."""
        return (self.options.teacher or self.config.teacher) if self.has_teacher else None

    @property
    def has_teacher(self) -> bool:
        """Whether the algorithm learns from a teacher: what its update compares the policy with
        (`teacher`), or what scores completions (`teacher_logp`)."""
        return not self.inputs.isdisjoint({"teacher", "teacher_logp"})

    @property
    def max_kept(self) -> int:
        """Returns the most ids that filters leave which the batch has for each token; 0: it has
        none."""
        return filters.most_recorded(self.options.sampling) if self.trains_on_rollouts else 0

    @property
    def optimizers(self) -> list[str]:
        """Keys of the stage that hold OptimizerOptions in use."""
        return ["optimizer", "critic"] if "values" in self.inputs else ["optimizer"]

    @property
    def sampled_values(self) -> bool:
        """Whether the generator could compute the critic's values while it samples."""
        return False

    @property
    def rows_per_update(self) -> int:
        """Rows of the batch of one update, before they are packed: sequences or pairs."""
        return self.options.prompts_per_step // self.options.updates_per_step

    @property
    def row_length(self) -> int:
        """Returns the most tokens of a row of the batch, before rows are packed."""
        return self.config.max_length * self.sequences_per_row

    @property
    def group(self) -> LargestGroup | None:
        """Returns the largest group of the stage, with completions of full length; None: its
        sequences have no groups."""
        options = self.options
        limit = self.config.max_length
        if self.answers_share_prompts:
            return LargestGroup(2, limit // 2, limit - limit // 2)
        if self.trains_on_rollouts and options.samples_per_prompt > 1:
            own = options.sampling.max_new_tokens
            return LargestGroup(options.samples_per_prompt, limit - own, own)
        return None

    @property
    def sharing_conflict(self) -> tuple[str, str] | None:
        """Returns (name, reason) of what in the configuration keeps sequences from sharing
        beginnings; None: nothing does."""
        options = self.options
        if self.group is None:
            if self.trains_on_rollouts:
                return (
                    f"stages.{self.index}.samples_per_prompt: 1",
                    "a prompt with one completion is not repeated",
                )
            return options.algorithm.name, "its sequences are in no groups"
        if options.dropout:
            return (
                f"stages.{self.index}.dropout",
                "sequences of a group would have one dropout mask, which changes the loss",
            )
        if self._capacities:
            name = f"stages.{self.index}.router.{self._capacities[0]}"
            return name, "which tokens are dropped depends on those that share their row"
        return None

    @property
    def _capacities(self) -> list[str]:
        """Returns the options in use that let updates drop tokens."""
        router = self.options.router
        return [
            key
            for key in ("capacity_factor", "ragged_buffer_factor")
            if getattr(router, key) is not None
        ]

    def check(self) -> Iterator[Fault]:
        """Yields the faults of the stage in this configuration. It is quick and does not import
        jax."""
        stage = self.options
        config = self.config
        name = self.options.algorithm.name
        if not self.datasets:
            yield Fault(
                f"{name} needs data, here or for all stages (`data`)", key=(*self.path, "data")
            )
        if stage.indexer.training == "dense_warmup" and name != "sft":
            yield Fault(
                f"a dense_warmup learns from texts alone and has no use for {name}; use sft",
                key=(*self.path, "indexer", "training"),
            )
        if stage.router_replay and config.generator.exact:
            yield Fault(
                "`generator.exact: true` takes log-probabilities under the trainer's own routes, "
                "and replay takes them under the generator's routes; leave one out",
                key=(*self.path, "router_replay"),
            )
        yield from self._check_kind()
        yield from self._check_adapter()
        yield from self._check_forbidden()
        if (
            stage.router.ragged_buffer_factor is not None
            and config.model.expert_parallel != "all_to_all"
        ):
            yield Fault(
                "only `model.expert_parallel: all_to_all` has this buffer, the scheme is "
                f"{config.model.expert_parallel}",
                key=(*self.path, "router", "ragged_buffer_factor"),
            )
        if stage.shared_prefix == "always" and self.sharing_conflict is not None:
            excluded, reason = self.sharing_conflict
            yield Fault(
                f"always does not go with {excluded}: {reason}; use auto",
                key=(*self.path, "shared_prefix"),
            )
        if stage.teacher and not self.has_teacher:
            yield Fault(
                f"{name} learns from no teacher; leave it out, or use distill, gkd or opd",
                key=(*self.path, "teacher"),
            )
        if stage.curriculum is not None:
            yield from self._check_curriculum(stage.curriculum)
        if stage.held_out and (reason := self._unheld()):
            yield Fault(
                f"{name} {reason}; leave it out, or use `evaluation`", key=(*self.path, "held_out")
            )
        if stage.micro_batch and stage.micro_batch > (rows := self.rows_per_update):
            text = f"{stage.micro_batch} rows, but one update has {rows}; leave it out or lower it"
            yield Fault(text, key=(*self.path, "micro_batch"))

    def _check_curriculum(self, options: CurriculumOptions) -> Iterator[Fault]:
        path = (*self.path, "curriculum")
        # A run that goes on reads the files of the stages that are not over when it reads data.
        goes_on = self.config.run.dir is not None and (self.config.directory / EVENTS).exists()
        try:
            named.check(options, with_files=not goes_on)
        except ValueError as error:
            keys = [key for key in options.options if f"`{key}`" in str(error)]
            place = ("options", *keys[:1]) if keys else ("name",)
            yield Fault(str(error), key=(*path, *place))

    def _unheld(self) -> str | None:
        """Returns why the stage has no loss on held-out rows, or None."""
        if self.trains_on_rollouts:
            return "has no loss of rows: it samples completions"
        if "teacher" in self.inputs:
            return (
                "learns from a teacher, and only sft, dpo, kto and reward_model measure their "
                "loss on held-out rows"
            )
        if self.options.indexer.training == "dense_warmup":
            return "with `indexer.training: dense_warmup` has no loss of its own"
        return None

    def remarks(self) -> Iterator[str]:
        """Yields settings that do something else than was probably meant, and are no errors."""
        if self.index == 0:
            yield from _cache_remarks(self.config)
        sampling = self.options.sampling
        if self.trains_on_rollouts and sampling.filters == "ignore" and filters.filters(sampling):
            yield (
                f"stages.{self.index}.sampling.filters: ignore: completions come from the "
                "filtered distribution and the log-probabilities of the loss from the full one, "
                "so the gradient is biased; renormalise takes both from the filtered one"
            )
        yield from self._freeze_remarks()
        yield from self._best_remarks()
        yield from self._adapter_remarks()
        if self.options.steps is None:
            return
        updates = self.options.steps * self.options.updates_per_step
        for key in self.optimizers:
            warmup = getattr(self.options, key).warmup_steps
            if warmup and warmup >= updates > 0:
                yield (
                    f"stages.{self.index}.{key}.warmup_steps: {warmup:,} updates, and the stage "
                    f"makes {updates:,}: the learning rate never reaches its peak"
                )

    def _freeze_remarks(self) -> Iterator[str]:
        """Yields that `freeze` takes the place of its default, which freezes the towers. `[]` says
        that they are to be trained."""
        names = self.options.freeze
        if not names or not self.trains_policy or any(map(towers.names_tower, names)):
            return
        if towers.stored_processors(self.config.model) is not None:
            yield (
                f"stages.{self.index}.freeze names no tower, so the stage trains the towers of "
                "pictures and sounds where its rows have them; add image and audio to freeze them, "
                "as without `freeze`"
            )

    def _adapter_remarks(self) -> Iterator[str]:
        """Yields that a learning rate looks like one for all weights."""
        optimizer = self.options.optimizer
        is_small = optimizer.learning_rate <= FULL_TRAINING_RATE
        if self.trains_adapter and optimizer.name == "adamw" and is_small:
            yield (
                f"stages.{self.index}.optimizer.learning_rate: {optimizer.learning_rate:g} looks "
                "like a rate for all weights; adapters learn at about 10 times that "
                "(docs/adapters.md)"
            )

    def _best_remarks(self) -> Iterator[str]:
        """Yields that `best` compares nothing, if its metric is measured after the last step
        alone."""
        best = self.options.best
        steps = self.options.steps
        if best is None or steps in (0, 1):
            return
        of_rows = best.metric.startswith("held_out/")
        measured, key = (
            (self.options.held_out, f"stages.{self.index}.held_out.every")
            if of_rows
            else (self.config.evaluation, "evaluation.every")
        )
        if measured is not None and (
            measured.every == 0 or (steps is not None and measured.every >= steps)
        ):
            yield (
                f"stages.{self.index}.best: {best.metric} is measured after the last step alone "
                f"({key}: {measured.every}), so no two steps are compared; set {key} below the "
                "steps of the stage"
            )

    def _check_kind(self) -> Iterator[Fault]:
        """Yields the faults that only this kind of stage can have."""
        yield from ()

    def _check_adapter(self) -> Iterator[Fault]:
        """Yields the faults of what a stage trains, where a model may have an adapter."""
        stage = self.options
        if self.config.model.adapter is None:
            if stage.trains == "adapter":
                text = "the model has no adapter; set model.adapter, or leave this out"
                yield Fault(text, key=(*self.path, "trains"))
            return
        if not self.trains_adapter:
            earlier = self.config.stages[: self.index]
            if any(each.trains != "weights" for each in earlier):
                yield Fault(
                    "an earlier stage trains an adapter over the weights, which stay from then "
                    "on; put this stage before it, or leave `trains` out",
                    key=(*self.path, "trains"),
                )
            return
        if stage.freeze:
            yield Fault(
                "the stage trains an adapter and no weights; leave this out, and name modules "
                "without an adapter in model.adapter.exclude",
                key=(*self.path, "freeze"),
            )
        if stage.indexer.training != "off":
            yield Fault(
                "indexers have no adapter; set `trains: weights`, or leave this out",
                key=(*self.path, "indexer", "training"),
            )
        if stage.mtp is not None:
            yield Fault(
                "prediction modules have no adapter; set `trains: weights`, or leave this out",
                key=(*self.path, "mtp"),
            )
        algorithm = self.algorithm
        if getattr(algorithm, "reference_every", 0) and algorithm.reference_mix != 1:
            yield Fault(
                f"{algorithm.reference_mix:g} of the policy and the rest of the old reference "
                "have a mean of products, which is not the product of mean factors: with an "
                "adapter the reference is renewed in full; set it to 1",
                key=(*self.path, "algorithm", "reference_mix"),
            )

    def _check_forbidden(self) -> Iterator[Fault]:
        """Yields the faults of `bad_words` and `min_tokens`."""
        sampling = self.options.sampling
        own = {"min_tokens": sampling.min_tokens, "bad_words": tuple(sampling.bad_words)}
        for name, value in own.items():
            if value and not self.trains_on_rollouts:
                yield Fault(
                    f"{self.options.algorithm.name} samples no completions to learn from, and "
                    f"evaluations have `evaluation.{name}`; leave it out",
                    key=(*self.path, "sampling", name),
                )
        try:
            SamplingParams(max_new_tokens=sampling.max_new_tokens, **own)
        except ValueError as error:
            text = str(error).removeprefix("SamplingParams: ")
            yield Fault(text, key=(*self.path, "sampling", text.split()[0]))

    def _check_offline(self) -> Iterator[Fault]:
        """Yields the faults of a stage that samples nothing."""
        if self.options.router_replay:
            yield Fault(
                f"{self.options.algorithm.name} learns from data that no generator routed; leave "
                "it out, or set it in stages that sample",
                key=(*self.path, "router_replay"),
            )
        for key in PRODUCER_OPTIONS:
            if getattr(self.options, key) is not None:
                yield Fault(
                    f"{self.options.algorithm.name} learns from data that no policy sampled; leave "
                    "it out",
                    key=(*self.path, key),
                )
        if self.config.evaluation and self.trains_policy:
            yield from self._check_room()

    def _check_room(self) -> Iterator[Fault]:
        new = self.options.sampling.max_new_tokens
        limit = self.config.max_length
        if new >= limit:
            text = f"{new} leaves no room for a prompt in max_length ({limit})"
            yield Fault(text, key=(*self.path, "sampling", "max_new_tokens"))

    def _check_no_capacity(self) -> Iterator[Fault]:
        """Yields an error for each option that lets updates drop tokens which the compared model
        keeps."""
        for key in self._capacities:
            yield Fault(
                f"{self.options.algorithm.name} compares the policy with a model that drops "
                f"nothing (the generator's, or the reference), but with {key} it would give "
                f"tokens other probabilities. Leave {key} out, or use it in sft stages only",
                key=(*self.path, "router", key),
            )


def _cache_remarks(config: RunConfig) -> Iterator[str]:
    generator = config.generator
    window = None if generator.sliding_window_cache else models.compressed_window(config.model)
    if window is not None and config.max_length > window + generator.prefill_chunk:
        yield (
            "generator.sliding_window_cache: false, so the cache of compressed attention keeps "
            f"the parts of entries of all {config.max_length:,} tokens, not of the last {window} "
            "alone; set it to true unless prompts share long prefixes (docs/caches.md)"
        )
