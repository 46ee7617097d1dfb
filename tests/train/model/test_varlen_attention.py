"""Attention of packed rows without a mask: each document as if it were alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from model_configs import GPT2, TINY
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.models.attention import VARLEN
from toolkit.train.data.collation import Collator, PackCollator
from toolkit.train.model import varlen_attention as varlen
from toolkit.train.model.varlen_attention import register, varlen_attention

register()
WINDOW = 8
SLIDING = {"sliding_window": WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", *["full_attention"] * 2]}
MODELS = {
    "llama": TINY,
    "mistral": TINY | {"sliding_window": WINDOW},
    "gemma3_text": TINY | SLIDING,
    "gpt2": GPT2 | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0),
}


class Tokenizer:
    pad_token_id = 0


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **MODELS[request.param], use_cache=False)
    return AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN, dtype=torch.float32).train()


def document(tokens: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(3, 96, (tokens,), generator=generator).tolist())


# longer than two windows, and shorter than one
FIRST, SECOND, THIRD = (document(n, seed=seed) for seed, n in enumerate((19, 26, 5)))


def pack(*documents: list[int]) -> dict[str, Any]:
    tokens = [token for tokens in documents for token in tokens]
    return {"input_ids": tokens, "labels": tokens, "documents": list(map(len, documents))}


def logits_and_gradient(model: Any, *documents: list[int], of: int, implementation: str = VARLEN) -> Any:
    """Logits of one document in a pack, and the gradient of a loss on them alone."""
    model.set_attn_implementation(implementation)
    batch = PackCollator(Tokenizer(), one_row=implementation == VARLEN)([pack(*documents)])
    del batch["labels"]
    model.zero_grad()
    start = sum(map(len, documents[:of]))
    logits = model(**batch).logits[0, start : start + len(documents[of])]
    logits.square().sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(gradients)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_document_has_the_logits_and_the_gradient_that_sdpa_gives_it_alone(model: Any, index: int) -> None:
    packed = logits_and_gradient(model, FIRST, SECOND, THIRD, of=index)
    alone = logits_and_gradient(model, (FIRST, SECOND, THIRD)[index], of=0, implementation="sdpa")
    for ours, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)


def test_padded_rows_get_the_mask_of_sdpa(model: Any) -> None:
    rows = [{"input_ids": row, "labels": row} for row in (FIRST, THIRD)]
    batch = Collator(Tokenizer())(rows)
    del batch["labels"]
    ours = model(**batch).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(ours, model(**batch).logits)


def test_documents_begin_where_positions_do_if_no_lengths_are_given(model: Any) -> None:
    batch = PackCollator(Tokenizer(), one_row=True)([pack(FIRST, SECOND)])
    given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    lengths = {name: value for name, value in batch.items() if name.startswith(("cu_seq", "max_length"))}
    assert torch.equal(model(**given).logits, model(**given, **lengths).logits)


def test_under_autocast_fp32_queries_are_computed_in_bf16() -> None:
    """Rotary embeddings leave queries and keys in fp32 where values are bf16."""
    query, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = varlen_attention(torch.nn.Identity(), query, query[:, :2], value, None)
    assert (output.dtype, tuple(output.shape)) == (torch.bfloat16, (1, 6, 4, 8))


def test_what_it_does_not_compute_is_an_error() -> None:
    part = torch.randn(1, 2, 4, 8)
    refused = {"softcap": 1.0, "s_aux": 1.0, "position_bias": 1.0, "is_causal": False}
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"does not support ({name}|attention in both directions)"):
            varlen_attention(torch.nn.Identity(), part, part, part, None, **{name: value})  # type: ignore[arg-type]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, *_: Any, **settings: Any
) -> torch.Tensor:
    """Compute what the documentation of `varlen_attn` promises, one document and head at a time."""
    before, after = settings["window_size"]
    assert (after, settings.get("enable_gqa", False)) == (0, query.shape[1] != key.shape[1])
    output, group = torch.empty_like(query), query.shape[1] // key.shape[1]
    for start, end in pairwise(starts.tolist()):
        at = torch.arange(end - start)
        seen = (at <= at[:, None]) & (at >= at[:, None] - (end if before < 0 else before))
        for head in range(query.shape[1]):
            keys, values = (part[start:end, head // group] for part in (key, value))
            scores = query[start:end, head] @ keys.T * settings["scale"]
            output[start:end, head] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
    return output


def test_the_call_for_gpus_computes_the_same(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PackCollator(Tokenizer(), one_row=True)([pack(FIRST, SECOND, THIRD)])
    del batch["labels"]
    by_document = model(**batch).logits
    monkeypatch.setattr(varlen, "has_varlen_kernel", lambda *_, **__: True)
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    torch.testing.assert_close(model(**batch).logits, by_document, rtol=1e-5, atol=2e-5)


def test_torchs_own_function_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, forward and backward: shapes and arguments, no values."""
    monkeypatch.setattr(varlen, "has_varlen_kernel", lambda *_, **__: True)
    monkeypatch.setattr(varlen, "_autocast", lambda part: part)  # torch knows no autocast there
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query, key, value = (torch.empty(1, heads, 12, 64, **kind) for heads in (4, 2, 2))
    given = {"cu_seq_lens_q": torch.empty(4, dtype=torch.int32, device="meta"), "max_length_q": 7}
    output, _ = varlen_attention(torch.nn.Identity(), query, key, value, None, sliding_window=4, scaling=0.1, **given)  # type: ignore[arg-type]
    assert tuple(output.shape) == (1, 12, 4, 64)
    output.sum().backward()
    assert all(part.grad.shape == part.shape for part in (query, key, value))


def test_only_what_torchs_flash_attention_computes_is_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_given(*, dtype: Any = torch.bfloat16, dropout: float = 0.0, sizes: tuple[int, int] = (64, 64)) -> bool:
        with FakeTensorMode():
            query, value = (torch.empty(12, 4, size, dtype=dtype, device="cuda") for size in sizes)
            return varlen.has_varlen_kernel(query, value, dropout=dropout)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert is_given()
    assert not is_given(dtype=torch.float32)
    assert not is_given(dropout=0.1)
    assert not any(is_given(sizes=sizes) for sizes in ((512, 512), (60, 60), (64, 32)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert not is_given()
