# %% [markdown]
# # 1. Classification: calibration, OOD detection, abstention
#
# **At the end** you have a classifier trained with `vsd.fit`, you know how far to trust its probabilities on clean,
# noisy and unknown images, and you have a rule that passes doubtful images on to a person. The tutorial takes ten
# minutes to read and half a minute to run.
#
# The data are the handwritten digits that come with scikit-learn. As a script, it also runs on larger data sets in the
# layout of torchvision (`mnist`, `fashion_mnist`, `cifar10`; `--download` fetches missing data):
#
#     python tutorials/01_classification.py --data mnist --root FOLDER --epochs 10

# %%
import matplotlib.pyplot as plt
import pyro
import torch

import pyro_vsd as vsd

EPOCHS, SAMPLES = 100, 100
train, test = vsd.datasets.digits()

# %% tags=["remove-cell"]
# Settings of our own runs: one thread, since the matrices are small; a short mode that only shows that all works; and
# other data sets.
import argparse
import os

torch.set_num_threads(1)
if SMOKE := "PYRO_VSD_SMOKE" in os.environ:
    EPOCHS, SAMPLES = 2, 10
parser = argparse.ArgumentParser()
parser.add_argument("--data", choices=["digits", "mnist", "fashion_mnist", "cifar10"], default="digits")
parser.add_argument("--root", default="data", help="the folder of torchvision's data sets")
parser.add_argument("--download", action="store_true")
parser.add_argument("--epochs", type=int, default=EPOCHS)
options, _ = parser.parse_known_args()  # ignores the arguments of a notebook's kernel
EPOCHS = options.epochs
if options.data != "digits":
    load = getattr(vsd.datasets, options.data)
    train, test = load(options.root, download=options.download, flatten=options.data != "cifar10")
CHECK = options.data == "digits" and not SMOKE  # the text is about the digits

# %% [markdown]
# ## Eight known classes, two unknown ones
#
# There are ten digits. We train on the first eight, 0 to 7. Test images of 8 and 9 are then out-of-distribution (OOD):
# similar images that belong to none of the trained classes.

# %%
train, known, unknown = train[train.y < 8], test[test.y < 8], test[test.y >= 8]
print(f"{len(train)} training images, {len(known)} test images of the eight classes, {len(unknown)} of two others")


# %% [markdown]
# ## Train and predict
#
# Start from any PyTorch network. `bayesianize` makes its weights random, `Classifier` adds the likelihood of the
# labels, and `VSDGuide` is the posterior: noise on the inputs of each layer, with a covariance that is learned. `fit`
# trains, and `predict` averages the probabilities of a hundred networks drawn from the posterior.


# %%
def network():
    return vsd.nn.mlp([train.x.shape[1], 100, 100, 8])


# %% tags=["remove-cell"]
if options.data == "cifar10":

    def network():
        return vsd.nn.convnet(num_classes=8)


# %%
pyro.set_rng_seed(0)
model = vsd.nn.Classifier(vsd.nn.bayesianize(network()), num_data=len(train))
guide = vsd.VSDGuide(model)
vsd.fit(model, guide, train, epochs=EPOCHS, progress=False)

prediction = vsd.predict(model, guide, known.x, num_samples=SAMPLES, seed=0)
print(vsd.metrics.report(prediction, known.y))

# %% [markdown]
# A prediction has `probs`, `labels`, `confidence` (the largest probability) and several measures of uncertainty.
# `report` computes the usual metrics: NLL and Brier score for the probabilities, ECE for their calibration.
#
# ## A plain network for comparison
#
# We train the same network without noise, with the same optimiser, schedule and number of epochs.


# %% tags=["hide-input"]
def train_plain():
    """Maximum likelihood by Adam; the learning rate falls to zero along a cosine, as in `vsd.fit`."""
    net, rate = network(), 0.01 if len(train) < 20_000 else 0.001
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for x, y in train.batches(100):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        schedule.step()
    return net


@torch.no_grad()
def predict(x):
    """The predictions of both networks."""
    return {
        "plain": vsd.ClassificationPrediction.from_samples(plain(x).softmax(-1).unsqueeze(0)),
        "VSD": vsd.predict(model, guide, x, num_samples=SAMPLES, seed=0),
    }


