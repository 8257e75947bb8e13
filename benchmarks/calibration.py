"""What ``vsd.calibrate`` gains on digits: held-out rows choose the factors, test rows are scored.

    python benchmarks/calibration.py           # three seeds, a few minutes
    python benchmarks/calibration.py --table   # from the stored results

MLP 64-100-100-10, 1,000 training rows, the other rows of the training part held out: all of them, 100 and 30. Once with
the default weight of the KL, once with a tenth and ten times of it, which leave too little and too much noise.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import pyro_vsd as vsd

RESULT = Path(__file__).parent / "results" / "calibration" / "digits.json"
KL_WEIGHTS = (0.1, 1.0, 10.0)
HELD_OUT = (442, 100, 30)


def run(kl_weight: float, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    data, test = vsd.datasets.digits()
    order = torch.randperm(len(data.x))
    train, rest = ((data.x[rows], data.y[rows]) for rows in (order[:1000], order[1000:]))
    model = vsd.nn.Classifier(vsd.nn.bayesianize(vsd.nn.mlp([64, 100, 100, 10])), num_data=1000)
    guide = vsd.VSDGuide(model)
    options: dict[str, Any] = {"elbo": vsd.VSD_ELBO(kl_weight=kl_weight), "seed": seed, "progress": False}
    optimizer = torch.optim.Adam(guide.parameter_groups(lr=3e-3))
    vsd.fit(model, guide, train, epochs=30, optimizer=optimizer, **options)

    def scores(calibration: vsd.Calibration | None) -> dict[str, float]:
        prediction = vsd.predict(model, guide, test.x, seed=seed, calibration=calibration)
        found = {"nll": vsd.metrics.nll(prediction, test.y), "ece": vsd.metrics.ece(prediction, test.y)}
        factors = {} if calibration is None else {"noise": calibration.noise, "temperature": calibration.temperature}
        return found | factors

    result = {"before": scores(None)}
    for rows in HELD_OUT:
        held_out = tuple(part[:rows] for part in rest)
        result[f"{len(held_out[0])} rows"] = scores(vsd.calibrate(model, guide, held_out))
    result["temperature alone"] = scores(vsd.calibrate(model, guide, rest, noise=False))
    return result


def table(stored: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| λ | | NLL | ECE | noise | temperature |", "|---|---|---|---|---|---|"]
    for weight, runs in stored.items():
        for label in runs[0]:
            cells = []
            for key, form in (("nll", ".4f"), ("ece", ".4f"), ("noise", ".2f"), ("temperature", ".2f")):
                values = [found[label][key] for found in runs if key in found[label]]
                cells.append(f"{statistics.mean(values):{form}}" if values else "–")
            lines.append(f"| {weight} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the stored results")
    if not parser.parse_args().table:
        torch.set_num_threads(1)
        stored = {str(weight): [run(weight, seed) for seed in range(3)] for weight in KL_WEIGHTS}
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(stored, indent=1))
    print(table(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
