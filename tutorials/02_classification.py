# %% [markdown]
# # 2. Classification: calibration, OOD detection, abstention
#
# A classifier returns probabilities. Are they calibrated: is it right in 90 % of the cases in which it says 90 %?
# Does it detect images of classes that it has never seen? Can it pass uncertain images to a human? We answer these
# questions for a VSD network and for the same network without noise.
#
# The data are the handwritten digits of scikit-learn. As a script, this tutorial also runs on larger data sets in the
# layout of torchvision:
#
#     python tutorials/02_classification.py --data mnist --root FOLDER --epochs 10
#
# Other choices are `fashion_mnist` and `cifar10`; `--download` fetches missing data.

# %%
import argparse
import os

import matplotlib.pyplot as plt
import pyro
import torch

import pyro_vsd as vsd

SMOKE = "PYRO_VSD_SMOKE" in os.environ  # a short run that only shows that everything works
torch.set_num_threads(1)  # matrices are too small to benefit from a second thread

parser = argparse.ArgumentParser()
parser.add_argument("--data", choices=["digits", "mnist", "fashion_mnist", "cifar10"], default="digits")
parser.add_argument("--root", default="data", help="the folder of torchvision's data sets")
parser.add_argument("--download", action="store_true")
parser.add_argument("--epochs", type=int, default=2 if SMOKE else 100)
options, _ = parser.parse_known_args()  # ignores the arguments of a notebook's kernel

# %% [markdown]
# ## Eight known classes, two unknown ones
#
# All of these data sets have ten classes. We train on the first eight only. Test images of the last two are then
# out-of-distribution (OOD): similar images that belong to none of the trained classes.

# %%
if options.data == "digits":
    train, test = vsd.datasets.digits()
else:
    load = getattr(vsd.datasets, options.data)
    train, test = load(options.root, download=options.download, flatten=options.data != "cifar10")
train, known, unknown = train[train.y < 8], test[test.y < 8], test[test.y >= 8]
print(f"{len(train)} training images, {len(known)} test images of the eight classes, {len(unknown)} of two others")


# %%
def network():
    if options.data == "cifar10":
        return vsd.nn.convnet(num_classes=8)
    return vsd.nn.mlp([train.x.shape[1], 100, 100, 8])


# %% [markdown]
# ## Training
#
# The plain network is trained by maximum likelihood. For VSD, `bayesianize` makes the weights random, `Classifier` adds
# the likelihood of the labels, `VSDGuide` is the posterior, and `fit` is the training loop. Both networks get the same
# optimiser and the same number of epochs.

# %%
BATCH, RATE = 100, 3e-3 if options.data == "digits" else 1e-3

pyro.set_rng_seed(0)
plain = vsd.baselines.make_method("map", network(), num_data=len(train), lr=RATE, prior_scale=None)
for _ in range(options.epochs):
    for x, y in train.batches(BATCH):
        plain.step(x, y)

pyro.set_rng_seed(0)
model = vsd.nn.Classifier(vsd.nn.bayesianize(network()), num_data=len(train))
guide = vsd.VSDGuide(model, num_reflections=2)
history = vsd.fit(
    model, guide, train, epochs=options.epochs, batch_size=BATCH, progress=False,
    optimizer=torch.optim.Adam(guide.parameter_groups(lr=RATE)),
)  # fmt: skip
first, last = (history[epoch]["loss"] / len(train) for epoch in (0, -1))
print(f"VSD, loss per image: {first:.3f} in the first epoch, {last:.3f} in the last")

# %% [markdown]
# ## Accuracy and calibration
#
# `predict` averages the probabilities of a hundred networks drawn from the posterior. `report` computes the usual
# metrics. From `fpr_at_95_tpr` on they evaluate the detection of the unknown classes by the largest probability.


