# %% [markdown]
# # 5. Convolutional networks: start from what is trained
#
# Image networks are rarely trained from nothing. This page takes a trained network and makes it Bayesian, looks at the
# layers that are worth noise, turns the result back into a plain network, takes units out of it, and ends with
# ResNet-18, GPUs and several processes.

# %%
import copy
import os

import matplotlib.pyplot as plt
import pyro
import torch
import torch.nn.functional as F

import pyro_vsd as vsd

SMOKE = "PYRO_VSD_SMOKE" in os.environ  # a short run that only shows that all of this works
torch.set_num_threads(1)  # the products are so small that a second thread would only be waited for
EPOCHS, SAMPLES = (1, 4) if SMOKE else (12, 30)

train, test = vsd.datasets.digits(flatten=False)
if SMOKE:
    train, test = train[:200], test[:100]
print(train)

# %% [markdown]
# ## A plain network, trained
#
# `convnet` is the paper's network: two convolutions and two dense layers, here for images of 8 × 8. It stands for
# whatever you have: a network of torchvision with its weights loaded works in the same way.

# %%
pyro.set_rng_seed(0)
plain = vsd.nn.convnet(in_channels=1, image_size=8)
start = copy.deepcopy(plain)


def train_plain(net, epochs):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for x, y in train.batches(100):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()


train_plain(plain, EPOCHS)
print([name for name, _ in plain.named_children()])

# %% [markdown]
# ## Bayesian, from there
#
# `bayesianize` keeps the weights that the network has, and the guide's Θ starts at them. So before any step the
# posterior mean *is* the trained network, and what remains to be learned is the noise. `include` selects layers by
# name: here the dense ones.
#
# Few steps of a small size hardly move a droprate: what is learned is log α, so `init_alpha` would stay the level of
# the noise. `parameter_groups` gives it a step size of its own.
#
# We train for as many epochs again, from the trained network and from the random start of the same network, and give
# the plain network the same extra epochs.


# %%
def fine_tune(net, **selection):
    """A network made Bayesian and trained; the model, its guide, and the NLL on test images after each epoch."""
    pyro.set_rng_seed(1)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(net, **selection), num_data=len(train))
    guide = vsd.VSDGuide(model, num_reflections=2)
    history = vsd.fit(
        model, guide, train, epochs=EPOCHS, validation=test, validation_samples=4, progress=False, seed=1,
        optimizer=torch.optim.Adam(guide.parameter_groups(lr=1e-3, log_alpha=5e-2)),
    )  # fmt: skip
    return model, guide, [epoch["validation"]["nll"] for epoch in history]


model = vsd.nn.Classifier(vsd.nn.bayesianize(plain), num_data=len(train))
exported = vsd.nn.mean_network(model, vsd.VSDGuide(model, num_reflections=2))
assert torch.equal(exported(test.x), plain(test.x))
print("before training, the posterior mean is the trained network")

runs = {
    "dense layers, trained start": fine_tune(plain, include="fc*"),
    "all layers, trained start": fine_tune(plain),
    "dense layers, random start": fine_tune(start, include="fc*"),
}
longer = copy.deepcopy(plain)
train_plain(longer, EPOCHS)

# %%
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for (name, (_, _, curve)), style in zip(runs.items(), ("o-", "s--", "^:"), strict=True):
    ax.plot(range(1, EPOCHS + 1), curve, style, markersize=4, label=name)
ax.set(xlabel="epoch of VSD", ylabel="NLL on test images", yscale="log")
ax.legend(frameon=False)
first = {name: curve[0] for name, (_, _, curve) in runs.items()}
print("NLL after one epoch:", {name: round(value, 3) for name, value in first.items()})
assert SMOKE or first["dense layers, trained start"] < 0.5 * first["dense layers, random start"]

# %% [markdown]
# The trained start saves the epochs in which a network learns to see. Then the predictions, on test images and on the
# same images with noise of standard deviation 0.4 on the pixels (black to white is 1), which no network was trained on.

