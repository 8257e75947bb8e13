# %% [markdown]
# # 8. From notebook to service
#
# **At the end** you have one ONNX file that holds a trained VSD network and 32 draws of its noise, and a small web
# service that gives probabilities and says when it is not sure. It needs neither PyTorch nor Pyro. The tutorial takes
# ten minutes to read and a minute to run.
#
# The extras `export` and `serve` bring what is needed: `pip install ".[export,serve,sklearn,plots]"`.

# %%
import atexit
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import matplotlib.pyplot as plt
import onnxruntime
import torch

import pyro_vsd as vsd

EPOCHS, MANY, RISK = 60, 5000, 0.01
folder = tempfile.TemporaryDirectory()

# %% tags=["remove-cell"]
# Settings of our own runs: one thread, since the matrices are small, and a short mode that only shows that all works.
import os

torch.set_num_threads(1)
if SMOKE := "PYRO_VSD_SMOKE" in os.environ:
    EPOCHS, MANY, RISK = 2, 200, 0.5

# %% [markdown]
# ## Train
#
# The digits of scikit-learn, 8 × 8 pixels. The last training rows are held out: some for the calibration, the others
# for the threshold.

# %%
torch.manual_seed(0)
data, test = vsd.datasets.digits()
train, for_calibration, held_out = data[:1100], data[1100:1250], data[1250:]
model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 100, 100, 10])), num_data=len(train))
guide = vsd.VSDGuide(model)
vsd.fit(model, guide, train, epochs=EPOCHS, seed=0, progress=False)
print(f"test accuracy: {vsd.metrics.accuracy(vsd.predict(model, guide, test.x, seed=0), test.y):.1%}")

# %% [markdown]
# ## Calibrate
#
# One factor on the noise and one temperature, chosen by the log score of held-out rows.

# %%
calibration = vsd.calibrate(model, guide, for_calibration, progress=False)
print(calibration)
for name, option in {"as trained": None, "calibrated": calibration}.items():
    found = vsd.predict(model, guide, test.x, seed=0, calibration=option)
    print(f"{name}: NLL {vsd.metrics.nll(found, test.y):.3f}, ECE {vsd.metrics.ece(found, test.y):.3f}")

# %% [markdown]
# ## Draws as constants
#
# A draw of a VSD weight is one number for each input of a layer: here 264 numbers for all layers, beside 17,000
# weights. `vsd.export.sampler` makes 32 draws once and keeps them. The result is a plain module. It is deterministic.

# %%
sampler = vsd.export.sampler(model, guide, draws=32, seed=0, calibration=calibration)
out = sampler(test.x)
print({name: tuple(value.shape) for name, value in out.items()})

# %% tags=["remove-cell"]
assert torch.equal(out["probs"], sampler(test.x)["probs"])

# %% [markdown]
# Are 32 draws enough? They are not random: their mean and covariance are matched to those of the noise. That roughly
# halves the error of the probabilities. We compare with 5,000 random draws.

# %%
common = {"calibration": calibration}
many = vsd.predict(
    model, guide, test.x, num_samples=MANY, seed=1, keep_samples=False, **common
).probs  # fmt: skip
errors = {
    noise: torch.stack(
        [vsd.export.sampler(model, guide, seed=s, noise=noise, **common)(test.x)["probs"] - many for s in range(10)]
    ).square().mean().sqrt().item()
    for noise in ("random", "matched")
}  # fmt: skip
print("error of the probabilities with 32 draws:", {noise: round(error, 4) for noise, error in errors.items()})

# %% tags=["remove-cell"]
assert SMOKE or errors["matched"] < 0.75 * errors["random"]

# %% [markdown]
# ## Choose a threshold
#
# The service abstains where the entropy is above a bound. We choose the bound on held-out rows: as many answers as
# possible with an error of at most 1 %. The scores come from the sampler itself, not from `predict`, so that the bound
# fits what is served.

# %%
samples = sampler(held_out.x)["samples"]
curve = vsd.metrics.risk_coverage(samples, held_out.y, score="entropy")
coverage, risk, score = curve.within(risk=RISK)
max_entropy = -score
print(f"answer rows with an entropy of at most {max_entropy:.2f}: {coverage:.0%} of those held out, error {risk:.1%}")

# %% [markdown]
# ## Export
#
# `vsd.export.onnx` writes the sampler to a file. For comparison we also write the plain network at the posterior mean.

# %%
paths = {name: Path(folder.name) / f"{name}.onnx" for name in ("model", "plain")}
vsd.export.onnx(model, guide, paths["model"], example=test.x[:1], calibration=calibration)
(Path(folder.name) / "service.json").write_text(json.dumps({"max_entropy": max_entropy}))

plain = vsd.nn.mean_network(model, guide).eval()
batch = {0: torch.export.Dim("batch")}
program = torch.export.export(plain, (test.x,), dynamic_shapes=(batch,), strict=False)
torch.onnx.export(program, f=paths["plain"], dynamo=True, external_data=False, verbose=False)

