# %% [markdown]
# # 7. What VSD is, and what it is not
#
# **At the end** you have seen the covariance that VSD learns, a case in which it matters and one in which it does not,
# a diagnosis of a training run, and a loop that asks for the labels it needs most. The tutorial takes fifteen minutes
# to read and two minutes to run.
#
# VSD is dropout with a learned covariance. It multiplies each unit of a layer by noise ξ with mean 1 and covariance
#
# $$\Sigma = U \operatorname{diag}(\alpha)\, U^\top, \qquad U = H_T \cdots H_1,$$
#
# where U is a product of T reflections. T = 0 is variational dropout (VD) with independent noise.
#
# VSD is *not* a bound on the evidence of the model as stated, because the prior's scale is replaced by its optimum. It
# does not regularise the weights Θ either, because the KL does not contain them.

# %%
import matplotlib.pyplot as plt
import pyro
import torch

import pyro_vsd as vsd

SEEDS, ROUNDS = 3, 8
TWIN_EPOCHS, PATIENT_EPOCHS, DIGIT_EPOCHS = 500, 150, 100


def train_guide(net, data, *, seed, epochs, batch_size, lr, noise=None, **options):
    """Make a network Bayesian and train it with a falling learning rate; a regression if noise is given."""
    pyro.set_rng_seed(seed)
    net = vsd.nn.bayesianize(net)
    model = vsd.nn.Regressor(net, len(data), noise=noise) if noise else vsd.nn.Classifier(net, len(data))
    guide = vsd.VSDGuide(model, **options)
    history = vsd.fit(model, guide, data, epochs=epochs, batch_size=batch_size, lr=lr, progress=False)
    return model, guide, history


# %% tags=["remove-cell"]
# Settings of our own runs: one thread, since the matrices are small, and a short mode that only shows that all works.
import os

torch.set_num_threads(1)
if SMOKE := "PYRO_VSD_SMOKE" in os.environ:
    SEEDS, ROUNDS, TWIN_EPOCHS, PATIENT_EPOCHS, DIGIT_EPOCHS = 2, 2, 10, 3, 5

# %% [markdown]
# ## Five pairs of twins
#
# There are ten inputs in five pairs. The two inputs of a pair are nearly equal, and the target is half the sum of all
# inputs. So the data determine the sum of the two weights of a pair, and say almost nothing about their difference. The
# posterior should be narrow for the sum and wide for the difference: if one weight is larger, the other is smaller.
# Independent noise cannot represent this.
#
# The model is linear, so the best covariance of the noise is known (`vsd.diagnosis.best_covariance`). `vsd.diagnose`
# reports how far a guide is on the way from the best independent noise (0 %) to it (100 %).


# %%
def twins(rows, apart, seed):
    generator = torch.Generator().manual_seed(seed)
    common, own, noise = (torch.randn(rows, n, generator=generator) for n in (5, 5, 1))
    x = torch.stack([common + apart * own, common - apart * own], -1).flatten(1)
    return vsd.datasets.Data(x, x.sum(-1) / 2 + 0.3 * noise.squeeze(-1))


