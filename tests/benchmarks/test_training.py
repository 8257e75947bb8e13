"""Training with a checkpoint after each epoch, the data it gets, and units that it makes."""

from dataclasses import replace

import pytest
import torch

from benchmarks.paper import data, images, runner, training
from benchmarks.paper.settings import digits
from benchmarks.paper.unit import Setting, Variant

SETTING = replace(digits.SETTINGS[0], epochs=3)
VARIANTS = {
    "vsd": Variant("vsd", {"num_reflections": 2}),
    "vsd, SGD": Variant("vsd", {"num_reflections": 2}, optimizer="sgd", lr=0.05),
    "hierarchical": Variant("vsd_hierarchical", {}),
    "low rank": Variant("vsd_low_rank", {"rank": 2}),
    "map": Variant("map", {}, schedule="constant"),
    "mc_dropout": Variant("mc_dropout", {"rate": 0.2}),
    "bbb_lrt": Variant("bbb_lrt", {}),
    "deep_ensemble": Variant("deep_ensemble", {"num_members": 2}),
    "swag": Variant("swag", {"start": 1, "period": 0.5}, schedule="swag", lr=0.05),
}


class EndedError(Exception):
    pass


def after_first_epoch(epoch, method, history):
    if epoch == 1:
        raise EndedError


def run(variant: Variant, path=None, callback=None, setting: Setting = SETTING):
    parts = data.load(setting, None)
    method = images.make(setting, variant, len(parts.train), 0)
    history, _ = training.train(method, parts.train, setting, variant, 0, path, callback=callback)
    return method, history


@pytest.mark.parametrize("name", VARIANTS)
def test_ended_training_goes_on_as_if_it_had_not(name, tmp_path):
    whole, history = run(VARIANTS[name])
    with pytest.raises(EndedError):
        run(VARIANTS[name], tmp_path / "a.pt", after_first_epoch)
    torch.manual_seed(99)
    resumed, again = run(VARIANTS[name], tmp_path / "a.pt")
    assert again == history
    for key, value in whole.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, resumed.state_dict()[key]), key


def test_a_checkpoint_of_other_settings_is_not_used(tmp_path):
    with pytest.raises(EndedError):
        run(VARIANTS["map"], tmp_path / "a.pt", after_first_epoch)
    other = replace(SETTING, lr=1e-3)
    _, history = run(VARIANTS["map"], tmp_path / "a.pt", setting=other)
    assert history == run(VARIANTS["map"], setting=other)[1]


@pytest.mark.parametrize("damage", ["cut", "empty", "a list"])
def test_a_damaged_checkpoint_is_named_and_the_unit_begins_anew(damage, tmp_path):
    path = tmp_path / "a.pt"
    with pytest.raises(EndedError):
        run(VARIANTS["map"], path, after_first_epoch)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    if damage == "a list":
        torch.save([1, 2], path)
    with pytest.warns(UserWarning, match=f"{path}: expected a checkpoint.*begins anew"):
        _, history = run(VARIANTS["map"], path)
    assert history == run(VARIANTS["map"])[1]


def test_sgd_takes_the_loss_per_row():
    method = images.make(SETTING, VARIANTS["vsd, SGD"], 1000, 0)
    assert isinstance(method.optimizer, torch.optim.SGD)
    assert method.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 1000)


def test_parameters_are_float32_and_come_from_the_seed():
    one, same, other = (images.make(SETTING, VARIANTS["vsd"], 1000, seed) for seed in (0, 0, 1))
    assert {p.dtype for p in one.parameters()} == {torch.float32}
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs if a.abs().sum() > 0)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant("map", optimizer="rmsprop"), "optimizer: expected 'own' or 'sgd', got 'rmsprop'"),
        (Variant("vsd", optimizer="sgd", rates={"log_alpha": 0.1}), "rates: expected none beside optimizer='sgd'"),
        (Variant("map", schedule="step"), "schedule: expected 'cosine', 'swag', 'steps' or 'constant', got 'step'"),
    ],
)
def test_unknown_ways_to_train_are_refused(variant, message):
    with pytest.raises(ValueError, match=message):
        run(variant)


def test_validation_rows_are_the_last_and_no_training_rows():
    parts, everything = data.load(SETTING, None), data.load(replace(SETTING, num_validation=0), None)
    assert len(parts.validation) == SETTING.num_validation
    assert len(everything.validation) == 0
    assert torch.equal(torch.cat([parts.train.x, parts.validation.x]), everything.train.x)
    assert torch.equal(parts.test.x, everything.test.x)


def test_without_a_folder_there_are_no_images():
    with pytest.raises(ValueError, match="data: expected a folder, got none. Pass --data FOLDER"):
        data.load(replace(SETTING, data="mnist"), None)


def test_normalised_by_the_training_rows_alone():
    setting = replace(SETTING, data="cifar10", ood=("cifar100",), normalize=True)
    parts = data.load(setting, None, smoke=True)
    raw = data.load(replace(setting, normalize=False), None, smoke=True)
    torch.testing.assert_close(parts.train.x.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float32), atol=1e-5, rtol=0)
    scale = raw.train.x.std((0, 2, 3), keepdim=True)
    expected = (raw.ood["cifar100"].x - raw.train.x.mean((0, 2, 3), keepdim=True)) / scale
    torch.testing.assert_close(parts.ood["cifar100"].x, expected)


@pytest.mark.parametrize("flip", [False, True])
def test_augmented_images_are_crops_of_the_padded_ones(flip):
    x = torch.rand(6, 3, 8, 8)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    crops = [
        padded[:, :, top : top + 8, left : left + 8].flip(-1)
        if mirrored
        else padded[:, :, top : top + 8, left : left + 8]
        for top in range(9)
        for left in range(9)
        for mirrored in ([False, True] if flip else [False])
    ]
    found = data.augmented(x, flip)
    for row in range(len(x)):
        assert any(torch.equal(found[row], crop[row]) for crop in crops)


def test_both_orientations_appear():
    x = torch.arange(8.0).expand(100, 1, 8, 8) + 1
    slopes = data.augmented(x, flip=True)[:, 0, 4, 4] - data.augmented(x, flip=True)[:, 0, 4, 3]
    assert {bool(s > 0) for s in slopes} == {True, False}


def test_units_come_seed_by_seed_and_a_variant_may_have_fewer():
    variants = {"a": Variant("map"), "b": Variant("map", seeds=(1,)), "c": Variant("map")}
    units = images.units(replace(SETTING, variants=variants, seeds=(0, 1)))
    assert [(unit.variant, unit.seed) for unit in units] == [("a", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]


def test_selection_by_variant_and_seed():
    units = runner.selected(["mnist_400x2"], ["map", "vsd_t2"], [1])
    assert [unit.name for unit in units] == ["mnist_400x2/vsd_t2-seed1", "mnist_400x2/map-seed1"]


def test_seeds_that_no_unit_has_are_refused():
    with pytest.raises(ValueError, match=r"seeds: expected some of \[0\], got \[7\]"):
        runner.selected(["digits"], seeds=[7])


def test_unknown_variants_are_refused():
    with pytest.raises(ValueError, match="only: expected some of vsd_t2, ard_vd, map, swag, got vsd_t9"):
        runner.selected(["digits"], ["vsd_t9"])


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match="task: expected one of mnist_400x2, .*, got 'imagenet'"):
        runner.selected(["imagenet"])