# %%
noisy = (test.x + 0.4 * torch.randn(test.x.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
scores = {"plain, as long": [longer(x).detach().softmax(-1) for x in (test.x, noisy)]}
for name, (model, guide, _) in runs.items():
    scores[name] = [vsd.predict(model, guide, x, num_samples=SAMPLES, seed=0) for x in (test.x, noisy)]
table = {}
print(f"{'':30}{'test images':>20}{'with noise':>24}\n{'':30}" + f"{'accuracy':>10}{'NLL':>7}{'ECE':>7}" * 2)
for name, predictions in scores.items():
    measures = (vsd.metrics.accuracy, vsd.metrics.nll, vsd.metrics.ece)
    numbers = [measure(prediction, test.y) for prediction in predictions for measure in measures]
    table[name] = numbers
    print(f"{name:30}" + "".join("{:10.3f}{:7.3f}{:7.3f}".format(*numbers[i : i + 3]) for i in (0, 3)))
clean, shifted, calibration = ({name: numbers[i] for name, numbers in table.items()} for i in (1, 4, 5))
assert SMOKE or min(clean, key=clean.get) == "plain, as long"
assert SMOKE or max(shifted, key=shifted.get) == max(calibration, key=calibration.get) == "plain, as long"
assert SMOKE or clean["dense layers, trained start"] < clean["dense layers, random start"]

# %% [markdown]
# On clean images the plain network has the smallest NLL: it is right nearly always, and VSD is a little too careful.
# On the noisy ones it is too sure, with the largest NLL and ECE of all; every VSD network is better there. Which layers
# have the noise makes less of a difference than whether there is any, and one run of each on 355 images cannot rank the
# three. The random start would need more epochs to catch up on clean images.

# %% [markdown]
# ## Back to a plain network, and smaller
#
# `mean_network` gives the network at the posterior mean: an ordinary `nn.Module` without Pyro, for `torch.save`, ONNX
# or a phone. It predicts at the price of one forward pass, and no longer knows what it does not know.
#
# The noise says which units matter: where the loss does not feel a unit, its noise may grow. `rank_units` orders the
# units of each weight from the surest to the noisiest. We take inputs of the first dense layer out of the exported
# network, the noisiest first, or the surest first, or in random order.

# %%
model, guide, _ = runs["dense layers, trained start"]
exported = vsd.nn.mean_network(model, guide)
start.load_state_dict(exported.state_dict())  # the names are those of the network that we began with
order = vsd.nn.rank_units(model, guide)["net.fc1.weight"]
print("class:", type(exported).__name__, "· inputs of fc1:", len(order))


def accuracy_without(units):
    net = copy.deepcopy(exported)
    with torch.no_grad():
        net.fc1.weight[:, units] = 0.0
        return vsd.metrics.accuracy(net(test.x).softmax(-1), test.y)


random = [torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
orders = {"noisiest first": [order.flip(0)], "random, mean of 5": random, "surest first": [order]}
shares = torch.linspace(0, 0.95, 20)
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
kept = {}
for (name, several), style in zip(orders.items(), ("o-", "^:", "s--"), strict=True):
    curves = [[accuracy_without(units[: int(share * len(units))]) for share in shares] for units in several]
    curve = kept[name] = torch.tensor(curves).mean(0)
    ax.plot(shares, curve, style, markersize=4, label=name)
ax.set(xlabel="share of fc1's inputs taken out", ylabel="accuracy")
ax.legend(frameon=False)
print("taken out           " + "".join(f"{share:8.0%}" for share in shares[::4]))
for name, curve in kept.items():
    print(f"{name:20}" + "".join(f"{value:8.3f}" for value in curve[::4]) + f"   mean {curve.mean():.3f}")
noisiest, chance, surest = kept.values()
assert SMOKE or (surest.mean() < min(noisiest.mean(), chance.mean()) and noisiest[10] > noisiest[0] - 0.03)
assert SMOKE or (noisiest - chance)[:13].abs().max() < 0.05

# %% [markdown]
# The units that VSD is sure of are the ones that the network needs: without them it fails first. More than half of the
# inputs can go at hardly any loss, the noisiest first; but so they can in random order, on average. The layer has more
# inputs than digits of 8 × 8 pixels need, and among the spare ones the noise does not tell which to take. Always put a
# random order beside a clever one. `vsd.nn.prune` takes out all units above a variance of your choice in one call.

# %% [markdown]
# ## ResNet-18
#
# One line, whatever the depth. Weights of convolutions get noise on their output channels (`conv_noise="in"`: on their
# inputs), one draw per image and channel; batch norms and biases stay parameters. Through 21 layers noise multiplies,
# so it should start small. A few steps on eight digits, to see that it runs:

# %%
pyro.set_rng_seed(0)
resnet = vsd.nn.resnet18(in_channels=1)
x, y = F.interpolate(train.x[:8], size=16), train.y[:8]
for name, selection in {"all layers": {}, "fc only": {"include": "fc"}}.items():
    model = vsd.nn.Classifier(vsd.nn.bayesianize(resnet, **selection), num_data=8)
    guide = vsd.VSDGuide(model, num_reflections=2, init_alpha=0.02)
    noise = sum(p.numel() for n, p in guide.named_parameters() if n.startswith(("log_alpha", "vectors")))
    weights = sum(p.numel() for p in resnet.parameters())
    print(f"{name}: {len(guide.sites)} random weights, {noise} numbers for the noise beside {weights} of the network")
    loss = vsd.VSD_ELBO(kl_weight=0.01)(model, guide)
    optimizer = torch.optim.Adam(guide.parameter_groups(lr=1e-3))
    losses = []
    for _ in range(2 if SMOKE else 8):
        optimizer.zero_grad()
        value = loss(x, y)
        value.backward()
        optimizer.step()
        losses.append(-float(loss.elbo.terms["log_likelihood"]) / len(x))
    print("  negative log-likelihood per image:", " ".join(f"{value:.2f}" for value in losses))
    assert noise < 0.01 * weights
    assert SMOKE or losses[-1] < losses[0]

# %% [markdown]
# The noise adds next to nothing to the network's size, and the eight images are soon learned. Noise on the last layer
# alone is the usual choice for a large trained network: freeze the rest (`requires_grad_(False)` before `bayesianize`,
# which leaves it so) and a Bayesian head is trained on fixed features. On CIFAR-10 noise on the dense layers of a small
# convolutional network was better than noise on all of them, and cheaper: see "Choosing options" in the documentation.
#
# ## On a GPU
#
# Move model and guide, then the data; before or after the first step. The module form of the objective, as above, does
# not wait for the device in a step:
#
#     model.to("cuda"), guide.to("cuda")
#     optimizer = torch.optim.Adam(guide.parameter_groups(lr=1e-3), fused=True)
#     for x, y in train.to("cuda").batches(100):
#         with torch.autocast("cuda", dtype=torch.bfloat16):  # likelihood and KL stay in float32
#             value = loss(x, y)
#
# `vsd.fit` wants model, guide and data on the same device and needs nothing else. None of this page was run on a GPU.
#
# ## In several processes
#
# `vsd.fit` knows `torch.distributed`. Started by `torchrun --nproc_per_node=2 train.py`, all processes call it with the
# same arguments; each takes its own rows of every batch and draws its own noise, and all end with the same parameters:
#
#     torch.distributed.init_process_group()
#     model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=len(train))  # the whole training set
#     guide = vsd.VSDGuide(model)
#     vsd.fit(model, guide, train, epochs=10)
#     prediction = vsd.training.distributed.predict(model, guide, test.x)  # shared out, and all get the whole
#
# `num_data` stays the size of the whole training set, however many processes there are.
#
# ## What to take away
#
# - `bayesianize(net)` starts from the weights that `net` has: train, or load, then make it Bayesian.
# - `include` and `exclude` choose the layers, by name, type or function.
# - After a short fine-tuning look at the droprates: give log α a larger step size if they have not moved.
# - `mean_network` and `rank_units` lead back to plain and smaller networks.
#
# Next: [what VSD is](06_what_vsd_is.ipynb).
