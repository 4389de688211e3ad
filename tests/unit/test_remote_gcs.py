"""Remote folders on Google Cloud Storage: gcsfs, against an emulator of the service. The emulator
lacks conditional writes, which `conditional` adds as the service documents them."""

import logging
import subprocess
import sys
from http import HTTPStatus

import pytest
import remote_runs

from rl.errors import ConfigError
from rl.remote.faults import Retries
from rl.remote.lock import LOCK, LeaseTimes, Lock, LockHeld
from rl.remote.probe import writable
from rl.remote.store import Store
from rl.run.mirror.mirror import RunMirror

pytest.importorskip("gcsfs")
QUICK = Retries(tries=2, sleep=lambda seconds: None)
TIMES = LeaseTimes(lease_s=3.0, renew_s=0.3, look_s=0.05, settle_s=0.0)


@pytest.fixture(scope="module")
def service():
    server = pytest.importorskip("gcp_storage_emulator.server")
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    upload = objects._media_upload

    def conditional(request, response, storage):
        expected = request.query.get("ifGenerationMatch", [None])[0]
        try:
            name = request.query["name"][0]
            present = storage.get_file_obj(request.params["bucket_name"], name)["generation"]
        except NotFound:
            present = "0"
        if expected not in (None, present):
            response.status = HTTPStatus.PRECONDITION_FAILED
            return None
        return upload(request, response, storage)

    running = server.create_server("localhost", 0, in_memory=True, default_bucket="bucket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_media_upload", conditional)
        running.start()
        port = running._api._httpd.server_address[1]
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it looks for credentials first
        yield running
        running.stop()


def test_objects_on_google_cloud_storage(service, tmp_path):
    store = Store("gs://bucket/objects", QUICK)
    (tmp_path / "large").write_bytes(b"0123456" * 2**20)  # sent in parts
    store.put(tmp_path / "large", "a/large")
    store.write("a/small", b"2")
    assert {name: facts.size for name, facts in store.list().items()} == {
        "a/large": 7 * 2**20,
        "a/small": 1,
    }
    seen = []
    store.get("a/large", tmp_path / "again", seen.append)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "large").read_bytes()
    assert seen[-1] == 7 * 2**20
    before = store.facts("a/small")
    store.write("a/small", b"3")
    assert store.facts("a/small").tag != before.tag
    store.copy("a/small", "b")
    assert store.read("b") == b"3" and store.is_file("b") and not store.is_file("a")
    store.delete_all(store.list())
    store.delete("b")
    assert store.list() == {} and store.facts("b") is None


def test_a_write_with_another_generation_is_refused(service):
    store = Store("gs://bucket/versions", QUICK)
    assert store.has_generations and store.read_versioned("one") is None
    assert store.replace("one", b"first", None) and not store.replace("one", b"second", None)
    version = store.read_versioned("one")
    assert version.data == b"first" and store.replace("one", b"third", version.version)
    assert not store.replace("one", b"fourth", version.version)
    assert store.read("one") == b"third"


def test_a_run_is_sent_and_fetched_and_a_second_one_refused(service, tmp_path):
    url = "gs://bucket/runs/first"
    assert writable(url).problem == "" and writable(url).compares_generations
    assert "no such bucket" in writable("gs://nobody/run").problem
    remote_runs.start(tmp_path / "run")
    nowhere = RunMirror("gs://nobody/run", tmp_path / "run", 2, retries=QUICK, times=TIMES)
    with pytest.raises(ConfigError, match="run.remote: gs://nobody/run: no such bucket"):
        nowhere.__enter__()
    with RunMirror(url, tmp_path / "run", 2, remote_runs.needed, QUICK, TIMES):
        remote_runs.step(tmp_path / "run", 1)
        remote_runs.checkpoint(tmp_path / "run", 1)
        with pytest.raises(LockHeld, match="is in use by the run in"):
            Lock(Store(url, QUICK), tmp_path / "new", TIMES).acquire()
    assert LOCK not in Store(url).list()
    (tmp_path / "new").mkdir(exist_ok=True)
    with RunMirror(url, tmp_path / "new", 2, remote_runs.needed, QUICK, TIMES):
        pass
    assert remote_runs.contents(tmp_path / "new") == remote_runs.contents(tmp_path / "run")


def test_a_check_imports_no_client(tmp_path):
    code = (
        "import sys\n"
        "from rl.commands import cli\n"
        "code = cli.train_main(['--check', 'quickstart', 'run.dir=run', 'run.remote=gs://b/run'])\n"
        "print([name for name in ('gcsfs', 'jax', 'aiohttp') if name in sys.modules])\n"
        "sys.exit(code)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]" and not list(tmp_path.iterdir())
