"""What several themes need: a small network trained on digits."""

import pyro
import pytest
import torch

import pyro_vsd as vsd


@pytest.fixture(scope="session")
def digits():
    """``(model, guide, prediction, test)`` of a network trained by the defaults."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        train, test = (part.to(torch.float32) for part in vsd.datasets.digits())
        model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 50, 10]).to(torch.float32)), num_data=len(train))
        guide = vsd.VSDGuide(model)
        loss = vsd.VSD_ELBO()(model, guide)
        optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
        for epoch in range(40):
            for x, y in train.batches(100, seed=epoch):
                optimizer.zero_grad()
                loss(x, y).backward()
                optimizer.step()
        prediction = vsd.predict(model, guide, test.x, num_samples=50, seed=0)
    pyro.clear_param_store()
    return model, guide, prediction, test
