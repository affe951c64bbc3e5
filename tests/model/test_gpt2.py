import math

import pytest
import torch

from gptile.kernels import IGNORE_INDEX, Ops
from gptile.model.config import GPT2Config
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import ContextLengthError, KVCache


def ids_for(model: GPT2, n_rows: int = 2, n_tokens: int = 12) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (n_rows, n_tokens))


def test_initialisation_is_gpt2s() -> None:
    model = GPT2(GPT2Config(vocab_size=997, n_positions=256, n_embd=256, n_layer=8, n_head=4))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert (parameter == 1).all(), name
        else:
            # Two projections a block feed the residual stream.
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name


def test_logits_only_where_asked(model: GPT2) -> None:
    ids = ids_for(model, 3)
    lengths = torch.tensor([12, 1, 7])
    full = model(ids).logits
    last = model(ids, logits_for="last", lengths=lengths).logits
    expected = torch.stack([full[row, n - 1] for row, n in enumerate(lengths)]).unsqueeze(1)
    torch.testing.assert_close(last, expected)
    wanted = torch.tensor([[0, 5], [11, 11], [3, 2]])
    some = model(ids, logits_for=wanted).logits
    torch.testing.assert_close(some, torch.stack([full[r, w] for r, w in enumerate(wanted)]))
    assert model(ids, logits_for="none").logits is None
    with pytest.raises(ValueError, match="logits_for"):
        model(ids, logits_for="first")


def test_causality_makes_right_padding_harmless(model: GPT2) -> None:
    ids = ids_for(model)
    padded = torch.cat([ids, ids_for(model, 2, 5)], 1)
    torch.testing.assert_close(model(padded).logits[:, :12], model(ids).logits)


def test_targets_are_already_shifted(model: GPT2) -> None:
    ids = ids_for(model)
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORE_INDEX
    output = model(ids, targets)
    logprobs = output.logits.double().log_softmax(-1)
    rows = [logprobs[b, t, ids[b, t + 1]] for b in range(2) for t in range(11)]
    assert output.loss.item() == pytest.approx(-torch.stack(rows).mean().item(), rel=1e-5)


def test_a_perfect_predictor_of_the_next_token_has_no_loss() -> None:
    # The hidden state of token t is one-hot; the head maps it to t + 1.
    ops = Ops.torch()
    n = 10
    head = torch.roll(torch.eye(n), 1, 0) * 100
    ids = torch.arange(8).unsqueeze(0)
    for shift, lossless in ((0, False), (1, True), (2, False)):
        loss = ops.linear_cross_entropy(torch.eye(n)[ids], head, ids + shift)
        assert (loss.item() < 1e-6) == lossless


def test_hidden_states_are_embedding_blocks_and_final_norm(model: GPT2) -> None:
    ids = ids_for(model)
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == model.config.n_layer + 1
    positions = torch.arange(ids.shape[1])
    torch.testing.assert_close(states[0], model.wte.weight[ids] + model.wpe.weight[positions])
    torch.testing.assert_close(states[-1] @ model.head_weight.T, model(ids).logits)


def test_dropout_acts_in_training_only_and_is_seeded(small_model) -> None:
    model = small_model(embd_pdrop=0.3, attn_pdrop=0.3, resid_pdrop=0.3)
    ids = ids_for(model)
    torch.testing.assert_close(model(ids).logits, model(ids).logits)
    model.train()
    torch.manual_seed(1)
    first = model(ids).logits
    assert not torch.equal(first, model(ids).logits)
    torch.manual_seed(1)
    assert torch.equal(first, model(ids).logits)


def test_each_dropout_has_its_own_place(small_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3, n_layer=2)
    dropped: list[float] = []
    attention = Ops.torch().attention

    def watched_attention(q, k, v, scale, dropout_p):
        dropped.append(dropout_p)
        return attention(q, k, v, scale, dropout_p)

    def watched_dropout(x, p, training=True):
        dropped.append(p if training else 0.0)
        return x

    monkeypatch.setattr("gptile.model.gpt2.F.dropout", watched_dropout)
    watched = GPT2(model.config, Ops.torch().replace(attention=watched_attention))
    watched(ids_for(model))
    # Embedding; then in each block attention weights, attention output, MLP output.
    assert dropped == [0.1, *[0.2, 0.3, 0.3] * 2]
    dropped.clear()
    watched.eval()(ids_for(model))
    assert set(dropped) == {0.0}


