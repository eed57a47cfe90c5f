"""llama.cpp loads the files of ``save_gguf`` and computes the logits of the model."""

import ctypes

import pytest
import torch
from gguf_models import FAMILIES, IDS, STACKED, TEXTS, logits, model, quantized, tokenizer

from qtensor.integrations.gguf import save_gguf
from qtensor.integrations.gguf.families import FAMILIES as KNOWN
from qtensor.integrations.gguf.tokenizer import PATTERNS

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python compiles it"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.nightly(reason="llama.cpp is compiled for this test alone"),
]
UNSCALED = [name for name in FAMILIES if name in ("qwen2", "gemma", "gemma2", "gemma3", "gpt-oss")]


@llama_cpp.llama_log_callback
def _quiet(level, text, data):
    pass


def theirs(path):
    """Logits (1, tokens, vocabulary) of ``IDS``."""
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    found = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    assert found, "llama.cpp refuses the file"
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = 64
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0  # a cache in float32
    context = llama_cpp.llama_init_from_model(found, options)
    ids = IDS[0].tolist()
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.logits[at] = token, at, 1
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    assert llama_cpp.llama_decode(context, batch) == 0
    count = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(found))
    rows = [llama_cpp.llama_get_logits_ith(context, at)[:count] for at in range(len(ids))]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(found)
    return torch.tensor([rows])


@pytest.mark.parametrize("name", FAMILIES)
def test_float32(name, tmp_path):
    """llama.cpp rounds rotated queries and keys to float16, so that errors are about 2^-10."""
    made = model(name, torch.float32)
    save_gguf(made, tmp_path / "x.gguf")
    want = logits(made)
    assert (theirs(tmp_path / "x.gguf") - want).abs().max() < 4 * 2**-10 * want.abs().max()


QUANTIZED = [(name, "nvfp4", "mse") for name in FAMILIES if name not in UNSCALED]
QUANTIZED += [(name, "mxfp4", "gptq") for name in FAMILIES]


@pytest.mark.parametrize(("name", "fmt", "rounding"), QUANTIZED)
def test_quantized(name, fmt, rounding, tmp_path):
    """llama.cpp quantizes activations to 8 bits, and so may send a token to other experts.

    A factor or an order that is lost would change every token.
    """
    made = quantized(name, fmt, tmp_path / "dense", rounding)
    save_gguf(made, tmp_path / "x.gguf")
    want, found = logits(made), theirs(tmp_path / "x.gguf")
    similar = torch.nn.functional.cosine_similarity(found.flatten(), want.flatten(), 0)
    assert similar > (0.99 if name in STACKED else 0.999)


@pytest.mark.parametrize("pattern", PATTERNS, ids=PATTERNS.values())
def test_tokens(pattern, tmp_path):
    """llama.cpp parts texts into the tokens of the tokenizer."""
    made = tokenizer(tmp_path / "tok", pattern)
    save_gguf(model("llama", vocab_size=320), tmp_path / "x.gguf", metadata=tmp_path / "tok")
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    found = llama_cpp.llama_model_load_from_file(str(tmp_path / "x.gguf").encode(), options)
    assert found, "llama.cpp refuses the file"
    vocabulary = llama_cpp.llama_model_get_vocab(found)
    for text in [*TEXTS, "<|begin|>it's 99 ends<|end|>"]:
        data, out = text.encode(), (ctypes.c_int32 * 200)()
        count = llama_cpp.llama_tokenize(vocabulary, data, len(data), out, 200, False, True)
        assert out[:count] == made.encode(text).ids, text
    llama_cpp.llama_model_free(found)


def test_which_families_forget_factors():
    """The list above is that of the library."""
    assert {family.architecture for family in KNOWN if not family.scaled} == set(UNSCALED)
