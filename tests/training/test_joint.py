"""Several networks as one program: the same losses, gradients and results as each alone."""

import pytest
import torch
from torch import nn

import pyro_vsd as vsd
from pyro_vsd.training.joint import JointLoss, NotJointError
from tests.training import cases

WEIGHTS = (0.1, 1.0, 3.0)


def losses(make=cases.regressor, weights=WEIGHTS, **options):
    found = []
    for weight in weights:
        model = make()
        guide = vsd.VSDGuide(model, **options).setup(cases.data().x, cases.data().y)
        found.append(vsd.VSD_ELBO(kl_weight=weight)(model, guide))
    return found


def alone(loss, x, y):
    """Loss and gradients by name from a fixed random state."""
    torch.manual_seed(5)
    value = loss(x, y)
    named = {name: p for name, p in loss.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return value.detach(), dict(zip(named, gradients, strict=True))


def hierarchical():
    return cases.regressor(prior=vsd.nn.HierarchicalPrior())


def latent():
    return cases.regressor(noise="latent")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (cases.regressor, {}),
        (cases.regressor, {"num_reflections": 0}),
        (cases.regressor, {"vectors": "low_rank", "rank": 2}),
        (hierarchical, {}),
        (latent, {}),
    ],
    ids=["plain", "no reflections", "low rank", "hierarchical", "latent noise"],
)
def test_each_member_has_its_own_loss_and_gradients(make, options, monkeypatch):
    """With the noise of all members equal; the comparison inside is the same, and finds a difference below."""
    members, data = losses(make, **options), cases.data()
    vmap = torch.vmap
    monkeypatch.setattr(torch, "vmap", lambda f, **kw: vmap(f, **kw | {"randomness": "same"}))
    joint = JointLoss(members)
    torch.manual_seed(0)
    joint.backward((data.x, data.y), {})
    torch.manual_seed(5)
    values = joint.backward((data.x, data.y), {})
    for m, loss in enumerate(members):
        value, gradients = alone(loss, data.x, data.y)
        torch.testing.assert_close(values[m], value)
        for name, gradient in gradients.items():
            if gradient is not None:
                torch.testing.assert_close(joint._stacked[name].grad[m], gradient)


def test_gradients_have_the_layout_that_fused_optimisers_expect():
    """Fused Adam ignores strides: with slices for gradients, all members but the first were trained on wrong ones."""
    members, data = losses(), cases.data()
    joint = JointLoss(members)
    joint.backward((data.x, data.y), {})
    assert [name for name, p in joint._stacked.items() if p.grad is not None and p.grad.stride() != p.stride()] == []


def test_members_draw_their_own_noise():
    members = losses(weights=(1.0, 1.0))
    members[1].load_state_dict(members[0].state_dict())
    data = cases.data()
    first, second = JointLoss(members).backward((data.x, data.y), {}).tolist()
    assert first != second


def test_capturing_leaves_generators_alone():
    data, joint = cases.data(), JointLoss(losses())
    torch.manual_seed(0)
    joint.backward((data.x, data.y), {})
    captured = torch.get_rng_state()
    torch.manual_seed(0)
    joint.backward((data.x, data.y), {})
    assert torch.equal(torch.get_rng_state(), captured)


def test_parameters_are_views_until_they_part():
    members, data = losses(), cases.data()
    joint = JointLoss(members)
    optimizer = torch.optim.Adam(joint.parameters, lr=0.1, fused=True)
    before = cases.values(*members)
    joint.backward((data.x, data.y), {})
    optimizer.step()
    after = cases.values(*members)
    assert not cases.same(before, after)
    joint.part()
    joint.backward((data.x, data.y), {})
    optimizer.step()
    assert cases.same(cases.values(*members), after)


def test_frozen_parameters_of_one_member_stay():
    members, data = losses(), cases.data()
    frozen = dict(members[1].named_parameters())["guide.log_alpha.net.0.weight"].requires_grad_(False)
    start = frozen.clone()
    joint = JointLoss(members)
    joint.backward((data.x, data.y), {})
    torch.optim.Adam(joint.parameters, lr=0.1).step()
    assert torch.equal(frozen, start)
    assert not torch.equal(dict(members[0].named_parameters())["guide.log_alpha.net.0.weight"], start)


def scaled(factor):
    """A network with a number that is no parameter."""

    class Scaled(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * self.factor

    net = Scaled(nn.Linear(cases.D, 4), nn.ReLU(), nn.Linear(4, 1))
    net.factor = factor
    return vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=cases.N)


def branching():
    class Branching(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else -super().forward(x)

    net = Branching(nn.Linear(cases.D, 4), nn.ReLU(), nn.Linear(4, 1))
    return vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=cases.N)


def convolution():
    net = nn.Sequential(nn.Unflatten(1, (1, cases.D)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 1))
    return vsd.nn.Regressor(vsd.nn.bayesianize(net), num_data=cases.N)


@pytest.mark.parametrize("make", [cases.batch_norm, branching, convolution])
def test_what_cannot_be_joint(make):
    data = cases.data()
    with pytest.raises(NotJointError):
        JointLoss(losses(make)).backward((data.x, data.y), {})


def test_members_that_differ():
    data, factors = cases.data(), iter([1.0, 2.0, 3.0])
    joint = JointLoss(losses(lambda: scaled(next(factors))))
    with pytest.raises(NotJointError, match="own"):
        joint.backward((data.x, data.y), {})
    wide = lambda: vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([cases.D, 6, 1])), num_data=cases.N)  # noqa: E731
    with pytest.raises(NotJointError, match="shapes"):
        JointLoss([*losses(), *losses(wide)])


def test_errors_of_the_model_are_its_own():
    joint = JointLoss(losses())
    with pytest.raises(ValueError, match="y must have the shape"):
        joint.backward((cases.data().x, torch.zeros(3)), {})


@pytest.mark.slow
def test_training_gives_what_each_alone_gives():
    """The same data, λ and starts: final losses agree within their spread over noise."""
    data, x = cases.data(200), None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, cases.D, generator=generator)
    y = x.sum(-1).sin() + 0.1 * torch.randn(200, generator=generator)
    data = (x, y)

    def trained(joint, seed):
        torch.manual_seed(3)
        members = losses(lambda: cases.regressor(200))
        torch.manual_seed(seed)
        group = JointLoss(members) if joint else None
        parameters = group.parameters if group else [p for loss in members for p in loss.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.01, fused=True)
        tail = []
        for step in range(400):
            optimizer.zero_grad()
            if group:
                values = group.backward(data, {})
            else:
                each = [loss(*data) for loss in members]
                sum(each).backward()
                values = torch.stack(each).detach()
            optimizer.step()
            if step >= 300:
                tail.append(values)
        return torch.stack(tail).mean(0)

    together, apart = (torch.stack([trained(joint, s) for s in range(4)]) for joint in (True, False))
    spread = torch.cat([together, apart]).std(0)
    assert bool(((together.mean(0) - apart.mean(0)).abs() < 3 * spread / 2**0.5).all())
