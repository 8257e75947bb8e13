# %% [markdown]
# # 6. Convolutional networks: start from a trained network
#
# **At the end** you have made a trained image network Bayesian, you know which layers to give noise, and you have a
# plain network back for export. The last sections are about ResNet-18, GPUs and distributed training. The tutorial
# takes fifteen minutes to read and half a minute to run.

# %%
import copy

import matplotlib.pyplot as plt
import pyro
import torch
import torch.nn.functional as F

import pyro_vsd as vsd

EPOCHS, SAMPLES, RESNET_STEPS = 12, 30, 8
train, test = vsd.datasets.digits(flatten=False)
print(train)

# %% tags=["remove-cell"]
# Settings of our own runs: one thread, since the matrices are small, and a short mode that only shows that all works.
import os

torch.set_num_threads(1)
if SMOKE := "PYRO_VSD_SMOKE" in os.environ:
    EPOCHS, SAMPLES, RESNET_STEPS, train, test = 1, 4, 2, train[:200], test[:100]

# %% [markdown]
# ## A plain network, trained
#
# `convnet` is the paper's network: two convolutions and two dense layers, here for images of 8 × 8 pixels. Your own
# network, or one of torchvision with its weights loaded, works in the same way.

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
# ## Make it Bayesian
#
# `bayesianize` keeps the weights of the network, and the guide's Θ starts at them. So before the first step the
# posterior mean *is* the trained network, and only the noise remains to be learned. `include` selects layers by name:
# here the dense ones.
#
# A few small steps hardly change the noise variances: the parameter is log α, so the noise would stay at `init_alpha`.
# `parameter_groups` gives log α its own learning rate.
#
# We train for as many epochs again, once from the trained network and once from the random initial values of the same
# network. The plain network gets the same extra epochs.


# %%
def fine_tune(net, **selection):
    """Make a network Bayesian and train it; return the model, its guide and the test NLL after each epoch."""
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
print("before training, the posterior mean is the trained network:", torch.equal(exported(test.x), plain(test.x)))

runs = {
    "dense layers, trained start": fine_tune(plain, include="fc*"),
    "all layers, trained start": fine_tune(plain),
    "dense layers, random start": fine_tune(start, include="fc*"),
}
longer = copy.deepcopy(plain)
train_plain(longer, EPOCHS)

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for (name, (_, _, curve)), style in zip(runs.items(), ("o-", "s--", "^:"), strict=True):
    ax.plot(range(1, EPOCHS + 1), curve, style, markersize=4, label=name)
reference = vsd.metrics.nll(longer(test.x).detach().softmax(-1), test.y)
ax.axhline(reference, color="0.3", linewidth=1, linestyle=(0, (4, 2)), label="plain network, after as many epochs")
ax.set(xlabel="epoch of VSD", ylabel="NLL on test images", yscale="log")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small")
first = {name: curve[0] for name, (_, _, curve) in runs.items()}
print("NLL after one epoch:", {name: round(value, 3) for name, value in first.items()})

# %% tags=["remove-cell"]
assert torch.equal(exported(test.x), plain(test.x))
assert SMOKE or first["dense layers, trained start"] < 0.5 * first["dense layers, random start"]

# %% [markdown]
# The trained start saves most of the epochs. Next we compare the predictions for test images, and for the same images
# with pixel noise of standard deviation 0.4 (black to white is 1). No network was trained on such noise.

