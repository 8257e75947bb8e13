"""Models of Hugging Face and LoRA adapters, from random tiny configurations: training, saving, merging, the Trainer."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import pyro_vsd as vsd  # noqa: E402
from pyro_vsd.transformers import VSDTrainer  # noqa: E402

ROWS, LENGTH, WORDS = 48, 7, 40
SMALL = {"vocab_size": WORDS, "num_labels": 2}


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**SMALL, **sizes, num_key_value_heads=1, pad_token_id=0)
    return transformers.LlamaForSequenceClassification(config)


def bert_config(**options):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertConfig(**{**SMALL, **sizes, **without, **options})


def bert():
    return transformers.BertForSequenceClassification(bert_config())


def bert_tokens():
    return transformers.BertForTokenClassification(bert_config())


class T5Head(nn.Module):
    """A T5 encoder and the mean of its tokens."""

    def __init__(self):
        super().__init__()
        config = transformers.T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        self.encoder, self.head = transformers.T5EncoderModel(config), nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


MAKE = {"llama": llama, "bert": bert, "bert_tokens": bert_tokens, "t5": T5Head}
TARGETS = {
    "llama": ["q_proj", "v_proj"],
    "bert": ["query", "value"],
    "bert_tokens": ["query", "value"],
    "t5": ["q", "v"],
}
HEAD = {"llama": "score", "bert": "classifier", "bert_tokens": "classifier", "t5": "head"}


def batch(kind="bert", rows=ROWS):
    """Sentences of 5 or 7 words; the class says whether one of them is early in the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0
    ids = ids * mask
    early = (ids > 0) & (ids < 8)
    labels = torch.where(mask.bool(), early.long(), -100) if kind == "bert_tokens" else early.any(1).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def inputs(data):
    return {name: value for name, value in data.items() if name != "labels"}


def with_lora(net, kind="bert", **options):
    config = peft.LoraConfig(**{"r": 4, "target_modules": TARGETS[kind], "modules_to_save": [HEAD[kind]], **options})
    return peft.get_peft_model(net, config)


def trained(kind="bert", epochs=8, reflections=2):
    """A Bayesian LoRA of a tiny network, trained; and its base before."""
    torch.manual_seed(0)
    net = with_lora(MAKE[kind](), kind)
    base = {name: value.clone() for name, value in net.named_parameters() if not value.requires_grad}
    model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(net), num_data=ROWS)
    guide = vsd.VSDGuide(model, num_reflections=reflections)
    history = vsd.fit(model, guide, batch(kind), epochs=epochs, lr=2e-2, batch_size=16, seed=0)
    return model, guide, base, history


@pytest.mark.parametrize("kind", MAKE)
def test_all_weights_of_a_model_train_on_dicts(kind):
    data = batch(kind)
    model = vsd.nn.Classifier(vsd.nn.bayesianize(MAKE[kind]()), num_data=ROWS)
    guide = vsd.VSDGuide(model)
    history = vsd.fit(model, guide, data, epochs=6, lr=1e-2, batch_size=16, seed=0, validation=data)
    assert history[-1]["loss"] < 0.95 * history[0]["loss"]
    prediction = vsd.predict(model, guide, inputs(data), num_samples=3, seed=0)
    assert prediction.probs.shape == (*data["labels"].shape, 2)


@pytest.mark.parametrize("kind", MAKE)
def test_lora_lowers_the_loss_and_keeps_the_base(kind):
    model, guide, base, history = trained(kind)
    assert all("lora_B" in name for name in guide.sites)
    assert all(site.event_shape[-1] == 4 for site in guide.sites.values())  # K = r
    assert history[-1]["loss"] < 0.95 * history[0]["loss"]
    now = dict(model.net.named_parameters())
    assert base
    assert all(torch.equal(now[name], value) for name, value in base.items())


def test_a_pattern_does_the_same_as_the_shortcut():
    net = with_lora(bert())
    one, other = vsd.nn.bayesianize(net, include="*lora_B*"), vsd.nn.bayesianize_lora(net)
    assert [site.name for site in one.weight_sites] == [site.name for site in other.weight_sites]


