"""`rl view`: the server by HTTP, and its page in a headless Chromium."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from test_viewer import COMPLETION, EVIL, sample, tokens, write

from rl.commands import cli
from rl.listener import names_server
from rl.records.samples import SampleLog
from rl.views.viewer import static

pytestmark = pytest.mark.xdist_group("chromium")
chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
ROOT = Path(cli.__file__).parents[2]
ALPHABET = "0123456789 abcdefghijklmnopqrstuvwxyz"


STATIC_FILTERS = {
    "fault:timeout": 1,
    "step:3-4 sample:0": 2,
    "reward.correct=1 step<=3": 3,
    '"</script><img"': 1,
    "adv>0 step:1-2": 2,
    "-step>2 len=3": 4,
    "finish:length": 1,
}


class Served:
    """`rl view` in a process of its own, over the samples of a run."""

    def __init__(self, run: Path, samples: int):
        """samples: waits until so many are indexed."""
        self.run = run
        code = "import sys; from rl.commands.cli import main; sys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "view", str(run), "--no-open"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.url = self.process.stdout.readline().strip()
        self.port, self.token = (
            int(self.url.split(":")[2].split("/")[0]),
            self.url.split("#token=")[1],
        )
        while self.json("/api/run")["total"] < samples:
            time.sleep(0.05)

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", path, headers={"x-duet-token": self.token} | headers)
        return connection.getresponse()

    def json(self, path: str):
        answer = self.get(path)
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=20) == 0


class Server(Served):
    """A run of 60 steps with a hostile sample."""

    def __init__(self, run: Path):
        self.log = SampleLog(run)
        (run / "config.yml").write_text(
            f"tokenizer: {{source: characters, alphabet: '{ALPHABET}'}}\n"
        )
        (run / "events.jsonl").write_text(
            '{"stage":"grpo","step":61,"metrics":{"reward/mean":0.75}}\n{"torn'
        )
        write(self.log, range(1, 61))
        evil = sample(
            61,
            0,
            prompt=EVIL,
            completion=EVIL,
            reward_log={EVIL: EVIL},
            columns={EVIL: EVIL},
            finish="length",
        )
        self.log.write([evil | {"faults": {EVIL: "timeout"}}], [tokens()])
        super().__init__(run, 121)


@contextlib.contextmanager
def files_served(folder: Path):
    """Yields the address of a file server over a folder, which knows nothing of the viewer."""
    code = """
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
server = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("run"))
    yield server
    server.end()


@pytest.fixture(scope="module")
def page(server):
    with Browser() as browser:
        browser.open(server.url)
        browser.wait("document.querySelectorAll('#list li').length === 50")
        yield browser
        assert browser.errors == []
        assert all(
            address.startswith(f"http://127.0.0.1:{server.port}/") for address in browser.requests
        )


def test_a_request_needs_the_token_and_the_host(server):
    for path in ("/api/run", "/api/samples", "/api/sample/x", "/api/groups/1", "/api/events"):
        answer = server.get(path, **{"x-duet-token": "guess"})
        assert (
            answer.status == 401
            and b"rl view" in answer.read()
            and not answer.getheader("access-control-allow-origin")
        )
    for host in ("evil.example", "127.0.0.1.evil.example:80", ""):
        assert server.get("/", Host=host).status == 421
    for host in ("localhost:9999", f"127.0.0.1:{server.port}", "[::1]"):
        assert server.get("/", Host=host).status == 200


def test_names_of_a_server():
    assert names_server("10.0.0.7:80", "0.0.0.0") and not names_server("evil.example", "0.0.0.0")
    assert names_server("box:80", "box") and not names_server("127.0.0.1", "box")


def test_pages_hold_no_data_and_have_a_policy(server):
    for path in ("/", "/viewer.js", "/viewer.css"):
        answer = server.get(path, **{"x-duet-token": ""})
        assert answer.status == 200 and "default-src 'none'" in answer.getheader(
            "content-security-policy"
        )
        assert (
            answer.getheader("x-content-type-options") == "nosniff"
            and b"timeout" not in answer.read()[:200]
        )
    assert server.get("/../config.yml").status == server.get("/api/../config.yml").status == 404


