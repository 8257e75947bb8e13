"""The page of gap splits from stored results alone, and one split of made-up data."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import pyro_vsd as vsd
from benchmarks import gaps

PAGE = Path(__file__).parents[2] / "docs" / "gaps.md"


def test_the_page_is_that_of_the_stored_results(tmp_path):
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text())
    gaps.write(copy)
    assert copy.read_text() == PAGE.read_text()


def test_disagreement_widens_where_the_members_differ():
    generator = torch.Generator().manual_seed(0)
    apart = torch.cat([torch.zeros(200), torch.ones(200)])
    means = apart * torch.randn(5, 400, generator=generator)
    y = torch.where(apart > 0, 3.0, 0.1) * torch.randn(400, generator=generator)
    predictions = [vsd.RegressionPrediction.from_samples(m[None], torch.tensor([0.1])) for m in means]
    mixed = gaps.widened(vsd.ensemble.mixture(predictions), gaps.disagreement(predictions, y))
    sigma = mixed.variance.sqrt()
    assert float(sigma[:200].mean()) == pytest.approx(0.1, rel=0.2)
    assert float(sigma[200:].mean()) > 2


def test_a_base_rate_bounds_the_loss():
    sure = vsd.RegressionPrediction.from_samples(torch.full((1, 1), 5.0), torch.tensor([0.01]))
    mixed = gaps.with_share(sure, 0.1)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(-1.0)) + torch.tensor(0.1).log()
    assert float(mixed.log_prob(torch.tensor([-1.0]))) == pytest.approx(float(expected))


@pytest.mark.slow
def test_a_split_of_made_up_data(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(360, 3, generator=generator)
    table[:, 2] = 5 + 3 * table[:, 0].sin()
    folders = [tmp_path / part / "yacht" / "data" for part in ("UCI_Datasets", "UCI_Datasets_gap")]
    order = table[:, 0].argsort()
    files = [{"data": table.numpy(), "index_features": [0, 1], "index_target": [2]}]
    files.append({"index_test_0": order[120:240], "index_train_0": torch.cat([order[:120], order[240:]])})
    for folder, content in zip(folders, files, strict=True):
        folder.mkdir(parents=True)
        for name, values in content.items():
            np.savetxt(folder / f"{name}.txt", np.asarray(values))
    monkeypatch.setitem(gaps.INPUTS, "yacht", 1)
    monkeypatch.setattr(gaps, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gaps, "SAMPLES", 3)
    fit = vsd.Ensemble.fit
    monkeypatch.setattr(vsd.Ensemble, "fit", lambda self, *args, **options: fit(self, *args, **options | {"epochs": 2}))
    monkeypatch.setattr(gaps, "PAPERS", ())
    folders = [str(tmp_path), str(tmp_path / "work")]
    monkeypatch.setattr("sys.argv", ["gaps", *folders, "--sets", "yacht", "--programs", "main", "T-1"])
    gaps.main()
    (path,) = gaps.RESULTS.glob("*.json")
    methods = json.loads(path.read_text())["methods"]
    assert {"plain", "single", "fitted", "T-1", "default_base", "vsd_widened"} <= methods.keys()
    assert all(math.isfinite(v[m]) for v in methods.values() for m in gaps.METRICS)
    assert "| five plain networks, stacked | " in gaps.tables()

    found = gaps.paper_rows("yacht", tmp_path, "mc_dropout", seed=0, steps=2)
    assert len(found["splits"]["rmse"]) == 1