train, alike, apart = twins(200, 0.1, seed=0), twins(300, 0.1, seed=1), twins(300, 1.0, seed=2)
SITE = "net.0.weight"
guides, reached, sigma = {}, {}, {}
print(f"{'T':>2}{'loss':>8}{'share reached, by seed':>28}{'mean':>7}{'σ, twins alike':>17}{'σ, twins apart':>17}")
for T in (0, 1, 2, 3, 5):
    rows = []
    for seed in range(SEEDS):
        net = vsd.nn.mlp([10, 1])
        torch.nn.init.constant_(net[0].weight, 0.5)  # the true weights: only the noise has to be learned
        model, guide, history = train_guide(
            net, train, seed=seed, epochs=TWIN_EPOCHS, batch_size=200, lr=5e-2, noise=0.3,
            num_reflections=T, init_alpha=0.05,
        )  # fmt: skip
        share = vsd.diagnose(model, guide, train, num_samples=4).sites[SITE]["better_noise"]["share_reached"]
        predictions = [vsd.predict(model, guide, data.x, num_samples=50, seed=0) for data in (alike, apart)]
        loss = sum(epoch["loss"] for epoch in list(history)[-50:]) / min(50, len(history))
        rows.append([loss, share, *(prediction.epistemic.mean().sqrt() for prediction in predictions)])
        guides[T] = guide
    loss, reached[T], *sigma[T] = torch.tensor(rows).T
    shares = " ".join(f"{share:.0%}" for share in reached[T].tolist())
    near, far = (values.mean() for values in sigma[T])
    print(f"{T:2}{loss.mean():8.1f}{shares:>28}{reached[T].mean():7.0%}{near:17.3f}{far:17.3f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.get_layout_engine().set(wspace=0.08)
for ax, (T, title) in zip(axes, {0: "T = 0: independent noise", 5: "T = 5: correlated noise"}.items(), strict=True):
    vsd.plots.noise_covariance(guides[T], ax=ax).set_title(title, fontsize="medium")
independent, structured = (guides[T].noise(SITE).covariance_matrix.detach() for T in (0, 5))
spread = structured.diagonal().sqrt()
correlation = structured / spread.outer(spread)
pairs = correlation[range(0, 10, 2), range(1, 10, 2)]
print("correlation within the pairs, T = 5:", " ".join(f"{value:.2f}" for value in pairs))
variances = [covariance.diagonal().mean() for covariance in (independent, structured)]
print(f"mean variance of a unit's noise: {variances[0]:.4f} at T = 0, {variances[1]:.4f} at T = 5")

# %% tags=["remove-cell"]
assert SMOKE or reached[5].min() > max(reached[T].max() for T in (0, 1, 2, 3)) > reached[0].max()
assert SMOKE or (sigma[5][1].mean() > 2 * sigma[0][1].mean() and sigma[5][0].mean() < 1.1 * sigma[0][0].mean())
assert SMOKE or (pairs.max() < -0.8 and variances[1] > 4 * variances[0])

# %% [markdown]
# The left panel shows independent noise. It must be small on every input, because noise on any single input changes the
# prediction. The right panel shows five reflections. The noise is several times as large (note the different scales),
# and it has opposite signs for the two inputs of a pair, so it cancels in their sum. If the twins are alike, as in
# training, both networks are about equally certain. If they differ, as in no training row, only structured noise makes
# the network much less certain.
#
# Five reflections can represent five pairs exactly, and they come close to the best covariance from every start. With
# fewer reflections the result depends on the initial vectors: the search is not convex. More reflections than necessary
# cost little and make the search easier.

# %% [markdown]
# ## Real data: T = 0, 1, 2, 3, and kinds of vectors
#
# We use the diabetes data of tutorial 2. The reflection vectors are free parameters by default. The paper
# computes them by small networks, `"fc"` and `"low_rank"`. A difference is meaningful only if it exceeds the spread
# over seeds. So each setting is trained with the same seeds and compared to VD (T = 0) with the same seed.

# %%
train, test = vsd.datasets.diabetes()
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
    for seed in range(SEEDS):
        pyro.set_rng_seed(seed)
        net = vsd.nn.mlp([10, 50, 1])
        model, guide, _ = train_guide(
            net, train, seed=seed, epochs=PATIENT_EPOCHS, batch_size=len(train), lr=3e-2, noise="learned", **options
        )  # fmt: skip
        prediction = vsd.predict(model, guide, test.x, num_samples=100, seed=0)
        scores.append([vsd.metrics.rmse(prediction, test.y), vsd.metrics.log_likelihood(prediction, test.y)])
    rmse[name], likelihood[name] = torch.tensor(scores).T

# %% tags=["hide-input"]
base = "T = 0 (VD)"
print(f"{'':18}{'RMSE':>8}{'± seeds':>9}{'ratio to T = 0':>20}{'log-likelihood, minus T = 0':>30}")
errors = {}
for name in SETTINGS:
    ratio, difference = rmse[name] / rmse[base], likelihood[name] - likelihood[base]
    errors[name] = [(value.mean(), value.std() / SEEDS**0.5) for value in (ratio, difference)]
    numbers = [f"{mean:.3f} ± {error:.3f}" for mean, error in errors[name]]
    print(f"{name:18}{rmse[name].mean():8.3f}{rmse[name].std():9.3f}{numbers[0]:>20}{numbers[1]:>30}")

# %% tags=["remove-cell"]
assert SMOKE or all(abs(ratio - 1) < 0.02 and abs(other) < 0.02 for (ratio, _), (other, _) in errors.values())

# %% [markdown]
# The settings are equally good: all errors are within 2 % of VD's, and the log-likelihoods within 0.02. With three
# seeds, one split of the patients and five comparisons, a difference of two standard errors would not be significant.
# The kind of vectors makes no difference either.
#
# **When is VD enough?** VD is enough if the noise is weak, as with a lot of data, and if inputs and units are not
# redundant. The KL alone never favours a rotation; only the likelihood can. Try more than the default two reflections
# if features are correlated and data are scarce, or if you need uncertainty between clusters as in tutorial 2. The
# page "Do correlations help?" of the documentation has more advice.

# %% [markdown]
# ## Diagnose a training run
#
# `vsd.diagnose` inspects a trained guide: the size and the correlations of its noise, the parts of the objective, and
# held-out predictions. It explains what is wrong and what to try.

# %%
report = vsd.diagnose(model, guide, train, test)
print(report)

# %% tags=["remove-cell"]
correlated = {name: site["correlated"] for name, site in report.sites.items()}
assert SMOKE or (report.healthy and max(correlated.values()) < 0.1)

# %% [markdown]
# The last of the guides above is healthy: there is no warning. Its noise is almost independent (the column
# `correlated`), which fits the comparison above. `report.plot()` draws the same.

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


def learn(kind, seed):
    """Accuracy on test images after each round of twenty labels."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train), generator=generator)
    labelled, pool, accuracy = order[:20], order[20:], []
    for _ in range(ROUNDS):
        pyro.set_rng_seed(seed)
        model, guide, _ = train_guide(
            vsd.nn.mlp([64, 50, 10]), train[labelled], seed=seed, epochs=DIGIT_EPOCHS, batch_size=len(labelled), lr=2e-2
        )  # fmt: skip
        accuracy.append(vsd.metrics.accuracy(vsd.predict(model, guide, test.x, num_samples=20, seed=0), test.y))
        scores = torch.rand(len(pool), generator=generator)
        if kind != "random":
            scores = vsd.metrics.acquisition(vsd.predict(model, guide, train.x[pool], seed=1), kind)
        chosen = scores.argsort(descending=True)
        labelled, pool = torch.cat([labelled, pool[chosen[:20]]]), pool[chosen[20:]]
    return accuracy


curves = {kind: torch.tensor([learn(kind, seed) for seed in range(SEEDS)]) for kind in KINDS}

# %% tags=["hide-input"]
labels = torch.arange(1, ROUNDS + 1) * 20
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for (kind, curve), style, shift in zip(curves.items(), ("o:", "s-", "^--"), (-2, 0, 2), strict=True):
    spread = curve.std(0, correction=0)
    ax.errorbar(labels + shift, curve.mean(0), spread, fmt=style, capsize=2, markersize=4, linewidth=1.2, label=kind)
    print(f"{kind:8}" + "".join(f"{value:8.3f}" for value in curve.mean(0)))
ax.set(xlabel="labels", ylabel="accuracy on test images", xticks=labels)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
ahead = {kind: (curves[kind] - curves["random"])[:, -1] for kind in ("entropy", "bald")}
for kind, difference in ahead.items():
    print(f"{kind} minus random at {labels[-1]} labels, by seed:", " ".join(f"{value:+.3f}" for value in difference))

# %% tags=["remove-cell"]
assert SMOKE or ahead["bald"].mean() > max(0.0, float(ahead["entropy"].mean()))

# %% [markdown]
# The bars show the spread over three runs; the points of a round are drawn side by side. With 160 labels BALD is better
# than random labels on average, and entropy is not as good: it also selects images that are ambiguous in themselves,
# while BALD selects images on which the networks *disagree*. Three runs on one small data set show that the loop works.
# They do not show how much it helps on your data.
#
# ## What you can do now
#
# - Look at the learned noise: `vsd.plots.noise_covariance(guide, site)`.
# - Compare values of T by paired runs with several seeds, and trust a difference only if it is larger than its spread.
#   Start with the default.
# - Ask `vsd.diagnose` what is wrong with a training run.
# - Rank the examples to label next: `vsd.metrics.acquisition(prediction, "bald")`.
#
# Next: [from notebook to service](08_from_notebook_to_service.ipynb).
