"""The real SmolLM2-135M-Instruct from its GGUF: our loader and model against transformers' own.

transformers dequantises, un-permutes and runs the same file with its own code under torch.
"""

from __future__ import annotations

import numpy as np
import pytest

from agentspec.model.weights import load_model, save_hf

# "The capital of France is Paris. The capital of Germany is", by the model's own tokenizer
IDS = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 4521, 314]
BERLIN = 11452


@pytest.fixture(scope="module")
def loaded(smollm2_gguf):
    return load_model(smollm2_gguf)


@pytest.mark.slow
def test_b52_logits_match_transformers_at_all_positions(loaded, smollm2_gguf):
    torch = pytest.importorskip("torch", reason="parity needs torch: pip install -e .[parity]")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        wanted = reference(torch.tensor([IDS])).logits.numpy()
    got = np.asarray(loaded.apply(loaded.params, [IDS]))
    assert 25 < np.abs(wanted).max() < 30  # at that size float32 itself rounds at 2e-6
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=1e-5)
    np.testing.assert_array_equal(got.argmax(-1), wanted.argmax(-1))
    assert np.abs(got - wanted).mean() < 5e-5


@pytest.mark.slow
def test_config_and_hf_export_of_the_gguf(loaded, tmp_path):
    config = loaded.config
    assert (config.n_layers, config.d_model, config.n_heads, config.n_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.d_ff, config.rope_theta) == (49152, 1536, 1e5)
    assert config.tie_embeddings and not config.qk_norm and config.eos_ids == (2,)
    save_hf(loaded, tmp_path / "hf")
    again = load_model(tmp_path / "hf")
    assert again.config == config
    np.testing.assert_array_equal(
        np.asarray(again.apply(again.params, [IDS[:8]])),
        np.asarray(loaded.apply(loaded.params, [IDS[:8]])),
    )


@pytest.mark.slow
def test_the_model_knows_the_capital_of_germany(loaded):
    """What transformers' own load answers, for machines without torch."""
    logits = np.asarray(loaded.apply(loaded.params, [IDS]))
    assert logits[0, -1].argmax() == BERLIN
    assert logits.max() == pytest.approx(27.84394, abs=1e-3)
