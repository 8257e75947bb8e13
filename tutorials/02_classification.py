# %% [markdown]
# # 2. Classification: to know, to doubt, to abstain
#
# A classifier gives probabilities. Are they worth their names: is it right in 90 % of the cases in which it says 90 %?
# Does it notice pictures of a kind it has never seen? And can it hand the doubtful ones to a human? We put these
# questions to a VSD network, and to the same network without noise.
#
# The data are the handwritten digits of scikit-learn. Run as a script, this page takes larger sets in the layout of
# torchvision:
#
#     python tutorials/02_classification.py --data mnist --root FOLDER --epochs 10
#
# with `mnist`, `fashion_mnist` or `cifar10`; `--download` fetches what is missing.

# %%
import argparse
import os

import matplotlib.pyplot as plt
import pyro
import torch

import pyro_vsd as vsd

SMOKE = "PYRO_VSD_SMOKE" in os.environ  # a short run that only shows that all of this works
torch.set_num_threads(1)  # the products are so small that a second thread would only be waited for

parser = argparse.ArgumentParser()
parser.add_argument("--data", choices=["digits", "mnist", "fashion_mnist", "cifar10"], default="digits")
parser.add_argument("--root", default="data", help="the folder of torchvision's data sets")
parser.add_argument("--download", action="store_true")
parser.add_argument("--epochs", type=int, default=2 if SMOKE else 100)
options, _ = parser.parse_known_args()  # a notebook's kernel has arguments of its own, which we ignore

# %% [markdown]
# ## Eight classes to learn, two to be surprised by
#
# All of these sets have ten classes. We train on the first eight only. Images of the last two, among the test images,
# are then what a network meets in use sooner or later: something of the same make that it has no class for.

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
# The plain network is trained by maximum likelihood. For VSD, `bayesianize` makes the weights random, `Classifier` says
# what is observed, `VSDGuide` is the posterior, and `fit` is the training loop. Both get the same optimiser and the
# same number of epochs.

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
# `predict` averages the probabilities of a hundred networks drawn from the posterior. `report` puts the usual measures
# side by side; from `fpr_at_95_tpr` on they are about telling the known classes from the others by the largest
# probability.


# %%
def predict(x):
    """What the two networks say of some images."""
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
# On clean test digits both networks are nearly always right, and both are well calibrated; with a handful of errors
# there is little to tell them apart, and the plain one even has the smaller ECE: VSD is a little too careful here.
#
# The difference shows when the world changes. We add noise to the pixels, of a standard deviation of up to half the
# range from black to white, and look at the same measures. Neither network was trained on such images.

# %%
generator = torch.Generator().manual_seed(1)
direction = torch.randn(known.x.shape, generator=generator)
noisy = {}
print(f"{'noise':>6}{'accuracy':>18}{'NLL':>18}{'ECE':>18}\n" + " " * 6 + f"{'plain':>11}{'VSD':>7}" * 3)
for strength in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5):
    noisy = predict((known.x + strength * direction).clamp(0, 1))
    measures = (vsd.metrics.accuracy, vsd.metrics.nll, vsd.metrics.ece)
    numbers = [measure(noisy[name], known.y) for measure in measures for name in ("plain", "VSD")]
    print(f"{strength:6.1f}" + "".join(f"{a:11.3f}{b:7.3f}" for a, b in zip(numbers[::2], numbers[1::2], strict=True)))

CHECK = options.data == "digits" and not SMOKE  # claims are about the digits
assert not CHECK or (numbers[2] > 2 * numbers[3] and numbers[4] > 2 * numbers[5])  # at the strongest noise

# %% [markdown]
# Both make more and more errors, at about the same pace. With little noise VSD is too careful and has the larger ECE.
# With much, the plain network is far too sure, and its NLL and ECE are more than twice those of VSD: careful is the
# better side to err on.
#
# The reliability diagram shows what an ECE is made of. Images are put into bins by how sure the network is; on the
# diagonal it is as often right as it says, below it is too sure. The bars are 95 % intervals. (These bins are
# wider than those of the table, so the ECE differs a little.)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
for ax, (title, predictions) in zip(axes, {"test images": seen, "with noise 0.5": noisy}.items(), strict=True):
    vsd.plots.reliability(predictions, known.y, num_bins=8, ax=ax)
    ax.set_title(title)