@pytest.mark.parametrize("training", [False, True])
def test_the_uncached_model_compiles_in_one_graph(small_model, training: bool) -> None:
    model = small_model(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0).train(training)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids, targets = ids_for(model), ids_for(model)
    lengths = torch.tensor([12, 5])
    expected = model(ids, targets, logits_for="last", lengths=lengths)
    got = compiled(ids, targets, logits_for="last", lengths=lengths)
    torch.testing.assert_close(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)


def test_a_tied_head_is_one_parameter_through_everything(small_model) -> None:
    model = small_model()
    assert model.head_weight is model.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    model = model.double()
    assert model.head_weight is model.wte.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids_for(model), ids_for(model)).loss.backward()
    optimizer.step()
    assert model.head_weight is model.wte.weight
    untied = small_model(tie_word_embeddings=False)
    assert untied.num_parameters() == small_model().num_parameters() + 61 * 24


def test_gradients_are_those_of_finite_differences(small_model) -> None:
    model = small_model(torch.float64, n_layer=2)
    ids, targets = ids_for(model), ids_for(model)
    model(ids, targets).loss.backward()
    for parameter in (model.h[0].attn.c_attn.weight, model.wpe.weight, model.h[1].ln_2.bias):
        direction = torch.randn_like(parameter)
        expected = (parameter.grad * direction).sum().item()
        with torch.no_grad():
            parameter += 1e-6 * direction
            above = model(ids, targets).loss.item()
            parameter -= 2e-6 * direction
            below = model(ids, targets).loss.item()
            parameter += 1e-6 * direction
        assert (above - below) / 2e-6 == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_layer_index_scaling_changes_all_layers_but_the_first(small_model) -> None:
    for n_layer, changes in ((1, False), (2, True)):
        torch.manual_seed(0)
        plain = small_model(n_layer=n_layer)
        torch.manual_seed(0)
        scaled = small_model(n_layer=n_layer, scale_attn_by_inverse_layer_idx=True)
        ids = ids_for(plain)
        assert torch.equal(plain(ids).logits, scaled(ids).logits) != changes


def test_upcasting_attention_does_not_change_fp32(small_model) -> None:
    torch.manual_seed(0)
    plain = small_model()
    torch.manual_seed(0)
    upcast = small_model(reorder_and_upcast_attn=True)
    ids = ids_for(plain)
    torch.testing.assert_close(plain(ids).logits, upcast(ids).logits)


def test_the_model_runs_on_the_ops_it_is_given(small_model) -> None:
    calls = []
    attention = Ops.torch().attention

    def counting(*args):
        calls.append(args)
        return attention(*args)

    config = small_model().config
    model = GPT2(config, Ops.torch().replace(attention=counting)).eval()
    model(ids_for(model))
    assert len(calls) == config.n_layer


def test_the_context_limit_holds_without_a_cache(model: GPT2) -> None:
    assert model(ids_for(model, 1, 32)).logits.shape == (1, 32, 61)
    with pytest.raises(ContextLengthError, match=r"33.*32"):
        model(ids_for(model, 1, 33))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cache_adds_no_error_in_any_dtype(small_model, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    ids = ids_for(model)
    cache = KVCache(model.config, 2, 32, dtype=dtype)
    with torch.no_grad():
        whole = model(ids).logits
        parts = [model(part, cache=cache).logits for part in ids.split([5, 1, 6], 1)]
        exact = model.double()(ids).logits
    uncached, cached = ((x - exact).norm() / exact.norm() for x in (whole, torch.cat(parts, 1)))
    assert cached <= 1.5 * uncached + torch.finfo(dtype).eps / 2