# %%
def predict(x):
    """The predictions of both networks for some images."""
    return {
        "plain": plain.predict(x),
        "VSD": vsd.predict(model, guide, x, num_samples=10 if SMOKE else 100, seed=0),
    }


seen, unseen = predict(known.x), predict(unknown.x)
reports = {name: vsd.metrics.report(seen[name], known.y, ood=unseen[name]) for name in seen}
print(f"{'metric':20}" + "".join(f"{name:>10}" for name in reports) + "  better")
for metric in reports["VSD"].to_dict():
    values = "".join(f"{report[metric]:10.4f}" for report in reports.values())
    print(f"{metric:20}{values}  {reports['VSD'].better(metric)}".rstrip())

# %% [markdown]
# On clean test digits both networks are nearly always right, and both are well calibrated. There are only a handful of
# errors, so the differences are small. The plain network even has the smaller ECE: VSD is slightly underconfident here.
#
# The difference appears under distribution shift. We add pixel noise with a standard deviation of up to half the range
# from black to white, and compute the same metrics. Neither network was trained on such images.

# %%
generator = torch.Generator().manual_seed(1)
direction = torch.randn(known.x.shape, generator=generator)
noisy = {}
print(f"{'noise':>6}{'accuracy':>18}{'NLL':>18}{'ECE':>18}\n" + " " * 6 + f"{'plain':>11}{'VSD':>7}" * 3)
for strength in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5):
    noisy = predict((known.x + strength * direction).clamp(0, 1))
    metrics = (vsd.metrics.accuracy, vsd.metrics.nll, vsd.metrics.ece)
    numbers = [metric(noisy[name], known.y) for metric in metrics for name in ("plain", "VSD")]
    print(f"{strength:6.1f}" + "".join(f"{a:11.3f}{b:7.3f}" for a, b in zip(numbers[::2], numbers[1::2], strict=True)))

CHECK = options.data == "digits" and not SMOKE  # claims are about the digits
assert not CHECK or (numbers[2] > 2 * numbers[3] and numbers[4] > 2 * numbers[5])  # at the strongest noise

# %% [markdown]
# Both networks make more errors as the noise grows, at about the same rate. With little noise VSD is underconfident and
# has the larger ECE. With strong noise the plain network is far overconfident: its NLL and ECE are more than twice
# those of VSD.
#
# The reliability diagram shows the parts of an ECE. Images are grouped into bins by confidence. On the diagonal the
# accuracy equals the confidence; below it the network is overconfident. The bars are 95 % intervals. They are wide
# where a bin has few images, as most bins of the left panel do. (These bins are wider than those of the table, so the
# ECE differs a little.)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
for ax, (title, predictions) in zip(axes, {"test images": seen, "with noise 0.5": noisy}.items(), strict=True):
    vsd.plots.reliability(predictions, known.y, num_bins=8, ax=ax)
    ax.set_title(title)

# %% [markdown]
# ## Images of unknown classes
#
# There is no correct label for the two unknown classes. The best prediction spreads its probability over the classes.
# The entropy measures this: it is 0 for a certain prediction and log 8 ≈ 2.08 nats if all eight classes are equally
# likely.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for ax, name in zip(axes, ("plain", "VSD"), strict=True):
    vsd.plots.entropy_histogram({"known classes": seen[name], "unknown classes": unseen[name]}, ax=ax)
    ax.set_title(name)

mean_entropy = {name: (seen[name].entropy.mean(), unseen[name].entropy.mean()) for name in seen}
sure_of = {}
for name, (inside, outside) in mean_entropy.items():
    sure_of[name] = certain = (unseen[name].confidence > 0.9).double().mean()
    print(f"{name:6} entropy: known {inside:.3f}, unknown {outside:.3f}; over 90 % confident for {certain:.0%}")

assert not CHECK or mean_entropy["VSD"][1] > mean_entropy["plain"][1]
assert not CHECK or sure_of["VSD"] < 0.5 * sure_of["plain"]
assert not CHECK or reports["VSD"]["auroc"] > reports["plain"]["auroc"]

