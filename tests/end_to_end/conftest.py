import launch
import pytest


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    """Paths in the configurations of these tests start at the root of the repository."""
    monkeypatch.chdir(launch.ROOT)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """The directory of a small run that nothing disturbed, made by the command in a process of its
    own."""
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    code, out, err = launch.finish(launch.process(*launch.arguments(directory)))
    assert code == 0, err
    (directory.parent / "stdout").write_text(out)
    return directory
