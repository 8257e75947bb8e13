# %% [markdown]
# # 6. What VSD is, and what it is not
#
# VSD is dropout with a learned covariance. It multiplies each unit of a layer by noise ξ with mean 1 and covariance
#
# $$\Sigma = U \operatorname{diag}(\alpha)\, U^\top, \qquad U = H_T \cdots H_1,$$
#
# where U is a product of T reflections. T = 0 is variational dropout (VD) with independent noise. This tutorial first
# shows a case in which the reflections matter, and the covariance that is learned. On real data they hardly matter. In
# the last part we use the uncertainty to choose the images that should be labelled next.
#
# VSD is *not* a bound on the evidence of the model as stated, because the prior's scale is replaced by its optimum. It
# does not regularise the weights Θ either, because the KL does not contain them.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import torch

import pyro_vsd as vsd

SMOKE = "PYRO_VSD_SMOKE" in os.environ  # a short run that only shows that everything works
torch.set_num_threads(1)  # matrices are too small to benefit from a second thread


def train_guide(net, data, *, seed, epochs, batch_size, lr, noise=None, **options):
    """Make a network Bayesian and train it with a falling learning rate; a regression if noise is given."""
    pyro.set_rng_seed(seed)
    net = vsd.nn.bayesianize(net)
    model = vsd.nn.Regressor(net, len(data), noise=noise) if noise else vsd.nn.Classifier(net, len(data))
    guide = vsd.VSDGuide(model, **options)
    history = vsd.fit(
        model, guide, data, epochs=epochs, batch_size=batch_size, progress=False,
        optimizer=torch.optim.Adam(guide.parameter_groups(lr=lr)),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
    )  # fmt: skip
    return model, guide, history


# %% [markdown]
# ## Five pairs of twins
#
# There are ten inputs in five pairs. The two inputs of a pair are nearly equal, and the target is half the sum of all
# inputs. So the data determine the sum of the two weights of a pair, and say almost nothing about their difference. The
# posterior should be narrow for the sum and wide for the difference: if one weight is larger, the other is smaller.
# Independent noise cannot represent this.
#
# The model is linear, so we can compute the best covariance of the noise (`vsd.diagnosis.best_covariance`).
# `vsd.diagnose` reports which share of the gain over the best independent noise a guide has found.


# %%
def twins(rows, apart, seed):
    generator = torch.Generator().manual_seed(seed)
    common, own, noise = (torch.randn(rows, n, generator=generator) for n in (5, 5, 1))
    x = torch.stack([common + apart * own, common - apart * own], -1).flatten(1)
    return vsd.datasets.Data(x, x.sum(-1) / 2 + 0.3 * noise.squeeze(-1))


train, alike, apart = twins(200, 0.1, seed=0), twins(300, 0.1, seed=1), twins(300, 1.0, seed=2)
SITE = "net.0.weight"
guides, found, sigma = {}, {}, {}
print(f"{'T':>2}{'loss':>8}{'gain found, by start':>28}{'mean':>7}{'σ, twins alike':>17}{'σ, twins apart':>17}")
for T in (0, 1, 2, 3, 5):
    rows = []
    for seed in range(2 if SMOKE else 3):
        net = vsd.nn.mlp([10, 1])
        torch.nn.init.constant_(net[0].weight, 0.5)  # the true weights: only the noise has to be learned
        model, guide, history = train_guide(
            net, train, seed=seed, epochs=10 if SMOKE else 500, batch_size=200, lr=5e-2, noise=0.3,
            num_reflections=T, init_alpha=0.05,
        )  # fmt: skip
        gain = vsd.diagnose(model, guide, train, num_samples=4).sites[SITE]["gain"]["found"]
        predictions = [vsd.predict(model, guide, data.x, num_samples=50, seed=0) for data in (alike, apart)]
        loss = sum(epoch["loss"] for epoch in list(history)[-50:]) / min(50, len(history))
        rows.append([loss, gain, *(prediction.epistemic.mean().sqrt() for prediction in predictions)])
        guides[T] = guide
    loss, found[T], *sigma[T] = torch.tensor(rows).T
    gains = " ".join(f"{gain:.0%}" for gain in found[T].tolist())
    near, far = (values.mean() for values in sigma[T])
    print(f"{T:2}{loss.mean():8.1f}{gains:>28}{found[T].mean():7.0%}{near:17.3f}{far:17.3f}")

# %%
independent, structured = (guides[T].noise(SITE) for T in (0, 5))
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for ax, (name, noise) in zip(axes, {"T = 0": independent, "T = 5": structured}.items(), strict=True):
    vsd.plots.noise_covariance(noise, ax=ax).set_title(name)
