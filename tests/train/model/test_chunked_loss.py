"""The chunked loss: loss and gradients of the full logits, in every architecture whose head it can take."""

import copy
from typing import Any

import pytest
import torch
from model_configs import TINY
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.engines.tensors import without_adapters
from toolkit.models.fake_tensors import LiveMemory
from toolkit.observe.batches import IGNORED
from toolkit.plan.logits import LOSSES, WITHOUT_CHUNKED_LOSS, LossSizes
from toolkit.record.reading import RankReading
from toolkit.train.data.collation import supervised_positions
from toolkit.train.model import chunked_loss
from toolkit.train.model.chunked_loss import ChunkedLoss, LogitScale, LossOptions, UnknownHead

ROUTED = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
SCALES = {
    "llama": ({}, LogitScale()),
    "llama, tied": ({"tie_word_embeddings": True}, LogitScale()),
    "gemma2": ({"final_logit_softcapping": 3.0}, LogitScale(cap=3.0)),
    "granite": ({"logits_scaling": 8.0}, LogitScale(slope=1 / 8)),
    "cohere": ({"logit_scale": 0.25}, LogitScale(slope=0.25)),
    "mixtral": (ROUTED, LogitScale()),
    "phi": ({}, LogitScale()),  # its head has a bias
    "opt": ({"word_embed_proj_dim": TINY["hidden_size"], "ffn_dim": 64, "dropout": 0.0}, LogitScale()),  # the decoder's
}


def tiny(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition(",")[0], **(TINY | settings))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def batch(**more: Any) -> dict[str, Any]:
    """Two rows of eleven tokens, of which some are not supervised."""
    tokens = torch.randint(2, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :4] = labels[1, 9:] = IGNORED
    return {"input_ids": tokens, "labels": labels} | more


def loss_and_gradients(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_to_full(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    """Compare with a copy of the model that has no chunked loss."""
    full = loss_and_gradients(copy.deepcopy(model), inputs)
    ChunkedLoss(without_adapters(model), chunk_tokens=4, **options)
    chunked = loss_and_gradients(model, inputs)
    assert chunked_loss.read_loss(model) == RankReading(loss="chunked", loss_chunk_tokens=4)
    assert full.keys() == chunked.keys()
    for name, expected in full.items():
        torch.testing.assert_close(chunked[name], expected, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": torch.tensor(123)}])  # of all steps and ranks
@pytest.mark.parametrize("name", SCALES)
def test_loss_and_gradients_are_those_of_the_full_logits(name: str, items: dict[str, Any]) -> None:
    settings, scale = SCALES[name]
    assert name.partition(",")[0] not in WITHOUT_CHUNKED_LOSS
    model = tiny(name, **settings)
    assert chunked_loss.read_logit_scale(model) == scale
    assert_equal_to_full(model, batch(**items))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_frozen_head_and_a_trained_copy_have_the_full_loss_and_one_with_adapters_its_full_logits() -> None:
    for trained in ({"modules_to_save": ["lm_head"]}, {}):
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], **trained)
        assert_equal_to_full(get_peft_model(tiny("llama"), config).eval(), batch())
    adapted = get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(UnknownHead, match="is not a linear layer, or has adapters"):
        chunked_loss.read_logit_scale(without_adapters(adapted))


def test_smoothed_labels_are_torchs() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.tensor([3, IGNORED, 19, 0, 1, 2, IGNORED, 5, 6])
    logits = hidden @ weight.T
    full = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.2)
    expected = torch.autograd.grad(full, (hidden, weight))
    options = LossOptions(chunk_tokens=4, label_smoothing=0.2)
    chunked = chunked_loss.chunked_cross_entropy(hidden, labels, supervised_positions(labels), weight, None, options)
    torch.testing.assert_close(chunked, full, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(chunked, (hidden, weight)), expected, atol=1e-6, rtol=1e-5)


def test_a_bf16_heads_gradient_is_added_up_in_fp32() -> None:
    """One chunk of 1 and 256 chunks of 2**-8: bf16 would stay at 1."""
    hidden, labels = torch.ones(257, 1, dtype=torch.bfloat16), torch.zeros(257, dtype=torch.int64)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden[1:] = 2.0**-8
    options = LossOptions(chunk_tokens=1)
    chunked_loss.chunked_cross_entropy(hidden, labels, supervised_positions(labels), weight, None, options).backward()
    assert weight.grad[1].item() == 1.0  # half of 1 + 256 · 2**-8, the probability of the other word being 0.5


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": torch.tensor(5)}])
def test_a_batch_without_supervised_tokens_has_gradients_of_zero(items: dict[str, Any]) -> None:
    """The part of its rows that a rank has under Ulysses may be of the prompts alone: nobody has counted its items."""
    inputs = batch(**items)
    inputs["labels"][:] = IGNORED
    model = tiny("llama")
    ChunkedLoss(model, chunk_tokens=4)
    found = loss_and_gradients(model, inputs)
    assert found.pop("loss").isnan().item() is (not items)
    assert all(not value.any() for value in found.values())
    assert len(found) == len(list(model.parameters()))


def test_evaluation_keeps_no_gradients_and_calls_without_labels_return_logits() -> None:
    model = tiny("llama")
    with torch.no_grad():
        full = model(**batch())
        ChunkedLoss(model, chunk_tokens=4, label_smoothing=0.5)
        assert model(**batch()).loss.item() == pytest.approx(full.loss.item(), abs=1e-6)
        assert torch.equal(model(input_ids=batch()["input_ids"]).logits, full.logits)


def test_a_model_without_a_chunked_loss_is_named_with_the_reason() -> None:
    model = tiny("llama")
    original = model.forward
    model.loss_function = lambda **_: torch.zeros(())
    with pytest.raises(UnknownHead, match="LlamaForCausalLM has a loss function of its own"):
        ChunkedLoss(model, chunk_tokens=4)
    assert model.forward == original
    assert chunked_loss.read_loss(model) == RankReading(loss="full", loss_chunk_tokens=None)
    # A family whose head is not its loss is planned so.
    assert "electra" in WITHOUT_CHUNKED_LOSS
    with pytest.raises(UnknownHead, match="ElectraForCausalLM cannot be asked what it does with its logits"):
        chunked_loss.read_logit_scale(tiny("electra", is_decoder=True))


def test_the_traced_peak_is_the_planned_one() -> None:
    """3,000 tokens of 64 and 5,000 words in bf16: 1,024 tokens' logits, their fp32 copy and the gradients."""
    tokens, words, size = 3000, 5000, 64
    hidden = torch.randn(tokens, size, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(words, size).to(torch.bfloat16).requires_grad_()
    labels, memory = torch.zeros(tokens, dtype=torch.int64), LiveMemory(vocab_size=0)
    positions, options = supervised_positions(labels), LossOptions(chunk_tokens=1024)
    with memory:
        memory.exclude((hidden, weight, labels, positions))
        loss = chunked_loss.chunked_cross_entropy(hidden, labels, positions, weight, None, options)
    planned, _ = LOSSES["chunked"](LossSizes(tokens=tokens, vocab_size=words, hidden_size=size, head_bytes=2))
    assert memory.peaks["load"].total_bytes == pytest.approx(planned, rel=0.03)
    assert memory.live_bytes == pytest.approx(2 * (tokens + words) * size, rel=0.1)
    loss.backward()
