# %% [markdown]
# # 5. Convolutional networks: start from a trained network
#
# Image networks are rarely trained from scratch. This tutorial makes a trained network Bayesian, compares the layers
# that can have noise, converts the result back to a plain network and removes units from it. The last sections are
# about ResNet-18, GPUs and distributed training.

# %%
import copy
import os

import matplotlib.pyplot as plt
import pyro
import torch
import torch.nn.functional as F

import pyro_vsd as vsd

SMOKE = "PYRO_VSD_SMOKE" in os.environ  # a short run that only shows that everything works
torch.set_num_threads(1)  # matrices are too small to benefit from a second thread
EPOCHS, SAMPLES = (1, 4) if SMOKE else (12, 30)

train, test = vsd.datasets.digits(flatten=False)
if SMOKE:
    train, test = train[:200], test[:100]
print(train)

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
# ## Export and pruning
#
# `mean_network` returns the network at the posterior mean. It is an ordinary `nn.Module` without Pyro, for
# `torch.save`, ONNX or a phone. A prediction costs one forward pass but has no model uncertainty.
#
# The noise shows which units are relevant: if the loss does not depend on a unit, its noise can grow. `rank_units`
# orders the units of each weight from the least to the most noise. We remove inputs of the first dense layer from the
# exported network in three orders: most noise first, least noise first, and random.

# %%
model, guide, _ = runs["dense layers, trained start"]
exported = vsd.nn.mean_network(model, guide)
start.load_state_dict(exported.state_dict())  # the parameter names are those of the original network
order = vsd.nn.rank_units(model, guide)["net.fc1.weight"]
print("class:", type(exported).__name__, "· inputs of fc1:", len(order))


def accuracy_without(units):
    net = copy.deepcopy(exported)
    with torch.no_grad():
        net.fc1.weight[:, units] = 0.0
        return vsd.metrics.accuracy(net(test.x).softmax(-1), test.y)


random = [torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
orders = {"most noise first": [order.flip(0)], "random, mean of 5": random, "least noise first": [order]}
shares = torch.linspace(0, 0.95, 20)
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
kept = {}
for (name, several), style in zip(orders.items(), ("o-", "^:", "s--"), strict=True):
    curves = [[accuracy_without(units[: int(share * len(units))]) for share in shares] for units in several]
    curve = kept[name] = torch.tensor(curves).mean(0)
    ax.plot(shares, curve, style, markersize=4, label=name)
ax.set(xlabel="share of fc1's inputs removed", ylabel="accuracy")
ax.legend(frameon=False)
print("removed             " + "".join(f"{share:8.0%}" for share in shares[::4]))
for name, curve in kept.items():
    print(f"{name:20}" + "".join(f"{value:8.3f}" for value in curve[::4]) + f"   mean {curve.mean():.3f}")
noisiest, chance, surest = kept.values()
assert SMOKE or (surest.mean() < min(noisiest.mean(), chance.mean()) and noisiest[10] > noisiest[0] - 0.03)
assert SMOKE or (noisiest - chance)[:13].abs().max() < 0.05

# %% [markdown]
# The network needs the units with the least noise: without them it fails first. More than half of the inputs can be
# removed at hardly any loss if those with the most noise go first. But on average the same is true of a random order.
# The layer has more inputs than digits of 8 × 8 pixels need, and among the redundant ones the noise does not show which
# to remove. Always compare a pruning order with a random one. `vsd.nn.prune` removes all units above a noise variance
# of your choice in one call.

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
# The noise adds very few parameters, and the network soon fits the eight images. For a large trained network the usual
# choice is noise on the last layer only: freeze the other parameters with `requires_grad_(False)` before `bayesianize`,
# and a Bayesian head is trained on top of them. `vsd.fit` then keeps the running statistics of frozen batch norms,
# too; in a loop of your own, put these layers into evaluation mode. On CIFAR-10 noise on the dense layers of a small
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
# ## What to take away
#
# - `bayesianize(net)` starts from the weights of `net`: train it or load weights first.
# - `include` and `exclude` select layers by name, type or function.
# - After a short fine-tuning check the noise variances. If they have not changed, give log α a larger learning rate.
# - `mean_network` returns a plain network; `rank_units` and `prune` help to make it smaller.
#
# Next: [what VSD is](06_what_vsd_is.ipynb).
