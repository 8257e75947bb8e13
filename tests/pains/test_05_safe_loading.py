"""Elsewhere checkpoints hold more than tensors, so that torch 2.6 refuses them (speechbrain#2856), and the repair is to
switch its protection off (yolov9#661). Here states and checkpoints load under ``weights_only=True``, and a file that
would run code is refused before it does.

More of it: ``tests/training/test_checkpoint.py``, ``test_corruption.py``.
"""

import pickle
from pathlib import Path

import pytest
import torch

import pyro_vsd as vsd
from pyro_vsd.training.archive import write_archive
from tests.infer import models


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("make", [models.regressor, models.HandWritten], ids=["listed", "hand_written"])
def test_states_are_tensors_and_plain_types(make, tmp_path):
    model, (x, y) = make(), models.data()
    guide = vsd.VSDGuide(model)
    models.train(model, guide, x, y)
    torch.save({"model": model.state_dict(), "guide": guide.state_dict()}, tmp_path / "states")
    states = torch.load(tmp_path / "states", weights_only=True)
    fresh = vsd.VSDGuide(model)
    fresh.load_state_dict(states["guide"])
    assert not models.moved(models.snapshot(guide), fresh)


@pytest.mark.parametrize("kind", ["pickle", "torch", "checkpoint"])
def test_a_hostile_file_is_refused_and_does_nothing(kind, tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "run"
    bait = {"guide": Hostile(mark)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(bait))
    elif kind == "torch":
        torch.save(bait, path)
    else:  # with the header and the checksum of our own
        write_archive(path, bait)
    model = models.regressor()
    guide = vsd.VSDGuide(model)
    before = models.snapshot(guide)
    with pytest.raises(ValueError, match="expected a checkpoint"):
        vsd.load_checkpoint(path, model=model, guide=guide)
    assert not mark.exists()
    assert not models.moved(before, guide)
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists()  # the bait does bite
