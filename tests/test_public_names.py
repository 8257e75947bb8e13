"""The public interface: names that exist, are documented, and are where users look for them."""

import importlib
import inspect
import pkgutil

import pytest

import pyro_vsd as vsd

PACKAGES = sorted(f"pyro_vsd.{info.name}" for info in pkgutil.iter_modules(vsd.__path__) if info.ispkg)


def public_objects():
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", []):
            yield pytest.param(getattr(module, name, None), id=f"{package}.{name}")


@pytest.mark.parametrize("package", ["pyro_vsd", *PACKAGES])
def test_all_names_exist_once(package):
    module = importlib.import_module(package)
    assert hasattr(module, "__all__"), f"{package} has no __all__"
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert [name for name in module.__all__ if name.startswith("_")] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_says_what_it_is(package):
    assert importlib.import_module(package).__doc__


@pytest.mark.parametrize("thing", list(public_objects()))
def test_public_name_is_documented(thing):
    if callable(thing) or inspect.ismodule(thing):
        assert inspect.getdoc(thing)


@pytest.mark.parametrize("name", ["ops", "distributions", "infer", "nn", "metrics", "datasets", "plots", "baselines"])
def test_packages_are_attributes(name):
    assert inspect.ismodule(getattr(vsd, name))


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("VSDGuide", "infer"),
        ("VSD_ELBO", "infer"),
        ("predict", "infer"),
        ("calibrate", "posthoc"),
        ("from_trained", "posthoc"),
        ("Calibration", "prediction"),
        ("coherent", "distributions"),
        ("Prediction", "prediction"),
        ("ClassificationPrediction", "prediction"),
        ("RegressionPrediction", "prediction"),
    ],
)
def test_short_names(name, home):
    assert getattr(vsd, name) is getattr(importlib.import_module(f"pyro_vsd.{home}"), name)
    assert name in vsd.__all__


def test_dir_lists_what_is_loaded_on_request():
    assert {"baselines", "plots"} <= set(dir(vsd))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pyro_vsd' has no attribute 'VDSGuide'"):
        vsd.VDSGuide  # noqa: B018


def test_version_is_a_plain_string():
    """``setup.cfg`` reads it without importing the package."""
    assert isinstance(vsd.__version__, str)
