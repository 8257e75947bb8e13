# %% [markdown]
# # 3. No knobs: from an estimator to a calibrated decision
#
# **At the end** you have predictions with good uncertainty without a single setting, you know what the ensemble behind
# them does, and you have two kinds of decisions: intervals with a guaranteed coverage, and a classifier that abstains.
# The tutorial takes ten minutes to read and two minutes to run.

# %%
from importlib.util import find_spec

import matplotlib.pyplot as plt
import numpy as np
import pyro
import torch
from sklearn.datasets import make_friedman1

import pyro_vsd as vsd

EPOCHS = None  # chosen by the library: 3,000 or 9,000 steps

# %% [markdown]
# ## An estimator
#
# The data are a standard test of scikit-learn: ten inputs of which five matter, and a target with noise of standard
# deviation 1. Some rows are kept for later decisions, and some for testing.

# %%
X, y = make_friedman1(1000, noise=1.0, random_state=0)
parts = {"train": slice(400), "held out": slice(400, 550), "test": slice(550, 1000)}
(X_train, y_train), (X_held, y_held), (X_test, y_test) = ((X[part], y[part]) for part in parts.values())

regressor = vsd.sklearn.VSDRegressor(random_state=0)

# %% tags=["remove-cell"]
# Settings of our own runs: one thread, since the matrices are small, and a short mode that only shows that all works.
import os

torch.set_num_threads(1)
if SMOKE := "PYRO_VSD_SMOKE" in os.environ:
    EPOCHS = 2
    regressor.set_params(epochs=EPOCHS)

# %%
regressor.fit(X_train, y_train)
mean, std = regressor.predict(X_test, return_std=True)
print(f"RMSE {np.sqrt(np.mean((mean - y_test) ** 2)):.2f}, mean σ {std.mean():.2f}; the noise alone has 1.00")
print(vsd.metrics.report(regressor.predictive(X_test), torch.tensor(y_test)))

# %% [markdown]
# There was nothing to choose. The estimator standardises inputs and targets, trains long enough for the number of rows,
# and lowers the learning rate to zero. It works in pipelines, grid searches and cross-validation like any other one.
#
# ## What is behind it: an ensemble
#
# By default the estimator trains five networks. They differ in their initial weights and in the weight λ of the KL, the
# one option of VSD that matters; one of them is plain, without noise. A part of the training rows is held out. The
# weights of the five in the mixture, and a factor on each one's σ, are those with which the mixture predicts the
# held-out rows best. These rows also choose between 3,000 and 9,000 training steps. Then all five are trained again on
# all rows. Nobody has to choose λ or the number of epochs.

# %%
print(regressor.ensemble_)
vsd.plots.members(regressor.ensemble_)
plt.show()

# %% [markdown]
# Bars are the weights. Points are the held-out scores of the members, each by itself and with the σ that suits it best;
# the dotted line is the score of the mixture as fitted. With your own network, use `vsd.Ensemble`. It takes a model as
# `vsd.fit` does, copies it, and starts each copy anew.

# %%
X_mean, X_std, y_mean, y_std = X_train.mean(0), X_train.std(0), y_train.mean(), y_train.std()


def standardised(X, y):
    return vsd.datasets.Data(
        torch.tensor((X - X_mean) / X_std, dtype=torch.float32), torch.tensor((y - y_mean) / y_std, dtype=torch.float32)
    )


train, test = standardised(X_train, y_train), standardised(X_test, y_test)
pyro.set_rng_seed(0)
net = vsd.nn.bayesianize(vsd.nn.mlp([10, 100, 1]))
model = vsd.nn.Regressor(net, num_data=len(train), noise="learned")
ensemble = vsd.Ensemble(model, members=5).fit(train, epochs=EPOCHS, progress=False)
predictions = {"the default ensemble": ensemble.predict(test.x)}

# %% [markdown]
# ## Is it worth it?
#
# A fair comparison has the same network, optimiser and number of steps. We train five plain networks (`None` is a
# member without noise). They are stacked in the same way as ours, or have equal weights and one σ, their error on the
# held-out rows. The last row is one of them alone, again with its error on the held-out rows as σ.

# %%
plain = vsd.Ensemble(model, members=5, kl_weight=[None] * 5).fit(train, epochs=EPOCHS, progress=False)
held_out = standardised(X_held, y_held)


def equal_weights(members):
    """The mixture of plain networks with equal weights; its σ is the error on the held-out rows."""
    held, new = (
        torch.stack([vsd.predict(*member, x, num_samples=1).mean for member in members])
        for x in (held_out.x, test.x)
    )  # fmt: skip
    return vsd.RegressionPrediction.from_samples(new, (held.mean(0) - held_out.y).square().mean().sqrt())


predictions["five plain networks, stacked"] = plain.predict(test.x)
predictions["five plain networks, equal"] = equal_weights(plain.members)
predictions["one plain network"] = equal_weights(plain.members[:1])

