"""The notebooks of docs/notebooks: every cell runs, in order, in one process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
CELL = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def cells(notebook: Path) -> list[tuple[str, str]]:
    """Lists (language, code) of the fences of a notebook in jupytext's Markdown format."""
    return CELL.findall(notebook.read_text())


def test_there_are_three_and_each_is_a_notebook_of_python():
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "inside_a_step", "own_reward"]
    for notebook in NOTEBOOKS:
        assert notebook.read_text().startswith("---\njupyter:\n  jupytext:\n"), (
            "jupytext reads this header"
        )
        code = [
            compile(text, f"{notebook.name}[{number}]", "exec")
            for number, (_, text) in enumerate(cells(notebook))
        ]
        assert {language for language, _ in cells(notebook)} == {"python"} and len(code) > 5


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_in_order(notebook, tmp_path):
    script = tmp_path / f"{notebook.stem}.py"
    script.write_text("\n".join(text for _, text in cells(notebook)))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