sessions = {name: onnxruntime.InferenceSession(str(path)) for name, path in paths.items()}
probs, _ = sessions["model"].run(None, {"x": test.x.numpy()})
difference = (torch.from_numpy(probs) - out["probs"]).abs().max()
print(f"largest difference between onnxruntime and PyTorch: {difference:.0e}")

# %% tags=["remove-cell"]
assert difference < 1e-5

# %% [markdown]
# ## Size and latency
#
# The file is larger by the noise. 32 draws of one row take less than 32 times the time of the plain network, because
# they pass as one batch.

# %% tags=["hide-input"]
input_name = sessions["plain"].get_inputs()[0].name
inputs = {"model": {"x": test.x[:1].numpy()}, "plain": {input_name: test.x[:1].numpy()}}
taken = {name: [] for name in paths}
for _ in range(500):
    for name, session in sessions.items():
        start = time.perf_counter()
        session.run(None, inputs[name])
        taken[name].append(time.perf_counter() - start)
size = {name: path.stat().st_size for name, path in paths.items()}
latency = {name: statistics.median(times) for name, times in taken.items()}
print(f"file:    {size['model'] / size['plain']:.2f} times the plain network's")
print(f"latency: {latency['model'] / latency['plain']:.1f} times the plain network's, for 32 draws")

# %% tags=["remove-cell"]
assert size["model"] < 2 * size["plain"]
assert latency["model"] < 32 * latency["plain"]

# %% [markdown]
# The network is small, so the noise is a large part of the file. For an MLP 784-400-400-10 the file is 1.12 times as
# large as the plain network's.
#
# ## Serve
#
# `examples/serve.py` is a service in 150 lines: FastAPI and onnxruntime. It reads `model.onnx` and `service.json`. In
# a browser its page lets you draw a digit. On your own machine:
#
#     python examples/serve.py prepare FOLDER
#     python examples/serve.py run FOLDER
#
# Here we start it on the loopback address and ask from Python.

# %%
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
script = files(vsd).parent / "examples" / "serve.py"
server = subprocess.Popen([sys.executable, str(script), "run", folder.name, "--port", str(port)])
atexit.register(server.terminate)  # also where a later cell fails


def ask(method, path, content=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, None if content is None else json.dumps(content))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


for _ in range(300):  # half a minute at most
    try:
        print(ask("GET", "/health"))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)

# %% [markdown]
# ## Ask
#
# Three images: a clear test image, the test image with the largest entropy, and a mixture of two digits.

# %%
entropy = torch.special.entr(out["probs"]).sum(-1)
mixture = 0.5 * (test.x[test.y == 0][0] + test.x[test.y == 7][0])
images = torch.stack([test.x[entropy.argmin()], test.x[entropy.argmax()], mixture])
status, answer = ask("POST", "/predict", {"inputs": images.tolist()})
labels, abstain = torch.tensor(answer["labels"]), torch.tensor(answer["abstain"])
print(status, labels.masked_fill(abstain, -1).tolist(), "(-1: not sure)")

# %% tags=["hide-input"]
figure, axes = plt.subplots(2, 3, figsize=(7, 4), height_ratios=[2, 1.2], sharey="row", layout="constrained")
for column, image in enumerate(images):
    doubt = answer["abstain"][column]
    axes[0, column].imshow(image.reshape(8, 8).numpy(), cmap="gray_r")
    axes[0, column].set_axis_off()
    axes[0, column].set_title("not sure" if doubt else f"this is {answer['labels'][column]}", fontsize=10)
    axes[1, column].bar(range(10), answer["probs"][column], color="C1" if doubt else "C0")
    axes[1, column].set(ylim=(0, 1), xticks=range(10), xlabel="digit")
    axes[1, column].set_title(f"entropy {answer['entropy'][column]:.2f}", fontsize=9)
    axes[1, column].spines[["top", "right"]].set_visible(False)
axes[1, 0].set_ylabel("probability")
plt.show()

# %% tags=["remove-cell"]
assert status == 200
assert answer["abstain"] == [value > max_entropy for value in answer["entropy"]]
assert SMOKE or answer["abstain"][:2] == [False, True]

# %% [markdown]
# Bad input gets a status of 4xx and a sentence.

# %%
for content in ({"inputs": [[0.5] * 63]}, {"inputs": [[float("nan")] * 64]}, {"rows": []}):
    status, answer = ask("POST", "/predict", content)
    print(status, answer["detail"])

# %% tags=["remove-cell"]
assert status == 422
server.terminate()
server.wait(timeout=30)
folder.cleanup()

# %% [markdown]
# ## What you can do now
#
# - Export a model with its uncertainty: `vsd.export.onnx`, or `vsd.export.sampler` and `torch.export.save` for
#   PyTorch's own runtimes.
# - Serve it without PyTorch, with a threshold above which the service abstains; start from `examples/serve.py`.
# - Test it under load: `benchmarks/serving.py` measures latencies of 16 clients and memory, and sends malformed
#   requests.
#
# The page *Export and serve* of the documentation lists what exports and what does not.
#
# Next: [9. A sentence encoder that knows when to doubt](09_sentence_encoder.ipynb).