print(f"{'':30}{'RMSE':>8}{'log-likelihood':>16}{'coverage of 95 %':>18}")
scores = {}
for name, prediction in predictions.items():
    scores[name] = vsd.metrics.log_likelihood(prediction, test.y)
    rmse, coverage = vsd.metrics.rmse(prediction, test.y), vsd.metrics.coverage(prediction, test.y)
    print(f"{name:30}{rmse:8.3f}{scores[name]:16.3f}{coverage:18.0%}")

# %% tags=["remove-cell"]
assert SMOKE or max(scores, key=scores.get) == "the default ensemble"
assert SMOKE or min(scores, key=scores.get) == "one plain network"

# %% [markdown]
# One plain network has the largest error. Five are better, and the default ensemble is better still: noise limits how
# closely four of its members fit the training rows. This is one data set and one seed. On some data sets plain
# networks, stacked, are as good; the page *Ensembles: measurements* of the documentation says on which.
#
# ## Intervals with a guaranteed coverage
#
# Conformal prediction corrects the intervals with held-out rows. The coverage then holds on average, whatever the
# network, for rows like the held-out ones. MAPIE does it (extra `conformal`), and its score `StdConformityScore` keeps
# intervals wide where σ is large.

# %%
if find_spec("mapie"):
    from mapie.conformity_scores import StdConformityScore
    from mapie.regression import SplitConformalRegressor

    split = SplitConformalRegressor(
        regressor, confidence_level=0.9, conformity_score=StdConformityScore(), prefit=True
    )  # fmt: skip
    split.conformalize(X_held, y_held)
    _, intervals = split.predict_interval(X_test)
    low, high = intervals[:, 0, 0], intervals[:, 1, 0]
    inside = ((y_test >= low) & (y_test <= high)).mean()
    print(f"90 % intervals contain {inside:.0%} of the test targets; their mean width is {(high - low).mean():.1f}")

# %% tags=["remove-cell"]
assert SMOKE or not find_spec("mapie") or 0.8 < inside < 0.98

# %% [markdown]
# ## A classifier that abstains
#
# For a decision by a threshold the probabilities themselves must be right. A single guide tends to be underconfident
# on images like those of training. `vsd.calibrate` chooses one factor on the noise and one temperature by held-out
# rows, in seconds. Other held-out rows choose the threshold: as many decisions as possible with an error of at most
# 1 %.

# %%
data, digits = vsd.datasets.digits()
train, for_calibration, for_threshold = data[:900], data[900:1150], data[1150:]
pyro.set_rng_seed(0)
classifier = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 100, 10])), num_data=len(train))
guide = vsd.VSDGuide(classifier)
vsd.fit(classifier, guide, train, epochs=EPOCHS, progress=False)
calibration = vsd.calibrate(classifier, guide, for_calibration, progress=False)
print(calibration)

found = {}
for name, option in {"as trained": None, "calibrated": calibration}.items():
    found[name] = vsd.predict(classifier, guide, digits.x, seed=0, calibration=option)
    nll, ece = vsd.metrics.nll(found[name], digits.y), vsd.metrics.ece(found[name], digits.y)
    print(f"{name:11} NLL {nll:.3f}, ECE {ece:.3f}")

# %%
judged = vsd.predict(classifier, guide, for_threshold.x, seed=0, calibration=calibration)
curve = vsd.metrics.risk_coverage(judged, for_threshold.y)
_, _, threshold = curve.within(risk=0.01)
answer = found["calibrated"]
decided, wrong = answer.confidence >= threshold, (answer.labels != digits.y).float()
print(f"confidence of at least {threshold:.2f}: {decided.float().mean():.0%} of the test images are decided")
print(f"error of all images {wrong.mean():.1%}, of the decisions {wrong[decided].mean():.1%}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
vsd.plots.reliability(found, digits.y, num_bins=10, ax=axes[0])
vsd.plots.risk_coverage({"calibrated": answer}, digits.y, ax=axes[1])
axes[1].axvline(float(decided.float().mean()), color="0.5", linewidth=0.8, linestyle="--", label="our threshold")
axes[1].set(xlim=(0.5, 1), xlabel="share of images decided", ylabel="error rate of the decisions")
axes[1].legend(frameon=False, fontsize="small")
plt.show()

# %% tags=["remove-cell"]
assert SMOKE or calibration.scores["after"] > calibration.scores["before"]
assert SMOKE or wrong[decided].mean() < 0.02 < decided.float().mean() - 0.5

# %% [markdown]
# The guarantee and the threshold hold for rows like the held-out ones. Under shift they do not: watch for it, as in
# the first tutorial.
#
# ## What you can do now
#
# - Get predictions with uncertainty from `VSDRegressor()` and `VSDClassifier()`, with nothing to set.
# - Train an ensemble of your own network with `vsd.Ensemble`, and see what each member adds: `ensemble.diagnose(data)`.
# - Calibrate a single guide with `vsd.calibrate`, and get intervals with a guaranteed coverage by MAPIE.
# - Decide or abstain by a threshold that held-out rows have chosen.
#
# Next: [your own Pyro model](04_your_own_pyro_model.ipynb).
