"""Links of the documents lead somewhere, and the messages that docs/troubleshooting.md quotes stand
in the code."""

import ast
import itertools
import re
import shlex
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import rl.errors
from rl.commands import cli
from rl.config import foreign

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("notebooks/*.md")),
]
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^()\s]+)\)")
PLACEHOLDER = "\0"


def prose(document: Path) -> str:
    """Returns the text of a document without fenced code."""
    return FENCE.sub("", document.read_text())


def links(text: str) -> list[str]:
    """Lists the targets of links and pictures. Code such as `names[0](x)` is no link."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "``", text))


def anchors(text: str) -> set[str]:
    """Returns the anchors of the headings, as a repository page makes them."""
    seen: Counter[str] = Counter()
    result = set()
    for title in re.findall(r"^#{1,6} (.+)$", text, re.M):
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        result.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return result


def dead(document: Path) -> list[str]:
    """Lists the links of a document that lead nowhere. External links are only parsed."""
    result = []
    for target in links(prose(document)):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            good = parts.scheme in ("http", "https") and re.fullmatch(
                r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc
            )
        else:
            path = (document.parent / parts.path).resolve() if parts.path else document
            good = path.exists() and path.is_relative_to(ROOT)
            if good and parts.fragment:
                good = path.suffix == ".md" and parts.fragment in anchors(prose(path))
        if not good:
            result.append(target)
    return result


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    assert not dead(document)


@pytest.mark.parametrize(
    "target",
    [
        "none.md",
        "b.md#absent",
        "#absent",
        "file.py#part",
        "../../outside.md",
        "ftp://a.org/x",
        "https:///x",
    ],
)
def test_a_dead_link_is_seen(tmp_path, monkeypatch, target):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# A `key`, twice\n\n## Same\n\n## Same\n")
    (tmp_path / "file.py").write_text("")
    document = tmp_path / "a.md"
    document.write_text(
        "# Here\n[1](b.md#a-key-twice) [2](b.md#same-1) [3](#here) [4](https://a.org/x) `f[0](x)`\n"
    )
    assert not dead(document)
    document.write_text(f"# Here\n[x]({target})\n")
    assert dead(document) == [target]


def test_the_index_lists_every_document():
    listed = {Path(urlsplit(target).path).name for target in links(prose(DOCS / "index.md"))}
    assert {path.name for path in DOCUMENTS} - listed <= {"index.md"}


def test_the_path_of_a_prompt_changes_rooms_as_often_as_it_says():
    section = (DOCS / "architecture.md").read_text().partition("## The path of a prompt\n")[2]
    text = section.partition("\n## ")[0]
    named = re.findall(r"`((?:rl|rollout|policy|rewards)/\w+)", text)
    changes = sum(here != there for here, there in itertools.pairwise(named))
    assert f"changes rooms {changes} times" in " ".join(text.split()) and changes <= 25


# Messages


def texts_of_the_code() -> list[str]:
    """Lists the texts of the packages, with a placeholder for what a program fills in."""
    result = []
    for package in ("rl", "policy", "rollout", "rewards"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    result.append(
                        "".join(
                            str(v.value) if isinstance(v, ast.Constant) else PLACEHOLDER
                            for v in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    result.append(node.value)
    return result


def quoted_messages() -> list[tuple[str, str]]:
    """Lists (section, message) of the tables of docs/troubleshooting.md whose first column is
    `message`."""
    result = []
    for section in re.split(r"^## ", (DOCS / "troubleshooting.md").read_text(), flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        if "\n| message |" in body:
            rows = [line for line in body.splitlines() if line.startswith("| `")]
            result += [(title, re.match(r"\| `([^`]+)` \|", row)[1]) for row in rows]
    return result


def says(text: str, message: str) -> bool:
    """Tells whether a text of the code has the parts of `message` between its `...`, in this
    order."""
    position = 0
    for part in filter(None, (part.strip() for part in message.split("..."))):
        position = text.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def test_every_quoted_message_stands_in_the_code():
    texts, messages = texts_of_the_code(), quoted_messages()
    assert len(messages) > 45
    assert not [
        message for _, message in messages if not any(says(text, message) for text in texts)
    ]


def test_a_message_that_no_code_says_is_seen():
    assert says(
        f"{PLACEHOLDER}: no file {PLACEHOLDER}; name another", "...: no file ...; name another"
    )
    assert not says(f"no file {PLACEHOLDER}", "no folder ...")
    assert not says("second, first", "first ... second")


def test_every_exit_code_has_its_words_and_a_section():
    text = (DOCS / "troubleshooting.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| `?([^`|]*?)`? ?\|", text, re.M))
    headings = {str(kind.exit_code): kind.heading for kind in rl.errors.DuetError.__subclasses__()}
    assert rows == headings | {"0": "", "1": "", "130": "interrupted", "141": ""}
    titles = " ".join(re.findall(r"^## .*exit codes? (.*)$", text, re.M))
    assert set(re.findall(r"\d+", titles)) == rows.keys() - {"0", "1", "141"}


def test_every_shipped_configuration_has_a_recipe():
    text = (DOCS / "recipes.md").read_text()
    shipped = {path.name for path in (ROOT / "configs").glob("*.yml")} - {"tiny.yml", "tiny_vl.yml"}
    assert set(re.findall(r"\]\(\.\./configs/(\w+\.yml)\)", text)) == shipped


def test_the_page_for_other_frameworks_has_the_table_of_the_messages():
    text = (DOCS / "from_other_frameworks.md").read_text()
    keys = text.split("\n## Keys\n")[1]
    mapped, absent = keys.split("\n## Keys without a counterpart\n")
    rows = [row.strip("| ").split(" | ") for row in mapped.splitlines() if row.startswith("| `")]
    assert {
        word: row[1].strip("` |") for row in rows for word in re.findall(r"`(\w+)`", row[0])
    } == foreign.FOREIGN
    notes = {
        word: row[2].strip() for row in rows if row[2:] for word in re.findall(r"`(\w+)`", row[0])
    }
    assert {word: note for word, note in notes.items() if note} == foreign.NOTES
    rows = [row.strip("| ").split(" | ") for row in absent.splitlines() if row.startswith("| `")]
    assert {
        word: row[1] for row in rows for word in re.findall(r"`(\w+)`", row[0])
    } == foreign.ABSENT


def test_every_command_for_programs_exists_with_its_options():
    commands = re.findall(r"\| `(rl(?:-train)? [^`]+)` \|", (DOCS / "agents.md").read_text())
    assert len(commands) > 10
    for command in commands:
        program, *arguments = [word.strip("[]") for word in shlex.split(command)]
        parser = cli.train_parser() if program == "rl-train" else cli.parser()
        if "--version" not in arguments:
            _, unknown = parser.parse_known_args(arguments)
            assert not unknown, command
