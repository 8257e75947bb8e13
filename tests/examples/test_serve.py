"""The example of a service: what it answers, under load, and its page in a browser."""

import importlib.util
import json
import os
import shutil
import subprocess
import time

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
pytest.importorskip("psutil")

from fastapi import HTTPException

from benchmarks import serving
from examples import serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_sklearn = pytest.mark.skipif(not importlib.util.find_spec("sklearn"), reason="the digits come with scikit-learn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    serve.prepare(folder, epochs=20)
    return folder


BAD_ROWS = [kind for kind, (*_, status) in serving.MALFORMED.items() if status in (400, 422)]


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows_get_a_sentence(kind):
    _, _, body, status = serving.MALFORMED[kind]
    with pytest.raises(HTTPException) as raised:
        serve.read_rows(body.encode() if isinstance(body, str) else body, [64])
    assert raised.value.status_code == status
    assert raised.value.detail.endswith(".")


@needs_sklearn
@pytest.mark.slow
def test_entropy_decides_who_abstains(folder):
    classifier = serve.Classifier(folder)
    rows = serve.read_rows(json.dumps({"inputs": [[0.0] * 64, [0.5] * 64]}).encode(), [64])
    out = classifier(rows)
    assert [len(out[name]) for name in ("labels", "probs", "entropy", "abstain")] == [2, 2, 2, 2]
    assert out["abstain"] == [entropy > classifier.max_entropy for entropy in out["entropy"]]
    kept = json.loads((folder / "service.json").read_text())
    assert kept["error"] <= 0.01 < kept["coverage"]


@needs_sklearn
@pytest.mark.slow
def test_under_load(folder):
    with serving.server(folder) as (port, pid):
        serving.load(port, pid, requests=400)  # the allocator reaches its size
        result = serving.load(port, pid, requests=2000, clients=16)
    assert sum(result.statuses.values()) == 2000
    assert result.wrong == []
    assert max(result.statuses) < 500
    early, late = result.memory
    assert late < 1.05 * early


# ---- the page


class Browser:
    """A headless Chromium, spoken to through pipes (its DevTools protocol)."""

    def __init__(self, url, profile):
        read, self.out = os.pipe()
        self.inn, write = os.pipe()

        def connect():
            os.dup2(read, 3)
            os.dup2(write, 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], preexec_fn=connect, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self.number, self.session, self.rest = 0, None, b""
        target = self("Target.createTarget", url=url)["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __call__(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                part = os.read(self.inn, 65536)
                assert part, "the browser has ended"
                self.rest += part
            answer, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(answer)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, expression):
        return self("Runtime.evaluate", expression=expression)["result"].get("value")

    def wait_for(self, expression, seconds=20):
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true"
            time.sleep(0.1)

    def draw(self, points):
        for kind, (x, y) in zip(["mousePressed", *["mouseMoved"] * len(points), "mouseReleased"],
                                [points[0], *points, points[-1]], strict=True):  # fmt: skip
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=20)
        os.close(self.out)
        os.close(self.inn)


@needs_sklearn
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_page_shows_probabilities_and_doubt(folder, tmp_path):
    with serving.server(folder) as (port, _):
        browser = Browser(f"http://127.0.0.1:{port}/", tmp_path / "profile")
        try:
            browser.wait_for("document.querySelectorAll('.row').length == 10")
            box = json.loads(browser.value("JSON.stringify(document.getElementById('pad').getBoundingClientRect())"))
            x, y = box["x"], box["y"]
            browser.draw([(x + 128, y + 30 + 10 * i) for i in range(20)])  # a vertical stroke
            browser.wait_for("document.getElementById('entropy').textContent.startsWith('Entropy')")
            shown = browser.value("document.getElementById('answer').textContent")
            assert shown.endswith(".")
            numbers = "[...document.querySelectorAll('.row .number')].map(n => n.textContent).join()"
            shares = [float(text.removesuffix(" %")) for text in browser.value(numbers).split(",")]
            assert sum(shares) == pytest.approx(100, abs=0.6)
            assert browser.value("document.getElementById('bars').className == 'doubt'") == shown.startswith("Not sure")
            browser.value("document.getElementById('clear').click()")
            assert browser.value("document.getElementById('entropy').textContent") == ""
        finally:
            browser.close()