# %% [markdown]
# ## Images of unknown classes
#
# There is no right answer for the two classes left out. The best that a network can do is to spread its probability,
# and the entropy says how far it does: 0 when it is certain, log 8 ≈ 2.08 nats when all eight classes are equal.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for ax, name in zip(axes, ("plain", "VSD"), strict=True):
    vsd.plots.entropy_histogram({"known classes": seen[name], "unknown classes": unseen[name]}, ax=ax)
    ax.set_title(name)

mean_entropy = {name: (seen[name].entropy.mean(), unseen[name].entropy.mean()) for name in seen}
sure_of = {}
for name, (inside, outside) in mean_entropy.items():
    sure_of[name] = certain = (unseen[name].confidence > 0.9).double().mean()
    print(f"{name:6} entropy: known {inside:.3f}, unknown {outside:.3f}; over 90 % sure of {certain:.0%} of these")

assert not CHECK or mean_entropy["VSD"][1] > mean_entropy["plain"][1]
assert not CHECK or sure_of["VSD"] < 0.5 * sure_of["plain"]
assert not CHECK or reports["VSD"]["auroc"] > reports["plain"]["auroc"]

# %% [markdown]
# The plain network is often certain of a class for an image that has none. VSD much less often.
#
# The entropy of an averaged prediction has two sources. Each sampled network may be unsure by itself (*expected
# entropy*: an image between two digits), or the networks may be sure and disagree (*mutual information*: they never
# saw the like). The two add up.

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
# In use, the two kinds of trouble come together: errors on known classes, and images of unknown ones, for which every
# decision is an error. Mix them, let the network decide where it is sure, and pass the rest on. The curve shows the
# share of errors among the decisions against the share of images decided.

# %%
mixed_y = torch.cat([known.y, torch.full((len(unknown),), -1)])  # no class is ever right for the unknown
mixed = {name: torch.cat([seen[name].probs, unseen[name].probs]) for name in seen}


def wrong(probs, y):
    return (probs.argmax(-1) != y).double()


figure, ax = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
vsd.plots.risk_coverage(mixed, mixed_y, loss=wrong, ax=ax)

aurc = {name: vsd.metrics.aurc(probs, mixed_y, loss=wrong) for name, probs in mixed.items()}
assert not CHECK or aurc["VSD"] < aurc["plain"]

# %% [markdown]
# As rankings the two are close: if you may choose how many images to pass on, either does. But a rule is more often a
# threshold: decide where the network claims to be more than 90 % sure. That trusts the number itself.

# %%
errors = {}
for name, probs in mixed.items():
    decided = probs.amax(-1) > 0.9
    errors[name] = wrong(probs, mixed_y)[decided].mean()
    print(f"{name:6} decides {decided.double().mean():.0%} of the images, {errors[name]:.1%} of them wrongly")
assert not CHECK or errors["VSD"] < 0.5 * errors["plain"]

# %% [markdown]
# ## Look at what it doubts
#
# The known images with the highest entropy: the true class, and what VSD makes of them.

# %%
doubtful = seen["VSD"].entropy.topk(8).indices
figure, axes = plt.subplots(1, 8, figsize=(9, 1.8), layout="constrained")
side = int((known.x[0].numel() // (3 if options.data == "cifar10" else 1)) ** 0.5)
for ax, row in zip(axes, doubtful.tolist(), strict=True):
    ax.imshow(known.x[row].reshape(-1, side, side).movedim(0, -1).squeeze(-1).numpy(), cmap="gray_r")
    label, confidence = seen["VSD"].labels[row], seen["VSD"].confidence[row]
    ax.set_title(f"is {known.y[row]}\n{label}: {confidence:.0%}", fontsize="small")
    ax.axis("off")

# %% [markdown]
# ## What to take away
#
# - `vsd.metrics.report(prediction, y, ood=other)` is the table; `prediction.entropy`, `.mutual_information` and
#   `.confidence` are numbers for every image.
# - On easy data that looks like the training data, expect little from any Bayesian method. Test where it is hard.
# - Choose the threshold to abstain at on data of your own: `vsd.metrics.risk_coverage(…).within(0.01)` gives the one
#   that keeps the errors at 1 %.
#
# Next: [your own Pyro model](03_your_own_pyro_model.ipynb).
