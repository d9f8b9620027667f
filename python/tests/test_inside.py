"""Activations, hooks and pictures: the same values as the program, and self-contained pictures."""

import base64
import json
import re
import sys
from importlib.util import find_spec

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES, read_safetensors

TEXT = "ROMEO:\nBut, soft! what light"
PLAIN = FIXTURES / "inside" / "plain"


@pytest.fixture(scope="module")
def plain():
    return candle_gpt2.Model.from_pretrained(PLAIN, dtype="f32")


def test_cached_activations_match_the_cli(model, program, tmp_path):
    file = tmp_path / "cache.npz"
    program("cache", TEXT, "--sites", "*", "--out", str(file))
    _, seen = model.run_with_cache(TEXT)
    assert list(seen) == model.hook_names
    with np.load(file) as written:
        assert sorted(written) == sorted(seen)
        for name in written:
            np.testing.assert_array_equal(written[name], seen[name], err_msg=name)


def decode_activations(choice):
    """Decodes activations to arrays keyed by hook point, and returns them with the token ids."""
    info, arrays = choice["activations_info"], {}
    for entry in choice["activations"]:
        arrays[entry["site"]] = np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(entry["shape"])
    return arrays, [info["token_ids"][position] for position in choice["activations"][0]["positions"]]


def test_completions_return_activations(exact):
    names = ["blocks.2.hook_resid_post", "blocks.5.hook_resid_post"]
    requested = {"sites": names, "positions": "all", "of": "both"}
    response = exact.complete(TEXT, max_tokens=4, temperature=0, activations=requested)
    assert response["choices"][0]["text"] == exact.complete(TEXT, max_tokens=4, temperature=0)["choices"][0]["text"]
    found, ids = decode_activations(response["choices"][0])
    _, seen = exact.run_with_cache(ids, names)
    assert len(ids) == len(exact.encode(TEXT)) + 3, "the last token is never an input"
    for name in names:
        # Single tokens and prompts use different kernels.
        np.testing.assert_allclose(found[name], seen[name][0], rtol=1e-4, atol=1e-4, err_msg=name)
    lists = exact.complete(TEXT, max_tokens=1, activations={"sites": "pattern2".split(), "encoding_format": "float"})
    [entry] = lists["choices"][0]["activations"]
    assert sum(entry["data"]) == pytest.approx(entry["shape"][0], abs=1e-4), "the weights of each query sum to 1"


