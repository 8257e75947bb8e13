"""``vsd.Ensemble``: several networks, each from its own start and with its own weight of the KL, stacked."""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_vsd._utils import check_integer, check_positive, map_tensors, mix_seed, num_rows, split_target, take_rows
from pyro_vsd.ensemble.contributions import Contributions
from pyro_vsd.ensemble.members import Member, kl_weights, make_members, silence
from pyro_vsd.ensemble.rows import has_labels, joined, split
from pyro_vsd.ensemble.training import Run, load_states, states_of
from pyro_vsd.infer import predict
from pyro_vsd.prediction import Prediction, RegressionPrediction, Stacking, mixture, stack
from pyro_vsd.prediction.stacking import FEWEST_FOR_WEIGHTS, with_factor
from pyro_vsd.training.checkpoint import check_rng_state, read_archive, to_plain, write_archive
from pyro_vsd.training.data import Batches, all_rows, arguments, checksum, inputs_and_target
from pyro_vsd.training.distributed import Group
from pyro_vsd.training.fitting import Checkpoint, interrupts
from pyro_vsd.training.history import History
from pyro_vsd.training.lengths import auto_batch_size, auto_lengths, auto_rate

__all__ = ["Ensemble"]

# Samples of each member for stacking, fewer where all would take more than this many numbers.
_SAMPLES, _FEWEST, _NUMBERS = 100, 10, 2**26
# Rows that the guides are set up with.
_FIRST = 100


