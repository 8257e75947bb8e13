"""Estimators for scikit-learn: Bayesian networks by structured dropout behind ``fit`` and ``predict``."""

import copy
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyro
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pyro_vsd import metrics
from pyro_vsd._utils import check_choice, check_integer, check_positive, reset_parameters_
from pyro_vsd.ensemble import Ensemble
from pyro_vsd.infer import VSDGuide, predict
from pyro_vsd.nn import Classifier, GaussianPrior, HierarchicalPrior, Prior, Regressor, bayesianize, mlp
from pyro_vsd.nn.networks import xavier_uniform_
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.training import fit
from pyro_vsd.training.lengths import auto_batch_size, auto_epochs

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
except ImportError as error:
    raise ImportError(
        f"pyro_vsd.sklearn needs scikit-learn 1.6 or newer ({error}). Install it: pip install 'pyro_vsd[sklearn]'"
    ) from error

__all__ = ["VSDClassifier", "VSDRegressor", "crps_scorer", "log_likelihood_scorer"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU}
PRIORS: dict[str, Callable[[], Prior]] = {"gaussian": GaussianPrior, "hierarchical": HierarchicalPrior}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# A column is divided by its standard deviation, or by this share of its range where that is more: pixels that hardly
# ever differ from zero would otherwise be blown up.
_RANGE = 1 / 8
# Networks by default: better than one on digits and diabetes (one seed).
_MEMBERS = 5
# An ensemble of fewer rows has equal weights, all members as trained.
_FEWEST = 20
# All threads share torch's generator, Pyro's parameter store and its stack of handlers.
_LOCK = threading.RLock()