independent, structured = (noise.covariance_matrix.detach() for noise in (independent, structured))
spread = structured.diagonal().sqrt()
correlation = structured / spread.outer(spread)
pairs = correlation[range(0, 10, 2), range(1, 10, 2)]
print("correlation within the pairs, T = 5:", " ".join(f"{value:.2f}" for value in pairs))
variances = [covariance.diagonal().mean() for covariance in (independent, structured)]
print(f"mean variance of a unit's noise: {variances[0]:.4f} at T = 0, {variances[1]:.4f} at T = 5")

assert SMOKE or found[5].min() > max(found[T].max() for T in (0, 1, 2, 3)) > found[0].max()
assert SMOKE or (sigma[5][1].mean() > 2 * sigma[0][1].mean() and sigma[5][0].mean() < 1.1 * sigma[0][0].mean())
assert SMOKE or (pairs.max() < -0.8 and variances[1] > 4 * variances[0])

# %% [markdown]
# The left panel shows independent noise. It must be small on every input, because noise on any single input changes the
# prediction. The right panel shows five reflections. The noise is several times as large (note the different scales),
# and it has opposite signs for the two inputs of a pair, so it cancels in their sum. If the twins are alike, as in
# training, both networks are about equally certain. If they differ, as in no training row, only structured noise makes
# the network much less certain.
#
# Five reflections can represent five pairs exactly. They find most of the gain from every start. With fewer reflections
# the result depends on the initial vectors, and T = 3 was no better than T = 2: the search is not convex. More
# reflections than necessary cost little and make the search easier.

# %% [markdown]
# ## Real data: T = 0, 1, 2, 3, and kinds of vectors
#
# We use the diabetes data of the first tutorial. The reflection vectors are free parameters by default. The paper
# computes them by small networks, `"fc"` and `"low_rank"`. A difference is meaningful only if it exceeds the spread
# over seeds. So each setting is trained with the same seeds and compared to VD (T = 0) with the same seed.

# %%
train, test = vsd.datasets.diabetes()
SEEDS = range(2 if SMOKE else 3)
SETTINGS = {
    "T = 0 (VD)": {"num_reflections": 0},
    "T = 1": {"num_reflections": 1},
    "T = 2": {"num_reflections": 2},
    "T = 3": {"num_reflections": 3},
    "T = 2, fc": {"num_reflections": 2, "vectors": "fc"},
    "T = 2, low rank": {"num_reflections": 2, "vectors": "low_rank", "rank": 8},
}
rmse, likelihood = {}, {}
for name, options in SETTINGS.items():
    scores = []
    for seed in SEEDS:
        pyro.set_rng_seed(seed)
        net = vsd.nn.mlp([10, 50, 1])
        model, guide, _ = train_guide(
            net, train, seed=seed, epochs=3 if SMOKE else 150, batch_size=len(train), lr=3e-2, noise="learned",
            **options,
        )  # fmt: skip
        prediction = vsd.predict(model, guide, test.x, num_samples=100, seed=0)
        scores.append([vsd.metrics.rmse(prediction, test.y), vsd.metrics.log_likelihood(prediction, test.y)])
    rmse[name], likelihood[name] = torch.tensor(scores).T

base = "T = 0 (VD)"
print(f"{'':18}{'RMSE':>8}{'± seeds':>9}{'ratio to T = 0':>20}{'log-likelihood, minus T = 0':>30}")
errors = {}
for name in SETTINGS:
    ratio, gain = rmse[name] / rmse[base], likelihood[name] - likelihood[base]
    errors[name] = [(value.mean(), value.std() / len(SEEDS) ** 0.5) for value in (ratio, gain)]
    numbers = [f"{mean:.3f} ± {error:.3f}" for mean, error in errors[name]]
    print(f"{name:18}{rmse[name].mean():8.3f}{rmse[name].std():9.3f}{numbers[0]:>20}{numbers[1]:>30}")

rotations = {name: error for name, error in errors.items() if name != base}
apart = [name for name, ((mean, error), _) in rotations.items() if abs(mean - 1) > 2 * error]
print("further from VD than two standard errors, in RMSE:", ", ".join(apart) or "none")
assert SMOKE or all(abs(ratio - 1) < 0.01 and abs(gain) < 0.01 for (ratio, _), (gain, _) in rotations.values())