def test_pages_of_fifty_do_not_overlap(server):
    seen, after = [], ""
    while after is not None:
        answer = server.json(f"/api/samples?q=step%3C=60&after={after}")
        seen += [(item["step"], item["sample"]) for item in answer["items"]]
        after = answer["next"]
    assert answer["matches"] == 120 and seen == [
        (step, number) for step in range(60, 0, -1) for number in (1, 0)
    ]
    assert server.json("/api/samples?q=reward%3C1.5&sort=gap")["items"][0]["step"] == 60


def test_one_sample_its_group_and_events(server):
    item = server.json("/api/samples?q=step:9+sample:1")["items"][0]
    shown = server.json(f"/api/sample/{item['id']}")
    assert shown["tokens"]["id"] == [5, 6, 7, 8, 2] and shown["tokens"]["text"][3] == "0"
    assert (
        shown["tokens"]["gap"][3] == pytest.approx(-0.009, abs=1e-4)
        and shown["tokens"]["logp"][0] is None
    )
    assert [(each["sample"], each["completion"]) for each in shown["group"]] == [
        (0, COMPLETION),
        (1, COMPLETION),
    ] and len(shown["others"]) == 118
    assert [each["step"] for each in server.json("/api/groups/9")["items"]] == [9, 9]
    events = server.json("/api/events")
    assert [each["step"] for each in events["events"]] == [61] and server.json(
        f"/api/events?after={events['next']}"
    )["events"] == []
    # A run that continues truncates the file: an answer behind its end begins anew.
    assert server.json(f"/api/events?after={events['next'] + 1000}") == events


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/samples?q=rewrd%3C1", 400, "no such field"),
        ("/api/samples?sort=size", 400, "sort=size"),
        ("/api/samples?after=gone-1", 404, "no longer"),
        ("/api/sample/..%2F..%2Fetc%2Fpasswd", 404, ""),
        ("/api/sample/abc-1", 404, "no sample abc-1"),
        ("/api/groups/9?step=x", 400, "not a number"),
    ],
)
def test_bad_requests_say_why(server, path, status, message):
    answer = server.get(path)
    assert answer.status == status and message in answer.read().decode()


def test_another_host_needs_a_token_file(tmp_path, server, capsys):
    run = str(server.run)
    assert (
        cli.main(["view", run, "--host", "0.0.0.0"]) == 2
        and "--token-file" in capsys.readouterr().err
    )
    (tmp_path / "short").write_text("secret\n")
    assert cli.main(["view", run, "--token-file", str(tmp_path / "short")]) == 2
    assert cli.main(["view", run, "--token-file", str(tmp_path / "none")]) == 2
    assert cli.main(["view", run, "--port", str(server.port), "--no-open"]) == 5
    assert cli.main(["view", str(tmp_path / "none")]) == 2


@chromium
def test_filter_open_and_hover(page):
    page.evaluate(
        "$('query').value = 'step:10-11 reward>1.5'; $('query').dispatchEvent(new Event('input'))"
    )
    page.wait("document.querySelectorAll('#list li').length === 2")
    page.evaluate("document.querySelector('#list li').click()")
    page.wait("document.querySelector('#right h2')?.textContent === 'grpo step 11, prompt 11/0'")
    page.wait("document.querySelectorAll('#strip .t').length === 5")
    page.evaluate("document.querySelector('[data-colour=gap]').click()")
    colours = page.evaluate(
        "[...document.querySelectorAll('#strip .t')].map(node => node.style.backgroundColor)"
    )
    assert [bool(each) for each in colours] == [
        False,
        False,
        False,
        True,
        False,
    ] and "--low" in colours[3]
    box = "document.querySelectorAll('#strip .t')[3].getBoundingClientRect()"
    page.mouse("mouseMoved", page.evaluate(f"{box}.x") + 3, page.evaluate(f"{box}.y") + 9)
    shown = page.wait("$('tip').hidden ? '' : $('tip').textContent")
    assert shown == (
        '"0"position3id8turn1log-probability-0.5probability0.6065gap-0.011entropy1advantage0.5flagstrained, clipped low'
    )


