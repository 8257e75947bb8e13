"""A parameter that becomes NaN in ``fit`` (pyro#1755). The rest of this theme is in ``tests/infer/test_elbo.py``."""

import pytest
import torch

import pyro_vsd as vsd
from tests.infer import models


def single():
    x, y = (v.float() for v in models.data())
    model = models.regressor(noise="learned").float()
    return model, vsd.VSDGuide(model), x, y


def test_a_parameter_that_became_nan_is_named_with_the_step():
    """The loss of a step is that of the parameters before it, so it is the parameters that ``fit`` looks at."""
    model, guide, x, y = single()

    class Spoils(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["params"][0].data[0] = torch.nan

    data = vsd.datasets.Data(x, y)
    message = r"parameter 'theta\.net\.0\.weight': expected finite entries, got NaN .*after 1"
    with pytest.raises(ValueError, match=message):
        vsd.fit(model, guide, data, epochs=1, batch_size=len(x), optimizer=lambda p: Spoils(p, lr=1e-3), progress=False)