def test_padding_changes_nothing():
    model, guide, _, _ = trained(epochs=2)
    data = inputs(batch())
    longer = {name: nn.functional.pad(value, (0, 3)) for name, value in data.items()}
    one, other = (vsd.predict(model, guide, x, num_samples=5, seed=0).probs for x in (data, longer))
    torch.testing.assert_close(one, other)


def test_tokens_of_a_sentence_share_their_noise():
    """Equal words at all positions: with noise of its own, each position would have its own output."""
    model, guide, _, _ = trained("bert_tokens", epochs=4)
    network = model.net.network
    network.get_base_model().bert.embeddings.position_embeddings.weight.data.zero_()
    ids = torch.full((6, LENGTH), 9)
    probs = vsd.predict(model, guide, ids, num_samples=4, seed=0, coherent=False).samples
    torch.testing.assert_close(probs, probs[:, :, :1].expand_as(probs))
    assert (probs[:, 0] - probs[:, 1]).abs().max() > 1e-6  # and each sentence has its own


def test_batch_encodings_and_padding_collators():
    model, guide, _, _ = trained(epochs=1)
    data = batch()
    encoded = transformers.BatchEncoding(inputs(data))
    one, other = (vsd.predict(model, guide, x, num_samples=3, seed=0).probs for x in (encoded, inputs(data)))
    assert torch.equal(one, other)
    assert torch.isfinite(vsd.VSD_ELBO()(model, guide)(encoded, data["labels"]))
    loader = DataLoader(Sentences(), batch_size=16, collate_fn=lambda rows: transformers.BatchEncoding(collate(rows)))
    loaded = vsd.predict(model, guide, loader, num_samples=3, seed=0)
    torch.testing.assert_close(loaded.probs, one)


def halves():
    """Rows for training and held-out ones."""
    return tuple({name: value[half] for name, value in batch(rows=96).items()} for half in (slice(48), slice(48, 96)))


def test_an_ensemble_keeps_the_base_and_starts_each_adapter():
    torch.manual_seed(0)
    model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(with_lora(bert())), num_data=ROWS)
    base = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    ensemble = vsd.Ensemble(model, members=2)
    first, second = (dict(member.named_parameters()) for member, _ in ensemble.members)
    assert all(torch.equal(first[name], second[name]) == (name in base) for name in first if not name.endswith("bias"))
    for _, guide in ensemble.members:
        assert not any(value.any() for value in guide.mean().values())  # B = 0: the network is the base
    train, held_out = halves()
    held_out = {name: held_out[name] for name in reversed(held_out)}
    with pytest.warns(UserWarning, match="members|rows"):  # one after the other, and few held-out rows
        ensemble.fit(train, epochs=1, validation=held_out)
    assert ensemble.predict(inputs(held_out), num_samples=4).probs.shape == (48, 2)
    for member, _ in ensemble.members:
        now = dict(member.named_parameters())
        assert all(torch.equal(now[name], value) for name, value in base.items())


def test_an_ensemble_starts_from_adapters_that_are_not_zero():
    """Both factors stay: the base may have been changed to fit their product, as ``init_lora_weights="pissa"`` does."""
    net = with_lora(bert(), init_lora_weights=False)
    factors = [name for name in net.state_dict() if "lora_" in name]
    model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(net), num_data=ROWS)
    for member, guide in vsd.Ensemble(model, members=2).members:
        now = vsd.nn.mean_network(member, guide).state_dict()
        assert all(torch.equal(now[name], net.state_dict()[name]) for name in factors)


@pytest.mark.parametrize("kind", ["llama", "bert", "bert_tokens", "t5"])
def test_exported_samplers_take_dicts(kind):
    model, guide, _, _ = trained(kind, epochs=1)
    data = inputs(batch(kind))
    sampler = vsd.export.sampler(model, guide, draws=3, seed=0, noise="random")
    torch.testing.assert_close(sampler(data)["probs"], vsd.predict(model, guide, data, num_samples=3, seed=0).probs)


