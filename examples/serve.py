"""Serves an exported classifier: probabilities, their entropy, and whether to abstain.

    pip install "pyro_vsd[export,serve,sklearn]"
    python examples/serve.py prepare FOLDER       # trains on digits, writes FOLDER/model.onnx and FOLDER/service.json
    python examples/serve.py run FOLDER           # http://127.0.0.1:8000, with a page to draw a digit

``run`` imports neither PyTorch nor Pyro. With a model of your own, ``vsd.export.onnx`` writes ``model.onnx``, and
``service.json`` holds ``{"max_entropy": …}``: rows with a larger entropy are left open.

    POST /predict   {"inputs": [[64 numbers], …]} -> {"labels", "probs", "entropy", "abstain"}, a list of rows each
    GET  /health    the shape of a row, the bound on the entropy
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from starlette.concurrency import run_in_threadpool

MAX_BYTES = 2**20
MAX_ROWS = 256
PAGE = Path(__file__).with_name("serve.html")


class Classifier:
    """An exported classifier with a bound on the entropy.

    :param folder: with ``model.onnx`` and ``service.json``.
    """

    def __init__(self, folder: Path):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # requests run side by side
        path, providers = str(folder / "model.onnx"), ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.input = self.session.get_inputs()[0]
        self.row_shape: list[int] = self.input.shape[1:]
        self.max_entropy = float(json.loads((folder / "service.json").read_text())["max_entropy"])

    def __call__(self, rows: np.ndarray) -> dict[str, Any]:
        (probs,) = self.session.run(["probs"], {self.input.name: rows})
        entropy = -(probs * np.log(np.maximum(probs, 1e-30))).sum(-1)
        return {
            "labels": probs.argmax(-1).tolist(),
            "probs": probs.tolist(),
            "entropy": entropy.tolist(),
            "abstain": (entropy > self.max_entropy).tolist(),
        }


def make_app(folder: Path) -> FastAPI:
    classifier, page = Classifier(folder), PAGE.read_text(encoding="utf-8")
    app = FastAPI(title="A classifier that knows what it does not know")

    @app.get("/", response_class=HTMLResponse)
    def index() -> str:
        return page

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "row_shape": classifier.row_shape, "max_entropy": classifier.max_entropy}

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        rows = read_rows(await read_body(request), classifier.row_shape)
        return await run_in_threadpool(classifier, rows)

    return app


async def read_body(request: Request) -> bytes:
    """The body, which is not read beyond its greatest size."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"The body has more than {MAX_BYTES} bytes. Send fewer rows at once.")
    return body


def read_rows(body: bytes, row_shape: list[int]) -> np.ndarray:
    """The rows of a request, checked."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, 'The body is not JSON. Send {"inputs": [row, …]}.') from None
    if not isinstance(content, dict) or "inputs" not in content:
        raise HTTPException(422, 'The body has no "inputs". Send {"inputs": [row, …]}.')
    try:
        rows = np.asarray(content["inputs"])
    except ValueError:  # rows of different lengths
        rows = np.asarray(None)
    if rows.dtype.kind not in "iuf" or rows.ndim < 1 or list(rows.shape[1:]) != row_shape:
        raise HTTPException(422, f'"inputs" must be rows of numbers of shape {row_shape}.')
    if not 1 <= len(rows) <= MAX_ROWS:
        raise HTTPException(422, f'"inputs" must have 1 to {MAX_ROWS} rows, not {len(rows)}.')
    # beyond what single precision holds, a number is infinite
    with np.errstate(over="ignore"):
        rows = rows.astype(np.float32)
    if not np.isfinite(rows).all():
        raise HTTPException(422, '"inputs" holds NaN or infinity.')
    return rows


def prepare(folder: Path, epochs: int = 60, risk: float = 0.01) -> None:
    """Trains on digits, exports, and chooses the bound: of the held-out rows below it at most this share is wrong."""
    import torch

    import pyro_vsd as vsd

    torch.manual_seed(0)
    data, _ = vsd.datasets.digits(dtype=torch.float32)
    train, held_out = data[:1100], data[1100:]
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 100, 100, 10])).float(), num_data=len(train))
    guide = vsd.VSDGuide(model)
    adam = torch.optim.Adam(guide.parameter_groups(lr=3e-3))
    vsd.fit(model, guide, train, epochs=epochs, optimizer=adam, seed=0, progress=False)
    samples = vsd.export.sampler(model, guide)(held_out.x)["samples"]
    coverage, error, score = vsd.metrics.risk_coverage(samples, held_out.y, score="entropy").within(risk=risk)
    folder.mkdir(parents=True, exist_ok=True)
    vsd.export.onnx(model, guide, folder / "model.onnx", held_out.x)
    (folder / "service.json").write_text(json.dumps({"max_entropy": -score, "coverage": coverage, "error": error}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.folder, options.epochs)
    else:
        uvicorn.run(make_app(options.folder), host="127.0.0.1", port=options.port, log_level="warning")