# %%
pyro.set_rng_seed(0)
plain = train_plain()
seen, unseen = predict(known.x), predict(unknown.x)
for name in seen:
    metrics = {f.__name__: f(seen[name], known.y) for f in (vsd.metrics.accuracy, vsd.metrics.nll, vsd.metrics.ece)}
    print(f"{name:6}" + "".join(f"{metric:>10} {value:.3f}" for metric, value in metrics.items()))

# %% [markdown]
# On clean test digits there is little to choose: both networks are nearly always right. VSD tends to be slightly
# *under*confident on such images, and its ECE may be the larger one. [Tutorial 3](03_no_knobs.ipynb) shows the remedy.
#
# ## Under distribution shift
#
# The difference appears when the images change. We add pixel noise with a standard deviation of up to half the range
# from black to white. Neither network was trained on such images.

# %%
direction = torch.randn(known.x.shape, generator=torch.Generator().manual_seed(1))
strengths = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
noisy = [predict((known.x + strength * direction).clamp(0, 1)) for strength in strengths]
METRICS = {"accuracy": vsd.metrics.accuracy, "NLL": vsd.metrics.nll, "ECE": vsd.metrics.ece}
curves = {
    title: {name: [metric(predictions[name], known.y) for predictions in noisy] for name in seen}
    for title, metric in METRICS.items()
}

# %% tags=["hide-input"]
STYLES = {"plain": {"color": "#0072B2", "marker": "o"}, "VSD": {"color": "#D55E00", "marker": "s", "linestyle": "--"}}
figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
for ax, (title, lines) in zip(axes, curves.items(), strict=True):
    for name, values in lines.items():
        ax.plot(strengths, values, label=name, markersize=4, **STYLES[name])
    ax.set(title=title, xlabel="standard deviation of the noise", ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False)
for title, lines in curves.items():
    print(f"{title:9}" + "   ".join(name + "".join(f"{v:7.3f}" for v in values) for name, values in lines.items()))

# %% tags=["remove-cell"]
worst = {title: {name: values[-1] for name, values in lines.items()} for title, lines in curves.items()}
assert not CHECK or all(worst[title]["plain"] > 1.5 * worst[title]["VSD"] for title in ("NLL", "ECE"))
assert not CHECK or abs(worst["accuracy"]["plain"] - worst["accuracy"]["VSD"]) < 0.1

# %% [markdown]
# Both networks make more errors as the noise grows, at about the same rate. But the plain network does not notice: with
# strong noise its NLL and ECE are far above those of VSD. (With little noise VSD has the larger ECE, since it is
# underconfident.)
#
# A reliability diagram shows where the ECE comes from. Images are grouped into bins by confidence. On the diagonal the
# accuracy equals the confidence; below it a network is overconfident. Vertical bars are 95 % intervals, the small
# numbers at the bottom count the images of each bin, and bins of fewer than five images are left out.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
for ax, (title, predictions) in zip(axes, {"clean images": seen, "noise 0.5": noisy[-1]}.items(), strict=True):
    vsd.plots.reliability(predictions, known.y, num_bins=10, ax=ax).set_title(title)

# %% [markdown]
# On clean images almost all confidences are near 1, and there are too few others to judge.
#
# ## Images of unknown classes
#
# No label is correct for 8 and 9. The best prediction spreads its probability over the classes. The entropy measures
# this: it is 0 for a certain prediction and log 8 ≈ 2.08 nats if all eight classes are equally likely. The curves show
# the share of images whose entropy is at most that on the x axis.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for ax, (title, predictions) in zip(axes, {"known classes": seen, "unknown classes": unseen}.items(), strict=True):
    vsd.plots.entropy_cdf(predictions, ax=ax).set_title(title)

sure = {name: (unseen[name].confidence > 0.9).double().mean() for name in unseen}
auroc = {name: vsd.metrics.auroc(seen[name].confidence, unseen[name].confidence) for name in seen}
for name in seen:
    print(f"{name:6} AUROC {auroc[name]:.3f}; more than 90 % confident about {sure[name]:.0%} of the unknown images")

