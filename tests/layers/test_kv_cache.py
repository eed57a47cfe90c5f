"""A cache holds the bytes of quantizing all tokens at once, however they were appended."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from formats import assert_same_bytes, rand

import qtensor
from qtensor.caches import global_value

B, H, D, TOKENS = 2, 2, 64, 20
FORMATS = ("fp8_rowwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp8", "bfloat16")
formats = pytest.mark.parametrize("text", FORMATS)
LAYOUTS = {
    "static": {"capacity": 24},
    "growing": {"capacity": 3, "grow": True},
    "pages": {"capacity": 24, "page_size": 4},
    "growing pages": {"capacity": 3, "grow": True, "page_size": 4},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
WIDE = 8.0


def make(text="mxfp8", capacity=24, **options):
    """Return an empty cache; formats with a global value have one for numbers up to ``WIDE``."""
    if text in ("nvfp4", "fp8"):
        wide = global_value(text, WIDE)
        options = {"k_global": wide, "v_global": wide, **options}
    return qtensor.KVCache(B, H, D, capacity, k_format=text, **options)


def tokens(count=TOKENS, heads=H, size=D):
    return rand(B, heads, count, size, dtype=torch.bfloat16).clamp(-WIDE, WIDE)


def whole(x, text):
    """Return the tokens quantized at once, with the global value of ``make``."""
    if text == "bfloat16":
        return x
    if text in ("nvfp4", "fp8"):
        marked = torch.cat([x, torch.full_like(x[:, :, :1], WIDE)], 2)
        return qtensor.quantize(marked, text)[:, :, :-1]
    return qtensor.quantize(x, text)


def assert_same_tokens(cache, k, text):
    """Assert that the cache holds the keys ``k``: codes and factors, not only values."""
    keys = cache.keys
    if cache.block_table is not None:
        table = cache.block_table
        rows = qtensor.dequantize(keys)
        rows = rows[table.flatten()].unflatten(0, table.shape).transpose(1, 2).flatten(2, 3)
        want = qtensor.dequantize(whole(k, text))
        assert_same_bytes(rows[:, :, : k.shape[2]].contiguous(), want)
        return
    got, want = keys[:, :, : k.shape[2]], whole(k, text)
    if text == "bfloat16":
        assert_same_bytes(got.contiguous(), want)
        return
    pairs = zip(got.clone().buffers(), want.clone().buffers(), strict=True)
    for one, other in pairs:
        assert_same_bytes(one, other)


@formats
@layouts
def test_appending_is_quantizing_the_whole(text, layout):
    k, v = tokens(), tokens()
    cache = make(text, **LAYOUTS[layout])
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 20)):
        cache.append(k[:, :, start:end], v[:, :, start:end])
    assert cache.lengths.tolist() == [TOKENS] * B
    assert_same_tokens(cache, k, text)


@formats
@layouts
def test_attention_is_that_of_the_whole(text, layout):
    k, v, q = tokens(), tokens(), tokens(heads=2 * H)
    cache = make(text, **LAYOUTS[layout])
    prompt = cache.update(q[:, :, :15], k[:, :, :15], v[:, :, :15])
    steps = [prompt] + [
        cache.update(*(t[:, :, i : i + 1] for t in (q, k, v))) for i in range(15, TOKENS)
    ]
    want = qtensor.attention(q, whole(k, text), whole(v, text), causal=True)
    assert_same_bytes(torch.cat(steps, 2), want)


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("text", ["mxfp4", "fp8_rowwise"])
def test_a_ring_shows_the_window(text, grow):
    """Long prompts, single tokens, and many more tokens than the ring holds."""
    count, window = 40, 6
    k, v, q = tokens(count), tokens(count), tokens(count, 2 * H)
    cache = make(text, 3 if grow else 64, window=window, page_size=4, grow=grow)
    parts = [slice(0, 17), *(slice(i, i + 1) for i in range(17, 30)), slice(30, 40)]
    results = [cache.update(*(t[:, :, part] for t in (q, k, v))) for part in parts]
    want = qtensor.attention(q, whole(k, text), whole(v, text), causal=True, window=window)
    assert_same_bytes(torch.cat(results, 2), want)
    assert cache.keys.shape[0] * 4 < B * count


def test_a_ring_goes_back_as_far_as_it_can():
    cache = make(window=6, page_size=4, capacity=64)
    cache.append(tokens(20), tokens(20))
    q, k = tokens(1, 2 * H), tokens(1)
    cache.crop(18)
    again = make(capacity=64)
    with pytest.raises(qtensor.UnsupportedError, match="ring of pages"):
        cache.crop(8)
    assert cache.lengths.tolist() == [18, 18]
    assert cache.update(q, k, k).shape == again.update(q, k, k).shape


def test_positions_lengths_and_tokens_that_are_not_written():
    k, v = tokens(4), tokens(4)
    cache, want = make(), make()
    positions = torch.tensor([[3, 1, 0, 2], [0, 1, -1, -1]])
    cache.append(k, v, positions)
    assert cache.lengths.tolist() == [4, 2]
    order = torch.tensor([2, 1, 3, 0])
    want.append(k[:, :, order], v[:, :, order])
    assert_same_bytes(cache.keys[0].dequantize(), want.keys[0].dequantize())
    assert not cache.keys[1].dequantize()[:, 2:].any()


@pytest.mark.parametrize("text", ["nvfp4", "fp8"])
def test_the_first_tokens_fix_the_global_value(text):
    k, v = tokens(), tokens()
    cache = qtensor.KVCache(B, H, D, 24, k_format=text)
    cache.append(k[:, :, :5], v[:, :, :5])
    want = global_value(text, 2 * k[:, :, :5].abs().max().float())
    assert_same_bytes(cache.state_dict()["k_global"], want)
    cache.append(k[:, :, 5:], v[:, :, 5:])
    assert_same_bytes(cache.state_dict()["k_global"], want)
    other = qtensor.KVCache(B, H, D, 24, k_format=text, k_global=want, v_global=1.0)
    other.append(k, v)
    assert_same_bytes(other.keys.dequantize(), cache.keys.dequantize())
    cache.reset()
    cache.append(k * 0.5, v)
    assert not torch.equal(cache.state_dict()["k_global"], want)


@pytest.mark.parametrize("sinks", [None, 1, 3])
def test_keys_without_their_mean(sinks):
    """Softmax does not see the mean; a sink does, so it is shifted. The error of the keys falls."""
    offset = 8 * torch.randn(D, generator=torch.Generator().manual_seed(3))
    k, v, q = (tokens() / 4 + offset).float(), tokens().float(), tokens(heads=2 * H).float()
    if sinks is not None:
        sinks = torch.randn((2 * H,) if sinks == 1 else (B, 2 * H, TOKENS))
    exact = qtensor.attention(q, k, v, causal=True, sinks=sinks, scale=0.02)
    errors = []
    for mean in (None, "first", offset.expand(H, D)):
        cache = make("mxfp4", v_format="float32", k_mean=mean)
        got = cache.update(q, k, v, sinks=sinks, scale=0.02)
        errors.append((got - exact).square().mean().sqrt())
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[0]


def test_a_mean_is_fixed_by_the_first_tokens():
    k, v = tokens(), tokens()
    cache = make("mxfp8", k_mean="first")
    cache.append(k[:, :, :5], v[:, :, :5])
    mean = k[:, :, :5].float().mean(2)
    torch.testing.assert_close(cache.k_mean, mean)
    mean = cache.k_mean.clone()
    cache.append(k[:, :, 5:], v[:, :, 5:])
    assert_same_bytes(cache.k_mean, mean)
    want = qtensor.quantize(k.float() - mean.unsqueeze(2), "mxfp8")
    assert_same_bytes(cache.keys[:, :, :TOKENS].dequantize(torch.float32), want.dequantize())


@pytest.mark.parametrize("layout", ["static", "growing pages"])
def test_sequences_change_places(layout):
    k, v, q = tokens(), tokens(), tokens(1, 2 * H)
    options = LAYOUTS[layout]
    cache = make("nvfp4", **options, k_mean=torch.ones(B, H, D))
    cache.append(k, v)
    cache.crop(torch.tensor([20, 9]))
    before = cache.attention(q)
    cache.select(torch.tensor([1, 0]))
    assert cache.lengths.tolist() == [9, 20]
    assert_same_bytes(cache.attention(q.flip(0)), before.flip(0))
    cache.select(torch.tensor([0, 0, 1]))
    three = cache.attention(q.flip(0)[[0, 0, 1]])
    assert_same_bytes(three, before.flip(0)[[0, 0, 1]])
    cache.append(*(tokens(2)[[0, 1, 1]] for _ in range(2)))
    assert cache.lengths.tolist() == [11, 11, 22]


def test_cropped_tokens_are_written_again():
    k, v, q = tokens(), tokens(), tokens(3, 2 * H)
    cache, want = make(), make()
    cache.append(k, v)
    cache.crop(11)
    cache.append(v[:, :, :3], k[:, :, :3])
    want.append(
        torch.cat([k[:, :, :11], v[:, :, :3]], 2), torch.cat([v[:, :, :11], k[:, :, :3]], 2)
    )
    assert_same_bytes(cache.attention(q), want.attention(q))


@formats
def test_copies_states_and_bytes(text):
    k, v, q = tokens(), tokens(), tokens(1, 2 * H)
    cache = make(text, v_format="mxfp4", v_global=None, k_mean="first")
    cache.append(k, v)
    want, nbytes = cache.attention(q), cache.nbytes
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    loaded = make(text, v_format="mxfp4", v_global=None, k_mean="first")
    loaded.load_state_dict(cache.state_dict())
    cache.reset()
    cache.append(v, k)
    for other in (*copies, loaded):
        assert other.to("cpu") is other
        assert_same_bytes(other.attention(q), want)
        assert other.nbytes == nbytes
        other.append(k[:, :, :1], v[:, :, :1])
        assert other.lengths.tolist() == [TOKENS + 1] * B
    with pytest.raises(qtensor.QTensorError, match=r"buffers of this cache.*k_codes"):
        make(text, capacity=30, v_format="mxfp4", v_global=None).load_state_dict(cache.state_dict())


@pytest.mark.parametrize(
    ("text", "size"),
    [("bfloat16", 128), ("fp8_rowwise", 68), ("mxfp8", 68), ("mxfp4", 36), ("nvfp4", 36)],
)
def test_bytes_of_a_token(text, size):
    """Rows and factors of a head of 64 elements; MX formats pad their 2 factors to 4."""
    cache = qtensor.KVCache(1, 4, 64, 1024, k_format=text)
    assert abs(cache.nbytes - 2 * 4 * 1024 * size) < 64


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: qtensor.KVCache(0, 2, 64, 8), "batch must be an integer of at least 1; got 0"),
        (lambda: make(window=4.5), "window must be an integer of at least 0; got 4.5"),
        (lambda: make(page_size=True), "page_size must be an integer.* got True"),
        (
            lambda: qtensor.KVCache(1, 2, 40, 8, k_format="mxfp8"),
            "multiple of 32 for mxfp8; got 40",
        ),
        (lambda: qtensor.KVCache(1, 2, 64, 8, k_format="fp8_blockwise"), "format of rows"),
        (lambda: qtensor.KVCache(1, 2, 64, 8, k_global=1.0), "no value of the whole cache"),
        (lambda: make("nvfp4", k_global=0.0), "k_global must be one number above 0"),
        (lambda: make(k_mean="mean"), "k_mean is 'first' or a tensor"),
        (lambda: make().append(tokens(25), tokens(25)), "positions must be below the 24 tokens"),
        (lambda: make().append(tokens(1)[0], tokens(1)), r"k must be \(B, heads"),
        (lambda: make().append(tokens(1), None), r"v must be \(B, heads.* latent=True"),
        (lambda: make(k_mean="first").attention(tokens(1), soft_cap=5.0), "Leave out k_mean"),
        (lambda: global_value("mxfp8", 1.0), "the format must have a value of the whole cache"),
    ],
)
def test_errors_name_the_rule(call, rule):
    with pytest.raises(qtensor.QTensorError, match=rule):
        call()


def test_a_refused_append_changes_nothing():
    cache = make(capacity=8)
    cache.append(tokens(6), tokens(6))
    before = {name: t.clone() for name, t in cache.state_dict().items()}
    with pytest.raises(qtensor.QTensorError):
        cache.append(tokens(3), tokens(3))
    for name, t in cache.state_dict().items():
        assert_same_bytes(t, before[name])


@pytest.mark.parametrize("change", ["heads", "size", "sequences", "tokens", "dtype"])
def test_refused_queries_append_nothing(change):
    cache, k, q = make(), tokens(2), tokens(2)
    q = {
        "heads": q[:, :1],
        "size": q[..., :32],
        "sequences": q[:1],
        "tokens": q[:, :, :1],
        "dtype": q.double(),
    }[change]
    with pytest.raises((qtensor.QTensorError, TypeError), match="update: q must"):
        cache.update(q, k, k)
    assert not cache.lengths.any()


def test_a_lost_gradient_is_refused():
    """The op has no gradient; torch would say so in a warning, and give None."""
    cache, k = make(), tokens(2)
    q = tokens(2).requires_grad_()
    for call in (lambda: cache.update(q, k, k), lambda: cache.attention(q)):
        with pytest.raises(qtensor.UnsupportedError, match="q that requires grad"):
            call()
    assert not cache.lengths.any()
    with torch.no_grad():
        assert cache.update(q, k, k).shape == q.shape


@pytest.mark.parametrize("name", ["k", "v", "mask", "sinks"])
def test_lost_gradients_of_other_operands_are_refused(name):
    """Keys and values were appended without theirs, and nothing said so. A ring takes parts."""
    cache = make(capacity=128, window=16, page_size=8, k_mean="first")
    q, k, v = tokens(100), tokens(100), tokens(100)
    options = {"mask": torch.zeros(1, 1, 100, 100), "sinks": torch.zeros(H)}
    {"k": k, "v": v, **options}[name].requires_grad_()
    with pytest.raises(qtensor.UnsupportedError, match=f"{name} that requires grad.*no_grad"):
        cache.update(q, k, v, **options)
    assert not cache.lengths.any()
    assert not cache.k_mean.any()
    if name in options:
        return
    with pytest.raises(qtensor.UnsupportedError, match=f"append: .* got {name} that requires"):
        cache.append(k, v)
    assert not cache.lengths.any()
    with torch.no_grad():
        cache.append(k[:, :, :8], v[:, :, :8])
    assert not cache.keys.requires_grad


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"mask": torch.ones(B, H, 3, 24, dtype=torch.bool)}, r"mask must have the shape \(2 or 1"),
        ({"mask": torch.ones(1, 1, 2, 4, dtype=torch.bool)}, "mask must cover .* 5 tokens"),
        ({"mask": torch.ones(1, 1, 2, 24, dtype=torch.int64)}, "mask must be bool"),
        ({"sinks": torch.ones(3)}, r"sinks must have the shape \(2,\)"),
        ({"first": torch.zeros(3, dtype=torch.int64)}, r"first must have the shape \(2,\)"),
        ({"first": torch.zeros(2)}, "first must be int64"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"window": -1}, "window must be at least 0"),
    ],
    ids=lambda case: "".join(case) if isinstance(case, dict) else "",
)
@pytest.mark.parametrize("mean", [None, "first"])
def test_refused_options_append_nothing(mean, options, rule):
    cache = make(k_mean=mean)
    cache.append(tokens(3), tokens(3))
    before = {name: t.clone() for name, t in cache.state_dict().items()}
    with pytest.raises(qtensor.QTensorError, match=rule):
        cache.update(tokens(2), tokens(2), tokens(2), **options)
    if mean is not None:
        with pytest.raises(qtensor.QTensorError, match="Leave out k_mean"):
            cache.update(tokens(2), tokens(2), tokens(2), soft_cap=5.0)
    for name, t in cache.state_dict().items():
        assert_same_bytes(t, before[name])


def test_a_ring_refuses_what_it_has_forgotten():
    k = rand(1, 1, 400, D)
    ring = qtensor.KVCache(1, 1, D, 400, k_format="float32", window=16)
    ring.update(k, k, k)
    for query, options in (
        (k[:, :, -1:], {"window": 0}),
        (k[:, :, -1:], {"window": 17}),
        (k, {}),
        (k[:, :, :1], {"positions": torch.zeros(1, 1, dtype=torch.int64)}),
    ):
        with pytest.raises(qtensor.UnsupportedError, match="a ring of pages"):
            ring.attention(query, **options)
    want = qtensor.attention(k, k, k, causal=True, window=8)
    assert_same_bytes(ring.attention(k[:, :, -64:], window=8), want[:, :, -64:].contiguous())


@pytest.mark.parametrize("options", [{"k_format": "nvfp4"}, {"k_mean": "first"}], ids=str)
def test_a_long_prompt_in_a_ring_has_the_bits_of_one_without(options):
    k, sinks = rand(1, 1, 200, D), rand(1, 1, 200)
    k[:, :, 100:] *= 20
    ring = qtensor.KVCache(1, 1, D, 200, window=16, **options)
    plain = qtensor.KVCache(1, 1, D, 200, **options)
    plain.append(k, k)
    want = plain.attention(k, window=16, sinks=sinks)
    assert_same_bytes(ring.update(k, k, k, sinks=sinks), want)
    with pytest.raises(qtensor.QTensorError, match="sequences, tokens and head size of k"):
        ring.update(k, k[:, :, :50], k[:, :, :50])


@pytest.mark.parametrize("refused", ["nothing", "no token", "too many"])
def test_only_written_tokens_fix_what_the_first_ones_decide(refused):
    cache, fresh = (qtensor.KVCache(1, 1, D, 5, k_format="nvfp4", k_mean="first") for _ in range(2))
    x = rand(1, 1, 5, D)
    if refused == "nothing":
        cache.append(x[:, :, :0], x[:, :, :0])
    elif refused == "no token":
        cache.append(0 * x, 0 * x, torch.full((1, 5), -1))
    else:
        with pytest.raises(qtensor.QTensorError):
            cache.append(1e-6 * torch.cat([x, x], 2), torch.cat([x, x], 2))
    for each in (cache, fresh):
        each.append(x, x)
    for name, t in fresh.state_dict().items():
        assert_same_bytes(cache.state_dict()[name], t)


def test_a_mean_of_the_caller_is_copied():
    mean = torch.zeros(1, D)
    cache, other = (qtensor.KVCache(1, 1, D, 4, k_mean=m) for m in (mean, torch.ones(1, D)))
    cache.load_state_dict(other.state_dict())
    assert not mean.any()


@pytest.mark.parametrize("page_size", [0, 4])
def test_a_cache_that_has_grown_is_restored(page_size):
    caches = [qtensor.KVCache(B, H, D, 4, grow=True, page_size=page_size) for _ in range(2)]
    caches[0].append(tokens(9), tokens(9))
    caches[1].load_state_dict(caches[0].state_dict())
    results = []
    for cache in caches:
        cache.append(tokens(9), tokens(9))
        results.append(cache.attention(tokens(18)))
    assert_same_bytes(*results)


def test_wrong_indices_are_refused():
    cache = make()
    cache.append(tokens(3), tokens(3))
    with pytest.raises(qtensor.QTensorError, match="nonzero"):
        cache.select(torch.tensor([False, True]))
    for lengths in (-1, torch.tensor([[1], [1]]), torch.tensor([1, -1])):
        with pytest.raises(qtensor.QTensorError, match="at least 0"):
            cache.crop(lengths)
    with pytest.raises(qtensor.QTensorError, match="positions must be"):
        cache.append(tokens(2), tokens(2), torch.tensor([3, 4]))
    assert cache.lengths.tolist() == [3, 3]
