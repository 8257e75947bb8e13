# %% [markdown]
# # 4. Your own Pyro model
#
# **At the end** you have a hand-written model with a network, group effects and an unknown noise level, trained with
# `VSDGuide` and a second guide, and you know how to watch the loss and how to save everything. The tutorial takes
# fifteen minutes to read and a minute to run.
#
# `vsd.nn` is a convenience. `VSDGuide` works with any Pyro model that samples weight matrices, for example a function
# with `pyro.sample` statements.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal
from pyro.optim import Adam

import pyro_vsd as vsd

STEPS, SAMPLES = 2000, 200
pyro.set_rng_seed(0)

# %% tags=["remove-cell"]
# Settings of our own runs: one thread, since the matrices are small, and a short mode that only shows that all works.
import os

torch.set_num_threads(1)
if SMOKE := "PYRO_VSD_SMOKE" in os.environ:
    STEPS, SAMPLES = 30, 20

# %% [markdown]
# ## Data: eight sensors
#
# Eight sensors measure the same function of three inputs. Each sensor has its own offset around a common level. Half of
# the sensors have many readings, the others few.

# %%
COUNTS = [100, 100, 100, 100, 4, 4, 4, 4]
true_offset = torch.randn(len(COUNTS))


def readings(counts):
    sensor = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x = torch.rand(len(sensor), 3) * 4 - 2
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] / 2 + true_offset[sensor]
    return x, sensor, y + 0.2 * torch.randn(len(sensor))


train, test = readings(COUNTS), readings([50] * 8)
num_data = len(train[2])
print(num_data, "readings; offsets:", true_offset.numpy().round(2))

# %% [markdown]
# ## The model
#
# The model contains nothing specific to VSD. Three rules make it work well:
#
# - A **weight** is a site with at least two event dimensions: `.to_event(2)`. All other sites, here `tau`, `sigma`,
#   `level` and `offset`, get a mean-field posterior.
# - Multiply weights and activations with `@`, `F.linear` or `F.conv*`. These functions apply separate noise to each
#   example.
# - The data plate has the size of the *whole* training set, so that the likelihood of a batch is scaled up to it. With
#   `pyro.plate("data", len(x))` instead, the KL of a batch would count too much.
#
# The biases of the hidden units are point estimates: a `pyro.param`.


# %%
def model(x, sensor, y=None):
    w1 = pyro.sample("w1", dist.Normal(0.0, 1.0).expand([3, 50]).to_event(2))
    b1 = pyro.param("b1", lambda: torch.randn(50))
    w2 = pyro.sample("w2", dist.Normal(0.0, 1.0).expand([50, 1]).to_event(2))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.LogNormal(-1.0, 1.0))
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    with pyro.plate("sensors", len(COUNTS)):
        offset = pyro.sample("offset", dist.Normal(0.0, tau))
    mean = (torch.relu(x @ w1 + b1) @ w2).squeeze(-1) + level + offset[sensor]
    with pyro.plate("data", num_data, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(mean, sigma), obs=y)


# %% [markdown]
# ## The guide
#
# The guide takes one line. It finds the sites in the first call or in `setup`. From the way the model uses a weight it
# also finds which axis of the weight has the noise. Create a torch optimiser after `setup`: before it the guide has no
# parameters.

# %%
pyro.clear_param_store()
guide = vsd.VSDGuide(model, num_reflections=2).setup(*train)
print(guide)
print("noise axis of w1:", guide.noise_dim("w1"), "of w2:", guide.noise_dim("w2"))

# %% [markdown]
# ## Training with an annealed KL
#
# A schedule is a function from the step to the weight of the KL. `linear_warmup` rises from 0 to 1 and stays there, so
# the network can fit the data before the noise grows. After each step `elbo.terms` holds the parts of the loss. They
# are tensors, so it costs nothing to keep them.


