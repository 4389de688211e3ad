"""`rl export`: writes the weights of a run or a model as a Hugging Face directory."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rl.commands import environment, sampled_model

SUMMARY = "write a checkpoint or a model as a directory of its own"
DESCRIPTION = (
    "Writes a Hugging Face directory: weights, config.json, tokenizer, chat template and "
    "generation_config.json with the stops of training. The directory appears after it was read "
    "back and its log-probabilities were compared with those of the source."
)
HELP = """\
examples:
  rl export runs/quickstart out/quickstart
  rl export runs/quickstart out/step100 --step grpo:100 --dtype bfloat16
  rl export runs/lora out/merged --merged
  rl export runs/first out/first --gguf q8_0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "source",
        type=os.path.expanduser,
        metavar="RUN | MODEL",
        help="folder of a run (its final weights, or its newest checkpoint if it has not ended), a "
        "Hugging Face directory, or a model on the Hugging Face hub",
    )
    parser.add_argument(
        "directory",
        type=lambda text: Path(text).expanduser(),
        metavar="DIR",
        help="directory to write; it must not exist",
    )
    parser.add_argument(
        "--step",
        metavar="[STAGE:]N",
        help="of a run: the checkpoint after step N, of the last stage that has one or of STAGE",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the weights that are written (that of the source)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--adapter",
        action="store_const",
        dest="form",
        const="adapter",
        help="of a model with an adapter: the adapter in the form of peft",
    )
    form.add_argument(
        "--merged",
        action="store_const",
        dest="form",
        const="merged",
        help="of a model with an adapter: the model with the adapter merged into its weights",
    )
    parser.add_argument(
        "--gguf",
        choices=("f16", "q8_0"),
        help="write one GGUF file, as llama.cpp reads it, with matrices in this type; needs "
        "`pip install 'duet-rl[gguf]'`",
    )
    parser.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="upload DIR to this repository of the Hugging Face hub, with the token of HF_TOKEN or "
        "of `hf auth login`",
    )
    parser.add_argument(
        "--private", action="store_true", help="with --push: make a new repository private"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace DIR if `rl export` wrote it; with --push: add a commit to a repository that "
        "has files",
    )
    sampled_model.add_platform(parser)


def run(arguments: argparse.Namespace) -> None:
    """Writes the directory. Raises what `rl.export.write.export` raises."""
    environment.choose_platform(arguments.platform)
    environment.use_program_cache(environment.default_program_cache())
    environment.leave_torch_out()
    from rl.errors import ConfigError
    from rl.export.hub import HubRepository
    from rl.export.request import ExportRequest
    from rl.export.write import export
    from rl.run.health import devices

    if arguments.private and not arguments.push:
        raise ConfigError("--private: says how --push ORG/NAME makes the repository; give both")
    if arguments.gguf and arguments.form == "adapter":
        raise ConfigError("--adapter: a GGUF file has it merged into the weights; leave one out")
    push = arguments.push and HubRepository(arguments.push, arguments.private, arguments.force)
    devices.check(arguments.platform)
    print(
        export(
            ExportRequest(
                arguments.source,
                arguments.directory,
                step=arguments.step,
                dtype=arguments.dtype,
                form=arguments.form,
                gguf=arguments.gguf,
                force=arguments.force,
                push=push or None,
            )
        )
    )
