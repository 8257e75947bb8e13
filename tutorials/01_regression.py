# %% [markdown]
# # 1. Regression: predictions with uncertainty
#
# A regression network should also say how large its error may be. This tutorial has three parts. First we compare VSD
# with three older methods on the toy problem of the VSD paper. Then we look at the gap between two clusters of data. In
# the last part the data are real patients, and we count how often the true value lies in the predicted interval.
#
# We write σ for the standard deviation of a prediction. Its square is the sum of two parts. The *aleatoric* part is the
# noise of the data. The *epistemic* part is the uncertainty about the function. More data reduces the second part, but
# not the first.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import torch

import pyro_vsd as vsd

SMOKE = "PYRO_VSD_SMOKE" in os.environ  # a short run that only shows that everything works
torch.set_num_threads(1)  # matrices are too small to benefit from a second thread

# %% [markdown]
# ## A cube with twenty points
#
# The data are $y = x^3 + \epsilon$ with $\epsilon \sim N(0, 3^2)$: twenty training points on [-4, 4], and predictions
# on [-6, 6]. Networks train best with targets of about unit scale, so we divide them by ten. The noise is then 0.3. As
# in the paper, all methods use this known value.

# %%
NOISE = 0.3
train, test = (vsd.datasets.Data(data.x, data.y / 10) for data in vsd.datasets.cubic())
print(train)

# %% [markdown]
# `make_method` gives every method the same interface: `step` and `predict`. The network has one hidden layer of 100
# units. Its input is a single number. Dropout noise on it would only blur the x axis, so the first layer, called `"0"`
# in the network, has no noise. (MC dropout does not change the inputs by default. BBB has a posterior for every weight
# and no noise on inputs.) All methods get the same number of steps with a learning rate that falls to zero.