# %%
noisy = (test.x + 0.4 * torch.randn(test.x.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
scores = {"plain, as long": [longer(x).detach().softmax(-1) for x in (test.x, noisy)]}
for name, (model, guide, _) in runs.items():
    scores[name] = [vsd.predict(model, guide, x, num_samples=SAMPLES, seed=0) for x in (test.x, noisy)]
table = {}
print(f"{'':30}{'test images':>20}{'with noise':>24}\n{'':30}" + f"{'accuracy':>10}{'NLL':>7}{'ECE':>7}" * 2)
for name, predictions in scores.items():
    metrics = (vsd.metrics.accuracy, vsd.metrics.nll, vsd.metrics.ece)
    numbers = [metric(prediction, test.y) for prediction in predictions for metric in metrics]
    table[name] = numbers
    print(f"{name:30}" + "".join("{:10.3f}{:7.3f}{:7.3f}".format(*numbers[i : i + 3]) for i in (0, 3)))

# %% tags=["remove-cell"]
clean, shifted, calibration = ({name: numbers[i] for name, numbers in table.items()} for i in (1, 4, 5))
assert SMOKE or min(clean, key=clean.get) == "plain, as long"
assert SMOKE or max(shifted, key=shifted.get) == max(calibration, key=calibration.get) == "plain, as long"
assert SMOKE or clean["dense layers, trained start"] < clean["dense layers, random start"]

# %% [markdown]
# On clean images the plain network has the smallest NLL: it is nearly always right, and VSD is slightly underconfident.
# On noisy images the plain network is overconfident, with the largest NLL and ECE of all; every VSD network is better
# there. It matters more that there is noise than which layers have it, and one run of each on 355 images cannot rank
# the three. The random start would need more epochs to catch up on clean images.

# %% [markdown]
# ## A plain network again
#
# `mean_network` returns the network at the posterior mean. It is an ordinary `nn.Module` without Pyro, for
# `torch.save`, ONNX or a phone. A prediction costs one forward pass but has no model uncertainty. (Tutorial 8 exports
# the uncertainty, too.)

# %%
model, guide, _ = runs["dense layers, trained start"]
exported = vsd.nn.mean_network(model, guide)
start.load_state_dict(exported.state_dict())  # the parameter names are those of the original network
print("class:", type(exported).__name__)

# %% [markdown]
# `rank_units` orders the units of each weight from the least to the most noise, and `prune` removes all units above a
# noise variance of your choice. Does the order help? We remove inputs of the first dense layer: those with the most
# noise, those with the least, and random ones.


# %% tags=["hide-input"]
def accuracy_without(units):
    net = copy.deepcopy(exported)
    with torch.no_grad():
        net.fc1.weight[:, units] = 0.0
        return vsd.metrics.accuracy(net(test.x).softmax(-1), test.y)


order = vsd.nn.rank_units(model, guide)["net.fc1.weight"]
random = [torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
orders = {"most noise first": [order.flip(0)], "random, mean of 5": random, "least noise first": [order]}
shares = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
print("accuracy, removed   " + "".join(f"{share:8.0%}" for share in shares))
kept = {}
for name, several in orders.items():
    rows = [[accuracy_without(units[: int(share * len(units))]) for share in shares] for units in several]
    kept[name] = torch.tensor(rows).mean(0)
    print(f"{name:20}" + "".join(f"{value:8.3f}" for value in kept[name]))

# %% tags=["remove-cell"]
noisiest, chance, surest = kept.values()
assert SMOKE or (chance[2] > chance[0] - 0.05 and noisiest[2] > noisiest[0] - 0.05)
assert SMOKE or (noisiest - chance)[:4].max() < 0.05

# %% [markdown]
# Here it does not: about half of the inputs can go at hardly any loss, in any order. The layer has more inputs than
# digits of 8 × 8 pixels need, and the noise does not show which of the redundant ones to remove. Always compare a
# pruning order with a random one.

# %% [markdown]
# ## ResNet-18
#
# A deep network takes the same single line. Convolutions have noise on their output channels (with
# `VSDGuide(model, conv_noise="in")` on their input channels), one draw per image and channel. Batch norms and biases
# stay parameters. The noise of 21 layers multiplies, so it should start small. We run a few steps on eight digits to
# see that it works:

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
    for _ in range(RESNET_STEPS):
        optimizer.zero_grad()
        value = loss(x, y)
        value.backward()
        optimizer.step()
        losses.append(-float(loss.elbo.terms["log_likelihood"]) / len(x))
    print("  negative log-likelihood per image:", " ".join(f"{value:.2f}" for value in losses))

# %% tags=["remove-cell"]
assert noise < 0.01 * weights
assert SMOKE or losses[-1] < losses[0]

# %% [markdown]
# The noise adds very few parameters, and the network soon fits the eight images. For a large trained network the usual
# choice is noise on the last layer only: freeze the other parameters with `requires_grad_(False)` before `bayesianize`,
# and a Bayesian head is trained on top of them. Batch norms have running statistics that move in training even if
# their parameters are frozen. `vsd.fit` keeps these as they are; in a loop of your own, put the layers into evaluation
# mode. On CIFAR-10 noise on the dense layers of a small
# convolutional network was better than noise on all layers, and cheaper: see "Choosing options" in the documentation.
#
# ## On a GPU
#
# Move model, guide and data to the device, before or after the first step. The module form of the objective, as above,
# does not wait for the device during a step:
#
#     model.to("cuda"), guide.to("cuda")
#     optimizer = torch.optim.Adam(guide.parameter_groups(lr=1e-3), fused=True)
#     for x, y in train.to("cuda").batches(100):
#         with torch.autocast("cuda", dtype=torch.bfloat16):  # likelihood and KL stay in float32
#             value = loss(x, y)
#
# `vsd.fit` needs model, guide and data on the same device and nothing else. This tutorial was not run on a GPU.
#
# ## Distributed training
#
# `vsd.fit` supports `torch.distributed`. With `torchrun --nproc_per_node=2 train.py` all processes call it with the
# same arguments. Each takes its own rows of every batch and draws its own noise. All end with the same parameters:
#
#     torch.distributed.init_process_group()
#     model = vsd.nn.Classifier(vsd.nn.bayesianize(net), num_data=len(train))  # the whole training set
#     guide = vsd.VSDGuide(model)
#     vsd.fit(model, guide, train, epochs=10)
#     prediction = vsd.training.distributed.predict(model, guide, test.x)  # each computes a part, all get the result
#
# `num_data` is the size of the whole training set for any number of processes.
#
# ## What you can do now
#
# - Make a trained network Bayesian: `bayesianize(net)` starts from its weights; `include` and `exclude` select layers
#   by name, type or function.
# - Fine-tune it for a few epochs, with a larger learning rate of log α so that the noise adapts. To keep all weights as
#   they are, use `vsd.from_trained`, which computes the noise in seconds.
# - Get a plain network back with `mean_network`.
#
# Next: [what VSD is](07_what_vsd_is.ipynb).