class Ensemble:
    r"""Several networks, each from its own start and with its own weight λ of the KL, mixed by stacking.

    .. math:: p(y \mid x) = \sum_m w_m \frac1{S_m} \sum_s p_m(y \mid x, W_{ms}; f_m)

    No λ has to be chosen: the weights w, and a factor f of each member's σ (a temperature for classes), are those with
    which the *mixture* gives held-out rows the highest density (:func:`~pyro_vsd.prediction.stack`).

    All members see the same batches, each draws its own noise. Where the network can be captured, they train as one
    program: five members of a small network take 1.2 (float32) to 1.6 times as long as one. Convolutions, batch
    normalisation and code that branches on data train one after the other, step by step.

    :param model_or_factory: a model, which is copied and started anew for each member (``reset_parameters`` of its
        layers; what is frozen stays, and LoRA adapters start as ``peft`` starts them); or a function without arguments
        that makes one, called once for each member. Its ``num_data`` is set to the rows that it is trained on.
    :param members: how many.
    :param kl_weight: λ of the members: one for each, a number or a schedule (:mod:`pyro_vsd.infer.schedules`), ``None``
        for a plain member without noise; or one for all; ``"spread"`` takes the first of 1, ``None``, 0.1, 3, 0.01,
        0.3, ``None``, 0.03, and then begins again.
    :param seed: of starts, batches, noise and held-out rows.
    :param guide_options: those of :class:`~pyro_vsd.infer.VSDGuide`.

    :ivar members: the pairs ``(model, guide)``.
    :ivar stacking: weights, factors and held-out scores (:class:`~pyro_vsd.prediction.Stacking`).
    :ivar history: a record of each epoch: ``epoch``, ``loss`` (the members' mean), ``losses``, ``lr``, and ``refit``.
    :ivar epochs: of the training run that was chosen.
    :ivar reason: why the members are not trained as one program; ``None`` if they are.

    >>> train, test = vsd.datasets.cubic()
    >>> net = vsd.nn.bayesianize(vsd.nn.mlp([1, 10, 1]))
    >>> model = vsd.nn.Regressor(net, num_data=len(train), noise="learned")
    >>> ensemble = vsd.Ensemble(model, members=3).fit(train, epochs=3, validation=None)
    >>> ensemble.predict(test.x, num_samples=30)
    RegressionPrediction(mean=(...,), num_samples=30, samples kept)
    """

    def __init__(
        self,
        model_or_factory: nn.Module | Callable[[], nn.Module],
        members: int = 5,
        kl_weight: float | str | None | Sequence[Any] | Callable[[int], float] = "spread",
        seed: int = 0,
        **guide_options: Any,
    ):
        if not callable(model_or_factory):
            kind = type(model_or_factory).__name__
            raise TypeError(f"model_or_factory must be a model or a function that makes one, not a {kind}.")
        check_integer("seed", seed)
        self.kl_weight = kl_weights(members, kl_weight)
        self.seed = int(seed)
        self.members: list[Member] = make_members(model_or_factory, self.kl_weight, self.seed, guide_options)
        self.stacking = Stacking.equal(members)
        self.history = History()
        self.epochs: int | None = None
        self.reason: str | None = None
        self._start: list[dict[str, Any]] | None = None

    @property
    def weights(self) -> Tensor:
        """The members' weights in the mixture, ``(M,)``."""
        return self.stacking.weights

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        names = ["plain" if w is None else "schedule" if callable(w) else f"{w:.3g}" for w in self.kl_weight]
        weights = ", ".join(f"{w:.2f}" for w in self.weights.tolist())
        return f"Ensemble(members={len(self)}, kl_weight=[{', '.join(names)}], weights=[{weights}])"

    # ---- training

    def fit(
        self,
        data: Any,
        validation: Any = 0.15,
        epochs: int | Sequence[int] | None = None,
        lr: float | None = None,
        refit: bool = True,
        *,
        batch_size: int | None = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> "Ensemble":
        """Trains the members, each from its start, and fits the mixture on held-out rows.

        Members are trained without the held-out rows, once for each number of ``epochs``, and the best mixture is kept.
        With ``refit`` they are then trained again, on all rows. Adam's rate falls to zero along a cosine. Ctrl-C ends
        training after the current step, saves the checkpoint and returns; ``history.stopped`` is then ``"interrupt"``.
        If a mixture has been fitted by then, the ensemble is the best one so far; else its members are as far as they
        came.

        Under ``torchrun``, after ``torch.distributed.init_process_group()``, all processes call ``fit`` with the same
        arguments. Each trains its share of the members, and all have the whole ensemble at the end.

        :param data: tensors ``(x, y)`` and all else that :func:`~pyro_vsd.fit` takes. The rows of a ``Dataset`` or a
            ``DataLoader`` are read once and kept in memory.
        :param validation: the share of rows to hold out; or rows of their own; or ``None``: equal weights, and members
            as trained. With fewer than 50 held-out rows the weights are equal, with fewer than 10 the members are as
            trained.
        :param epochs: passes over the data, or several numbers, of which held-out rows choose one. By default 3,000 or
            9,000 steps for up to 1,000 rows, and 9,000 or more for more than 2,250; in between the first number grows.
            With fewer than 50 held-out rows it takes the first of these.
        :param lr: Adam's rate at the start; by default 0.01, and 0.001 for 20,000 rows and more.
        :param batch_size: most rows in a batch; by default a fifth of the rows, and between 8 and 200, or
            100 for 20,000 rows and more.
        :param refit: whether to train again on all rows, those of ``validation`` included, with the weights kept.
        :param checkpoint: a path or a :class:`~pyro_vsd.training.Checkpoint`. If the file exists, training continues
            from it, on the CPU bit for bit. Other data or other options raise an error.
        :param progress: a progress bar; by default only in a terminal.
        :returns: the ensemble.
        """
        given = [] if epochs is None else list(epochs) if isinstance(epochs, Iterable) else [epochs]
        for number in given:
            check_integer("epochs", number, 1)
        if epochs is not None and not given:
            raise ValueError("epochs is empty. Give a number, several to choose from, or None.")
        if len(given) > 1 and validation is None:
            raise ValueError("epochs: held-out rows choose one of several numbers, and validation=None has none.")
        if batch_size is not None:
            check_integer("batch_size", batch_size, 1)
        if lr is not None:
            check_positive("lr", lr)
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        rows = all_rows(data, "data")
        labelled = validation is not None and has_labels(self.members[0][0], take_rows(rows, slice(0, _FIRST)))
        train, held_out = split(rows, validation, mix_seed(self.seed, -3), labelled)
        self._set_up(train)
        again = joined(train, held_out) if held_out is not None and refit else None
        batches = Batches(train, batch_size or auto_batch_size(num_rows(train)))
        lengths = given or auto_lengths(num_rows(train), batches.num_steps() or 1)
        if not given and (held_out is None or num_rows(held_out) < FEWEST_FOR_WEIGHTS):
            lengths = lengths[:1]
        self.history, self.stacking, self.epochs = History(), Stacking.equal(len(self)), None
        saved = None
        if checkpoint is not None and checkpoint.resume and os.path.exists(checkpoint.path):
            saved = checkpoint.path
        with torch.random.fork_rng(devices=_devices(self.members)), interrupts() as pressed, Group() as group:
            if group.size > len(self):
                raise ValueError(f"members={len(self)} are fewer than the {group.size} processes that share them.")
            runs = [self._run(train, length, lr, batch_size, n, group) for n, length in enumerate(lengths)]
            last = None
            if again is not None:
                last = self._run(again, lengths[0], lr, batch_size, len(runs), group)
            fitting = _Fitting(self, runs, last, held_out, checkpoint, progress, pressed, group)
            if saved is not None:
                fitting.resume(saved)
            fitting.train()
        return self

    def _set_up(self, rows: Any) -> None:
        """Parameters of all guides, as they start; those of plain members without noise."""
        if self._start is None:
            device = next((p.device for model, _ in self.members for p in model.parameters()), None)
            first = take_rows(rows, slice(0, _FIRST))
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for m, (model, guide) in enumerate(self.members):
                    if hasattr(model, "num_data"):
                        model.num_data = num_rows(rows)
                    torch.manual_seed(mix_seed(self.seed, m))
                    args, kwargs = arguments(first, device, model)
                    guide.setup(*args, **kwargs)
            for (_, guide), weight in zip(self.members, self.kl_weight, strict=True):
                if weight is None:
                    silence(guide)
            self._start = states_of(self.members)

    def _run(self, rows: Any, epochs: int, lr: float | None, batch_size: int | None, number: int, group: Group) -> Run:
        count = num_rows(rows)
        batches = Batches(rows, batch_size or auto_batch_size(count))
        weights = [0.0 if weight is None else weight for weight in self.kl_weight]
        rate, seed = lr or auto_rate(count), mix_seed(self.seed, -10 - number)
        return Run(self.members, weights, batches, epochs, rate, seed, slice(group.rank, None, group.size))

    # ---- prediction

    def predict(
        self,
        *inputs: Any,
        num_samples: int = 100,
        batch_size: int | None = None,
        seed: int | None = None,
        keep_samples: bool = True,
        progress: bool | None = None,
    ) -> Prediction:
        """The mixture's predictive distribution of every row, an ordinary prediction.

        Samples are spread over the members by weight, at least one of each; a plain member has only one.
        ``prediction.weights`` makes the mixture exact. The options are those of :func:`~pyro_vsd.infer.predict`.

        :param num_samples: of all members together.
        """
        check_integer("num_samples", num_samples, len(self))
        found = self.member_predictions(
            *inputs, num_samples=self.shares(num_samples), batch_size=batch_size, seed=seed, progress=progress
        )
        prediction = self.stacking.mix(found)
        if not keep_samples:
            prediction.samples = prediction.components = None
            if isinstance(prediction, RegressionPrediction):
                prediction.scales = None
        return prediction

    def member_predictions(
        self, *inputs: Any, num_samples: int | Sequence[int] = 100, seed: int | None = None, **options: Any
    ) -> list[Prediction]:
        """The prediction of each member alone, as trained: without weights and factors.

        :param num_samples: of each, a number or one for each; a plain member has one.
        """
        numbers = [num_samples] * len(self) if isinstance(num_samples, int) else list(num_samples)
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        return [
            predict(
                model, guide, *inputs, num_samples=1 if self.kl_weight[m] is None else numbers[m],
                seed=mix_seed(seed, m), **options,
            )
            for m, (model, guide) in enumerate(self.members)
        ]  # fmt: skip

    def shares(self, num_samples: int) -> list[int]:
        """Samples of each member: in proportion to the weights, at least one, a single one of plain members."""
        noisy = [m for m, weight in enumerate(self.kl_weight) if weight is not None]
        counts = [1] * len(self)
        weights = self.weights.tolist()
        for _ in range(num_samples - len(self) if noisy else 0):
            # where a sample stands for most
            m = max(noisy, key=lambda m: weights[m] / counts[m])
            counts[m] += 1
        return counts

    # ---- judging

    def diagnose(self, data: Any, *, num_samples: int = 100, seed: int = 0) -> Contributions:
        """What each member contributes to the mixture on these rows, best ones that it was not trained on.

        :param data: as in :meth:`fit`.
        :param num_samples: of each member.

        >>> train, test = vsd.datasets.cubic()
        >>> model = vsd.nn.Regressor(vsd.nn.bayesianize(vsd.nn.mlp([1, 10, 1])), num_data=len(train), noise="learned")
        >>> ensemble = vsd.Ensemble(model, members=2, kl_weight=[1.0, None]).fit(train, epochs=3, validation=None)
        >>> [member["weight"] for member in ensemble.diagnose(test).members]
        [0.5, 0.5]
        """
        inputs, y = split_target(all_rows(data, "data"))
        found = self.member_predictions(*inputs, num_samples=num_samples, seed=seed)
        parts = [with_factor(p, f) for p, f in zip(found, self.stacking.factors.tolist(), strict=True)]

        def score(chosen: list[int]) -> float:
            mixed = mixture([parts[m] for m in chosen], self.weights[chosen])
            return float(mixed.log_prob(y).double().mean())

        all_members = list(range(len(self)))
        whole, members = score(all_members), []
        for m in all_members:
            others = [other for other in all_members if other != m]
            entry = {"kl_weight": self.kl_weight[m], "weight": float(self.weights[m])}
            entry |= {"factor": float(self.stacking.factors[m]), "score": score([m])}
            members.append(entry | {"contribution": whole - score(others) if others else float("nan")})
        return Contributions(members, whole, len(y))

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`predict` needs: parameters and buffers of each member, weights and factors."""
        stacking = asdict(self.stacking)
        return {"members": states_of(self.members), "stacking": stacking, "kl_weight": self._plain_weights()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave into an ensemble that was made in the same way."""
        if not isinstance(state, dict) or not {"members", "stacking"} <= set(state):
            raise ValueError("state must be what Ensemble.state_dict() returns: a dict with 'members' and 'stacking'.")
        if len(state["members"]) != len(self):
            raise ValueError(f"state is that of {len(state['members'])} members, and this ensemble has {len(self)}.")
        own = self._plain_weights()
        if state.get("kl_weight", own) != own:
            raise ValueError(f"state is that of members with kl_weight={state['kl_weight']}, and these have {own}.")
        with torch.random.fork_rng(devices=[]):
            load_states(self.members, state["members"])
        self.stacking = Stacking(**state["stacking"])

    def _plain_weights(self) -> list[Any]:
        """λ of each member as a state holds it."""
        return ["schedule" if callable(weight) else weight for weight in self.kl_weight]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for model, guide in self.members:  # a guide is pickled without its model
            guide._model = (model,)


class _Fitting:
    """Training for each length, stacking, and training again for the length that held-out rows chose; saved and
    continued.

    :param runs: without the held-out rows.
    :param last: on all rows.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        runs: list[Run],
        last: Run | None,
        held_out: Any,
        checkpoint: Checkpoint | None,
        progress: bool | None,
        pressed: list[int],
        group: Group,
    ):
        self.ensemble, self.candidates, self.last = ensemble, runs, last
        self.held_out, self.checkpoint = held_out, checkpoint
        self.progress, self.pressed, self.group = False if group.rank else progress, pressed, group
        self.runs = runs if last is None else [*runs, last]
        self.number, self.run = 0, runs[0]
        self.chosen = 0
        self.best: list[dict[str, Any]] | None = None  # the members whose mixture is the best so far
        self.resumed = False
        # a schedule is known by its values: the name of a function holds its address
        places = [runs[0].steps * part // 4 for part in range(5)]
        self.settings: dict[str, Any] = {
            "kl_weight": [[float(w(s)) for s in places] if callable(w) else w for w in ensemble.kl_weight],
            "seed": ensemble.seed, "lr": runs[0].lr, "processes": group.size,
            "epochs": [run.epochs for run in runs], "refit": last is not None,
            "batch_size": runs[0].batches.batch_size, "rows": runs[0].batches.num_rows,
            "held-out rows": 0 if held_out is None else num_rows(held_out),
            "checksum of the data": checkpoint and checksum((runs[0].batches.data, held_out)),
        }  # fmt: skip

    def train(self) -> None:
        ensemble, disable = self.ensemble, None if self.progress is None else not self.progress
        before = sum(run.steps for run in self.runs[: self.number]) + self.run.step
        with tqdm(total=self._total(), initial=before, desc="fit", unit="step", disable=disable) as self.bar:
            for number in range(self.number, len(self.runs)):
                self.number, self.run = number, self.runs[number]
                for model, _ in ensemble.members:
                    if hasattr(model, "num_data"):
                        model.num_data = self.run.batches.num_rows
                if not self.resumed:
                    self._begin()
                self.resumed = False
                finished = self.run.train(self._after_step)
                self.run.finish()
                self._share()
                if not finished:
                    ensemble.history.stopped = "interrupt"
                    break
                if self.held_out is not None:
                    self._stack()
        if self.best is not None and (self.last is None or not finished):
            load_states(ensemble.members, self.best)
        if finished or self.best is not None:
            ensemble.epochs = self.runs[self.chosen].epochs

    def _total(self) -> int:
        return sum(run.steps for run in self.runs)

    def _begin(self) -> None:
        ensemble = self.ensemble
        assert ensemble._start is not None
        load_states(ensemble.members, ensemble._start)
        torch.manual_seed(mix_seed(self.run.seed, self.group.rank) if self.group.size > 1 else self.run.seed)
        self.run.start(ensemble.reason if self.number else None)
        if self.run.reason is not None and not self.number:
            self._say(f"the members are trained one after the other: {self.run.reason}.")
        ensemble.reason = self.run.reason

    def _say(self, text: str) -> None:
        if self.group.rank:
            return
        if self.bar.disable:
            warnings.warn(text, stacklevel=5)
        else:
            self.bar.write(text)

    def _after_step(self) -> bool:
        self.bar.update()
        stop, every = self.group.any(bool(self.pressed)), self.checkpoint
        if every is not None:
            due = every.every_steps is not None and self.run.step % every.every_steps == 0
            due |= self.run.done == 0 and self.run.epoch % every.every_epochs == 0
            if due or stop or self.run.epoch == self.run.epochs:
                self._save()
        return stop

    def _share(self) -> None:
        """Gives all processes the members and the records of each."""
        members, size = self.ensemble.members, self.group.size
        own = _on_cpu(states_of(self.run.members))
        found = self.group.gather((own, self.run.records))
        for rank, (states, _) in enumerate(found):
            for (model, guide), state in zip(members[rank::size], states, strict=True):
                if rank != self.group.rank:
                    model.load_state_dict(state["model"])
                    guide.load_state_dict(state["guide"])
        self.run.records = [_joined(parts, len(members)) for parts in zip(*(r for _, r in found), strict=True)]
        records = [{**record, "refit": n > 0} for n, run in enumerate(self.runs) for record in run.records]
        self.ensemble.history = History(records)

    def _stack(self) -> None:
        """Weights and factors from the held-out rows; after training again, each σ at the level they gave it."""
        ensemble, (inputs, y) = self.ensemble, inputs_and_target(self.held_out, self.run.device)
        row = predict(*ensemble.members[0], *take_rows(inputs, slice(0, 1)), num_samples=1, seed=0)
        samples = min(_SAMPLES, max(_FEWEST, _NUMBERS // (len(y) * row.mean.numel() * len(ensemble))))
        found = ensemble.member_predictions(*inputs, num_samples=samples, seed=ensemble.seed, progress=False)
        if self.run is self.last:
            ensemble.stacking = self.group.same(ensemble.stacking.carried_over(found))
            return
        stacking = self.group.same(stack(found, y))
        if not self.number or stacking.after > ensemble.stacking.after:
            ensemble.stacking, self.chosen, self.best = stacking, self.number, states_of(ensemble.members)
        if self.number < len(self.candidates) - 1:
            return
        if self.last is not None:
            self.last.set_epochs(self.candidates[self.chosen].epochs)
            self.bar.total = self._total()
        if not stacking.fitted and len(ensemble) > 1:
            self._say(f"{len(y)} held-out rows are too few to fit weights ({FEWEST_FOR_WEIGHTS}): all are equal.")

    # ---- checkpoints

    def _save(self) -> None:
        assert self.checkpoint is not None
        earlier = [run.records for run in self.runs[: self.number]]
        content = {
            "settings": self.settings, "number": self.number, "runs": self.group.gather(_on_cpu(self.run.state())),
            "earlier": earlier, "stacking": asdict(self.ensemble.stacking), "start": self.ensemble._start,
            "chosen": self.chosen, "best": self.best,
        }  # fmt: skip
        if self.group.rank == 0:
            write_archive(self.checkpoint.path, {"ensemble": to_plain(content, "ensemble")})

    def resume(self, path: Any) -> None:
        name, content = os.fspath(path), read_archive(path)
        advice = "Start a new run with a different path or Checkpoint(path, resume=False)."
        try:
            state = content["ensemble"]
            found = state["settings"]
            for run in state["runs"]:
                check_rng_state(run["rng"])
            stacking = Stacking(**state["stacking"])
            self.chosen, self.best = state["chosen"], state["best"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"checkpoint: {name!r} was not written by Ensemble.fit. {advice}") from error
        wrong = [f"{k}={found.get(k)}, not {v}" for k, v in self.settings.items() if found.get(k) != v]
        if wrong:
            raise ValueError(f"checkpoint: the run in {name!r} has {'; '.join(wrong)}. {advice}")
        self.number, self.run = state["number"], self.runs[state["number"]]
        for run, records in zip(self.runs, state["earlier"], strict=False):
            run.records = records
        self.ensemble.stacking, self.ensemble._start = stacking, state["start"]
        if self.run is self.last:
            self.last.set_epochs(self.candidates[self.chosen].epochs)
        for model, _ in self.ensemble.members:
            if hasattr(model, "num_data"):
                model.num_data = self.run.batches.num_rows
        self.run.load(state["runs"][self.group.rank])
        self.ensemble.reason, self.resumed = self.run.reason, True


def _on_cpu(state: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().cpu(), state)


def _joined(parts: Sequence[dict[str, Any]], members: int) -> dict[str, Any]:
    """The record of an epoch from those of the processes."""
    losses = [parts[m % len(parts)]["losses"][m // len(parts)] for m in range(members)]
    return {**parts[0], "loss": math.fsum(losses) / members, "losses": losses}


def _devices(members: list[Member]) -> list[int]:
    return sorted({p.device.index for model, _ in members for p in model.parameters() if p.is_cuda})