def test_gradients_with_edits_match_finite_differences(plain):
    hooked = candle_gpt2.HookedTransformer.from_pretrained_no_processing(plain, default_prepend_bos=False, tensors="numpy")
    ids, names, at_logits = [1, 2, 3, 4, 5], ["blocks.0.attn.hook_z", "blocks.1.hook_resid_pre"], np.zeros((1, 5, 61))
    at_logits[0, -1, [3, 7]] = 1, -1
    expected = {}
    with hooked.hooks(bwd_hooks=[(name, lambda gradient, hook: expected.update({hook.name: gradient})) for name in names]):
        logits = hooked(ids)
        hooked.backward(at_logits)
    metric, values, gradients = plain.gradients(ids, names, answer=3, against=7)
    assert metric == pytest.approx(logits[0, -1, 3] - logits[0, -1, 7], abs=1e-4)
    assert list(values) == list(gradients) == names
    for name in names:
        np.testing.assert_allclose(gradients[name], expected[name], rtol=1e-4, atol=1e-5)
    # Gradients with a steering vector, and with an array that replaces an activation.
    patch = np.random.default_rng(0).normal(size=values[names[0]].shape).astype(np.float32)
    steering = plain.steering(np.ones((1, 21), np.float32), layer=0, scale=0.3)
    edits = [steering, (names[0], patch)]
    metric, values, gradients = plain.gradients(ids, names, edits, answer=3, against=7)
    np.testing.assert_array_equal(values[names[0]], patch)
    direction = gradients[names[0]] / np.linalg.norm(gradients[names[0]])

    def moved(by):
        logits, _ = plain.run_with_cache(ids, [], [steering, (names[0], patch + by * direction)])
        return float(logits[0, -1, 3] - logits[0, -1, 7])

    assert moved(0) == pytest.approx(metric, abs=1e-4)
    assert (moved(1e-2) - moved(-1e-2)) / 2e-2 == pytest.approx(np.linalg.norm(gradients[names[0]]), rel=0.02)
    for hooks, message in (
        ([(names[0], lambda value, name: value)], r"hooks: the function at blocks\.0\.attn\.hook_z cannot be differentiated"),
        ([(names[0], "z")], r'hooks: expected a function or an array for "blocks\.0\.attn\.hook_z", found str'),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            plain.gradients(ids, names, hooks)
    with pytest.raises(candle_gpt2.Gpt2Error, match=r"hooks: the array at blocks\.0\.attn\.hook_z has shape \[3\]; expected \[1, 5, 3, 7\]"):
        plain.gradients(ids, [], [(names[0], np.ones(3, np.float32))])


def test_transcoder_latent_gradients_follow_the_decoder(model):
    dictionary = model.dictionary(FIXTURES.parents[2] / "models" / "stories" / "transcoders" / "layer_3")
    plain_metric, _, _ = model.gradients(TEXT, [])
    metric, values, gradients = model.gradients(TEXT, "resid_post3", dictionaries=[dictionary])
    assert metric == pytest.approx(plain_metric, abs=1e-3), "the error term restores the output of the MLP"
    latents, error = (f"blocks.3.hook_mlp_out.hook_sae_{end}" for end in ("acts_post", "error"))
    assert list(values) == ["blocks.3.hook_resid_post", latents, error]
    np.testing.assert_allclose(gradients[error], gradients["blocks.3.hook_resid_post"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[latents], gradients[error] @ dictionary.weight("W_dec").T, rtol=1e-3, atol=1e-4)
    _, named, _ = model.gradients(TEXT, [latents, "blocks.3.hook_resid_post", error], dictionaries=[dictionary])
    assert list(named) == list(values)
    _, without, _ = model.gradients(TEXT, [], dictionaries=[dictionary], error_term=False)
    assert list(without) == [latents]


def test_completions_can_be_steered(model):
    name = "blocks.2.hook_resid_pre"
    width = model.run_with_cache(TEXT, [name])[1][name].shape[-1]
    vector = np.random.default_rng(1).normal(size=width).astype(np.float32)

    def text(**fields):
        return model.complete(TEXT, max_tokens=6, temperature=0, **fields)["choices"][0]["text"]

    def steered(scale):
        return text(steering=[{"site": name, "vector": vector, "scale": scale}])

    assert steered(0) == text()
    assert steered(8.0) != text()
    hooked = model.generate(TEXT, do_sample=False, max_new_tokens=6, hooks=[(name, lambda value, name: value + 8 * vector)])
    assert steered(8.0) == hooked
    with pytest.raises(ValueError, match=r"steering\[0\].vector: expected"):
        model.complete(TEXT, steering=[{"site": name, "vector": [1.0]}])
    with pytest.raises(ValueError, match=r"activations.sites\[0\]: .*did you mean"):
        model.complete(TEXT, activations={"sites": ["resid_pots"]})


def test_hook_points_have_several_names(model):
    full = "blocks.1.attn.hook_pattern"
    for names in (full, [full], "1.pattern", "pattern1", "blocks.1.attn.*pattern"):
        assert list(model.run_with_cache(TEXT, names)[1]) == [full]
    assert list(model.run_with_cache(TEXT, ["resid_post"])[1]) == [f"blocks.{i}.hook_resid_post" for i in range(7)]
    with pytest.raises(ValueError, match="did you mean"):
        model.run_with_cache(TEXT, "blocks.0.attn.hook_patern")
    assert model.run_with_cache(TEXT, [])[1] == {}
    with pytest.raises(ValueError, match="blocks.9"):
        model.run_with_cache(TEXT, "blocks.9.attn.hook_z")


def test_prepend_bos_adds_the_bos_token(model):
    ids = [model.config["bos_token_id"], *model.encode(TEXT)]
    with_bos, _ = model.run_with_cache(TEXT, "embed", prepend_bos=True)
    np.testing.assert_array_equal(with_bos, model.run_with_cache(ids, "embed")[0])


def test_read_only_hook_changes_nothing(model):
    found = []
    logits, _ = model.run_with_cache(TEXT, "embed", hooks=[("pattern", lambda array, name: found.append((name, array)))])
    _, seen = model.run_with_cache(TEXT, "pattern")
    assert [name for name, _ in found] == list(seen)
    for name, array in found:
        np.testing.assert_array_equal(array, seen[name])
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    # Compare with another observed run, because unobserved runs use fused operations.
    np.testing.assert_array_equal(logits, model.run_with_cache(TEXT, "embed, pattern")[0])


def test_arrays_are_shared_through_dlpack_without_copying(model):
    seen = []
    hooks = [("embed", lambda array, name: seen.append(array))]
    logits, cache = model.run_with_cache(TEXT, "blocks.0.hook_resid_post", hooks=hooks)
    libraries = [np.from_dlpack]
    if find_spec("torch"):
        import torch

        libraries.append(torch.from_dlpack)
    for array in [model.logits(TEXT), logits, *cache.values(), *seen]:
        for from_dlpack in libraries:
            other = np.asarray(from_dlpack(array))
            assert other.ctypes.data == array.ctypes.data
            np.testing.assert_array_equal(other, array)
    assert [array.flags.writeable for array in seen] == [False]


def test_hook_replaces_the_activation(plain):
    """Ablates heads one by one, as TransformerLens does."""
    analyses = json.loads((PLAIN / "analyses.json").read_text())
    _, expected = read_safetensors(PLAIN / "analyses.safetensors")
    ids, answer, wrong = analyses["clean_ids"], analyses["answer"], analyses["wrong"]

    def ablate(head):
        def zero_head(z, name):
            z = z.copy()
            z[:, :, head] = 0
            return z

        return zero_head

    for (layer, head), value in np.ndenumerate(expected["ablate.raw_zero"]):
        hooks = [(f"blocks.{layer}.attn.hook_z", ablate(head))]
        logits = plain.logits(ids, hooks=hooks)
        assert abs(logits[answer] - logits[wrong] - value) < 1e-4, (layer, head)
        np.testing.assert_array_equal(plain.run_with_cache(ids, "logits", hooks=hooks)[0][0, -1], logits)


def test_cache_contains_the_edited_activations(model):
    hooks = [("blocks.2.hook_resid_pre", lambda array, name: np.zeros(array.shape))]
    _, seen = model.run_with_cache(TEXT, ["blocks.1.hook_resid_post", "blocks.2.hook_resid_pre"], hooks=hooks)
    assert not seen["blocks.2.hook_resid_pre"].any() and seen["blocks.1.hook_resid_post"].any()


def test_hooks_run_during_generation(model):
    token = 35
    passes = []

    def force_token(logits, name):
        passes.append(logits.shape)
        logits = np.full_like(logits, -100)
        logits[..., token] = 100
        return logits

    hooks = [("logits", force_token)]
    results = model.generate([TEXT, TEXT], hooks=hooks, do_sample=False, max_new_tokens=4, details=True)
    assert [result["ids"] for result in results] == [[token] * 4] * 2 and passes
    stream = model.stream(TEXT, hooks=hooks, do_sample=False, max_new_tokens=3)
    assert ("".join(stream), stream.ids) == (model.decode([token] * 3), [token] * 3)


def test_hook_exceptions_propagate(model):
    class Own(Exception):
        pass

    def fail(array, name):
        raise Own(name)

    hooks = [("blocks.1.hook_mlp_out", fail)]
    for run in (
        lambda: model.run_with_cache(TEXT, "embed", hooks=hooks),
        lambda: model.logits(TEXT, hooks=hooks),
        lambda: model.generate(TEXT, hooks=hooks),
        lambda: list(model.stream(TEXT, hooks=hooks)),
    ):
        with pytest.raises(Own, match="blocks.1.hook_mlp_out"):
            run()


@pytest.mark.parametrize(
    ("hooks", "kind", "message"),
    [
        ([("nowhere", print)], ValueError, "unknown hook point `nowhere`"),
        ([("embed", 3)], TypeError, "expected a function or an array"),
        (["embed"], TypeError, r"list of \(name, function\) pairs"),
        ([("embed", lambda array, name: array[0])], ValueError, "returned an array of shape"),
        ([("embed", lambda array, name: "x")], ValueError, r"a hook at hook_embed returned a str that cannot be converted to an array of shape \[1, .*could not convert"),
    ],
)
def test_invalid_hooks_are_rejected(model, hooks, kind, message):
    with pytest.raises(kind, match=message):
        model.logits(TEXT, hooks=hooks)


def test_logit_lens_matches_the_cli(model, program):
    watch = "I"
    report = json.loads(program("look", "lens", TEXT, "--json", "--top", "3", "--watch", watch, "--show", "rank"))
    lens = model.logit_lens(TEXT, top=3, watch=[watch], show="rank")
    assert lens.axes == {axis["name"]: axis["labels"] for axis in report["axes"]}
    np.testing.assert_array_equal(lens.values.ravel(), report["values"])
    # The values are for the watched token, so cells show no other token.
    assert lens.texts == [] and "texts" not in report
    assert model.logit_lens(TEXT).texts == json.loads(program("look", "lens", TEXT, "--json"))["texts"]
    cells = [cell for layer in report["layers"] for cell in layer["cells"]]
    shape = lens.values.shape
    details = lens.details
    assert details["top_ids"].reshape(-1, 3).tolist() == [[t["token"]["id"] for t in c["top"]] for c in cells]
    expected_details = {
        "entropy": [c["entropy"] for c in cells],
        "divergence": [c["divergence"] for c in cells],
        "top_logprobs": [[t["logprob"] for t in c["top"]] for c in cells],
        "watched_rank": [[w["rank"] for w in c["watched"]] for c in cells],
        "watched_logprob": [[w["logprob"] for w in c["watched"]] for c in cells],
        "next_logprob": [np.nan if c["next_logprob"] is None else c["next_logprob"] for c in cells],
    }
    for name, expected in expected_details.items():
        assert details[name].shape[:2] == shape
        np.testing.assert_array_equal(details[name].ravel(), np.array(expected, details[name].dtype).ravel(), name)


def test_attention_patterns_match_the_cli(model, program):
    report = json.loads(program("look", "attention", TEXT, "--json", "--heads", "1.2,3.0", "--bos"))
    picture = model.attention(TEXT, heads=["1.2", (3, 0)], prepend_bos=True)
    assert picture.to_dict() == report
    _, seen = model.run_with_cache(TEXT, "blocks.1.attn.hook_pattern", prepend_bos=True)
    head = list(picture.axes["head"]).index("2")
    np.testing.assert_array_equal(np.nan_to_num(picture.values[0, head]), seen["blocks.1.attn.hook_pattern"][0, 2])
    assert model.attention(TEXT, layers=[0]).values.shape[:2] == (1, 4)


def test_pictures_render_without_network_requests(model, tmp_path):
    picture = model.logit_lens(TEXT)
    shown = picture._repr_html_()
    assert shown.startswith("<iframe data-fit srcdoc=") and shown.count("<iframe") == 1
    page = picture.html()
    assert page.startswith("<!doctype html>")
    for text in (shown, page):
        requests = re.findall(r"""(?:src|href)=["']?(?!["'])[^ >]*|@import|url\([^)]*\)|fetch\(""", text)
        assert not [request for request in requests if "http" in request], requests
    assert picture.svg(1).startswith("<svg") and str(picture).startswith("logit lens")
    sizes = f"layer {model.config['n_layer'] + 1} × token {len(model.encode(TEXT))}"
    assert repr(picture) == f'Picture("logit lens: probability of the most probable token", {sizes})'
    for name, beginning in [("lens.html", "<!doctype html>"), ("lens.svg", "<svg")]:
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(beginning)
    # The frame adapts its height to the page.
    assert "frame.style.height" in shown
    with pytest.raises(ValueError, match="ends in .html, .svg, .png or .pdf"):
        picture.save(tmp_path / "lens.jpg")
    with pytest.raises(ValueError, match="1 or 2"):
        picture.svg(3)


def test_picture_from_custom_values():
    values = np.array([[1.5, np.nan, -2.0], [0.25, 0.5, 3.0]])
    picture = candle_gpt2.Picture("scores", values, {"layer": range(2), "head": ["a", "b", "c"]})
    assert picture.title == "scores" and picture.axes == {"layer": ["0", "1"], "head": ["a", "b", "c"]} and picture.tokens == []
    np.testing.assert_array_equal(picture.values, values.astype(np.float32))
    assert picture.to_dict()["scale"] == "signed"
    assert str(picture).split() == "scores rows: layer, columns: head a b c 0 1.50 - -2 1 0.250 0.500 3".split()
    svg = picture.svg()
    assert "<title>scores</title>" in svg and "−3<" in svg
    assert "#dcdee3" in svg, "a cell without a value is grey"
    assert "no BOS" not in picture.html().split("<body")[0]
    bars = candle_gpt2.Picture("loss", [1, 2], {"position": ["x", "y"]}, texts=["one", "two"], scale="amount")
    assert bars.texts == ["one", "two"] and bars.svg().count("<rect") > 2
    for axes, options, message in (
        ({"layer": range(3)}, {}, r"values: expected shape \[3\] from the labels of the axes \(layer\), found shape \[2, 3\]"),
        ({}, {}, "found shape \\[2, 3\\]"),
        ({"layer": range(2), "head": range(3)}, {"scale": "log"}, 'scale: expected "signed", "share" or "amount", found "log"'),
        ({"layer": range(2), "head": range(3)}, {"texts": ["a"]}, "expected 6 cell texts"),
    ):
        with pytest.raises(ValueError, match=message):
            candle_gpt2.Picture("scores", values, axes, **options)


def test_pictures_export_to_png_and_pdf_with_cairosvg(tmp_path, monkeypatch):
    picture = candle_gpt2.Picture("scores", [[1.0, 2.0]], {"layer": [0], "head": [0, 1]})
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ImportError, match=r"scores\.png: \.png needs CairoSVG; run `pip install cairosvg`, or save an \.svg"):
        picture.save(tmp_path / "scores.png")
    monkeypatch.undo()
    pytest.importorskip("cairosvg", reason="CairoSVG is not installed: pip install cairosvg")
    for name, beginning in (("scores.png", b"\x89PNG"), ("scores.pdf", b"%PDF")):
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(beginning)


def test_colored_tokens_show_one_value_per_token():
    picture = candle_gpt2.Picture.colored_tokens(["One", " day", ","], [0.5, -2.0, np.nan], "surprise")
    assert picture.tokens == ["One", "·day", ","] and picture.axes == {"token": ["One 0", "·day 1", ", 2"]}
    assert picture.title == "surprise" and "surprise" in picture.html()
    assert picture.svg().count("·day") == 2, "in the text and below its bar"
    with pytest.raises(ValueError, match=r"values: expected one value for each of the 2 tokens, found shape \[3\]"):
        candle_gpt2.Picture.colored_tokens(["a", "b"], [1, 2, 3])
    with pytest.raises(ValueError, match="scale: expected"):
        candle_gpt2.Picture.colored_tokens(["a"], [1], scale="log")


def test_picture_docstring_covers_every_argument():
    for name in ("title:", "values:", "axes:", "texts:", "scale:", "colored_tokens", "save()"):
        assert name in candle_gpt2.Picture.__doc__


def test_control_vectors_load_save_and_apply(plain, tmp_path):
    directions = {1: np.linspace(-1, 1, 21), 0: np.ones(21)}
    vector = plain.control_vector(directions, scale=2.0)
    assert repr(vector) == "ControlVector(layers=[0, 1])"
    hooks = [(f"blocks.{layer}.hook_resid_post", lambda value, name, d=d: value + 2 * d) for layer, d in directions.items()]
    ids = [1, 2, 3, 4]
    expected = plain.logits(ids, hooks=hooks)
    np.testing.assert_allclose(plain.logits(ids, hooks=[vector]), expected, atol=1e-5)
    assert not np.allclose(plain.logits(ids), expected)
    np.testing.assert_array_equal(plain.logits(ids, hooks=[plain.control_vector(directions, scale=0)]), plain.logits(ids))
    with pytest.raises(candle_gpt2.Gpt2Error, match="begin at block 1"):
        vector.save(tmp_path / "vector.gguf")
    only = plain.control_vector(directions, layers=(1, 5))
    only.save(tmp_path / "vector.gguf")
    read = plain.control_vector(tmp_path / "vector.gguf")
    assert list(read.directions) == [1]
    np.testing.assert_array_equal(read.directions[1], directions[1].astype(np.float32))
    np.testing.assert_array_equal(plain.logits(ids, hooks=[read]), plain.logits(ids, hooks=[only]))
    for wrong, kind, message in (
        ({1: np.ones(20)}, ValueError, r"expected shape \(21\), found \(20\)"),
        ({2: np.ones(21)}, ValueError, "expected a block below 2"),
        (PLAIN / "model.safetensors", (ValueError, candle_gpt2.Gpt2Error), "expected controlvector"),
        ("no/such.gguf", FileNotFoundError, "no/such.gguf"),
    ):
        with pytest.raises(kind, match=message):
            plain.control_vector(wrong)
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        plain.control_vector(directions, scale=float("nan"))
    with pytest.raises(ValueError, match=r"layers: expected \(first, last\) with first <= last, found \(1, 0\)"):
        plain.control_vector(directions, layers=(1, 0))
