"""What :func:`pyro_vsd.diagnose` returns: a report that prints, converts and draws itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyro_vsd.diagnosis.findings import Finding
from pyro_vsd.diagnosis.objective import Objective

__all__ = ["Diagnosis"]


class Diagnosis:
    """Measures of a trained guide and what they mean; prints as a table.

    :ivar sites: numbers of each weight: ``K``, ``Q``, ``T``, quantiles of ``alpha``, shares ``collapsed`` and
        ``exploded``, ``alpha_spread`` (of log α), ``correlated`` (share of ‖Σ‖² off the diagonal), ``kl`` (nats per
        datum, not weighted), ``theta_moved`` (distance from the start over its norm), ``theta_growth``,
        ``theta_slope`` and ``gain``; ``None`` where not known. Of a gain: the objective ``now``, ``rescaled`` (each
        unit's noise at its best size), ``best_diagonal`` and ``best``; the share ``found``; ``size``, noise over best.
    :ivar objective: nats per datum: ``log_likelihood``, ``constant``, ``kl``, ``weighted_kl``; ``balance``, the
        kl_weight at which KL and log-likelihood would be equal; settings.
    :ivar prediction: measures on held-out rows, or on the data; empty where there are none.
    :ivar findings: the worst first.
    :ivar left_out: what could not be measured, and why.
    """

    def __init__(
        self,
        sites: dict[str, dict[str, Any]],
        objective: dict[str, Any],
        prediction: dict[str, Any],
        findings: Sequence[Finding],
        left_out: Sequence[str],
        alpha: dict[str, Any],
    ) -> None:
        order = {"error": 0, "warning": 1, "note": 2}
        self.sites, self.objective, self.prediction = sites, objective, prediction
        self.findings = sorted(findings, key=lambda finding: order[finding.severity])
        self.left_out = list(left_out)
        #: droprates of each weight, for the figure
        self.alpha = alpha

    @property
    def healthy(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return not any(finding.severity in ("error", "warning") for finding in self.findings)

    @property
    def codes(self) -> set[str]:
        """Short names of the errors and warnings."""
        return {finding.code for finding in self.findings if finding.severity != "note"}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings and containers."""
        return {
            "healthy": self.healthy,
            "sites": {name: dict(values) for name, values in self.sites.items()},
            "objective": dict(self.objective),
            "prediction": dict(self.prediction),
            "findings": [finding._asdict() for finding in self.findings],
            "left_out": list(self.left_out),
        }

    def to_pandas(self) -> Any:
        """A data frame with a row for each weight, and a column ``alpha.median`` for ``["alpha"]["median"]``."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("expected pandas for to_pandas, got none. Install it: pip install pandas") from error
        rows = [_flat(values) for values in self.sites.values()]
        return pandas.DataFrame(rows, index=pandas.Index(list(self.sites), name="site"))

    def plot(self, axes: Sequence[Any] | None = None) -> Sequence[Any]:
        """Draws :func:`pyro_vsd.plots.diagnosis`: four panels, on new axes without."""
        from pyro_vsd.plots import diagnosis

        return diagnosis(self, axes=axes)

    def __repr__(self) -> str:
        blocks = [self._objective_lines(), self._site_lines()]
        if self.prediction:
            blocks.append(self._prediction_lines())
        blocks.append([str(finding) for finding in self.findings] or ["nothing to mend was found"])
        if self.left_out:
            blocks.append([f"left out: {text}" for text in self.left_out])
        return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks)

    def _objective_lines(self) -> list[str]:
        values = self.objective
        head = f"{values['rows']} of {_text(values['data'])} rows, kl_weight {values['kl_weight']:g}, "
        head += f"kl_scale {values['kl_scale']!r}" + (" (assumed: no elbo was given)" if values["assumed"] else "")
        if values["log_likelihood"] is None:
            return [head]
        lines = [head, f"{'nats per datum':<28}{'value':>10}"]
        for name in ("log_likelihood", "constant", "kl", "weighted_kl"):
            label = {"constant": "of a constant prediction"}.get(name, name)
            lines.append(f"{label:<28}{_text(values[name], 4):>10}")
        return [*lines, f"{'balance at kl_weight':<28}{_text(values['balance'], 3):>10}"]

    def _site_lines(self) -> list[str]:
        table: list[tuple[str, ...]] = [
            ("site", "K", "Q", "T", "alpha 5%", "median", "95%", "correlated", "KL/datum", "gain found", "theta moved")
        ]
        for name, site in self.sites.items():
            gain = site.get("gain") or {}
            alpha = [f"{site['alpha'][level]:.2g}" for level in ("5%", "median", "95%")]
            counts = [str(site[key]) for key in ("K", "Q", "T")]
            tail = (_percent(site["correlated"]), _text(site.get("kl"), 4), _share(gain.get("found")))
            table.append((name, *counts, *alpha, *tail, _percent(site["theta_moved"])))
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        return [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in table
        ]

    def _prediction_lines(self) -> list[str]:
        values = self.prediction
        lines = [f"{values['on']}: {values['rows']} rows, {values['num_samples']} samples"]
        for name in ("nll", "error_rate", "rmse", "ece", "coverage", "epistemic_share", "samples_needed"):
            if name in values:
                text = str(values[name]) if isinstance(values[name], int) else f"{values[name]:.4f}"
                lines.append(f"{name:<28}{text:>10}")
        return lines


def described(objective: Objective | None, **settings: Any) -> dict[str, Any]:
    """The report's account of the objective; ``None`` for all that was not measured."""
    names = ("log_likelihood", "constant", "weighted_kl", "balance", "num_data")
    values = {name: None if objective is None else getattr(objective, name) for name in names}
    return {**values, "kl": None if objective is None else sum(objective.kl.values()), **settings}


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in record.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return result


def _text(value: float | None, digits: int | None = None) -> str:
    return "-" if value is None else str(value) if digits is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _share(value: float | None) -> str:
    """Of a gain; how far below none it is, where correlations as trained do harm, tells nothing more."""
    if value is None or value >= 0:
        return _percent(value)
    return "< 0" if value < -0.005 else "0 %"
