"""Several batches behind one step: the gradient of their rows together, with the KL once."""

import os
import signal

import pyro.optim
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_vsd as vsd
from pyro_vsd.training import EarlyStopping, fit, load_checkpoint
from tests.training import cases, workers


def loader(size):
    data = cases.data()
    return DataLoader(TensorDataset(data.x, data.y), batch_size=size)


SOURCES = {"data": lambda size: cases.data(), "loader": loader}


def run(alpha=0.2, source="data", size=4, make=cases.regressor, **options):
    torch.manual_seed(4)
    model = make()
    guide = vsd.VSDGuide(model, init_alpha=alpha, scale_vectors=False)
    elbo = options.pop("elbo", None) or vsd.VSD_ELBO(kl_weight=vsd.infer.linear_warmup(5))
    options = {"seed": 0, "epochs": 3, "batch_size": size, "elbo": elbo, **options}
    history = fit(model, guide, SOURCES[source](size), **options)
    return cases.values(model, guide), history, elbo


def assert_close(first, second):
    assert set(first) == set(second)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("k", [2, 3, 4, 6])
def test_fit_is_that_of_one_large_batch(source, k):
    """Without noise to speak of, all parameters, also the noise variances, whose gradient is then the KL's alone. For
    four, tensors make two steps of three batches, and a loader one of four and one of two."""
    found = run(1e-24, source, 4, accumulate=k, optimizer=workers.sgd)
    expected = run(1e-24, source, 4 * k, optimizer=workers.sgd)
    assert_close(found[0], expected[0])
    assert found[2].step == expected[2].step == 3 * -(-6 // k)


@pytest.mark.parametrize("k", [2, 3, 6])
def test_so_is_the_history(k):
    found = run(1e-24, size=4, accumulate=k, optimizer=workers.sgd)
    expected = run(1e-24, size=4 * k, optimizer=workers.sgd)
    for record, other in zip(found[1], expected[1], strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-9)
        assert record["kl"] == pytest.approx(other["kl"], rel=1e-9)


def gradients(loss, batches):
    loss.zero_grad()
    for x, y in batches:
        (loss(x, y) / len(batches)).backward()
    return {name: p.grad.clone() for name, p in loss.named_parameters()}


def parts(k):
    data = cases.data()
    return list(zip(data.x.chunk(k), data.y.chunk(k), strict=True))


def test_by_hand_it_is_the_mean_of_the_losses():
    model = cases.regressor()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, init_alpha=1e-24))
    assert_close(gradients(loss, parts(4)), gradients(loss, parts(1)))


def test_by_hand_with_noise_in_expectation():
    model = cases.regressor()
    loss = vsd.VSD_ELBO()(model, vsd.VSDGuide(model, init_alpha=0.2))
    draws = {k: [gradients(loss, parts(k)) for _ in range(200)] for k in (1, 3)}
    scores = []
    for name in draws[1][0]:
        one, many = (torch.stack([draw[name] for draw in draws[k]]) for k in (1, 3))
        error = ((one.var(0) + many.var(0)) / 200).sqrt()
        scores.append(((one.mean(0) - many.mean(0)) / error).flatten())
    scores = torch.cat(scores)
    scores = scores[scores.isfinite()]
    assert len(scores) > 40
    assert scores.abs().max() < 4.5  # of about fifty normal scores
    assert 0.4 < scores.square().mean() < 2.0


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: a process started in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, interruptible):
    options = {"accumulate": 2, "make": cases.batch_norm, "validation": cases.data(), "epochs": 4}
    options["early_stopping"] = EarlyStopping(patience=9)
    whole = run(**options)

    pressed = []

    def press(step):
        if step == 4 and not pressed:
            pressed.append(step)
            os.kill(os.getpid(), signal.SIGINT)
        return vsd.infer.linear_warmup(5)(step)

    path = tmp_path / "run.ckpt"
    assert run(elbo=vsd.VSD_ELBO(kl_weight=press), checkpoint=path, **options)[1].stopped == "interrupt"
    saved = load_checkpoint(path)
    assert (saved["step"], saved["extra"]["fit"]["done"]) == (5, 2)
    with pytest.raises(ValueError, match=r"\baccumulate\b"):
        run(checkpoint=path, **{**options, "accumulate": 3})
    resumed = run(checkpoint=path, **options)
    assert cases.same(resumed[0], whole[0])
    assert list(resumed[1]) == list(whole[1])


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 0}, {"accumulate": 1.5}, {"accumulate": 2, "optimizer": pyro.optim.Adam({})}],
    ids=["zero", "no integer", "an optimiser of Pyro"],
)
def test_wrong_values(options):
    with pytest.raises(ValueError, match=r"\baccumulate\b"):
        run(**options)