# %% [markdown]
# The plain network is often certain about images of unknown classes. VSD is much less often.
#
# The entropy of an averaged prediction is the sum of two parts. The *expected entropy* is large if each sampled network
# is uncertain by itself, for example about an image between two digits. The *mutual information* is large if the
# networks are confident but disagree, for example about an image unlike the training data.

# %%
for name, prediction in {"known": seen["VSD"], "unknown": unseen["VSD"]}.items():
    parts = prediction.entropy.mean(), prediction.expected_entropy.mean(), prediction.mutual_information.mean()
    print("{:8} entropy {:.3f} = expected entropy {:.3f} + mutual information {:.3f}".format(name, *parts))

growth = unseen["VSD"].mutual_information.mean() / seen["VSD"].mutual_information.mean()
print(f"mutual information of the unknown is {growth:.1f} times that of the known")
assert not CHECK or growth > 5

# %% [markdown]
# ## Decide or abstain
#
# In practice there are two kinds of errors: wrong labels for known classes, and any label for an image of an unknown
# class. We mix both kinds of images. The network decides where it is confident and passes the rest on. The curve shows
# the error rate among the decisions against the share of images that are decided. The dotted lines are the error rates
# if all images are decided.

# %%
mixed_y = torch.cat([known.y, torch.full((len(unknown),), -1)])  # no label is right for the unknown classes
mixed = {name: torch.cat([seen[name].probs, unseen[name].probs]) for name in seen}


def wrong(probs, y):
    return (probs.argmax(-1) != y).double()


figure, ax = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
vsd.plots.risk_coverage(mixed, mixed_y, loss=wrong, ax=ax)

aurc = {name: vsd.metrics.aurc(probs, mixed_y, loss=wrong) for name, probs in mixed.items()}
assert not CHECK or aurc["VSD"] < aurc["plain"]

# %% [markdown]
# The two networks rank the images about equally well. If you can choose how many images to pass on, either will do. But
# most rules are thresholds: decide if the confidence is above 90 %. Such a rule relies on calibrated probabilities.

# %%
errors = {}
for name, probs in mixed.items():
    decided = probs.amax(-1) > 0.9
    errors[name] = wrong(probs, mixed_y)[decided].mean()
    print(f"{name:6} decides {decided.double().mean():.0%} of the images, {errors[name]:.1%} of them wrongly")
assert not CHECK or errors["VSD"] < 0.5 * errors["plain"]

# %% [markdown]
# ## The most uncertain images
#
# These are the images of known classes with the highest entropy, with the true class and the prediction of VSD.

# %%
doubtful = seen["VSD"].entropy.topk(8).indices
figure, axes = plt.subplots(1, 8, figsize=(9, 1.8), layout="constrained")
side = int((known.x[0].numel() // (3 if options.data == "cifar10" else 1)) ** 0.5)
for ax, row in zip(axes, doubtful.tolist(), strict=True):
    ax.imshow(known.x[row].reshape(-1, side, side).movedim(0, -1).squeeze(-1).numpy(), cmap="gray_r")
    label, confidence = seen["VSD"].labels[row], seen["VSD"].confidence[row]
    ax.set_title(f"true {known.y[row]}\nsays {label} ({confidence:.0%})", fontsize="small")
    ax.axis("off")

# %% [markdown]
# ## What to take away
#
# - `vsd.metrics.report(prediction, y, ood=other)` computes the table. `prediction.entropy`, `.mutual_information` and
#   `.confidence` have one value for each image.
# - On easy data similar to the training data, expect little from any Bayesian method. Test it under shift.
# - Choose the threshold for abstaining on your own held-out data: `vsd.metrics.risk_coverage(…).within(0.01)` returns
#   the threshold that limits the error to 1 %.
#
# Next: [your own Pyro model](03_your_own_pyro_model.ipynb).