# %%
def train_method(name, sizes, data, *, steps, batch_size=100, noise="learned", **options):
    """Train a method with Adam; the learning rate falls from 0.01 to 0 along a cosine."""
    pyro.set_rng_seed(0)
    net = vsd.nn.mlp(sizes)
    method = vsd.baselines.make_method(
        name, net, num_data=len(data), task="regression", noise=noise, lr=1e-2, **options
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(method.optimizer, steps)
    while method.num_steps < steps:
        for x, y in data.batches(batch_size):
            method.step(x, y)
            schedule.step()
    return method


STEPS, SAMPLES = (20, 20) if SMOKE else (1500, 1000)
OPTIONS = {"bbb": {}, "mc_dropout": {}, "vd": {"exclude": "0"}, "vsd": {"exclude": "0", "num_reflections": 2}}
methods = {
    name: train_method(name, [1, 100, 1], train, steps=STEPS, noise=NOISE, **options)
    for name, options in OPTIONS.items()
}
predictions = {name: method.predict(test.x, num_samples=SAMPLES, seed=0) for name, method in methods.items()}

# %%
TITLES = {"bbb": "BBB", "mc_dropout": "MC dropout", "vd": "VD", "vsd": "VSD"}
figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
for ax, (name, prediction) in zip(axes.flat, predictions.items(), strict=True):
    vsd.plots.band(test.x, prediction, data=(train.x, train.y), ax=ax)
    ax.plot(test.x, test.y, "k:", linewidth=1)
    ax.set(title=TITLES[name], ylabel="y / 10", ylim=(-16, 16))
    ax.label_outer()

# %% [markdown]
# The dotted line is the true function, the shaded bands are ±1, 2 and 3 σ, and the dashed lines show the epistemic
# part. As desired, all four methods have a small σ at the data and a larger σ away from it. The table has the error
# within the range of the data, σ near the middle and outside the data, and the share of the true function outside the
# data that lies in the band of ±3 σ.

# %%
x = test.x.squeeze(-1).abs()
inside, outside = x <= 4, x > 4
errors, sigma_outside = {}, {}
print(f"{'':12}{'RMSE |x|≤4':>12}{'σ |x|≤2':>10}{'σ |x|>4':>10}{'in ±3σ, |x|>4':>15}")
for name, prediction in predictions.items():
    sigma, error = prediction.stddev, (prediction.mean - test.y).abs()
    sigma_outside[name] = sigma[outside].mean()
    errors[name] = vsd.metrics.rmse(prediction.mean[inside], test.y[inside])
    covered = (error < 3 * sigma)[outside].double().mean()
    middle, beyond = sigma[x <= 2].mean(), sigma_outside[name]
    print(f"{TITLES[name]:12}{errors[name]:12.2f}{middle:10.2f}{beyond:10.2f}{covered:15.0%}")
    assert SMOKE or beyond > 2 * middle
for name in ("vd", "vsd"):
    print(f"mean noise variance α of {TITLES[name]}: {methods[name].guide.alpha('net.2.weight').mean():.2f}")

assert SMOKE or sigma_outside["vsd"] > sigma_outside["vd"] > sigma_outside["mc_dropout"]
assert SMOKE or errors["bbb"] > max(errors["mc_dropout"], errors["vd"], errors["vsd"])

# %% [markdown]
# Of the three kinds of dropout VSD has the largest σ outside the data. The noise variances explain this: VD keeps every
# α at 1 or below, VSD does not. BBB is also uncertain there, but it has the worst fit to the data.
#
# No band contains the whole true function. ReLU networks extrapolate along straight lines, and the cube does not. A
# band shows how much the networks that fit the data disagree. It cannot show functions that no such network represents.

# %% [markdown]
# ## Between two clusters
#
# Being uncertain *between* clusters is harder than being uncertain outside them. With noise on the inputs of the last
# layer, the epistemic variance of the output is
#
# $$\mathrm{Var} f(x) = (\theta \odot h(x))^\top\, \Sigma\, (\theta \odot h(x)),$$
#
# where $h(x)$ are the hidden units and $\Sigma$ is the covariance of their noise. With *independent* noise (VD: Σ is
# diagonal) this is a sum of squares of ReLUs, which is a convex function of $x$ in one dimension. Between two clusters
# it can never exceed its value at the less certain cluster. Only correlated noise can do better: it can cancel at the
# data but not between them.
#
# First we train a plain network with one hidden layer of 50 units. `bayesianize` starts from the weights of the
# network. So we can keep the network fixed and fit the noise alone, with a learning rate of zero for everything else.
# All guides trained in this way have the same mean and differ only in the number T of reflections. The noise multiplies
# weights, so a weight near zero stays near zero. For this reason the last layer starts five times as large as usual.

# %%
train, test = vsd.datasets.two_clusters()
pyro.set_rng_seed(0)
trained = vsd.nn.mlp([1, 50, 1])
with torch.no_grad():
    trained[2].weight *= 5
optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
for _ in range(20 if SMOKE else 500):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(trained(train.x).squeeze(-1), train.y).backward()
    optimizer.step()


def fit_noise(net, num_reflections, **rates):
    """Fit structured noise on the last layer of a network; return the predictions."""
    pyro.set_rng_seed(0)
    model = vsd.nn.Regressor(vsd.nn.bayesianize(net, exclude="0"), num_data=len(train), noise=0.1)
    guide = vsd.VSDGuide(model, num_reflections=num_reflections, init_alpha=0.01)
    optimizer = torch.optim.Adam(guide.parameter_groups(lr=3e-2, **rates))
    epochs = 20 if SMOKE else 2000  # one batch holds all data
    vsd.fit(
        model, guide, train, epochs=epochs, optimizer=optimizer, progress=False,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
    )  # fmt: skip
    return vsd.predict(model, guide, test.x, num_samples=SAMPLES, seed=0)


gaps = {
    "VD: T = 0, noise only": fit_noise(trained, 0, theta=0, model=0),
    "VSD: T = 2, noise only": fit_noise(trained, 2, theta=0, model=0),
    "VSD: T = 20, noise only": fit_noise(trained, 20, theta=0, model=0),
    "VSD: T = 2, trained from scratch": fit_noise(vsd.nn.mlp([1, 50, 1]), 2),
}

# %%
figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
for ax, (name, prediction) in zip(axes.flat, gaps.items(), strict=True):
    vsd.plots.band(test.x, prediction, data=(train.x, train.y), part="epistemic", ax=ax)
    ax.plot(test.x, test.y, "k:", linewidth=1)
    ax.set(title=name, ylim=(-3, 3))
    ax.label_outer()

# %%
x = test.x.squeeze(-1)
at_data = ((x >= -1) & (x <= -0.7)) | ((x >= 0.5) & (x <= 1))
between = (x > -0.5) & (x < 0.3)
ratios = {}
print(f"{'epistemic σ':32}{'at the data':>12}{'between':>10}{'ratio':>8}{'cosine in ±3σ':>16}")
for name, prediction in gaps.items():
    sigma = prediction.epistemic.sqrt()
    ratios[name] = sigma[between].mean() / sigma[at_data].mean()
    inside = ((prediction.mean - test.y).abs() < 3 * sigma)[between].double().mean()
    print(f"{name:32}{sigma[at_data].mean():12.3f}{sigma[between].mean():10.3f}{ratios[name]:8.2f}{inside:16.0%}")

independent, few, many, default = ratios.values()
assert SMOKE or independent < 1 < many
assert SMOKE or independent < few < many
assert SMOKE or default < 1

# %% [markdown]
# Independent noise has the *smallest* σ between the clusters, as the formula predicts. With enough reflections the σ of
# VSD is larger there than at the data. It is still too small to contain the true cosine (last column): the noise only
# multiplies the weights of one trained network, and does not cover all functions that fit the data.
#
# We chose this recipe (noise only, a larger last layer, twenty reflections) among about thirty that we tried, by the
# ratio printed above. It shows what the noise can do, not what a first try gives.
#
# The last panel is a warning. By default there are two reflections and everything is trained together. The result does
# not detect the gap. During training, noise on important units raises the loss, and the network learns to avoid it. If
# you need uncertainty between clusters, fit the noise to a trained network with many reflections. They cost little.

# %% [markdown]
# ## Patients: intervals and their coverage
#
# The diabetes data of scikit-learn contain the progression of the disease after a year and ten measurements of each
# patient. A 90 % interval is correct if it contains the true value for nine of ten test patients. Here the
# observation noise is learned, and the ten inputs have dropout noise as well. Batches always have nearly equal sizes;
# with a batch size of 59 they are exactly equal.

# %%
train, test = vsd.datasets.diabetes()
print(len(train), "training and", len(test), "test patients")
STEPS, SAMPLES = (12, 20) if SMOKE else (900, 500)
patients = {}
for name, options in {"map": {}, "vsd": {"num_reflections": 2}}.items():
    method = train_method(name, [10, 50, 1], train, steps=STEPS, batch_size=59, **options)
    patients[name] = method.predict(test.x, num_samples=SAMPLES, seed=0)

LEVELS = torch.tensor([0.5, 0.8, 0.9, 0.95])
coverages = {
    name: torch.tensor([vsd.metrics.coverage(prediction, test.y, level) for level in LEVELS.tolist()])
    for name, prediction in patients.items()
}
print("interval        " + "".join(f"{level:8.0%}" for level in LEVELS))
for name, covered in coverages.items():
    print(f"coverage, {name:6}" + "".join(f"{share:8.0%}" for share in covered))
    print(vsd.metrics.report(patients[name], test.y), "\n")

gap = {name: (covered - LEVELS).abs().mean() for name, covered in coverages.items()}
assert SMOKE or gap["vsd"] < gap["map"]
assert SMOKE or coverages["map"].lt(LEVELS).all()

# %% [markdown]
# The plain network (`map`, the best single set of weights) is overconfident at every level: it has fitted the noise of
# the training patients and underestimates its errors. VSD comes close to the levels and is better in every metric of
# the report. With so few patients a share has a standard error of up to five points, so the remaining differences may
# be chance.
#
# The figure shows the intervals of the first twenty test patients in the original units.

# %%
low, high = patients["vsd"].interval(0.9)
centre, low, high, truth = (v[:20] * test.y_std + test.y_mean for v in (patients["vsd"].mean, low, high, test.y))
figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
reach = torch.stack([centre - low, high - centre])
ax.errorbar(range(20), centre, reach, fmt="o", markersize=4, capsize=3, label="mean and 90 % interval")
ax.plot(range(20), truth, "kx", label="truth")
ax.set(xlabel="patient", ylabel="disease progression", xticks=range(20))
figure.legend(loc="outside upper center", ncols=2, frameon=False)
print(f"{((truth >= low) & (truth <= high)).sum()} of 20 inside")

# %% [markdown]
# ## What to take away
#
# - `make_method(name, net, …)` gives every method of `vsd.baselines` the same interface: compare them on your data.
# - `prediction.epistemic` shows where the model needs data; `prediction.interval` gives the range of a new value.
# - Check `vsd.metrics.coverage` on held-out data before you trust an interval.
# - Dropout can detect a gap only with correlated noise; `num_reflections` sets how rich the correlations are.
#
# Next: [classification](02_classification.ipynb).
