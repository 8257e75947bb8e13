# %% [markdown]
# # 3. Your own Pyro model
#
# `vsd.nn` is a convenience. `VSDGuide` serves any Pyro model that has weights in it: a function with `pyro.sample`
# statements will do. Here we write one with a network, group effects and an unknown noise level, attach guides to it,
# anneal the KL, see what the loss is made of, and save and load all of it.

# %%
import os
import tempfile

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal
from pyro.optim import Adam

import pyro_vsd as vsd

SMOKE = "PYRO_VSD_SMOKE" in os.environ  # a short run that only shows that all of this works
torch.set_num_threads(1)  # the products are so small that a second thread would only be waited for
pyro.set_rng_seed(0)

# %% [markdown]
# ## Data: eight sensors
#
# Eight sensors measure the same function of three inputs, each with an offset of its own around a common level. Half of
# them have given many readings, the others few.

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
# Nothing in it knows of VSD. Three things make it work well:
#
# - A **weight** is a site of at least two event dimensions: `.to_event(2)`. Any other site, here `tau`, `sigma`,
#   `level` and `offset`, gets a mean-field posterior.
# - Weights meet activations through `@`, `F.linear` or `F.conv*`. That is where every example gets noise of its own.
# - The plate of the data states the size of the *whole* set, so that a batch is scaled up to it.
#
# The hidden units' biases are point estimates: a `pyro.param`.


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
# One line. The guide finds the sites when it first sees data, or in `setup`; it also finds along which axis of a weight
# the noise runs, from the way the model uses it.

# %%
pyro.clear_param_store()
guide = vsd.VSDGuide(model, num_reflections=2).setup(*train)
for name, parameter in guide.named_parameters():
    print(f"{name:18}", tuple(parameter.shape))
print("noise axis of w1:", guide.noise_dim("w1"), "of w2:", guide.noise_dim("w2"))

# %% [markdown]
# ## Training with an annealed KL
#
# A schedule is a function from the step to the weight of the KL; `linear_warmup` rises from 0 to 1 and stays there.
# That gives the network time to fit before the noise grows. After each step `elbo.terms` holds the parts of the loss.
# They are tensors, so keeping them costs nothing.

# %%
STEPS = 30 if SMOKE else 2000


