"""Libraries on top of transformers: ``Trainer``, PEFT and accelerate with quantized weights."""

import pytest
import safetensors.torch
import torch
from transformers_models import config, dense, frozen, load, logits, need, trainer, transformers

import qtensor
from qtensor.integrations.offload import _placed, disk_offload, dispatch_model
from qtensor.integrations.transformers import QTensorConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours
KINDS = [("llama-tied", "nvfp4"), ("qwen3-moe", "nvfp4"), ("gpt-oss", "mxfp8")]


@pytest.fixture
def make(tmp_path):
    """Return a function that loads a quantized model."""

    def model(name, fmt):
        folder = tmp_path / name
        if not folder.exists():
            dense(name, folder)
        return load(folder, quantization_config=QTensorConfig(fmt))

    return model


def assert_frozen(model, before):
    after = frozen(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(("name", "fmt"), KINDS)
def test_trainer_trains_what_is_not_quantized(name, fmt, make, tmp_path):
    need("accelerate")
    model = make(name, fmt)
    before, embeddings = frozen(model), model.model.embed_tokens.weight.detach().clone()
    trainer(model, tmp_path / "run", 2).train()
    assert_frozen(model, before)
    assert not torch.equal(model.model.embed_tokens.weight, embeddings)
    # The checkpoint of Trainer is one of ours: a new process resumes from it.
    resumed = trainer(make(name, fmt), tmp_path / "run", 4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert_frozen(resumed.model, before)


@pytest.mark.parametrize(("name", "fmt"), KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_with_lora(name, fmt, checkpointing, make, tmp_path):
    need("accelerate")
    peft = need("peft")
    model = make(name, fmt)
    before = frozen(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    run = trainer(adapted, tmp_path / "run", 3, gradient_checkpointing=checkpointing)
    run.train()
    after = list(frozen(adapted).values())  # PEFT renames them; the order stays
    assert len(after) == len(before)
    assert all(map(torch.equal, after, before.values()))
    changed = [p for n, p in adapted.named_parameters() if "lora_B" in n]
    assert changed
    assert all(p.abs().max() > 0 for p in changed)


@pytest.mark.parametrize(("name", "fmt"), KINDS)
def test_lora_is_saved_and_loaded_on_top(name, fmt, make, tmp_path):
    peft = need("peft")
    adapted = peft.get_peft_model(
        make(name, fmt), peft.LoraConfig(r=4, target_modules="all-linear")
    )
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(make(name, fmt), tmp_path / "adapter")
    assert torch.equal(logits(again.eval()), logits(adapted.eval()))
    assert not torch.equal(logits(again), logits(make(name, fmt)))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "orthogonal"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_adapters_that_start_from_the_weight(fmt, init, make):
    """PiSSA leaves plain residuals, which one call quantizes; OLoRA writes them into the codes."""
    peft = need("peft")
    model = make("llama", fmt)
    wanted = logits(model)
    options = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": init}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    bases = [name for name, _ in adapted.named_modules() if name.endswith("base_layer")]
    if init.startswith("pissa"):
        difference = (logits(adapted) - wanted).norm() / wanted.norm()
        assert difference < 0.02  # the residuals are rounded to bfloat16
        qtensor.quantize_(adapted, fmt, lambda module, name: name.endswith("base_layer"))
    for name in bases:
        assert isinstance(adapted.get_submodule(name).weight, qtensor.QuantizedTensor)
    difference = (logits(adapted) - wanted).norm() / wanted.norm()
    assert difference < {"nvfp4": 0.2, "mxfp8": 0.1}[fmt]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_eva_leaves_the_codes(fmt, make):
    peft = need("peft")
    inputs = [torch.randint(0, 64, (1, 96)) for _ in range(4)]
    targets = {"r": 4, "target_modules": ["q_proj", "up_proj"]}
    model = make("llama", fmt)
    wanted, before = logits(model), frozen(model)
    about = peft.EvaConfig(rho=1.0)
    options = peft.LoraConfig(**targets, init_lora_weights="eva", eva_config=about)
    adapted = peft.get_peft_model(model, options, low_cpu_mem_usage=True)
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in inputs]
    peft.initialize_lora_eva_weights(adapted, batches, show_progress_bar=False)
    assert torch.equal(logits(adapted), wanted)
    assert all(map(torch.equal, frozen(adapted).values(), before.values()))
    adapted(inputs[0], labels=inputs[0]).loss.backward()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_corda_leaves_plain_residuals(fmt, make):
    peft = need("peft")
    pytest.importorskip("attr", reason="CorDA of peft imports the package attrs, of the extra dev")
    from peft.tuners.lora import corda  # noqa: PLC0415 - it needs attrs

    inputs = [torch.randint(0, 64, (1, 96)) for _ in range(4)]
    model = make("llama", fmt)
    wanted, about = logits(model), peft.tuners.lora.config.CordaConfig()
    options = {"init_lora_weights": "corda", "corda_config": about, "r": 4}
    options = peft.LoraConfig(**options, target_modules=["q_proj", "up_proj"])

    @torch.no_grad()
    def run():
        for ids in inputs:
            model(ids)

    corda.preprocess_corda(model, options, run_model=run)
    adapted = peft.get_peft_model(model, options)
    difference = (logits(adapted) - wanted).norm() / wanted.norm()
    assert difference < 0.02  # the residuals are rounded to bfloat16


@pytest.mark.parametrize(("name", "fmt"), KINDS)
def test_state_of_accelerate_is_saved_as_pickles(name, fmt, make, tmp_path):
    """Its safetensors files hold one plain array for each parameter."""
    accelerate = need("accelerate")
    model = accelerate.Accelerator(cpu=True).prepare(make(name, fmt))
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model)
    with pytest.raises(qtensor.QTensorError, match="is not one block of memory"):
        accelerator.save_state(tmp_path / "state")
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    other = make(name, fmt)
    with torch.no_grad():
        other.model.embed_tokens.weight.zero_()
    again = accelerate.Accelerator(cpu=True)
    again.prepare(other)
    again.load_state(tmp_path / "state")
    assert torch.equal(logits(other), logits(model))


def test_files_of_safetensors_itself(make, tmp_path):
    """``save_model`` writes raw memory; ``checkpoints.save`` writes a model in its place."""
    model = make("llama", "nvfp4")
    with pytest.raises(ValueError, match="is not one block of memory"):
        safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    qtensor.checkpoints.save(model, tmp_path / "ours.safetensors")
    state = qtensor.checkpoints.load_state_dict(tmp_path / "ours.safetensors")
    other = make("llama", "mxfp8")
    other.load_state_dict(state, assign=True)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("accelerate_map", [{"": "cpu"}, "auto"])
def test_a_saved_folder_is_placed_by_accelerate(accelerate_map, make, tmp_path):
    accelerate = need("accelerate")
    model = make("qwen3-moe", "nvfp4")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved", device_map=accelerate_map)), logits(model))
    with accelerate.init_empty_weights():
        empty = transformers.AutoModelForCausalLM.from_config(config("qwen3-moe"))
    with pytest.raises(ValueError, match="this looks incorrect"):
        accelerate.load_checkpoint_and_dispatch(empty, tmp_path / "saved", device_map={"": "cpu"})


@pytest.mark.parametrize(("name", "fmt"), KINDS)
@pytest.mark.parametrize("how", ["cpu_offload", "prepare", "dispatch_model", "from file"])
def test_accelerate(name, fmt, how, make, tmp_path):
    accelerate = need("accelerate")
    model = make(name, fmt)
    wanted = logits(model)
    if how == "cpu_offload":
        model = accelerate.cpu_offload(model, execution_device="cpu")
    elif how == "prepare":
        model = accelerate.Accelerator(cpu=True).prepare(model)
    elif how == "dispatch_model":
        model = accelerate.dispatch_model(model, {"": "cpu"})
    else:
        torch.save(model.state_dict(), tmp_path / "model.bin")
        with accelerate.init_empty_weights():
            kind = transformers.AutoModelForCausalLM
            model = kind.from_config(config(name), dtype=torch.bfloat16)
        model.tie_weights()
        file = str(tmp_path / "model.bin")
        model = accelerate.load_checkpoint_and_dispatch(model, file, device_map={"": "cpu"}).eval()
    assert torch.equal(logits(model), wanted)
    assert frozen(make(name, fmt))


def test_layers_are_placed_one_by_one():
    """accelerate knows tied weights by their address; ours knows them by identity."""
    accelerate = need("accelerate")
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    for layer in layers[:2]:
        layer.weight = torch.nn.Parameter(qtensor.quantize(layer.weight.detach(), "mxfp8"))
    layers[2].weight = layers[0].weight
    model = torch.nn.Sequential(*layers)
    x = torch.randn(4, 64)
    wanted = model(x)
    places = {"0": "cpu", "1": "cpu", "2": "cpu"}
    with pytest.raises(
        qtensor.QTensorError, match="call disk_offload or dispatch_model of qtensor"
    ):
        accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    model = dispatch_model(model, places, force_hooks=True)
    assert all(hasattr(layer, "_hf_hook") for layer in layers)
    assert torch.equal(model(x), wanted)
    assert layers[1].weight is not layers[0].weight
    assert layers[2].weight is layers[0].weight
    with pytest.raises(ValueError, match="does not give any device"):
        dispatch_model(model, {"0": "cpu"})
    with pytest.raises(qtensor.QTensorError, match="Call disk_offload of"):
        dispatch_model(model, {**places, "1": "disk"})


@pytest.mark.parametrize(("name", "fmt"), KINDS)
def test_models_are_placed_layer_by_layer(name, fmt, make):
    need("accelerate")
    model = make(name, fmt)
    wanted = logits(model)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "cpu" for i in range(2)} | {"lm_head": "cpu"}
    model = dispatch_model(model, places, force_hooks=True)
    assert torch.equal(logits(model), wanted)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings


@pytest.mark.parametrize(("place", "function"), [("disk", "disk_offload"), (0, "dispatch_model")])
def test_a_model_is_loaded_to_one_device(place, function, tmp_path):
    dense("llama", tmp_path)
    places = {"": "cpu", "model.layers.1": place}
    with pytest.raises(qtensor.QTensorError, match=f"then call {function} of qtensor"):
        load(tmp_path, quantization_config=QTensorConfig("nvfp4"), device_map=places)


@pytest.mark.parametrize(
    ("places", "main", "runs", "moves"),
    [
        ({"a": "cpu", "b": "cpu"}, None, ["cpu", "cpu", "cpu"], ""),
        ({"a": 0, "b": "cpu"}, None, [0, 0, 0], "b"),
        ({"a": 0, "b": 1, "c": "cpu"}, None, [0, 1, 0, 0], "c"),
        ({"a": 0, "b": "cpu"}, 1, [0, 1, 1], "b"),
        ({"a": "mps", "b": "cpu"}, None, ["mps", "mps", "mps"], ""),
        ({"a": torch.device("cuda", 1), "b": torch.device("cpu")}, "cuda:1", ["cuda:1"] * 3, "b"),
    ],
)
def test_where_modules_run(places, main, runs, moves):
    """Beside a GPU, modules on the CPU run on the main device; ``""`` is the rest of the model."""
    execution, offloaded = _placed(places, main)
    assert list(execution) == [*places, ""]
    assert list(map(str, execution.values())) == list(map(str, runs))
    assert [name for name in places if offloaded[name]] == list(moves)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights move to a GPU for each call")
@pytest.mark.parametrize(("name", "fmt"), KINDS)
def test_layers_on_the_cpu_run_on_a_gpu(name, fmt, make):
    need("accelerate")
    model = make(name, fmt)
    wanted = logits(model)
    places = {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
    places |= {"model.layers.0": "cpu", "model.layers.1": 0}
    model = dispatch_model(model, places)
    assert all(p.is_meta for p in model.model.layers[0].parameters())
    torch.testing.assert_close(logits(model), wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("name", "fmt"), KINDS)
def test_disk_offload(name, fmt, make, tmp_path):
    """The weights lie in files; each layer reads its own, as often as it runs."""
    need("accelerate")
    model = make(name, fmt)
    wanted = logits(model)
    offloaded = disk_offload(model, tmp_path / "offload")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(logits(offloaded), wanted)
    assert torch.equal(logits(offloaded), wanted)
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    stored = sum(path.stat().st_size for path in (tmp_path / "offload").iterdir())
    parameters = sum(p.numel() for p in model.parameters())
    assert stored < 2 * parameters  # tied weights once, and less than in bfloat16
    with pytest.raises(qtensor.QTensorError, match="must not exist"):
        disk_offload(make(name, fmt), tmp_path / "offload")


def test_disk_offload_of_accelerate_says_what_to_do(make, tmp_path):
    """accelerate writes one plain array for each parameter, which a quantized weight is not."""
    accelerate = need("accelerate")
    with pytest.raises(qtensor.QTensorError, match="call disk_offload of qtensor"):
        accelerate.disk_offload(make("llama", "nvfp4"), str(tmp_path / "offload"))
    with pytest.raises(qtensor.QTensorError, match="those of the model"):
        disk_offload(make("llama", "nvfp4"), tmp_path / "offload", state_dict={})


@pytest.mark.parametrize("step", ["rotated", "calibrated"])
def test_disk_offload_of_layers_that_change_their_inputs(step, tmp_path):
    """The folder had other names for rotations, and could not hold factors of inputs."""
    need("accelerate")
    x = torch.randn(8, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    if step == "rotated":
        qtensor.rotate_(model, [x], size=32)
    qtensor.quantize_(model, "mxfp8")
    if step == "calibrated":
        qtensor.calibrate(model, [x], "fp8").apply(model)
    want = model(x)
    offloaded = disk_offload(model, tmp_path / "offload", offload_buffers=True)
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(offloaded(x), want)
    assert torch.equal(offloaded(x), want)