@chromium
def test_hostile_texts_show_as_text(page):
    page.evaluate("search('fault')")
    page.wait("document.querySelectorAll('#list li').length === 1")
    page.evaluate("document.querySelector('#list li').click()")
    page.wait("document.querySelector('#right h2')?.textContent.startsWith('grpo step 61')")
    assert (
        page.evaluate("document.images.length") == 0
        and page.evaluate("document.scripts.length") == 1
    )
    assert (
        page.evaluate(
            "[...document.querySelectorAll('pre')].filter(node => "
            "node.textContent.includes('</script><img')).length"
        )
        == 4
    )
    assert (
        "</script><img" in page.evaluate("$('list').textContent")
        and page.evaluate("document.title") != "1"
    )


@chromium
def test_the_token_leaves_the_address_and_a_bad_filter_is_explained(page):
    assert "token" not in page.evaluate("location.href")
    page.evaluate("search('rewrd<1')")
    assert "no such field" in page.wait("$('error').hidden ? '' : $('error').textContent")
    page.errors[:] = [each for each in page.errors if "400" not in each]  # Chromium logs the status
    page.evaluate("search('')")
    page.wait("$('error').hidden && document.querySelectorAll('#list li').length === 50")
    page.evaluate("$('left').scrollTop = 1e6")
    page.wait("document.querySelectorAll('#list li').length > 50")


@chromium
def test_a_run_that_goes_on_is_followed(page, server):
    page.evaluate("search('step:70-')")
    page.wait("$('count').textContent.startsWith('0 of 121')")
    write(server.log, (70,), 1)
    page.wait("document.querySelectorAll('#list li').length === 1")


@pytest.mark.slow
@chromium
def test_a_static_folder_shows_the_same(server, tmp_path, capsys):
    site = tmp_path / "site"
    assert cli.main(["view", str(server.run), "--static", str(site)]) == 0
    assert cli.main(["view", str(server.run), "--static", str(site)]) == 0  # again
    assert cli.main(["view", str(server.run), "--static", str(server.run)]) == 2
    with files_served(site) as address, Browser() as browser:
        browser.open(address)
        browser.wait("document.querySelectorAll('#list li').length === 50")
        browser.evaluate("step(1)")
        browser.wait("document.querySelectorAll('#strip .t').length === 5")
        browser.evaluate("document.querySelector('td a').click()")
        for text, count in STATIC_FILTERS.items():
            browser.evaluate(f"search({text!r})")
            browser.wait(f"document.querySelectorAll('#list li').length === {count}")
            browser.wait("$('error').hidden")
        browser.evaluate("search('rewrd<1')")
        assert "no such field" in browser.wait("$('error').hidden ? '' : $('error').textContent")
        assert browser.errors == []


# The page's script with as much of a browser as it needs to start.
_STUBS = """
const nodes = {}, node = () => ({content: MODE, addEventListener() {}, replaceChildren() {}, append() {}, hidden: true});
globalThis.document = {querySelector: node, getElementById: (id) => nodes[id] ||= node(), addEventListener() {}};
globalThis.sessionStorage = {getItem: () => "", setItem() {}};
globalThis.history = {replaceState() {}};
globalThis.location = PLACE;
globalThis.fetch = async () => { throw new TypeError("Failed to fetch"); };
globalThis.setTimeout = () => 0;
"""
_SHOWN = "; setImmediate(() => console.log(nodes.error.hidden ? '' : nodes.error.textContent));"


def shown(mode: str, protocol: str, path: str) -> str:
    """The error that the page shows after its start."""
    place = {
        "protocol": protocol,
        "pathname": path,
        "hash": "",
        "search": "",
        "origin": "http://127.0.0.1:1",
    }
    stubs = _STUBS.replace("MODE", json.dumps(mode)).replace("PLACE", json.dumps(place))
    script = (Path(static.__file__).parent / "viewer.js").read_text()
    done = subprocess.run(
        ["node", "-e", stubs + script + _SHOWN], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node is installed")
def test_a_page_that_nothing_serves_says_what_to_type():
    said = shown("static", "file:", "/home/me/site/index.html")
    assert (
        "opened as a file" in said
        and "python -m http.server -d /home/me/site   then open http://localhost:8000" in said
    )
    assert "-d '/home/me/my site'" in shown("static", "file:", "/home/me/my%20site/index.html")
    assert "-d C:/site " in shown("static", "file:", "/C:/site/index.html")
    assert "type: rl view RUN" in shown("server", "file:", "/x/viewer.html")
    assert shown("server", "http:", "/").endswith("nothing answers; type: rl view RUN")
    assert "start its server again" in shown("static", "http:", "/index.html")
