"""What tests of `rl import` share: the new file, as the schema reads it, and what was said."""

import io
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from rl.commands import cli
from rl.config import files
from rl.config.run import RunConfig
from rl.imports import convert
from rl.imports.draft import Draft


def run_import(*arguments, environment=None) -> tuple[int, str, str]:
    """Returns the exit code, the new file and all that was printed."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.yml"
        with (
            redirect_stdout(said),
            redirect_stderr(said),
            mock.patch.dict(os.environ, environment or {}),
        ):
            code = cli.main(["import", "-o", str(output), *map(str, arguments)])
        return code, output.read_text() if output.exists() else "", said.getvalue()


def config_of(framework, *arguments, code=0) -> RunConfig:
    """Returns the imported configuration. Holds its exit code, and that it is valid."""
    returned, text, said = run_import(framework, *arguments)
    assert returned == code, said
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yml"
        path.write_text(text)
        tree = files.merged([path], [])
    config, faults = files.validate(tree)
    assert config is not None and not faults, faults
    return config


def draft_of(framework, *sources, facts=convert.Facts()) -> Draft:
    """Returns the draft of files."""
    return convert.converted(framework, list(map(str, sources)), facts, {})


def refused(framework, *sources) -> set[str]:
    """Returns the keys that are refused. Holds that the exit code is 2."""
    assert run_import(framework, *sources)[0] == 2
    draft = draft_of(framework, *sources)
    return {key for entry in draft.entries if entry.fate == "refused" for key in entry.keys}


def said_of(framework, *arguments, environment=None) -> str:
    """Returns the new file and all that was printed."""
    _, text, said = run_import(framework, *arguments, environment=environment)
    return text + said
