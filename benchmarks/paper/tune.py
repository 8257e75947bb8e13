"""Searches: what a variant leaves open is chosen on validation rows, split off the training set.

Only training and validation rows reach a search, never test rows. Optuna keeps it in the work folder, trial by trial,
so that it goes on where it was ended.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pyro
import torch
from optuna.storages.journal import JournalFileBackend
from tqdm import tqdm

from benchmarks.paper import store
from benchmarks.paper.data import load
from benchmarks.paper.evaluation import scores
from benchmarks.paper.images import make, shortened, tuning_path, versions, with_values
from benchmarks.paper.training import train
from benchmarks.paper.unit import Setting

__all__ = ["tune"]

# Of the seed of a search: none of the units'.
_SEED = 1234
_SAMPLES = 20


def tune(
    setting: Setting,
    name: str,
    data: Path | None,
    work: Path,
    results: Path = store.RESULTS,
    num_trials: int = 10,
    epochs: int = 6,
) -> dict[str, Any]:
    """Chooses by the NLL on the validation rows after a shorter training, and writes the choice and all trials.

    :param epochs: of a trial; the schedule is the variant's, over these.
    """
    path = tuning_path(results, setting.task, name)
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    variant = setting.variants[name]
    if not variant.tuned or not setting.num_validation:
        raise ValueError(f"{setting.task}/{name}: expected something to tune and validation rows, got none.")
    variant = shortened(variant, setting, epochs)
    train_rows, validation = load(replace(setting, ood=()), data)[:2]
    work.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(work / "searches.log"))),
        study_name=f"{setting.task}/{name}/{epochs}",
        load_if_exists=True,
    )

    def objective(trial: optuna.Trial) -> float:
        values = {key: trial.suggest_float(key, low, high, log=scale == "log")
                  for key, (scale, low, high) in variant.tuned.items()}  # fmt: skip
        candidate = with_values(variant, store.rounded(values, 3))
        method = make(setting, candidate, len(train_rows), _SEED)
        train(method, train_rows, setting, candidate, _SEED)
        return scores(method, validation, _SAMPLES, _SEED)[1]["nll"]

    done = len(_finished(study))
    for number in tqdm(range(done, num_trials), desc=f"{setting.task}/{name}", unit="trial", disable=None):
        # a seed by trial: a search that was interrupted makes the same proposals
        study.sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=num_trials // 2)
        study.optimize(objective, n_trials=1)
    trials = _finished(study)[:num_trials]
    best = min(trials, key=lambda trial: trial.value)
    result = {
        "task": setting.task,
        "variant": name,
        "by": "NLL on the validation rows",
        "epochs": epochs,
        "num_samples": _SAMPLES,
        "space": {key: list(value) for key, value in variant.tuned.items()},
        "chosen": store.rounded(best.params, 3),
        "trials": [{**store.rounded(trial.params, 3), "nll": store.rounded(trial.value, 5)} for trial in trials],
        "versions": versions(),
    }
    store.write(path, json.dumps(result, indent=1) + "\n")
    return result


def _finished(study: optuna.Study) -> Sequence[Any]:
    return study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
