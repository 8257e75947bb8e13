"""What each member of an ensemble contributes."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Contributions"]


@dataclass(frozen=True)
class Contributions:
    """What each member contributes to the mixture: what ``Ensemble.diagnose`` returns. Prints as a table.

    :ivar members: for each member its ``kl_weight`` (``None``: plain), ``weight``, ``factor`` (of σ, or the
        temperature), ``score`` (mean log-density of the rows by it alone) and ``contribution``: by how much the
        mixture's score falls if it is left out, the other weights scaled up.
    :ivar score: that of the mixture.
    :ivar num_rows: rows behind the scores.
    """

    members: list[dict[str, Any]]
    score: float
    num_rows: int

    def __str__(self) -> str:
        lines = [f"mixture: log-density {self.score:.4f} ({self.num_rows} rows)"]
        lines.append(f"{'member':>6} {'kl_weight':>9} {'weight':>7} {'factor':>7} {'alone':>9} {'contribution':>12}")
        for number, m in enumerate(self.members):
            name = "plain" if m["kl_weight"] is None else "schedule" if callable(m["kl_weight"]) else m["kl_weight"]
            numbers = f"{m['weight']:7.3f} {m['factor']:7.3f} {m['score']:9.4f} {m['contribution']:12.4f}"
            lines.append(f"{number:>6} {name:>9} {numbers}")
        return "\n".join(lines)
