"""The paper's networks behind the reflection vectors."""

import pytest
import torch

from pyro_vsd.infer.vectors import VectorNetwork


@pytest.mark.parametrize("rank", [None, 2])
def test_each_vector_is_made_from_the_one_before(rank):
    made = VectorNetwork(3, 5, rank, scale=1.0, like=torch.zeros(()))
    layers = [layer for layer in made.net.modules() if isinstance(layer, torch.nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in layers] == ([(5, 5)] if rank is None else [(2, 5), (5, 2)])
    vector = made.start
    for row in made():
        for number, layer in enumerate(layers):
            vector = (vector if number == 0 else vector.clamp(min=0)) @ layer.weight.mT + layer.bias
        torch.testing.assert_close(row, vector)
