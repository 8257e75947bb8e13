"""Estimators for scikit-learn: Bayesian networks by structured dropout behind ``fit`` and ``predict``."""

import math
import numbers
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyro
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pyro_vsd.infer import VSD_ELBO, VSDGuide, predict
from pyro_vsd.nn import (
    Classifier,
    GaussianPrior,
    HierarchicalPrior,
    Prior,
    Regressor,
    bayesianize,
    mlp,
    xavier_uniform_,
)
from pyro_vsd.prediction import ClassificationPrediction, Prediction, RegressionPrediction
from pyro_vsd.training import fit

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
except ImportError as error:
    raise ImportError(
        f"expected scikit-learn 1.6 or newer for pyro_vsd.sklearn, got none ({error}). Install it: pip install "
        "'pyro_vsd[sklearn]'"
    ) from error

__all__ = ["VSDClassifier", "VSDRegressor"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU}
PRIORS: dict[str, Callable[[], Prior]] = {"gaussian": GaussianPrior, "hierarchical": HierarchicalPrior}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# batch_size="auto": at least about ten steps an epoch, so that small data are fitted within the default epochs, and
# batches that a core still works through about as fast as through a single row.
_STEPS, _LEAST, _MOST = 10, 8, 100
# Torch's generator, Pyro's store and its stack of handlers are one for all threads.
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
        kl_weight: float | Callable[[int], float] = 1.0,
        learning_rate: float = 0.01,
        epochs: int = 100,
        batch_size: int | str = "auto",
        num_samples: int = 100,
        standardize: bool = True,
        early_stopping: int | None = None,
        validation_fraction: float = 0.1,
        dtype: str = "float64",
        device: str = "cpu",
        random_state: Any = None,
    ):
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.num_reflections = num_reflections
        self.prior = prior
        self.kl_weight = kl_weight
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.standardize = standardize
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.dtype = dtype
        self.device = device
        self.random_state = random_state

    # ---- training

    def _train(self, X: NDArray[Any], y: Tensor, num_outputs: int, make_model: Callable[..., Any], strata: Any) -> None:
        """Makes and trains the network. ``y`` is what the model takes; ``strata`` are classes to split by, or ``None``.

        All else that ``fit`` sets has been set: what fails here leaves no ``guide_`` behind.
        """
        sizes, prior, dtype = self._check_settings()
        self.scaler_ = StandardScaler().fit(X) if self.standardize else None
        x, random = self._inputs(X), check_random_state(self.random_state)
        seed, split_seed = (int(random.randint(2**31 - 1)) for _ in range(2))
        y = y.to(self.device)
        train, validation = (x, y), None
        if self.early_stopping is not None:
            train, validation = self._split(x, y, split_seed, strata)
        rows = len(train[0])
        with isolated(seed):
            # Drawn again in the dtype of the estimator: the start must not depend on torch's default dtype.
            plain = mlp([x.shape[1], *sizes, num_outputs], ACTIVATIONS[self.activation]).to(dtype)
            torch.manual_seed(seed)
            net = bayesianize(xavier_uniform_(plain).to(self.device), prior)
            model = make_model(net, num_data=rows)
            guide = VSDGuide(model, num_reflections=self.num_reflections)
            history = fit(
                model,
                guide,
                train,
                epochs=self.epochs,
                optimizer=lambda groups: torch.optim.Adam(groups, lr=self.learning_rate),
                scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs),
                elbo=VSD_ELBO(kl_weight=self.kl_weight),
                batch_size=self._batch_rows(rows),
                validation=validation,
                early_stopping=self.early_stopping,
                progress=False,
                seed=seed,
            )
        if history.stopped == "interrupt":
            # A search over many fits would otherwise go on with the next.
            raise KeyboardInterrupt
        self.model_, self.guide_, self.history_, self.seed_ = model, guide, history, seed

    def _split(self, x: Tensor, y: Tensor, seed: int, strata: Any) -> tuple[Any, Any]:
        held_out = math.ceil(self.validation_fraction * len(x))
        if not 0 < held_out < len(x):
            raise ValueError(
                f"early_stopping: expected rows for training and for validation, got n_samples={len(x)} with "
                f"validation_fraction={self.validation_fraction}. Use early_stopping=None."
            )
        rows = np.arange(len(x))
        # With few rows of a class they cannot be split evenly.
        if strata is not None and (np.bincount(strata).min() < 2 or held_out < strata.max() + 1):
            strata = None
        train, held = train_test_split(rows, test_size=held_out, random_state=seed, stratify=strata)
        return (x[train], y[train]), (x[held], y[held])

    def _batch_rows(self, rows: int) -> int:
        if self.batch_size == "auto":
            return min(_MOST, max(_LEAST, rows // _STEPS))
        return int(self.batch_size)

    def _check_settings(self) -> tuple[list[int], Prior, torch.dtype]:
        """Checks what the library's own parts do not check, and reads names."""
        sizes: Any = self.hidden_layer_sizes
        sizes = list(sizes) if isinstance(sizes, Iterable) else [sizes]
        if not all(_is_integer(size) and size >= 1 for size in sizes):
            raise ValueError(
                f"hidden_layer_sizes: expected the number of units of each hidden layer, got "
                f"{self.hidden_layer_sizes!r}."
            )
        for name, known in (("activation", ACTIVATIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {list(known)}, got {getattr(self, name)!r}.")
        if isinstance(self.prior, str) and self.prior not in PRIORS:
            raise ValueError(f"prior: expected one of {list(PRIORS)} or a prior of vsd.nn, got {self.prior!r}.")
        others: dict[str, list[Any]] = {"batch_size": ["auto"], "early_stopping": [None]}
        for name in ("epochs", "num_samples", "batch_size", "early_stopping"):
            value, also = getattr(self, name), others.get(name, [])
            if value not in also and not (_is_integer(value) and value >= 1):
                choices = " or ".join(["an integer >= 1", *map(repr, also)])
                raise ValueError(f"{name}: expected {choices}, got {value!r}.")
        for name, upper in (("learning_rate", math.inf), ("validation_fraction", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or not 0 < float(value) < upper:
                raise ValueError(f"{name}: expected a number above 0 and below {upper}, got {value!r}.")
        prior = PRIORS[self.prior]() if isinstance(self.prior, str) else self.prior
        return [int(size) for size in sizes], prior, DTYPES[self.dtype]

    # ---- prediction

    def _inputs(self, X: NDArray[Any]) -> Tensor:
        if self.scaler_ is not None:
            X = self.scaler_.transform(X)
        return torch.tensor(X, dtype=DTYPES[self.dtype], device=self.device)

    def _predict(self, X: Any, keep_samples: bool) -> Prediction:
        check_is_fitted(self, "guide_")
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        # One noise vector for all rows of a sample: what is said of a row does not depend on the others.
        with isolated(self.seed_):
            return predict(
                self.model_,
                self.guide_,
                self._inputs(X),
                num_samples=self.num_samples,
                seed=self.seed_,
                coherent=True,
                keep_samples=keep_samples,
                progress=False,
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "guide_" in state:  # a guide is pickled without its model
            self.guide_._model = (self.model_,)


class VSDRegressor(RegressorMixin, _Estimator):
    r"""A Bayesian network for numbers, with Gaussian noise.

    .. math:: y_n \sim \mathcal N(f_W(x_n), \sigma^2), \qquad W \sim \text{structured dropout}

    Targets are standardised inside, and all answers are in their own units. Predictions are means over
    ``num_samples`` sampled networks, the same ones at each call: a row's answer depends on that row alone. Neither
    Pyro's parameter store nor torch's generators are touched.

    :param hidden_layer_sizes: units of each hidden layer; ``()`` is a linear model.
    :param noise: σ, in units of the targets' standard deviation: a number, ``"learned"``, ``"latent"`` or
        ``"heteroscedastic"`` (depends on x); see :class:`vsd.nn.Regressor <pyro_vsd.nn.Regressor>`. Several outputs
        have a σ each.
    :param activation: ``"relu"``, ``"tanh"``, ``"silu"`` or ``"gelu"``.
    :param num_reflections: see :class:`~pyro_vsd.infer.VSDGuide`.
    :param prior: ``"gaussian"``, ``"hierarchical"``, or a prior of :mod:`pyro_vsd.nn`.
    :param kl_weight: see :class:`~pyro_vsd.infer.VSD_ELBO`.
    :param learning_rate: Adam's, at the start; it falls to zero along a cosine.
    :param epochs: passes over the data.
    :param batch_size: rows in a batch; ``"auto"`` takes a tenth of the rows, and between 8 and 100.
    :param num_samples: sampled networks for predictions.
    :param standardize: whether inputs are brought to mean 0 and standard deviation 1.
    :param early_stopping: epochs to wait for a better likelihood of rows held out; ``None`` holds out none.
    :param validation_fraction: the share of rows held out for early stopping.
    :param dtype: ``"float64"`` or ``"float32"``.
    :param device: where to compute.
    :param random_state: an integer, a ``RandomState``, or ``None`` for NumPy's global one.

    :ivar model_: the network with its observation model; ``guide_`` its posterior: for all of ``vsd`` to use, in
        standardised units; :meth:`predictive` gives predictions in those of y.
    :ivar history_: a record of each epoch.
    :ivar n_features_in\_: columns of X; ``feature_names_in_`` their names where X had some.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> regressor = VSDRegressor(epochs=5, random_state=0).fit(X[:400], y[:400])
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
        kl_weight: float | Callable[[int], float] = 1.0,
        learning_rate: float = 0.01,
        epochs: int = 100,
        batch_size: int | str = "auto",
        num_samples: int = 100,
        standardize: bool = True,
        early_stopping: int | None = None,
        validation_fraction: float = 0.1,
        dtype: str = "float64",
        device: str = "cpu",
        random_state: Any = None,
    ):
        super().__init__(
            hidden_layer_sizes,
            activation=activation,
            num_reflections=num_reflections,
            prior=prior,
            kl_weight=kl_weight,
            learning_rate=learning_rate,
            epochs=epochs,
            batch_size=batch_size,
            num_samples=num_samples,
            standardize=standardize,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            dtype=dtype,
            device=device,
            random_state=random_state,
        )
        self.noise = noise

    def fit(self, X: Any, y: Any) -> "VSDRegressor":
        """Trains on inputs ``(N, F)`` and targets ``(N,)`` or ``(N, D)``."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self.target_scaler_ = StandardScaler().fit(y.reshape(len(y), -1))
        self.target_ndim_ = y.ndim
        scaled = self.target_scaler_.transform(y.reshape(len(y), -1))
        D = scaled.shape[1]
        target = torch.tensor(scaled if D > 1 else scaled[:, 0])
        separate = D if D > 1 and self.noise in ("learned", "latent") else None

        def make_model(net: nn.Module, num_data: int) -> Regressor:
            return Regressor(net, num_data, noise=self.noise, num_outputs=separate)

        self._train(X, target, 2 * D if self.noise == "heteroscedastic" else D, make_model, None)
        return self

    def predictive(self, X: Any) -> RegressionPrediction:
        """The predictive distribution, in the targets' units: for ``vsd.metrics`` and ``vsd.plots``.

        >>> X = np.linspace(-1, 1, 30)[:, None]
        >>> VSDRegressor((8,), epochs=3, random_state=0).fit(X, X[:, 0]).predictive(X).epistemic.shape
        torch.Size([30])
        """
        found = self._predict(X, keep_samples=True)
        assert isinstance(found, RegressionPrediction)
        samples, scales = found.require_samples("predictive")
        mean, scale = (torch.as_tensor(moment, device=samples.device) for moment in self._target_moments())
        return RegressionPrediction.from_samples(samples.double() * scale + mean, scales.double() * scale)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predictive means, shaped as the targets; with ``return_std`` also the standard deviations, noise included."""
        found = self._predict(X, keep_samples=False)
        mean, scale = self._target_moments()
        shape = (-1,) if self.target_ndim_ == 1 else (len(found), -1)
        means = (_numpy(found.mean) * scale + mean).reshape(shape)
        return (means, (_numpy(found.variance.sqrt()) * scale).reshape(shape)) if return_std else means

    def predict_quantiles(self, X: Any, quantiles: Any) -> NDArray[Any]:
        """Quantiles of the predictive distribution, noise included: the targets' shape with ``(Q,)`` in front."""
        found = self.predictive(X)
        levels = torch.as_tensor(quantiles, dtype=torch.float64)
        shape = (-1,) if self.target_ndim_ == 1 else (len(found), -1)
        return _numpy(found.quantile(levels)).reshape(*levels.shape, *shape)

    def predict_interval(self, X: Any, level: float = 0.95) -> tuple[NDArray[Any], NDArray[Any]]:
        """The central interval ``(lower, upper)`` that holds the target with probability ``level``."""
        if not 0 < level < 1:
            raise ValueError(f"level: expected a number strictly between 0 and 1, got {level!r}.")
        lower, upper = self.predict_quantiles(X, [(1 - level) / 2, (1 + level) / 2])
        return lower, upper

    def _target_moments(self) -> tuple[Any, Any]:
        """Mean and standard deviation of the targets: one number, or one for each output."""
        mean, scale = self.target_scaler_.mean_, self.target_scaler_.scale_
        return (mean, scale) if len(mean) > 1 else (mean[0], scale[0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class VSDClassifier(ClassifierMixin, _Estimator):
    r"""A Bayesian network for classes.

    .. math:: y_n \sim \mathrm{Categorical}(\mathrm{softmax}(f_W(x_n))), \qquad W \sim \text{structured dropout}

    Parameters and what is promised of predictions are those of :class:`VSDRegressor`, without ``noise``.

    :ivar classes\_: the labels, in the order of the columns of :meth:`predict_proba`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = VSDClassifier(epochs=5, random_state=0).fit(X, y)
    >>> classifier.predict_proba(X).shape
    (150, 3)
    """

    def fit(self, X: Any, y: Any) -> "VSDClassifier":
        """Trains on inputs ``(N, F)`` and labels ``(N,)`` of any kind."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y: expected at least two classes, got one class, {self.classes_[0]!r}.")
        self._train(X, torch.tensor(labels), len(self.classes_), Classifier, labels)
        return self

    def predictive(self, X: Any) -> ClassificationPrediction:
        """The predictive distribution: for ``vsd.metrics`` and ``vsd.plots``. Classes are positions in ``classes_``."""
        found = self._predict(X, keep_samples=True)
        assert isinstance(found, ClassificationPrediction)
        return found

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Mean probabilities ``(N, C)``, columns as in ``classes_``."""
        found = self._predict(X, keep_samples=False)
        assert isinstance(found, ClassificationPrediction)
        return _numpy(found.probs)

    def predict_log_proba(self, X: Any) -> NDArray[Any]:
        """Logarithms of :meth:`predict_proba`."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable classes ``(N,)``."""
        best = self.predict_proba(X).argmax(1)  # raises where there has been no fit
        found: NDArray[Any] = self.classes_[best]
        return found


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Torch's generators and Pyro's parameter store as a new process has them, and as they were afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with _LOCK, torch.random.fork_rng(devices=devices), pyro.get_param_store().scope():
        torch.manual_seed(seed)
        yield


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _numpy(value: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = value.detach().cpu().numpy()
    return found
