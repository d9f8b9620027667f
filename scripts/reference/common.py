"""Code shared by the suites: output, seeded models, a tokenizer."""

import json
import math
import os
import pathlib
import shutil
import tempfile

# Set before the imports that read them, to prevent downloads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The committed fixtures; suites read the tiny checkpoint from there.
FIXTURES = ROOT / "crates" / "testing" / "fixtures"
TINY = FIXTURES / "tiny-checkpoint"
VERSIONS = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
WITHOUT_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
written_to = FIXTURES


def built_in():
    """Returns a new folder with the built-in model as transformers saves it, in f32."""
    source, folder = ROOT / "models" / "stories", pathlib.Path(tempfile.mkdtemp())
    config = transformers.GPT2Config.from_pretrained(source)
    quantized = transformers.GPT2LMHeadModel.from_pretrained(source, gguf_file="model.gguf", config=config)
    model = transformers.GPT2LMHeadModel(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, folder)
    return folder


def start(out):
    """Sets the output folder for the suites, uses one thread and silences the libraries."""
    global written_to
    written_to = out.resolve()
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    transformers.logging.set_verbosity_error()


def place(path):
    """Returns a path in the output folder and creates its parent folder."""
    target = written_to / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def save(path, tensors, versions=VERSIONS, dtype=None, **metadata):
    """Writes one fixture: contiguous tensors, and a metadata entry with the versions and further values.

    Uses a single entry, because safetensors writes several in an order that varies between runs.
    """
    target = place(f"{path}.safetensors")
    tensors = {name: value.detach().to(dtype or value.dtype).clone().contiguous() for name, value in tensors.items()}
    save_file(tensors, target, metadata={"reference": json.dumps({**versions, **metadata}, sort_keys=True)})
    print(f"{target.relative_to(written_to)}: {len(tensors)} tensors, {target.stat().st_size} bytes")


def save_json(path, value, **form):
    """Writes expected outputs and the versions as JSON."""
    target = place(f"{path}.json")
    target.write_text(json.dumps({"versions": VERSIONS, **value}, **({"indent": 1} | form)) + "\n")
    print(f"{target.relative_to(written_to)}: {target.stat().st_size} bytes")


def pattern(*shape, scale=1.0, offset=0):
    """Returns a tensor in [-scale/2, scale/2) that Rust can rebuild exactly.

    The values are bits of a multiplicative hash of the index.
    """
    count = math.prod(shape)
    index = torch.arange(count, dtype=torch.int64) + 1 + offset
    hashed = ((index * 2654435761) % 2**32) >> 8
    return ((hashed.to(torch.float64) / 2**24 - 0.5) * scale).to(torch.float32).reshape(shape)


def randomize(model):
    """Fills a model with weights large enough for every term to affect the logits visibly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if ".ln_" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise / math.sqrt(model.config.n_embd) * 0.9)
    return model.eval()


def seeded(model, seed):
    """Fills a model with random weights from this seed."""
    torch.manual_seed(seed)
    return randomize(model)


def random_gpt2(seed, **sizes):
    """Returns a GPT2LMHeadModel with weights large enough for every term to affect the logits visibly."""
    torch.manual_seed(seed)
    # transformers 5 no longer defaults `tie_word_embeddings` to True in the constructor, so always set it.
    sizes.setdefault("tie_word_embeddings", True)
    sizes.setdefault("bos_token_id", 0)
    sizes.setdefault("eos_token_id", 0)
    config = transformers.GPT2Config(**sizes)
    config._attn_implementation = "eager"
    return randomize(transformers.GPT2LMHeadModel(config))


def checkpoint_tensors(model):
    """Returns the tensors that save_pretrained writes: `transformer.` prefix, no tied head."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return state


def named_parameters(model):
    """Yields every parameter under its name in the Rust model, with linear weights as (out, in)."""
    conv1d = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, parameter in model.named_parameters():
        turn = (lambda tensor: tensor.t()) if name in conv1d else (lambda tensor: tensor)
        yield name.removeprefix("transformer."), parameter, turn


TEXT = """
The first citizen spoke: we are accounted poor citizens, the patricians good. What authority surfeits on
would relieve us. Attention asks of every word which of the words before it matter, and by how much.
naïve café — 日本語 🤗 emoji, £5 and ½ cup.
"""


def train_tokenizer(folder, vocab_size):
    """Trains a byte-level BPE on TEXT, writes vocab.json and merges.txt to `folder` and returns it."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [TEXT], vocab_size=vocab_size, special_tokens=["<|endoftext|>"], min_frequency=1, show_progress=False
    )
    tokenizer.save_model(str(folder))
    return str(folder)
