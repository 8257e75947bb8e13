"""Tables and figures from stored results, and the results that the page stands on."""

import doctest
import importlib

import pytest
import torch

import pyro_vsd as vsd
from benchmarks.paper import figures, published, store, tables
from benchmarks.paper.__main__ import PAGES, main
from benchmarks.paper.registry import SETTINGS
from benchmarks.paper.unit import Setting

COMMITTED = [
    (task, path)
    for task, setting in SETTINGS.items()
    if isinstance(setting, Setting)
    for path in sorted((store.RESULTS / task).glob("*.json"))
]


def result(nll: float, **more):
    counts = [0] * 50
    counts[0], counts[-1] = 90, 10
    score = {name: 0.5 for _, name in tables.DETECTION}
    return {
        "metrics": {"nll": nll, "error": 0.01, "ece": 0.005},
        "validation": {"nll": 2 * nll},
        "reliability": {"num_bins": 15, "bin": [7, 14], "size": [10, 90], "accuracy": [0.5, 1.0],
                        "confidence": [0.5, 0.98]},
        "entropy": {"max": 2.302585, "test": counts, "fashion_mnist": counts[::-1]},
        "ood": {"fashion_mnist": {"max_probability": score}},
        "layers": {"0": {"spectral_norm": 1.0, "stable_rank": 2.0}, "4": {"spectral_norm": 3.0, "stable_rank": 4.0}},
        "history": {"loss": [1.0, 0.5]},
    } | more  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for seed, (vsd_nll, vd_nll) in enumerate([(0.040, 0.050), (0.044, 0.052)]):
        store.save(result(vsd_nll), tmp_path, "mnist_400x2", "vsd_t2", seed)
        store.save(result(vd_nll), tmp_path, "mnist_400x2", "ard_vd", seed)
    store.save(result(0.06), tmp_path, "mnist_ablation", "rank2", 0)
    return tmp_path


