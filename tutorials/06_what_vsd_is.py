# %% [markdown]
# # 6. What VSD is, and what it is not
#
# VSD is dropout with a learned covariance: each unit of a layer is multiplied by noise ξ of mean 1 and covariance
#
# $$\Sigma = U \operatorname{diag}(\alpha)\, U^\top, \qquad U = H_T \cdots H_1,$$
#
# a product of T reflections. T = 0 is variational dropout (VD): independent noise. This page shows a case in which the
# reflections matter, looks at the covariance that is learned, then at real data, where they hardly do, and at last puts
# the uncertainty to work: it chooses which images are worth a label.
#
# What VSD is *not*: a bound on the evidence of the model as stated (the prior's scale is replaced by its optimum), or a
# regulariser of the weights Θ, which the KL does not contain.

# %%
import os

import matplotlib.pyplot as plt
import pyro
import torch

import pyro_vsd as vsd

SMOKE = "PYRO_VSD_SMOKE" in os.environ  # a short run that only shows that all of this works
torch.set_num_threads(1)  # the products are so small that a second thread would only be waited for


def train_guide(net, data, *, seed, epochs, batch_size, lr, noise=None, **options):
    """A network made Bayesian and trained, the step size falling to zero; regression where a noise is given."""
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
# Ten inputs in five pairs. The two of a pair are nearly equal, and the target is half the sum of all. What the data say
# about the weights is clear for the sum of each pair, and nearly nothing for the difference. A posterior should be
# narrow in the first and wide in the second: two weights, one up as the other goes down. Independent noise cannot be
# that.
#
# The model is linear, so there is a best covariance of the noise to compare with (`vsd.diagnosis.best_covariance`), and
# `vsd.diagnose` reports how much of the gain over the best independent noise a guide has found.


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
        torch.nn.init.constant_(net[0].weight, 0.5)  # the true weights: only the noise has to be found
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
# Left, independent noise: it must be small on every input, for each by itself changes the prediction. Right, five
# reflections: the noise is several times as large (mind the scales), and of opposite sign for the two of a pair, so
# that it cancels in their sum. Where the twins are alike, as in training, both networks are about as sure. Where they
# differ, which no training row has shown, only structured noise makes the network much less sure.
#
# Five reflections could undo five pairs exactly; they find most of the gain from every start. With fewer it depends on
# where the vectors start, and T = 3 was no better than T = 2: the search is not convex. More reflections than seem
# necessary cost little and help to find the way.

# %% [markdown]
# ## Real data: T = 0, 1, 2, 3, and the kind of vectors
#
# The diabetes patients of the first tutorial. The reflection vectors are free parameters by default; the paper makes
# them by small networks, `"fc"` and `"low_rank"`. A difference means something only beside the spread over seeds, so
# each setting is trained from the same starts, and compared to VD (T = 0) from that start.

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
# Nothing to choose between them: all errors are within 1 % of VD's, the log-likelihoods within 0.01. T = 3 comes out
# worse by more than two standard errors, yet with three starts, one split of the patients and five comparisons that is
# no finding. The kind of the vectors makes no difference either.
#
# **When is VD enough?** Where the noise is weak, as with many data, and where inputs and units are not redundant: the
# KL alone never wants a rotation, only the likelihood can pay for one. Try more reflections than the default two where
# features are correlated and data are few, or a gap between the data has to be noticed, as in the first tutorial. The
# page "Choosing options" of the documentation has more measurements.

# %% [markdown]
# ## Diagnose
#
# `vsd.diagnose` looks at a trained guide: the droprates, the parts of the objective, how much of the possible gain the
# covariance has found, held-out predictions. What it finds amiss it says, with what to do about it.

# %%
report = vsd.diagnose(model, guide, train, test)
print(report)
correlated = {name: site["correlated"] for name, site in report.sites.items()}
assert SMOKE or (report.healthy and max(correlated.values()) < 0.05)

# %% [markdown]
# The last of the guides above is healthy. Its noise is all but independent (`correlated`), and the note says what is
# left to gain: a few hundredths of a nat per patient.

# %% [markdown]
# ## Active learning
#
# Labels cost money. Given 20 labelled digits and a pool without labels, which 20 to ask for next? Those for which the
# network is least sure (`"entropy"`), or those for which the sampled networks disagree most (`"bald"`: the mutual
# information of label and weights), or any. After each round the network is trained anew, from the same start.

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
            scores = vsd.metrics.acquisition(vsd.predict(model, guide, train.x[pool], num_samples=20, seed=1), kind)
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
assert SMOKE or (all(difference.mean() > 0 for difference in gain.values()) and gain["bald"].min() > 0)
mean = {kind: curve.mean(0) for kind, curve in curves.items()}
assert SMOKE or (mean["bald"][-2] > mean["random"][-1] and (mean["entropy"] < mean["random"])[1:4].all())

# %% [markdown]
# The bars are the spread over three runs. With 160 labels both scores are ahead of chance, BALD in every run; with 140
# it is ahead of random labels with 160. Entropy begins below chance: it also asks for images that are doubtful in
# themselves, while BALD asks where the networks *disagree*. Three runs on one small data set show that the loop works,
# not how much it gains on yours.
#
# ## What to take away
#
# - The reflections buy correlations. Look at them: `vsd.plots.noise_covariance(guide.noise(site))`.
# - Compare T by paired runs from several starts, and believe a difference when it is larger than its spread.
# - Start with the defaults; ask `vsd.diagnose` what is left to gain.
# - `vsd.metrics.acquisition(prediction, "bald")` ranks what to label next.
