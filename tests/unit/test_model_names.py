"""docs/families.md names the published models of every family that transformers has a class for."""

import re
from pathlib import Path

from policy import families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
OWN = {"default", "simple", "simple_mlp"}


def test_every_family_has_published_models():
    table = PAGE.read_text().split("| published model | family |")[1].split("\n\n")[0]
    named = {
        word
        for line in table.splitlines()
        for word in re.findall(r"\b\w+\b", line.rpartition(" | ")[2])
    }
    assert set(families.known()) - named == OWN