# %%
def train_guide(guide, steps=STEPS, batch_size=104):
    """Train with SVI on batches of equal size; return the terms of every step, the SVI object and the ELBO."""
    elbo = vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(steps // 2))
    svi = SVI(model, guide, Adam({"lr": 1e-2}), elbo)
    history = []
    while len(history) < steps:
        for rows in torch.randperm(num_data).split(batch_size):
            svi.step(*(tensor[rows] for tensor in train))
            history.append(elbo.terms)
    return history, svi, elbo


history, svi, elbo = train_guide(guide)
first, last = history[0], history[-1]
for name, step in {"first step": first, "last step": last}.items():
    kl = sum(step["kl"].values())
    print(f"{name:10} loss {step['loss']:8.1f} = -({step['log_likelihood']:8.1f}) + {step['kl_weight']:.2f} · {kl:.1f}")

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
vsd.plots.elbo_terms(history, window=min(50, len(history)), ax=axes[0])
axes[0].set_ylim(-200, 1000)
LINES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
for name, line in zip(history[0]["kl"], LINES, strict=True):
    axes[1].plot([float(step["kl"][name]) for step in history], label=name, linewidth=1, linestyle=line)
axes[1].axhline(0, color="0.6", linewidth=0.8)
axes[1].set(xlabel="step", ylabel="KL, not weighted (nats)")
axes[1].spines[["top", "right"]].set_visible(False)
axes[1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% tags=["remove-cell"]
assert torch.isclose(last["loss"], last["kl_weight"] * sum(last["kl"].values()) - last["log_likelihood"])
assert last["loss"] < first["loss"]

# %% [markdown]
# The left panel shows the loss and its parts, averaged over fifty steps. The weighted KL rises with its weight, while
# the fit still improves. The right panel shows the KL of each site. (The KL of `tau` is a sampled estimate and can be
# negative.) All values are sums over the whole training set, which is Pyro's convention.
#
# ## The posterior
#
# `guide.posterior(site)` is the distribution of a site. A constant can be moved between the offsets and the level, so
# we subtract the mean from both the offsets and the truth before we compare them. The offset of a sensor with few
# readings should be less certain than that of a sensor with many.

# %%
offset = guide.posterior("offset")
spread = offset.stddev.detach()
error = (offset.mean - offset.mean.mean()).detach() - (true_offset - true_offset.mean())
print("sensor           " + "".join(f"{number:7}" for number in range(len(COUNTS))))
print("readings         " + "".join(f"{count:7}" for count in COUNTS))
print("error of offset  " + "".join(f"{value:7.2f}" for value in error))
print("posterior σ      " + "".join(f"{value:7.2f}" for value in spread))
print(f"noise σ: {guide.median()['sigma']:.2f} (truth 0.2)")

# %% tags=["remove-cell"]
assert SMOKE or spread[4:].min() > spread[:4].max()
assert SMOKE or error.abs().max() < 0.5

# %% [markdown]
# `vsd.predict` takes all arguments of the model except the target. As in tutorial 2 the result splits the variance.
# The uncertainty of the offsets is epistemic.

# %%
prediction = vsd.predict(model, guide, *test[:2], num_samples=SAMPLES, seed=0)
print(vsd.metrics.report(prediction, test[2]))
rmse = {"one guide": vsd.metrics.rmse(prediction, test[2])}
few = test[1] >= 4
epistemic = {name: prediction.epistemic[rows].mean().sqrt() for name, rows in {"many": ~few, "few": few}.items()}
print(f"epistemic σ of sensors with many readings {epistemic['many']:.3f}, with few {epistemic['few']:.3f}")

# %% tags=["remove-cell"]
assert SMOKE or epistemic["few"] > epistemic["many"]

# %% [markdown]
# ## Several guides
#
# Mean-field posteriors have no correlations. They cannot represent that the level may be higher and all offsets lower
# by the same amount, so they underestimate the uncertainty of both. A second guide can handle these sites.
# `AutoGuideList` combines guides, and `poutine.block` gives each its part of the model.

# %%
pyro.set_rng_seed(0)
pyro.clear_param_store()
weights = ["w1", "w2"]
both = AutoGuideList(model)
both.append(vsd.VSDGuide(poutine.block(model, expose=weights), num_reflections=2))
both.append(AutoMultivariateNormal(poutine.block(model, hide=weights)))
_ = train_guide(both, batch_size=num_data)  # all readings in every step: the narrow valley needs low-noise gradients
prediction = vsd.predict(model, both, *test[:2], num_samples=SAMPLES, seed=0)
rmse["both guides"] = vsd.metrics.rmse(prediction, test[2])
print("RMSE:", {name: round(value, 3) for name, value in rmse.items()})

# %% [markdown]
# We draw the level and the first sensor's offset from both guides. Their common constant is not determined by the data,
# since the network can hold a part of it too, and each training run ends at a different one. So we look at the spread
# around the mean. The dashed line is the direction in which level + offset stays the same.


# %% tags=["hide-input"]
def level_and_offset(guide):
    """Draw the level and the first sensor's offset a thousand times; subtract the means."""
    with torch.no_grad():
        draws = [guide(*train) for _ in range(1000)]
    draws = torch.stack([torch.stack([draw["level"], draw["offset"][0]]) for draw in draws], -1)
    return draws - draws.mean(-1, keepdim=True)


figure, ax = plt.subplots(figsize=(4.6, 4), layout="constrained")
correlation, spread = {}, {}
for name, one, style in (("multivariate normal", both, "C1s"), ("mean field", guide, "C0o")):
    draws = level_and_offset(one)
    ax.plot(*draws, style, markersize=3, alpha=0.4, markeredgewidth=0, label=name)
    correlation[name], spread[name] = torch.corrcoef(draws)[0, 1], draws.std(-1)
    sigmas = "level {:.3f}, offset {:.3f}".format(*spread[name])
    print(f"{name:20} σ: {sigmas}; correlation {correlation[name]:.2f}")
ax.axline((0, 0), slope=-1, color="0.3", linestyle="--", linewidth=1, label="level + offset unchanged")
ax.set(xlabel="level, minus its mean", ylabel="offset of sensor 0, minus its mean", aspect="equal")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize="small")
print(f"tau / √8: {guide.median()['tau'] / 8**0.5:.2f}")

# %% tags=["remove-cell"]
assert SMOKE or correlation["multivariate normal"] < -0.5
assert SMOKE or (spread["multivariate normal"] > spread["mean field"]).all()
assert SMOKE or rmse["both guides"] < 1.1 * rmse["one guide"]

# %% [markdown]
# The second guide represents the direction of the line, so both of its posteriors are wider. They are still too narrow:
# with eight offsets of scale τ their mean, and therefore the level, is uncertain by about τ/√8. Stochastic gradients
# need many steps to fill a long narrow valley. The predictions depend on the sum only, and they are as good as before.
#
# A guide can also be your own function that calls `VSDGuide` for the weights and `pyro.sample` for the rest. The
# objective contains the KL of every site: in closed form if it is known, else as a sampled estimate. Sites without
# reparametrised samples, such as discrete sites, must be summed out of the model first.
#
# ## Saving and loading
#
# The parameters of a `VSDGuide` belong to the guide, as in any PyTorch module. `state_dict()` has all of them. It also
# lists the sites, so a new guide can load it without any data.

# %%
state = guide.state_dict()
fresh = vsd.VSDGuide(model, num_reflections=2)
fresh.load_state_dict(state)
print(len(state), "entries, the first:", next(iter(state)))

# %% tags=["remove-cell"]
assert torch.equal(fresh.alpha("w2"), guide.alpha("w2"))

# %% [markdown]
# **Pyro's parameter store** holds the parameters of `pyro.param` statements: here `b1`, because this model is a
# function. The store is global and identifies parameters by name. This has two consequences:
#
# - Call `pyro.clear_param_store()` before you train again, as we did above. Otherwise the second model starts with the
#   `b1` of the first one. The guide's parameters never come from the store.
# - A guide's `state_dict` does not contain `b1`. `save_checkpoint` saves it, along with the optimiser's state, the step
#   of the KL schedule and the state of the random generators.
#
# If the model is a `PyroModule` (all of `vsd.nn` are), its parameters belong to the module and you can ignore the
# store.

# %%
pyro.set_rng_seed(1)
pyro.clear_param_store()
guide = vsd.VSDGuide(model, num_reflections=2)
_, svi, elbo = train_guide(guide, STEPS // 10)
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.ckpt"
vsd.save_checkpoint(path, model=model, guide=guide, optimizer=svi.optim, elbo=elbo, step=elbo.step)
expected = [svi.step(*train) for _ in range(3)]

pyro.clear_param_store()  # as in a new process
guide = vsd.VSDGuide(model, num_reflections=2)
elbo = vsd.VSD_ELBO(kl_weight=elbo.kl_weight)
svi = SVI(model, guide, Adam({"lr": 1e-2}), elbo)
content = vsd.load_checkpoint(path, model=model, guide=guide, optimizer=svi.optim, elbo=elbo)
resumed = [svi.step(*train) for _ in range(3)]

print("step", content["step"], "· losses without a stop", expected, "· resumed", resumed)

# %% tags=["remove-cell"]
assert resumed == expected
folder.cleanup()

# %% [markdown]
# The three losses after loading equal those without the interruption, bit for bit.
#
# ## What you can do now
#
# - Write a Pyro model as you like. `.to_event(2)` makes a site a weight; `VSDGuide(model)` does the rest.
# - Watch `elbo.terms`: they show early if the KL dominates the likelihood or falls to zero.
# - Use a guide with correlations for sites that depend on each other.
# - Save functions with `pyro.param` with `save_checkpoint`. For modules and guides `state_dict` is enough.
#
# Next: [priors](05_priors.ipynb).