def train_guide(guide, steps=STEPS, batch_size=104):
    """Trains with SVI on batches of equal size; returns the terms of every step, and the two that did it."""
    elbo = vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(steps // 2))
    svi = SVI(model, guide, Adam({"lr": 1e-2}), elbo)
    history = []
    while len(history) < steps:
        for rows in torch.randperm(num_data).split(batch_size):
            svi.step(*(tensor[rows] for tensor in train))
            history.append(elbo.terms)
    return history, svi, elbo


history, svi, elbo = train_guide(guide)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
window = min(50, len(history))
vsd.plots.elbo_terms(history, window=window, ax=axes[0])
axes[0].set_ylim(-200, 1000)
for name in history[0]["kl"]:
    axes[1].plot([float(step["kl"][name]) for step in history], label=name, linewidth=1)
axes[1].set(xlabel="step", ylabel="KL, not weighted (nats)")
axes[1].legend(frameon=False, fontsize="small", ncols=2)

first, last = history[0], history[-1]
for name, step in {"first step": first, "last step": last}.items():
    kl = sum(step["kl"].values())
    print(f"{name:10} loss {step['loss']:8.1f} = -({step['log_likelihood']:8.1f}) + {step['kl_weight']:.2f} · {kl:.1f}")

assert torch.isclose(last["loss"], last["kl_weight"] * sum(last["kl"].values()) - last["log_likelihood"])
assert last["loss"] < first["loss"]

# %% [markdown]
# Left, the loss and its parts, as means over fifty steps: the weighted KL rises with its weight, while the fit still
# improves. Right, what each site costs by itself. All numbers are for the whole data set, as everywhere in Pyro.
#
# ## What was learned
#
# `guide.posterior(site)` is the distribution of a site. A constant can be moved from all offsets to the level and back,
# so we compare the offsets to the truth after taking off the mean of both. A sensor with few readings should be known
# less well than one with many.

# %%
offset = guide.posterior("offset")
spread = offset.stddev.detach()
error = (offset.mean - offset.mean.mean()).detach() - (true_offset - true_offset.mean())
print("sensor           " + "".join(f"{number:7}" for number in range(len(COUNTS))))
print("readings         " + "".join(f"{count:7}" for count in COUNTS))
print("error of offset  " + "".join(f"{value:7.2f}" for value in error))
print("posterior σ      " + "".join(f"{value:7.2f}" for value in spread))
print(f"noise σ: {guide.median()['sigma']:.2f} (truth 0.2)")

assert SMOKE or spread[4:].min() > spread[:4].max()
assert SMOKE or error.abs().max() < 0.5

# %% [markdown]
# `vsd.predict` takes the model's arguments without the target, as many as there are. The result splits the variance
# as in the first tutorial; the offset's uncertainty is part of the epistemic one.

# %%
prediction = vsd.predict(model, guide, *test[:2], num_samples=20 if SMOKE else 200, seed=0)
print(vsd.metrics.report(prediction, test[2]))
rmse = {"one guide": vsd.metrics.rmse(prediction, test[2])}
few = test[1] >= 4
epistemic = {name: prediction.epistemic[rows].mean().sqrt() for name, rows in {"many": ~few, "few": few}.items()}
print(f"epistemic σ of sensors with many readings {epistemic['many']:.3f}, with few {epistemic['few']:.3f}")
assert SMOKE or epistemic["few"] > epistemic["many"]

# %% [markdown]
# ## Several guides
#
# Mean-field posteriors know no correlations. That the level may be higher and all offsets lower by as much is beyond
# them, so they think to know both well. Another guide can take these sites: `AutoGuideList` joins guides, and
# `poutine.block` shows each its part of the model.

# %%
pyro.set_rng_seed(0)
pyro.clear_param_store()
weights = ["w1", "w2"]
both = AutoGuideList(model)
both.append(vsd.VSDGuide(poutine.block(model, expose=weights), num_reflections=2))
both.append(AutoMultivariateNormal(poutine.block(model, hide=weights)))
_ = train_guide(both, batch_size=num_data)  # all readings in every step: the narrow valley needs calm gradients


# %%
def level_and_offset(guide):
    """A thousand draws of the level and of the first sensor's offset."""
    with torch.no_grad():
        draws = [guide(*train) for _ in range(1000)]
    return torch.stack([torch.stack([draw["level"], draw["offset"][0]]) for draw in draws], -1)


figure, ax = plt.subplots(figsize=(5, 3.6), layout="constrained")
correlation, spread, total = {}, {}, {}
for name, one, colour in (("mean field", guide, "C0"), ("multivariate normal", both, "C1")):
    draws = level_and_offset(one)
    ax.plot(*draws, ".", markersize=2, color=colour, label=name)
    correlation[name], spread[name] = torch.corrcoef(draws)[0, 1], draws.std(-1)
    total[name] = draws.mean(-1).sum()
    sigmas = "level {:.3f}, offset {:.3f}".format(*spread[name])
    print(f"{name:20} σ: {sigmas}; correlation {correlation[name]:.2f}; mean of level + offset {total[name]:.2f}")
ax.set(xlabel="level", ylabel="offset of sensor 0")
ax.legend(frameon=False, markerscale=4)

print(f"tau / √8: {guide.median()['tau'] / 8**0.5:.2f}")

assert SMOKE or correlation["multivariate normal"] < -0.5
assert SMOKE or (spread["multivariate normal"] > spread["mean field"]).all()
assert SMOKE or (total["multivariate normal"] - total["mean field"]).abs() < 0.1
prediction = vsd.predict(model, both, *test[:2], num_samples=20 if SMOKE else 200, seed=0)
rmse["both guides"] = vsd.metrics.rmse(prediction, test[2])
print("RMSE:", {name: round(value, 3) for name, value in rmse.items()})
assert SMOKE or rmse["both guides"] < 1.1 * rmse["one guide"]

# %% [markdown]
# The two guides have ended at different places of one valley, along which level + offset is the same. The second sees
# its direction, and is less sure of both numbers for it. It is still too sure: eight offsets of size τ leave their
# mean, and so the level, unknown by about τ/√8. A long narrow valley takes stochastic gradients many steps to fill.
# The predictions, which depend on the sum alone, are as good as before.
#
# A guide may just as well be a function of yours that calls `VSDGuide` for the weights and `pyro.sample` for the rest.
# The objective pays for every site: in closed form where the KL is known, else by the draw. Sites without a
# reparametrised draw, discrete ones, have to be summed out of the model first.
#
# ## Saving and loading
#
# Where are the numbers? Those of a `VSDGuide` are its own, like those of any PyTorch module: `state_dict()` has them
# all, and says which sites there are, so that a new guide can load them before it has seen any data.

# %%
state = guide.state_dict()
fresh = vsd.VSDGuide(model, num_reflections=2)
fresh.load_state_dict(state)
assert torch.equal(fresh.alpha("w2"), guide.alpha("w2"))
print(len(state), "entries, the first:", next(iter(state)))

# %% [markdown]
# **Pyro's parameter store** is where `pyro.param` statements keep theirs: here `b1`, because this model is a function.
# It is one global place by name. Two things follow.
#
# - `pyro.clear_param_store()` before training anew, as we did above, or the second model starts with the first one's
#   `b1`. The guide's parameters never come from there.
# - A guide's `state_dict` does not hold `b1`. `save_checkpoint` does, and the optimiser's state, the step of the KL
#   schedule and the state of the random generators besides.
#
# If the model is a `PyroModule` (all of `vsd.nn` is), its parameters belong to the module: forget the store.

# %%
pyro.set_rng_seed(1)
pyro.clear_param_store()
guide = vsd.VSDGuide(model, num_reflections=2)
_, svi, elbo = train_guide(guide, STEPS // 10)
path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
vsd.save_checkpoint(path, model=model, guide=guide, optimizer=svi.optim, elbo=elbo, step=elbo.step)
expected = [svi.step(*train) for _ in range(3)]

pyro.clear_param_store()  # as in a new process
guide = vsd.VSDGuide(model, num_reflections=2)
elbo = vsd.VSD_ELBO(kl_weight=elbo.kl_weight)
svi = SVI(model, guide, Adam({"lr": 1e-2}), elbo)
content = vsd.load_checkpoint(path, model=model, guide=guide, optimizer=svi.optim, elbo=elbo)
resumed = [svi.step(*train) for _ in range(3)]

print("step", content["step"], "· losses without a stop", expected, "· resumed", resumed)
assert resumed == expected

# %% [markdown]
# The three losses after loading are the same to the last bit as without the stop.
#
# ## What to take away
#
# - Write the model as you like. `.to_event(2)` makes a weight; `VSDGuide(model)` does the rest.
# - Watch `elbo.terms`: a KL that swamps the likelihood, or one that falls to nothing, shows there first.
# - Give sites that belong together to a guide that knows correlations.
# - Functions with `pyro.param`: save with `save_checkpoint`. Modules and guides: `state_dict` is all.