def test_trained_adapters_get_noise_from_dicts():
    train, held_out = halves()
    net = vsd.nn.bayesianize_lora(with_lora(bert(), init_lora_weights=False))
    model, guide = vsd.from_trained(net, train, held_out, num_samples=5, max_units=8)
    assert all("lora_B" in name for name in guide.sites)
    assert vsd.predict(model, guide, inputs(held_out), num_samples=3).probs.shape == (48, 2)


def test_calibration_takes_dicts():
    model, guide, _, _ = trained(epochs=2)
    calibration = vsd.calibrate(model, guide, batch(), num_samples=5, noise=False)
    assert calibration.scores["after"] >= calibration.scores["before"]


def test_saved_adapters_and_state_restore_predictions(tmp_path):
    model, guide, _, _ = trained("llama")
    data = inputs(batch())
    before = vsd.predict(model, guide, data, num_samples=5, seed=0)
    vsd.nn.mean_network(model, guide).save_pretrained(tmp_path)
    torch.save({"model": model.state_dict(), "guide": guide.state_dict()}, tmp_path / "state.pt")

    torch.manual_seed(0)
    net = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(net), num_data=ROWS)
    guide = vsd.VSDGuide(model)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    guide.load_state_dict(state["guide"])
    assert torch.equal(vsd.predict(model, guide, data, num_samples=5, seed=0).probs, before.probs)


def test_merging_merges_the_mean():
    model, guide, _, _ = trained()
    data = inputs(batch())
    mean = vsd.nn.mean_network(model, guide)
    query = "bert.encoder.layer.0.attention.self.query"
    layer = mean.get_base_model().get_submodule(query)
    expected = layer.base_layer.weight + layer.scaling["default"] * (
        guide.mean()[f"net.base_model.model.{query}.lora_B.default.weight"] @ layer.lora_A["default"].weight
    )
    logits = mean(**data).logits
    merged = mean.merge_and_unload()
    assert type(merged) is transformers.BertForSequenceClassification
    torch.testing.assert_close(merged.get_submodule(query).weight, expected)
    torch.testing.assert_close(merged(**data).logits, logits)


@pytest.mark.parametrize("method", ["save_pretrained", "merge_and_unload"])
def test_methods_that_would_use_the_first_weights_raise(method):
    net = vsd.nn.bayesianize_lora(with_lora(bert()))
    with pytest.raises(ValueError, match=method):
        getattr(net, method)


def test_without_reflections_the_noise_is_between_the_factors():
    """The output of a layer has the moments of ``(W + s B diag(ξ) A) x`` with independent ξ."""
    torch.manual_seed(0)
    net = peft.get_peft_model(nn.Sequential(nn.Linear(5, 3)), peft.LoraConfig(r=4, target_modules=["0"]))
    layer = net.base_model.model[0]
    layer.lora_B["default"].weight.data.normal_()
    model = vsd.nn.Regressor(vsd.nn.bayesianize_lora(net), num_data=10)
    guide = vsd.VSDGuide(model, num_reflections=0).setup(torch.randn(2, 5), torch.randn(2, 3))
    (site,) = guide.sites
    guide.get_parameter(f"log_alpha.{site}").data = torch.tensor([-1.0, 0.0, 0.5, 1.0])
    x = torch.randn(1, 5)
    samples = vsd.predict(model, guide, x.expand(40_000, 5), num_samples=1, seed=0, coherent=False).samples[0]
    inner = layer.scaling["default"] * layer.lora_A["default"](x)[0]
    factor = layer.lora_B["default"].weight * inner  # (out, r)
    covariance = factor @ guide.alpha(site).diag() @ factor.T
    gap = (samples.mean(0) - layer(x)[0]) / covariance.diagonal().sqrt()
    assert gap.abs().max() < 0.03  # six standard errors
    scale = covariance.diagonal().outer(covariance.diagonal()).sqrt()
    torch.testing.assert_close(samples.T.cov() / scale, covariance / scale, atol=0.05, rtol=0.0)