# %% [markdown]
# The settings are equally good: all errors are within 1 % of VD's, and the log-likelihoods within 0.01. T = 3 is
# worse by more than two standard errors. With three seeds, one split of the patients and five comparisons this is not
# significant. The kind of vectors makes no difference either.
#
# **When is VD enough?** VD is enough if the noise is weak, as with a lot of data, and if inputs and units are not
# redundant. The KL alone never favours a rotation; only the likelihood can. Try more than the default two reflections
# if features are correlated and data are scarce, or if you need uncertainty between clusters as in the first tutorial.
# The page "Do correlations help?" of the documentation has more advice.

# %% [markdown]
# ## Diagnose a training run
#
# `vsd.diagnose` inspects a trained guide: the noise variances, the parts of the objective, the share of the possible
# gain that the covariance has found, and held-out predictions. It explains what is wrong and what to try.

# %%
report = vsd.diagnose(model, guide, train, test)
print(report)
correlated = {name: site["correlated"] for name, site in report.sites.items()}
assert SMOKE or (report.healthy and max(correlated.values()) < 0.05)

# %% [markdown]
# The last of the guides above is healthy. Its noise is almost independent (`correlated`). The note says how much a
# better covariance could gain: a few hundredths of a nat per patient.

# %% [markdown]
# ## Active learning
#
# Labels are expensive. We start with 20 labelled digits and a pool without labels. Which 20 images should be labelled
# next? We compare three choices: images with the most uncertain predictions (`"entropy"`), images on which the sampled
# networks disagree most (`"bald"`, the mutual information of label and weights), and random images. After each round
# the network is trained again from the same initial values.

# %%
train, test = vsd.datasets.digits()
KINDS = ("random", "entropy", "bald")
ROUNDS, SEEDS = (2, 1) if SMOKE else (8, 3)


def learn(kind, seed):
    """Accuracy on test images after each round of twenty labels."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train), generator=generator)
    labelled, pool, accuracy = order[:20], order[20:], []
    for _ in range(ROUNDS):
        pyro.set_rng_seed(seed)
        model, guide, _ = train_guide(
            vsd.nn.mlp([64, 50, 10]), train[labelled], seed=seed, epochs=5 if SMOKE else 100, batch_size=len(labelled),
            lr=2e-2,
        )  # fmt: skip
        accuracy.append(vsd.metrics.accuracy(vsd.predict(model, guide, test.x, num_samples=20, seed=0), test.y))
        scores = torch.rand(len(pool), generator=generator)
        if kind != "random":
            scores = vsd.metrics.acquisition(vsd.predict(model, guide, train.x[pool], seed=1), kind)
        chosen = scores.argsort(descending=True)
        labelled, pool = torch.cat([labelled, pool[chosen[:20]]]), pool[chosen[20:]]
    return accuracy


curves = {kind: torch.tensor([learn(kind, seed) for seed in range(SEEDS)]) for kind in KINDS}
labels = [20 * (number + 1) for number in range(ROUNDS)]
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for (kind, curve), style in zip(curves.items(), ("o:", "s-", "^--"), strict=True):
    ax.errorbar(labels, curve.mean(0), curve.std(0, correction=0), fmt=style, capsize=3, markersize=4, label=kind)
    print(f"{kind:8}" + "".join(f"{value:8.3f}" for value in curve.mean(0)))
ax.set(xlabel="labels", ylabel="accuracy on test images")
ax.legend(frameon=False)
gain = {kind: (curves[kind] - curves["random"])[:, -1] for kind in ("entropy", "bald")}
for kind, difference in gain.items():
    print(f"{kind} minus random at {labels[-1]} labels, by seed:", " ".join(f"{value:+.3f}" for value in difference))
assert SMOKE or (gain["bald"].mean() > 0.01 and gain["bald"].min() >= 0)
mean = {kind: curve.mean(0) for kind, curve in curves.items()}
assert SMOKE or (mean["entropy"] < mean["random"])[1:4].all()

# %% [markdown]
# The bars show the spread over three runs. With 160 labels BALD is better than random labels on average, and worse in
# no run. Entropy is not better. With 40 to 80 labels it is worse than random: it also selects images that are ambiguous
# in themselves, while BALD selects images on which the networks *disagree*. Three runs on one
# small data set show that the loop works. They do not show how much you gain on your data.
#
# ## What to take away
#
# - The reflections describe correlations of the noise: look at `vsd.plots.noise_covariance(guide.noise(site))`.
# - Compare values of T by paired runs with several seeds. Trust a difference only if it is larger than its spread.
# - Start with the defaults; `vsd.diagnose` estimates how much a better covariance could gain.
# - `vsd.metrics.acquisition(prediction, "bald")` ranks the examples to label next.
