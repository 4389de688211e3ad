import pytest

import runs


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    """Paths in the configurations of these tests start at the root of the repository."""
    monkeypatch.chdir(runs.ROOT)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """The directory of a small run that nothing disturbed, made by the command in a process of its own."""
    directory = tmp_path_factory.mktemp("unbroken") / "run"
    code, out, err = runs.finish(runs.process(*runs.arguments(directory)))
    assert code == 0, err
    (directory.parent / "stdout").write_text(out)
    return directory