def test_several_adapters_each_have_their_noise():
    torch.manual_seed(0)
    net = with_lora(bert(), modules_to_save=None)
    net.add_adapter("second", peft.LoraConfig(r=2, target_modules=["query", "value"]))
    with pytest.raises(ValueError, match="adapters"):
        vsd.nn.bayesianize_lora(net, adapters="second")  # frozen: the first one is active
    net.set_adapter("second")
    net = vsd.nn.bayesianize_lora(net)
    assert {site.name.split(".")[-2] for site in net.weight_sites} == {"second"}
    net.set_adapter("default")
    net = vsd.nn.bayesianize_lora(net)  # the first one, too
    assert {site.name.split(".")[-2] for site in net.weight_sites} == {"default", "second"}

    model, data = vsd.nn.Classifier(net, num_data=ROWS), batch()
    guide = vsd.VSDGuide(model)
    vsd.fit(model, guide, data, epochs=3, lr=2e-2, batch_size=16, seed=0)
    first = vsd.predict(model, guide, inputs(data), num_samples=3, seed=0).probs
    net.set_adapter("second")
    second = vsd.predict(model, guide, inputs(data), num_samples=3, seed=0).probs
    assert not torch.allclose(first, second)  # the second one has not been trained
    net.set_adapter("default")
    assert torch.equal(vsd.predict(model, guide, inputs(data), num_samples=3, seed=0).probs, first)


def test_adapters_of_convolutions_have_noise_on_their_ranks():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0"]))
    model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(net, vsd.nn.HierarchicalPrior()), num_data=10)
    guide = vsd.VSDGuide(model)
    (name,) = (name for name, site in guide.sites.items() if site.kind == "weight")
    assert guide.alpha(name).shape == (4,)
    vsd.fit(model, guide, (torch.randn(10, 3, 3, 3), torch.randint(2, (10,))), epochs=1)