# %% tags=["remove-cell"]
assert not CHECK or sure["VSD"] < 0.5 * sure["plain"]
assert not CHECK or auroc["VSD"] > auroc["plain"]

# %% [markdown]
# For known classes low entropies are right, so the upper curve is better; for unknown classes the lower curve is. The
# plain network is often certain about images of unknown classes. VSD is much less often.
#
# The entropy of an averaged prediction is the sum of two parts. The *expected entropy* is large if each sampled network
# is uncertain by itself, for example about an image between two digits. The *mutual information* is large if the
# networks are confident but disagree, for example about an image unlike the training data.

# %%
for name, prediction in {"known": seen["VSD"], "unknown": unseen["VSD"]}.items():
    parts = prediction.entropy.mean(), prediction.expected_entropy.mean(), prediction.mutual_information.mean()
    print("{:8} entropy {:.3f} = expected entropy {:.3f} + mutual information {:.3f}".format(name, *parts))

# %% tags=["remove-cell"]
assert not CHECK or unseen["VSD"].mutual_information.mean() > 3 * seen["VSD"].mutual_information.mean()

# %% [markdown]
# ## Decide or abstain
#
# In practice there are two kinds of errors: wrong labels for known classes, and any label for an unknown class. We mix
# both kinds of images. The network decides where it is confident and passes the rest on. The curve shows the error rate
# among the decisions against the share of images that are decided.

# %%
mixed_y = torch.cat([known.y, torch.full((len(unknown),), -1)])  # no label is right for the unknown classes
mixed = {name: torch.cat([seen[name].probs, unseen[name].probs]) for name in seen}


def wrong(probs, y):
    return (probs.argmax(-1) != y).double()


figure, ax = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
vsd.plots.risk_coverage(mixed, mixed_y, loss=wrong, ax=ax)
ax.set(xlim=(0.5, 1), xlabel="share of images decided", ylabel="error rate of the decisions")

errors = {}
for name, probs in mixed.items():
    decided = probs.amax(-1) > 0.9
    errors[name] = wrong(probs, mixed_y)[decided].mean()
    print(f"{name:6} decides {decided.double().mean():.0%} of the images, {errors[name]:.1%} of them wrongly")

# %% tags=["remove-cell"]
assert not CHECK or errors["VSD"] < 0.5 * errors["plain"]

# %% [markdown]
# As rankings of the images the two are close. If you can choose how many images to pass on, either will do. But most
# rules are thresholds, such as "decide if the confidence is above 90 %" in the two lines above. Such a rule relies on
# the probabilities themselves, and VSD makes far fewer wrong decisions by it.
#
# ## The most uncertain images
#
# These are the images of known classes with the highest entropy.

# %% tags=["hide-input"]
doubtful = seen["VSD"].entropy.topk(8).indices
figure, axes = plt.subplots(1, 8, figsize=(9, 1.8), layout="constrained")
side = int((known.x[0].numel() // (3 if options.data == "cifar10" else 1)) ** 0.5)
for ax, row in zip(axes, doubtful.tolist(), strict=True):
    ax.imshow(known.x[row].reshape(-1, side, side).movedim(0, -1).squeeze(-1).numpy(), cmap="gray_r")
    label, confidence = seen["VSD"].labels[row], seen["VSD"].confidence[row]
    ax.set_title(f"true {known.y[row]}\nsays {label} ({confidence:.0%})", fontsize="small")
    ax.axis("off")

# %% [markdown]
# ## What you can do now
#
# - Train your own network with `vsd.fit` and get probabilities with `vsd.predict`.
# - Evaluate them: `vsd.metrics.report(prediction, y, ood=other)` also scores OOD detection. Test under shift: on easy
#   data similar to the training data, expect little from any Bayesian method.
# - Choose a threshold for abstaining on held-out data: `vsd.metrics.risk_coverage(…).within(0.01)` returns the one that
#   limits the error to 1 %.
#
# Next: [regression](02_regression.ipynb).
