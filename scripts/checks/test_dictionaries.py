"""Dictionaries: SAELens encodes and decodes like this package, with dictionaries that either one wrote.

Needs requirements-circuits.txt and this repository's Python package (scripts/build_wheel.sh). `gpt2 train`
trains each kind for a few steps on the built-in model. Each SAELens class is filled with random numbers and
saved by SAELens.
"""

import pytest
from paths import FIXTURES

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
pytest.importorskip("transformer_lens.HookedTransformer", reason="needs TransformerLens 2")
sae_lens = pytest.importorskip("sae_lens", reason="needs SAELens")
candle_gpt2 = pytest.importorskip("candle_gpt2", reason="needs the Python package")

from sae_lens.registry import get_sae_class  # noqa: E402
from sae_lens.saes.sae import SAEMetadata  # noqa: E402

WIDTH, LATENTS, K = 256, 256, 8
# Relative to the largest value; covers f32 sums of hundreds of products in a different order.
TOLERANCE = 1e-5
KINDS = ("top-k", "batch-top-k", "matryoshka", "standard", "jump-relu", "gated", "transcoder", "skip-transcoder")
ARCHITECTURES = (
    "standard", "topk", "jumprelu", "gated", "transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"
)


@pytest.fixture(scope="module")
def model():
    return candle_gpt2.Model.from_pretrained()


def assert_near(found, expected, label):
    found, expected = numpy.asarray(found), expected.numpy()
    difference = numpy.abs(found - expected).max() / numpy.abs(expected).max()
    print(f"{label}: differs by {difference:.1e} of the largest")
    assert difference < TOLERANCE, label


def compare(model, folder):
    """Compares the latents and outputs of SAELens and this package for random inputs."""
    theirs = sae_lens.SAE.load_from_disk(folder, device="cpu")
    ours = model.dictionary(folder)
    assert (ours.hook_name, ours.d_in, ours.d_sae) == (theirs.cfg.metadata.hook_name, theirs.cfg.d_in, theirs.cfg.d_sae)
    x = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        latents = theirs.encode(x)
        found = ours.encode(x.numpy())
        active = (latents > 0).sum(-1).float().mean().item()
        assert 1 < active < LATENTS, f"{active} latents are active"
        assert_near(found, latents, f"{theirs.cfg.architecture()}, {active:.1f} active: latents")
        # SAELens's `decode` omits the skip connection of a skip transcoder.
        assert_near(ours.decode(found, x.numpy()), theirs(x), f"{theirs.cfg.architecture()}: output")
        sae = candle_gpt2.SAE.load(folder)
        assert_near(sae.encode(x), latents, f"{theirs.cfg.architecture()}: latents of SAE")
        assert_near(sae.decode(latents, x), theirs(x), f"{theirs.cfg.architecture()}: output of SAE")


@pytest.mark.parametrize("kind", KINDS)
def test_saelens_loads_our_dictionaries(kind, model, program, tmp_path):
    hook = "blocks.2.ln2.hook_normalized" if kind.endswith("transcoder") else "blocks.2.hook_resid_post"
    text = FIXTURES / "evaluation" / "text.txt"
    active = [] if kind == "gated" else ["--k", K]
    program("train", "--task", "dictionary", "--data", text, "--init", "built-in", "--site", hook, "--kind", kind, "--latents", LATENTS,
            *active, "--steps", 5, "--batch-size", 2, "--context", 64, "--out", tmp_path / "ours")
    compare(model, tmp_path / "ours")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_our_loader_reads_saelens_dictionaries(architecture, model, tmp_path):
    kind, config = get_sae_class(architecture)
    is_transcoder = architecture.endswith("transcoder")
    hook = "blocks.2.hook_resid_mid" if is_transcoder else "blocks.2.hook_resid_pre"
    metadata = SAEMetadata(model_name="stories", hook_name=hook, prepend_bos=True)
    sizes = {"d_in": WIDTH, "d_sae": LATENTS, "metadata": metadata}
    if is_transcoder:
        metadata.hook_name_out = "blocks.2.hook_mlp_out"
        sizes |= {"d_out": WIDTH, "apply_b_dec_to_input": False}
    sizes |= {"k": K} if architecture == "topk" else {}
    theirs = kind(config(**sizes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            scale = WIDTH**-0.5 if name.startswith("W_") else 0.3
            values = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(values.abs() if name == "threshold" else values)
    theirs.save_model(tmp_path)
    compare(model, tmp_path)