class Attention(nn.Module):
    """``peft`` merges the adapters of such a layer into its weights in each call."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)


class Int8Linear(nn.Module):
    """A layer that hides its product, as those of quantised models."""


def hidden_product(net):
    net.base_model.model.bert.encoder.layer[0].attention.self.query.lora_B["default"] = Int8Linear()
    return net


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (bert, "model"),
        (lambda: with_lora(bert(), use_dora=True), "model"),
        (lambda: hidden_product(with_lora(bert())), "lora_B"),
        (lambda: merged(with_lora(bert())), "merged"),
        (lambda: peft.get_peft_model(Attention(), peft.LoraConfig(target_modules=["attention"])), "model"),
    ],
    ids=["no LoRA", "DoRA", "quantised", "merged", "attention"],
)
def test_layers_without_a_plain_product_raise(make, named):
    with pytest.raises(ValueError, match=named):
        vsd.nn.bayesianize_lora(make())


def merged(net):
    net.merge_adapter()
    return net


@pytest.mark.parametrize("adapters", ["third", ["default", "third"]])
def test_unknown_adapters_raise(adapters):
    with pytest.raises(ValueError, match="adapters"):
        vsd.nn.bayesianize_lora(with_lora(bert()), adapters=adapters)


# ---- the Trainer


class Sentences(Dataset):
    def __init__(self):
        self.rows = batch()

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {name: value[index] for name, value in self.rows.items()} | {"unused": index}


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask", "labels")}


def trainer(folder, model, guide, size=16, accumulate=1, epochs=1, **options):
    ours = ("kl_weight", "elbo", "num_samples", "compute_metrics", "eval_dataset")
    others = {name: options.pop(name) for name in ours if name in options}
    settings = {
        "output_dir": folder, "num_train_epochs": epochs, "per_device_train_batch_size": size, "use_cpu": True,
        "gradient_accumulation_steps": accumulate, "learning_rate": 1e-2, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "log_level": "error", "logging_strategy": "epoch", "dataloader_pin_memory": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**settings, **options})
    return VSDTrainer(model, guide, args, train_dataset=Sentences(), **others)


def lora_model(**options):
    torch.manual_seed(0)
    model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(with_lora(bert())), num_data=ROWS)
    return model, vsd.VSDGuide(model, **options)


def without_noise(guide):
    for name, parameter in guide.named_parameters():
        if name.startswith("log_alpha"):
            parameter.data.fill_(-60.0)
            parameter.requires_grad_(False)


@pytest.mark.parametrize(("size", "accumulate"), [(12, 4), (20, 3)])
def test_accumulated_batches_equal_a_large_one(tmp_path, size, accumulate):
    """Also where the last one is shorter. (The noise is taken out: it differs between batches.)"""
    states = []
    for rows, times in ((ROWS, 1), (size, accumulate)):
        model, guide = lora_model(scale_vectors=False)
        without_noise(guide)
        trainer(tmp_path, model, guide, rows, times, max_grad_norm=0.0, optim="sgd", learning_rate=0.5).train()
        states.append({**dict(model.named_parameters()), **dict(guide.named_parameters())})
    start = {**dict(lora_model()[0].named_parameters()), **dict(lora_model()[1].named_parameters())}
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name])
    moved = [name for name, value in states[0].items() if name in start and not torch.equal(value, start[name])]
    assert any("lora_A" in name for name in moved) or any("theta" in name for name in moved)


def test_the_kl_counts_once_divided_by_the_rows_of_the_data(tmp_path):
    model, guide = lora_model()
    run = trainer(tmp_path, model, guide, kl_weight=0.5)
    data = batch()
    torch.manual_seed(1)
    loss = run.compute_loss(run.model, data)
    torch.manual_seed(1)
    elbo = vsd.VSD_ELBO(kl_weight=0.5)
    torch.testing.assert_close(loss, elbo(model, guide)(inputs(data), data["labels"]) / ROWS)
    terms = elbo.terms
    expected = 0.5 * sum(terms["kl"].values()) - terms["log_likelihood"]
    torch.testing.assert_close(loss.detach(), expected / ROWS)


def test_trainer_learns_evaluates_and_resumes(tmp_path):
    def metrics(found):
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    def run(model, guide):
        schedule = vsd.infer.linear_warmup(6)
        options = {"kl_weight": schedule, "eval_dataset": Sentences(), "compute_metrics": metrics, "num_samples": 3}
        return trainer(tmp_path, model, guide, epochs=4, save_strategy="epoch", eval_strategy="epoch", **options)

    model, guide = lora_model()
    first = run(model, guide)
    first.train()
    losses = [row["eval_loss"] for row in first.state.log_history if "eval_loss" in row]
    assert losses[-1] < losses[0]
    assert first.elbo.step == 11  # counted from 0
    assert 0 <= first.evaluate()["eval_accuracy"] <= 1
    assert first.predict(Sentences()).predictions.shape == (ROWS, 2)
    data = inputs(batch())
    expected = vsd.predict(model, guide, data, num_samples=3, seed=0).probs

    model, guide = lora_model()
    run(model, guide).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert torch.equal(vsd.predict(model, guide, data, num_samples=3, seed=0).probs, expected)


def test_weight_decay_leaves_the_noise_alone(tmp_path):
    model, guide = lora_model()
    names = trainer(tmp_path, model, guide).get_decay_parameter_names(vsd.VSD_ELBO()(model, guide))
    assert any("theta" in name for name in names)
    assert not any("log_alpha" in name or "vectors" in name for name in names)


def test_trainer_warns_of_a_wrong_number_of_rows(tmp_path):
    torch.manual_seed(0)
    model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(with_lora(bert())), num_data=2 * ROWS)
    with pytest.warns(UserWarning, match="num_data"):
        trainer(tmp_path, model, vsd.VSDGuide(model))


def test_trainer_takes_models_of_ours_only(tmp_path):
    model, guide = lora_model()
    with pytest.raises(TypeError, match="model"):
        trainer(tmp_path, copy.deepcopy(model.net), guide)


def test_trainer_takes_the_guide_second(tmp_path):
    model, _ = lora_model()
    with pytest.raises(TypeError, match=r"\bguide\b"):
        VSDTrainer(model, transformers.TrainingArguments(str(tmp_path), use_cpu=True))


@pytest.mark.parametrize(
    "setting",
    [{"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 1.0}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_settings_that_do_not_apply_raise(tmp_path, setting):
    with pytest.raises(ValueError, match=r"\bargs\b"):
        trainer(tmp_path, *lora_model(), **setting)
