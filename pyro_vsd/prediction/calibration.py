"""What held-out rows change in predictions: the size of the noise, a temperature, a scale of σ."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, OneHotCategorical

from pyro_vsd._utils import check_nonnegative, check_positive
from pyro_vsd.prediction.base import Prediction, not_kept
from pyro_vsd.prediction.classification import ClassificationPrediction
from pyro_vsd.prediction.regression import RegressionPrediction

__all__ = ["Calibration"]


@dataclass(frozen=True, init=False, repr=False)
class Calibration:
    r"""Three factors, chosen on held-out rows: see :func:`pyro_vsd.calibrate`, and ``vsd.predict(…, calibration=…)``.

    .. math:: \alpha \to c\,\alpha, \qquad p_s \propto p_s^{1/\tau}, \qquad \sigma_s \to k\,\sigma_s

    Temperature and scale act on each sample's distribution, so that the parts of the uncertainty still add up.

    :ivar noise: c, one factor on all noise variances of the guide.
    :ivar temperature: τ, for classes; above 1 predictions are less sure.
    :ivar scale: k, for regression.
    :ivar scores: mean log score of the held-out rows: ``"before"``, with the best ``"noise"`` alone, with the best
        ``"temperature"`` or ``"scale"`` alone, and ``"after"``, with both.
    :ivar num_rows: how many rows these were.

    >>> calibration = Calibration(temperature=2.0)
    >>> prediction = vsd.ClassificationPrediction.from_samples(torch.tensor([[[0.9, 0.1]]]))
    >>> calibration.apply(prediction).probs
    tensor([[0.7500, 0.2500]])
    """

    noise: float
    temperature: float
    scale: float
    scores: dict[str, float] = field(hash=False)
    num_rows: int

    def __init__(
        self,
        noise: float = 1.0,
        temperature: float = 1.0,
        scale: float = 1.0,
        *,
        scores: Mapping[str, float] | None = None,
        num_rows: int = 0,
    ) -> None:
        check_nonnegative("noise", noise)
        check_positive("temperature", temperature)
        check_positive("scale", scale)
        given = {"noise": noise, "temperature": temperature, "scale": scale, "num_rows": num_rows}
        for name, value in {**given, "scores": dict(scores or {})}.items():
            object.__setattr__(self, name, value)

    def apply(self, prediction: Prediction) -> Prediction:
        """The prediction with this temperature or scale; it needs samples. The noise is the guide's: see
        :meth:`VSDGuide.noise_times <pyro_vsd.infer.VSDGuide.noise_times>`."""
        if self.temperature == self.scale == 1:
            return prediction
        if isinstance(prediction, ClassificationPrediction):
            self._check_kind("scale", prediction)
            if prediction.samples is None:
                raise not_kept("calibration")
            samples = (prediction.samples.log() / self.temperature).softmax(-1)
            return ClassificationPrediction.from_samples(samples, prediction.weights)
        self._check_kind("temperature", prediction)
        if not isinstance(prediction, RegressionPrediction):
            self._check_kind("scale", prediction)
        assert isinstance(prediction, RegressionPrediction)
        samples, scales = prediction.require_samples("calibration")
        return RegressionPrediction.from_samples(samples, self.scale * scales, prediction.weights)

    def distribution(self, observed: Distribution) -> Distribution:
        """An observed site's distribution with this temperature or scale."""
        if self.temperature == self.scale == 1:
            return observed
        if isinstance(observed, Independent):
            return Independent(self.distribution(observed.base_dist), observed.reinterpreted_batch_ndims)
        if isinstance(observed, Categorical | OneHotCategorical | Bernoulli):
            self._check_kind("scale", observed)
            kind = next(k for k in (Categorical, OneHotCategorical, Bernoulli) if isinstance(observed, k))
            return kind(logits=observed.logits / self.temperature, validate_args=False)
        self._check_kind("temperature", observed)
        if not isinstance(observed, Normal):
            self._check_kind("scale", observed)
        assert isinstance(observed, Normal)
        return Normal(observed.loc, self.scale * observed.scale, validate_args=False)

    def _check_kind(self, name: str, found: Any) -> None:
        """Raises if the factor ``name``, which does not go with what was found, is not 1."""
        if getattr(self, name) != 1:
            kind = type(found).__name__
            raise ValueError(f"calibration has {name}={getattr(self, name):.3g}, which does not go with a {kind}.")

    def to_plain(self) -> dict[str, Any]:
        """Plain types; ``Calibration(**plain)`` makes it again."""
        return asdict(self)

    def __repr__(self) -> str:
        factors = {name: getattr(self, name) for name in ("noise", "temperature", "scale")}
        shown = [f"{name}={value:.3g}" for name, value in factors.items() if value != 1]
        if self.scores:
            change = f"{self.scores['before']:.4f} -> {self.scores['after']:.4f}"
            shown.append(f"log score {change} on {self.num_rows} rows")
        return f"Calibration({', '.join(shown)})"