class _Estimator(BaseEstimator):
    """What both estimators share: settings, training, prediction."""

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        *,
        activation: str = "relu",
        num_reflections: int = 2,
        prior: str | Prior = "gaussian",
        members: int | str = "auto",
        kl_weight: Any = "auto",
        learning_rate: float = 0.01,
        epochs: int | str = "auto",
        batch_size: int | str = "auto",
        num_samples: int = 100,
        standardize: bool = True,
        early_stopping: int | None = None,
        validation_fraction: float = 0.15,
        dtype: str = "float64",
        device: str = "cpu",
        random_state: Any = None,
        module: Any = None,
        class_weight: Any = None,
    ):
        self.module, self.class_weight = module, class_weight
        self.hidden_layer_sizes, self.activation = hidden_layer_sizes, activation
        self.num_reflections, self.prior = num_reflections, prior
        self.members, self.kl_weight = members, kl_weight
        self.learning_rate, self.epochs, self.batch_size = learning_rate, epochs, batch_size
        self.num_samples, self.standardize = num_samples, standardize
        self.early_stopping, self.validation_fraction = early_stopping, validation_fraction
        self.dtype, self.device, self.random_state = dtype, device, random_state

    # ---- training

    def _train(
        self, X: NDArray[Any], y: Tensor, num_outputs: int, make_model: Callable[..., Any], strata: Any, weight: Any
    ) -> None:
        """Makes and trains the network. ``strata``: classes to split by, or ``None``."""
        sizes, prior, dtype = self._check_settings()
        self.scaler_ = _scaler(X) if self.standardize else None
        x, random = self._inputs(X), check_random_state(self.random_state)
        seed, split_seed = (int(random.randint(2**31 - 1)) for _ in range(2))
        data = (x, y.to(self.device))
        weights = None if weight is None else torch.tensor(weight, dtype=x.dtype, device=x.device)
        members = self._num_members(weight is not None)

        def make(num_data: int) -> Any:
            start = torch.initial_seed()
            net = self._network(x.shape[1], sizes, num_outputs, start)
            if members > 1 and isinstance(self.module, nn.Module):
                reset_parameters_(net)
            return make_model(bayesianize(net.to(self.device, dtype), prior), num_data=num_data)

        with isolated(seed):
            if members > 1:
                found = self._ensemble(make, data, seed, members)
            else:
                found = self._single(make, data, weights, seed, split_seed, strata)
        # last: a fit that fails leaves an estimator that is not fitted
        for name, value in {**found, "seed_": seed}.items():
            setattr(self, name, value)

    def _single(
        self, make: Any, data: tuple[Tensor, Tensor], weights: Tensor | None, seed: int, split_seed: int, strata: Any
    ) -> dict[str, Any]:
        train, validation = data, None
        if self.early_stopping is not None:
            kept, held_out = self._split(len(data[0]), split_seed, strata)
            train, validation = (data[0][kept], data[1][kept]), (data[0][held_out], data[1][held_out])
            weights = None if weights is None else weights[kept]
        if self.kl_weight is None:
            raise ValueError("kl_weight=None is a plain member of an ensemble. With members=1 give a number or 'auto'.")
        rows = len(train[0])
        model = make(rows)
        guide = VSDGuide(model, num_reflections=self.num_reflections)
        size = auto_batch_size(rows) if self.batch_size == "auto" else int(self.batch_size)
        steps = -(-rows // size)
        epochs = auto_epochs(rows, steps) if self.epochs == "auto" else int(self.epochs)
        history = fit(
            model,
            guide,
            train,
            epochs=epochs,
            optimizer=lambda groups: torch.optim.Adam(groups, lr=self.learning_rate),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps),
            scheduler_interval="batch",
            kl_weight=1.0 if self._is_auto("kl_weight") else self.kl_weight,
            batch_size=size,
            sample_weight=weights,
            validation=validation,
            early_stopping=self.early_stopping,
            progress=False,
            seed=seed,
        )
        if history.stopped == "interrupt":
            raise KeyboardInterrupt  # otherwise a search over many fits would continue with the next one
        return {"ensemble_": None, "model_": model, "guide_": guide, "history_": history}

    def _ensemble(self, make: Any, data: Any, seed: int, members: int) -> dict[str, Any]:
        weight = "spread" if self._is_auto("kl_weight") else self.kl_weight
        options: dict[str, Any] = {"kl_weight": weight, "seed": seed, "num_reflections": self.num_reflections}
        ensemble = Ensemble(lambda: make(len(data[0])), members, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* held-out rows are too few to fit weights")
            ensemble.fit(
                data,
                validation=self.validation_fraction if len(data[0]) >= _FEWEST else None,
                epochs=None if self._is_auto("epochs") else int(self.epochs),
                lr=self.learning_rate,
                batch_size=None if self._is_auto("batch_size") else int(self.batch_size),
                progress=False,
            )
        if ensemble.history.stopped == "interrupt":
            raise KeyboardInterrupt
        return {"ensemble_": ensemble, "model_": None, "guide_": None, "history_": ensemble.history}

    def _num_members(self, weighted: bool = False) -> int:
        if self._is_auto("members"):
            return _MEMBERS if self.early_stopping is None and not weighted else 1
        if weighted and int(self.members) > 1:
            raise ValueError("sample_weight and class_weight go with members=1: an ensemble counts rows equally.")
        return int(self.members)

    def _is_auto(self, name: str) -> bool:
        value = getattr(self, name)
        return isinstance(value, str) and value == "auto"

    def _network(self, num_inputs: int, sizes: list[int], num_outputs: int, seed: int) -> nn.Module:
        """A network of the estimator's own, or a copy of the user's."""
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        if self.module is not None:
            made = self.module(num_inputs, num_outputs)
            if not isinstance(made, nn.Module):
                raise TypeError(
                    f"module must be a network or a function (inputs, outputs) that makes one, not {made!r}."
                )
            return made
        # Drawn again in the estimator's dtype: the initial weights must not depend on torch's default dtype.
        plain = mlp([num_inputs, *sizes, num_outputs], ACTIVATIONS[self.activation]).to(DTYPES[self.dtype])
        torch.manual_seed(seed)
        return xavier_uniform_(plain)

    def _split(self, rows: int, seed: int, strata: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Rows for training, and held-out rows."""
        held_out = math.ceil(self.validation_fraction * rows)
        if not 0 < held_out < rows:
            raise ValueError(
                f"early_stopping needs rows for training and for validation; n_samples={rows} with "
                f"validation_fraction={self.validation_fraction} leaves none for one of them. Use early_stopping=None."
            )
        # A class with too few rows cannot be split evenly.
        if strata is not None and (np.bincount(strata).min() < 2 or held_out < strata.max() + 1):
            strata = None
        kept, held = train_test_split(np.arange(rows), test_size=held_out, random_state=seed, stratify=strata)
        return kept, held

    def _check_settings(self) -> tuple[list[int], Prior, torch.dtype]:
        """Checks what the library's own parts do not check, and looks up names."""
        sizes = self.hidden_layer_sizes if isinstance(self.hidden_layer_sizes, Iterable) else [self.hidden_layer_sizes]
        for size in sizes:
            check_integer("hidden_layer_sizes", size, 1)
        check_choice("activation", self.activation, list(ACTIVATIONS))
        check_choice("dtype", self.dtype, list(DTYPES))
        for name in ("members", "num_samples", "epochs", "batch_size", "early_stopping"):
            optional = name == "early_stopping" and self.early_stopping is None
            if not optional and not (name not in ("num_samples", "early_stopping") and self._is_auto(name)):
                check_integer(name, getattr(self, name), 1)
        if self._num_members() > 1 and self.early_stopping is not None:
            raise ValueError(
                "early_stopping goes with members=1: an ensemble trains until its rate has fallen to zero."
            )
        check_positive("learning_rate", self.learning_rate)
        check_positive("validation_fraction", self.validation_fraction)
        if self.validation_fraction >= 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must be below 1.")
        prior = self.prior
        if isinstance(prior, str):
            check_choice("prior", prior, list(PRIORS))
            prior = PRIORS[prior]()
        return [int(size) for size in sizes], prior, DTYPES[self.dtype]

    # ---- prediction

    def _inputs(self, X: NDArray[Any]) -> Tensor:
        if self.scaler_ is not None:
            X = self.scaler_.transform(X)
        return torch.tensor(X, dtype=DTYPES[self.dtype], device=self.device)

    def _predict(self, X: Any, keep_samples: bool) -> Prediction:
        check_is_fitted(self, "history_")
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        options: dict[str, Any] = {"keep_samples": keep_samples, "progress": False}
        options |= {"num_samples": self.num_samples, "seed": self.seed_}
        with isolated(self.seed_):
            if self.ensemble_ is not None:
                options["num_samples"] = max(self.num_samples, len(self.ensemble_))
                return self.ensemble_.predict(self._inputs(X), **options)
            return predict(self.model_, self.guide_, self._inputs(X), **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state.get("guide_") is not None:  # a guide is pickled without its model
            self.guide_._model = (self.model_,)


class VSDRegressor(RegressorMixin, _Estimator):
    r"""A Bayesian network for regression, with Gaussian noise.

    .. math:: y_n \sim \mathcal N(f_W(x_n), \sigma^2), \qquad W \sim \text{structured dropout}

    Targets are standardised inside; predictions are in their own units, means over ``num_samples`` sampled networks,
    the same ones at each call. Pyro's parameter store and torch's generators are left as they are.

    :param hidden_layer_sizes: units of each hidden layer; ``()`` is a linear model.
    :param noise: σ, in units of the targets' standard deviation: a number, ``"learned"``, ``"latent"`` or
        ``"heteroscedastic"`` (depends on x); see :class:`vsd.nn.Regressor <pyro_vsd.nn.Regressor>`. Several outputs
        have a σ each.
    :param activation: ``"relu"``, ``"tanh"``, ``"silu"`` or ``"gelu"``.
    :param num_reflections: see :class:`~pyro_vsd.infer.VSDGuide`.
    :param prior: ``"gaussian"``, ``"hierarchical"``, or a prior of :mod:`pyro_vsd.nn`.
    :param members: networks in an ensemble (:class:`~pyro_vsd.Ensemble`), mixed by what they predict of held-out rows,
        then trained again on all rows; 1 for a single network. ``"auto"`` is 5; with early stopping or weights 1.
    :param kl_weight: see :class:`~pyro_vsd.infer.VSD_ELBO`; for an ensemble one of each member. ``"auto"`` is 1 for a
        single network, and the ensemble's default for an ensemble.
    :param learning_rate: Adam's, at the start; it falls to zero along a cosine.
    :param epochs: passes over the data; ``"auto"`` makes 3,000 steps, more for more than 1,000 rows. An ensemble has
        the lengths of :meth:`Ensemble.fit <pyro_vsd.ensemble.Ensemble.fit>`, and held-out rows choose.
    :param batch_size: rows in a batch; ``"auto"`` takes a fifth of the rows, and between 8 and 200, or 100 for
        20,000 rows and more.
    :param num_samples: sampled networks for predictions.
    :param standardize: whether inputs are brought to mean 0 and standard deviation 1; less, if the range is more than
        8 standard deviations.
    :param early_stopping: with a single network, epochs to wait for a better likelihood of held-out rows; ``None``
        trains on all rows.
    :param validation_fraction: the share of rows held out for early stopping or for the weights of an ensemble.
    :param dtype: ``"float64"`` or ``"float32"``.
    :param device: where to compute.
    :param random_state: an integer, a ``RandomState``, or ``None`` for NumPy's global one.
    :param module: a network of your own in place of ``hidden_layer_sizes`` and ``activation``: an ``nn.Module``, which
        is copied, or a function ``(inputs, outputs)`` of two numbers that makes one.

    :ivar ensemble_: the ensemble, if ``members`` is more than 1.
    :ivar model_: else the network with its observation model, in standardised units.
    :ivar guide_: and its posterior.
    :ivar history_: a record of each epoch.
    :ivar n_features_in\_: columns of X; ``feature_names_in_`` their names where X had some.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> regressor = VSDRegressor(members=2, epochs=5, random_state=0).fit(X[:400], y[:400])
    >>> mean, std = regressor.predict(X[400:], return_std=True)
    >>> mean.shape, std.shape
    ((42,), (42,))
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        *,
        noise: float | str = "learned",
        activation: str = "relu",
        num_reflections: int = 2,
        prior: str | Prior = "gaussian",
        members: int | str = "auto",
        kl_weight: Any = "auto",
        learning_rate: float = 0.01,
        epochs: int | str = "auto",
        batch_size: int | str = "auto",
        num_samples: int = 100,
        standardize: bool = True,
        early_stopping: int | None = None,
        validation_fraction: float = 0.15,
        dtype: str = "float64",
        device: str = "cpu",
        random_state: Any = None,
        module: Any = None,
    ):
        super().__init__(
            hidden_layer_sizes, activation=activation, num_reflections=num_reflections, prior=prior,
            members=members, kl_weight=kl_weight, learning_rate=learning_rate, epochs=epochs, batch_size=batch_size,
            num_samples=num_samples, standardize=standardize, early_stopping=early_stopping,
            validation_fraction=validation_fraction, dtype=dtype, device=device, random_state=random_state,
            module=module,
        )  # fmt: skip
        self.noise = noise

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "VSDRegressor":
        """Trains on inputs ``(N, F)`` and targets ``(N,)`` or ``(N, D)``.

        :param sample_weight: how often each row counts, ``(N,)``. The KL then weighs as for a data set of as many rows
            as the weights add up to.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        weight = _check_weight(sample_weight, len(X))
        columns = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        self.target_scaler_, self.target_ndim_ = StandardScaler().fit(columns), y.ndim
        scaled = self.target_scaler_.transform(columns)
        D = scaled.shape[1]
        target = torch.tensor(scaled if D > 1 else scaled[:, 0])
        separate = D if D > 1 and self.noise in ("learned", "latent") else None

        def make_model(net: nn.Module, num_data: int) -> Regressor:
            return Regressor(net, num_data, noise=self.noise, num_outputs=separate)

        self._train(X, target, 2 * D if self.noise == "heteroscedastic" else D, make_model, None, weight)
        return self

    def predictive(self, X: Any) -> RegressionPrediction:
        """The predictive distribution, in the targets' units: for ``vsd.metrics`` and ``vsd.plots``.

        >>> X = np.linspace(-1, 1, 30)[:, None]
        >>> VSDRegressor((8,), members=1, epochs=3, random_state=0).fit(X, X[:, 0]).predictive(X).epistemic.shape
        torch.Size([30])
        """
        return self._in_own_units(X, keep_samples=True)

    def _in_own_units(self, X: Any, keep_samples: bool) -> RegressionPrediction:
        found = self._predict(X, keep_samples)
        assert isinstance(found, RegressionPrediction)
        return found.to(torch.float64).rescaled(self.target_scaler_.scale_, self.target_scaler_.mean_)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predictive means, shaped as the targets; with ``return_std`` also the standard deviations, noise included."""
        found = self._in_own_units(X, keep_samples=False)
        mean = self._as_targets(found.mean)
        return (mean, self._as_targets(found.stddev)) if return_std else mean

    def predict_quantiles(self, X: Any, quantiles: Any) -> NDArray[Any]:
        """Quantiles of the predictive distribution, noise included: the targets' shape with ``(Q,)`` in front."""
        levels = torch.as_tensor(quantiles, dtype=torch.float64)
        return self._as_targets(self.predictive(X).quantile(levels))

    def predict_interval(self, X: Any, level: float = 0.95) -> tuple[NDArray[Any], NDArray[Any]]:
        """The central interval ``(lower, upper)`` that holds the target with probability ``level``."""
        lower, upper = self.predictive(X).interval(level)
        return self._as_targets(lower), self._as_targets(upper)

    def _as_targets(self, values: Tensor) -> NDArray[Any]:
        """In the shape of the targets: a single output was ``(N,)`` or ``(N, 1)``."""
        column = self.target_ndim_ == 2 and len(self.target_scaler_.mean_) == 1
        return (values.unsqueeze(-1) if column else values).numpy(force=True)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class VSDClassifier(ClassifierMixin, _Estimator):
    r"""A Bayesian network for classification.

    .. math:: y_n \sim \mathrm{Categorical}(\mathrm{softmax}(f_W(x_n))), \qquad W \sim \text{structured dropout}

    Parameters are those of :class:`VSDRegressor`, without ``noise``.

    :param class_weight: ``"balanced"``, or a dict from labels to weights; multiplied with ``sample_weight``.

    :ivar classes\_: the labels, in the order of the columns of :meth:`predict_proba`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = VSDClassifier(members=1, epochs=5, random_state=0).fit(X, y)
    >>> classifier.predict_proba(X).shape
    (150, 3)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "VSDClassifier":
        """Trains on inputs ``(N, F)`` and labels ``(N,)`` of any kind.

        :param sample_weight: how often each row counts, ``(N,)``. The KL then weighs as for a data set of as many rows
            as the weights add up to.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y holds one class only, {self.classes_[0]!r}: a classifier needs two.")
        weight = _check_weight(sample_weight, len(X))
        if self.class_weight is not None:
            by_class = compute_sample_weight(self.class_weight, y)
            weight = by_class if weight is None else weight * by_class
        self._train(X, torch.tensor(labels), len(self.classes_), Classifier, labels, weight)
        return self

    def predictive(self, X: Any) -> ClassificationPrediction:
        """The predictive distribution: for ``vsd.metrics`` and ``vsd.plots``. Classes are positions in ``classes_``."""
        found = self._predict(X, keep_samples=True)
        assert isinstance(found, ClassificationPrediction)
        return found

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Mean probabilities ``(N, C)``, columns as in ``classes_``."""
        return self._predict(X, keep_samples=False).mean.numpy(force=True)

    def predict_log_proba(self, X: Any) -> NDArray[Any]:
        """Logarithms of :meth:`predict_proba`."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable classes ``(N,)``."""
        best = self.predict_proba(X).argmax(1)  # first: it raises if the estimator is not fitted
        return np.asarray(self.classes_[best])


def _scaler(X: NDArray[Any]) -> StandardScaler:
    """Mean and standard deviation of each column, or a share of its range where that is more."""
    scaler = StandardScaler().fit(X)
    scaler.scale_ = np.maximum(scaler.scale_, _RANGE * np.ptp(X, axis=0))
    return scaler


def _check_weight(weight: Any, rows: int) -> NDArray[Any] | None:
    if weight is None:
        return None
    weight = np.asarray(weight, dtype=np.float64)
    if weight.shape != (rows,) or not np.isfinite(weight).all() or (weight < 0).any() or not weight.any():
        raise ValueError(f"sample_weight must be {rows} numbers >= 0, one for each row of X, and not all zero.")
    return weight


def log_likelihood_scorer(estimator: Any, X: Any, y: Any) -> float:
    """The mean log-likelihood of targets, which sees uncertainty: ``GridSearchCV(…, scoring=log_likelihood_scorer)``.

    :param estimator: a fitted :class:`VSDRegressor` or :class:`VSDClassifier`, alone or at the end of a pipeline.

    >>> X = np.linspace(-1, 1, 30)[:, None]
    >>> regressor = VSDRegressor((8,), epochs=3, random_state=0).fit(X, X[:, 0])
    >>> log_likelihood_scorer(regressor, X, X[:, 0]) < 0
    True
    """
    last, X = _last_step(estimator, X)
    if isinstance(last, VSDClassifier):
        known = {label: place for place, label in enumerate(last.classes_.tolist())}
        places = [known.get(label, -1) for label in np.asarray(y).tolist()]
        if -1 in places:  # a class that training has not seen has no probability
            return -math.inf
        y = torch.tensor(places)
    return float(last.predictive(X).log_prob(y).mean())


def crps_scorer(estimator: Any, X: Any, y: Any) -> float:
    """Minus the continuous ranked probability score of a regressor, so that larger is better, as scorers have it.

    :param estimator: a fitted :class:`VSDRegressor`, alone or at the end of a pipeline.
    """
    last, X = _last_step(estimator, X)
    return -float(metrics.crps(last.predictive(X), y))


def _last_step(estimator: Any, X: Any) -> tuple[Any, Any]:
    """The last step of a pipeline, or the estimator, and its inputs."""
    if not hasattr(estimator, "steps"):
        return estimator, X
    return estimator[-1], estimator[:-1].transform(X) if len(estimator) > 1 else X


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """A seed and an empty parameter store inside; torch's generators and Pyro's store as before afterwards."""
    with _LOCK, torch.random.fork_rng(devices=range(torch.cuda.device_count())), pyro.get_param_store().scope():
        torch.manual_seed(seed)
        yield