@pytest.mark.parametrize("module", PAGES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_pages_hold_what_the_results_say(module):
    text = module.PAGE.read_text(encoding="utf-8")
    assert text == tables.page(text, module.render()), "run: python -m benchmarks.paper tables --write"


@pytest.mark.parametrize(("task", "path"), COMMITTED, ids=lambda value: getattr(value, "name", value))
def test_results_were_made_with_these_settings(task, path):
    found, setting = store.load_one(path), SETTINGS[task]
    variant = setting.variants[found["variant"]]
    assert path == store.path_of(store.RESULTS, task, found["variant"], found["seed"])
    assert found["method"] == variant.method
    assert found["options"] == variant.options | {k: v for k, v in found["tuned"].items() if k != "lr"}
    assert set(found["tuned"]) == set(variant.tuned)
    assert found["training"]["epochs"] == (variant.epochs or setting.epochs)
    assert found["training"]["lr"] == found["tuned"].get("lr", variant.lr or setting.lr)
    assert (found["training"]["schedule"], found["training"]["optimizer"]) == (variant.schedule, variant.optimizer)
    assert found["training"].get("rates", {}) == variant.rates
    current = setting.common()
    assert found["setting"].keys() <= current.keys()
    for key, value in found["setting"].items():
        assert value == (list(current[key]) if isinstance(current[key], tuple) else current[key]), key


def test_the_papers_number_stands_beside_ours(folder):
    line = next(row for row in tables.render(folder).splitlines() if row.startswith("| VSD, T = 2 |"))
    assert line == (
        "| VSD, T = 2 | 0.0420 ± 0.0020 (2) | 0.042 | 1.00 ± 0.00 (2) | 1.08 | 0.0050 ± 0.0000 (2) | 0.006 "
        "| 0.0840 ± 0.0040 (2) |"
    )


def test_differences_are_paired_by_seed(folder):
    store.save(result(0.01), folder, "mnist_400x2", "vsd_t2", 2)  # no twin: not counted
    text = tables.render(folder)
    assert "| VSD, T = 2 − VD (ARD: VSD with T = 0) | -0.0090 ± 0.0010 (2) | 0.00 ± 0.00 (2) |" in text


def test_a_single_seed_has_no_error(folder):
    assert "| low rank, r = 2 | 0.0600 (1) | 0.049 |" in tables.render(folder)


def test_the_last_layer_is_measured(folder):
    assert "| VSD, T = 2 | 3.00 ± 0.00 (2) | 2.05 | 4.00 ± 0.00 (2) | 4.19 |" in tables.render(folder)


def test_without_results_there_are_no_tables(tmp_path):
    assert tables.render(tmp_path) == ""


@pytest.mark.parametrize("command", ["tables", "tables --write", "figures --out {out}"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_results_is_refused(command, exists, tmp_path, monkeypatch):
    pages = [module.PAGE.read_bytes() for module in PAGES]
    where = tmp_path if exists else tmp_path / "typo"
    words = [*command.format(out=tmp_path / "out").split(), "--results", str(where)]
    monkeypatch.setattr("sys.argv", ["paper", *words])
    with pytest.raises(SystemExit, match="results: expected .* got none"):
        main()
    assert pages == [module.PAGE.read_bytes() for module in PAGES]


def test_no_page_is_written_if_one_lacks_its_results(folder, monkeypatch):
    before = tables.PAGE.read_bytes()
    monkeypatch.setattr("sys.argv", ["paper", "tables", "--write", "--results", str(folder)])
    missing = "docs/rotation_evidence.md, docs/options_evidence.md, benchmarks/README.md"
    with pytest.raises(SystemExit, match=f"expected those of {missing} in"):
        main()
    assert tables.PAGE.read_bytes() == before


def test_writing_replaces_the_tables_alone(folder, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n\n{tables.START}\nold\n{tables.END}\n\nafter\n", encoding="utf-8")
    tables.rebuild(path, tables.render(folder))
    text = path.read_text(encoding="utf-8")
    assert text == f"before\n\n{tables.START}\n\n{tables.render(folder)}\n\n{tables.END}\n\nafter\n"


# of LeNet-5 the paper has figures alone
@pytest.mark.parametrize("task", [task for task, rows in published.CLASSIFICATION.items() if rows])
def test_rows_named_by_settings_are_the_papers(task):
    named = {variant.paper for variant in SETTINGS[task].variants.values() if variant.paper}
    rows = set(published.CLASSIFICATION[task])
    # SGD was run on the CIFAR sets alone
    assert named - rows <= {"VSD with SGD"}


def test_figures_are_drawn_from_results(folder, tmp_path):
    made = figures.draw(tmp_path / "pictures", folder)
    assert sorted(path.name for path in made) == [
        "mnist_400x2_entropy_fashion_mnist.png",
        "mnist_400x2_loss.png",
        "mnist_400x2_reliability.png",
    ]
    assert all(path.stat().st_size > 10_000 for path in made)


def test_rows_made_from_bins_have_their_calibration_error():
    probs = torch.rand(500, 10).mul(6).softmax(-1)
    y = torch.where(torch.rand(500) < 0.4, probs.argmax(-1), torch.randint(10, (500,)))
    bins = vsd.metrics.reliability_bins(probs, y)
    full = bins.size > 0
    stored = {name: getattr(bins, name)[full].tolist() for name in ("accuracy", "confidence")}
    again = figures.rows_of_confidence({"size": bins.size[full].int().tolist(), **stored})
    assert vsd.metrics.ece(*again) == pytest.approx(vsd.metrics.ece(probs, y), abs=1e-9)
    assert vsd.metrics.accuracy(*again) == pytest.approx(vsd.metrics.accuracy(probs, y), abs=1e-9)


@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_rows_made_from_a_histogram_fall_into_its_bins(num_classes):
    counts = torch.randint(5, (50,)).tolist()
    entropy = vsd.metrics.predictive_entropy(figures.rows_of_entropy(counts, num_classes))
    top = torch.tensor(float(num_classes)).log().item()
    assert torch.histc(entropy, 50, 0, top).int().tolist() == counts


@pytest.mark.parametrize("name", ["store", "training", "tables", "figures"])
def test_examples(name):
    failed, tried = doctest.testmod(
        importlib.import_module(f"benchmarks.paper.{name}"),
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert failed == 0
    assert tried > 0
