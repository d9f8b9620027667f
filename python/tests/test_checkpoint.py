"""Inspection, verification and conversion of checkpoints: the same results as the program, and safe to interrupt."""

import json
import shutil
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES, read_safetensors, write_safetensors

FORMATS = FIXTURES / "formats"
TINY = FIXTURES / "tiny-checkpoint"
CHECKPOINTS = {
    "safetensors": TINY,
    "shards": FORMATS / "safetensors-shards",
    "pytorch-zip": FORMATS / "pytorch-zip",
    "pytorch-legacy": FORMATS / "pytorch-legacy" / "pytorch_model.bin",
    "tensorflow": FORMATS / "tensorflow",
    "nanogpt": FORMATS / "nanogpt" / "ckpt.pt",
    "llmc": FORMATS / "llmc" / "gpt2.bin",
    "gguf": FORMATS / "gguf" / "q4_0.gguf",
    "built-in": "built-in",
}


@pytest.fixture
def cli_json(program):
    """Runs the program with `--json` and parses its output."""

    def run(*arguments):
        return json.loads(program(*map(str, arguments), "--json"))

    return run


@pytest.fixture
def damaged(tmp_path):
    """Copies the tiny checkpoint and sets a value to NaN."""
    folder = tmp_path / "damaged"
    shutil.copytree(TINY, folder)
    _, arrays = read_safetensors(folder / "model.safetensors")
    arrays = {name: array.copy() for name, array in arrays.items()}
    name = next(name for name in arrays if name.endswith("h.0.mlp.c_fc.weight"))
    arrays[name][1, 2] = float("nan")
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_inspect_matches_the_cli(name, cli_json):
    path = CHECKPOINTS[name]
    assert candle_gpt2.inspect(path) == cli_json("inspect", "--model", path)
    with_values = candle_gpt2.inspect(path, tensors=True)
    assert with_values == cli_json("inspect", "--model", path, "--tensors")
    statistics = [tensor["statistics"] for tensor in with_values["tensors"] if tensor["role"] == "parameter"]
    assert statistics and all(values["min"] <= values["mean"] <= values["max"] for values in statistics)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_verify_matches_the_cli(name, cli_json):
    path = CHECKPOINTS[name]
    found = candle_gpt2.verify(path)
    assert found == cli_json("verify", "--model", path)
    assert found["sound"] and found["problems"] == [] and found["cache_difference"] < 1e-3


def test_two_checkpoints_are_compared(cli_json):
    first, second = FORMATS / "gguf" / "f32.gguf", FORMATS / "gguf" / "q8_0.gguf"
    found = candle_gpt2.inspect(first, diff=second)
    assert found == cli_json("inspect", "--model", first, "--diff", second)
    assert not found["equal"] and 0 < found["largest"] < 0.1
    assert candle_gpt2.inspect(first, diff=first)["equal"]
    against = candle_gpt2.verify(first, against=second)
    assert against["against_difference"] > 1e-3 and not against["sound"]
    assert candle_gpt2.verify(first, against=second, tolerance=1e9)["sound"]


def test_preset_is_inspected_without_files(cli_json):
    found = candle_gpt2.inspect(preset="gpt2-xl")
    assert found == cli_json("inspect", "--preset", "gpt2-xl")
    assert found["parameters"]["unique"] == 1_557_611_200


@pytest.mark.parametrize(
    ("output", "dtype"),
    [("copy", "f32"), ("copy", "f16"), ("copy", "torch.bfloat16"), ("copy.gguf", "q8_0"), ("copy.gguf", "f32")],
)
def test_convert_writes_the_same_bytes_as_the_cli(output, dtype, exact, cli_json, tmp_path):
    ours, theirs = tmp_path / "ours" / output, tmp_path / "theirs" / output
    for folder in (ours.parent, theirs.parent):
        folder.mkdir()
    cli_dtype = {"torch.bfloat16": "bf16"}.get(dtype, dtype)
    is_gguf = output.endswith(".gguf")
    with pytest.warns(UserWarning, match="GGUF does not store .* do_sample, temperature, top_k, min_p") if is_gguf else nullcontext():
        found = candle_gpt2.convert("built-in", ours, dtype=dtype)
    expected = cli_json("convert", "built-in", theirs, "--dtype", cli_dtype)
    assert found == expected | {"output": str(ours)}

    def contents(path):
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return {file.name: file.read_bytes() for file in files}

    assert contents(ours) == contents(theirs)
    again = candle_gpt2.Model.from_pretrained(ours)
    if dtype == "f32":
        # f32 represents the q8_0 values of the built-in model exactly.
        text = again.generate("One day", max_new_tokens=8, do_sample=False)
        assert text == exact.generate("One day", max_new_tokens=8, do_sample=False)


def test_convert_accepts_a_separate_tokenizer(tmp_path):
    bare = FORMATS / "llmc" / "gpt2.bin"
    with pytest.raises(ValueError, match="tokenizer"):
        candle_gpt2.convert(bare, tmp_path / "a.gguf")
    candle_gpt2.convert(bare, tmp_path / "a.gguf", tokenizer=TINY)
    assert candle_gpt2.inspect(tmp_path / "a.gguf")["format"] == "gguf"


@pytest.mark.parametrize("name", [None, TINY])
def test_model_methods_match_the_module_functions(name, tmp_path):
    model, path = candle_gpt2.Model.from_pretrained(name), name or "built-in"
    assert model.inspect() == candle_gpt2.inspect(name) == candle_gpt2.inspect(path)
    assert model.inspect(tensors=True) == candle_gpt2.inspect(path, tensors=True)
    assert model.inspect(diff=TINY) == candle_gpt2.inspect(path, diff=TINY)
    with pytest.raises(ValueError, match="`diff` and `tensors` are mutually exclusive"):
        model.inspect(diff=TINY, tensors=True)
    assert model.verify() == candle_gpt2.verify(path)
    written = model.convert(tmp_path / "copy", dtype="f16")
    assert written["format"] == "safetensors" and Path(written["output"]) == tmp_path / "copy"
    assert candle_gpt2.inspect(tmp_path / "copy")["dtypes"].keys() == {"F16"}


def test_repr_counts_weight_bytes(tiny):
    parameters = tiny.inspect()["parameters"]["unique"]
    f32 = candle_gpt2.Model.from_pretrained(TINY, dtype="f32")
    memory = repr(f32).split(" in ")[1]
    assert float(memory.split(" MB")[0]) >= round(4 * parameters / 1e6, 1)


def test_damaged_checkpoint_is_reported(damaged, tmp_path, cli_json):
    found = candle_gpt2.verify(damaged)
    assert not found["sound"] and "values are NaN" in found["problems"][0]
    assert candle_gpt2.inspect(damaged, tensors=True) == json.loads(
        json.dumps(cli_json("inspect", "--model", damaged, "--tensors"))
    )
    weights = damaged / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    found = candle_gpt2.verify(damaged)
    assert not found["sound"] and len(found["problems"]) == 1 and str(weights) in found["problems"][0]
    for failing in (
        lambda: candle_gpt2.inspect(damaged),
        lambda: candle_gpt2.convert(damaged, tmp_path / "never"),
        lambda: candle_gpt2.Model.from_pretrained(damaged),
    ):
        with pytest.raises(candle_gpt2.Gpt2Error, match="model.safetensors"):
            failing()
    assert not (tmp_path / "never").exists()


def test_invalid_calls_are_rejected(tmp_path):
    missing = tmp_path / "nothing.gguf"
    for failing in (candle_gpt2.inspect, candle_gpt2.verify, lambda path: candle_gpt2.convert(path, tmp_path / "a")):
        with pytest.raises(FileNotFoundError, match="nothing.gguf"):
            failing(missing)
    for options, message in [
        ({"preset": "gpt3"}, "gpt3"),
        ({"preset": "gpt2", "tensors": True}, "`diff` and `tensors` need `model`: a preset has no weights"),
        ({"preset": "gpt2", "n_head": 2}, "`n_head` applies only to checkpoints"),
        ({"model": TINY, "preset": "gpt2"}, "are mutually exclusive"),
        ({"model": TINY, "diff": TINY, "tensors": True}, "are mutually exclusive"),
    ]:
        with pytest.raises(ValueError, match=message):
            candle_gpt2.inspect(**options)
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="tolerance: expected a non-negative number"):
            candle_gpt2.verify(TINY, tolerance=tolerance)
    with pytest.raises(ValueError, match="dtype: expected one of f32, f16, bf16, q8_0, q4_0"):
        candle_gpt2.convert(TINY, tmp_path / "a", dtype="q3")
    with pytest.raises(ValueError, match=r'`dtype` q8_0: a Hugging Face folder can only store f32, f16 or bf16'):
        candle_gpt2.convert(TINY, tmp_path / "a", dtype="q8_0")
    (tmp_path / "there").mkdir()
    with pytest.raises(candle_gpt2.Gpt2Error, match="already exists"):
        candle_gpt2.convert(TINY, tmp_path / "there")
    with pytest.raises(candle_gpt2.Gpt2Error, match="vocabulary sizes differ"):
        candle_gpt2.verify("built-in", against=TINY)


# Script that prints the seconds from the signal to the end of the call.
INTERRUPTED = """
import os, signal, sys, threading, time
import candle_gpt2

sent = []

def interrupt():
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)

timer = threading.Timer(float(sys.argv[1]) if len(sys.argv) > 1 else {delay}, interrupt)
timer.start()
try:
    {call}
    print("not interrupted")
except KeyboardInterrupt:
    print(time.perf_counter() - sent[0])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Creates a sparse checkpoint file with 400 MB of zeros."""
    folder = tmp_path_factory.mktemp("large")
    layers, width, tokens = 12, 768, 20_000
    config = dict(model_type="gpt2", vocab_size=tokens, n_positions=64, n_embd=width, n_layer=layers, n_head=12)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"wte.weight": [tokens, width], "wpe.weight": [64, width], "ln_f.weight": [width], "ln_f.bias": [width]}
    for layer in range(layers):
        for name, out in [("attn.c_attn", 3), ("attn.c_proj", 1), ("mlp.c_fc", 4)]:
            shapes[f"h.{layer}.{name}.weight"] = [width, out * width]
            shapes[f"h.{layer}.{name}.bias"] = [out * width]
        shapes[f"h.{layer}.mlp.c_proj.weight"] = [4 * width, width]
        for name in ("mlp.c_proj.bias", "ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            shapes[f"h.{layer}.{name}"] = [width]
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.parametrize(
    "call",
    [
        "candle_gpt2.inspect({path!r}, tensors=True)",
        "candle_gpt2.inspect({path!r}, diff={path!r})",
        "candle_gpt2.verify({path!r})",
        "candle_gpt2.convert({path!r}, {output!r})",
        "candle_gpt2.Model.from_pretrained({path!r}, dtype='q4')",
    ],
)
def test_ctrl_c_stops_the_call_and_leaves_no_files(call, large, python, tmp_path):
    call = call.format(path=str(large), output=str(tmp_path / "out"))
    # Repeat the call, so that the signal arrives during it on any machine.
    call = f"while True: {call}" if "convert" not in call else call
    done = python(INTERRUPTED.format(call=call, delay=0.1))
    assert done.returncode == 0, done.stderr
    # The documented limit is 0.1 s; the rest allows for busy machines and unoptimized builds.
    assert float(done.stdout) < 0.5, done.stdout
    assert list(tmp_path.iterdir()) == []


class SlowHub(BaseHTTPRequestHandler):
    """Serves a hub with one model, whose weights never finish downloading."""

    has_begun = threading.Event()
    is_over = threading.Event()
    FILES = {"config.json": (TINY / "config.json").read_bytes()}

    def log_message(self, *_):
        pass

    def answer(self, body, **headers):
        self.send_response(206 if "Range" in self.headers else 200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        name = self.path.rsplit("/", 1)[1]
        if self.path.startswith("/api/"):
            files = [{"rfilename": name} for name in ("config.json", "model.safetensors")]
            body = json.dumps({"sha": "0" * 40, "siblings": files}).encode()
            self.answer(body, Content_Length=len(body))
            return
        size = 10_000_000 if name == "model.safetensors" else len(self.FILES[name])
        metadata = {"X_Repo_Commit": "0" * 40, "ETag": f'"{name}"'}
        if self.headers.get("Range", "") == "bytes=0-0":
            self.answer(b"x", Content_Length=1, Content_Range=f"bytes 0-0/{size}", **metadata)
        elif name == "config.json":
            self.answer(self.FILES[name], Content_Length=size, **metadata)
        else:
            self.answer(b"x" * 100_000, Content_Length=size, **metadata)
            self.has_begun.set()
            self.is_over.wait(60)


def test_ctrl_c_stops_a_stalled_download(python, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        script = INTERRUPTED.format(call="candle_gpt2.Model.from_pretrained('someone/tiny')", delay=3.0)
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        done = python(script, HF_ENDPOINT=endpoint, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="")
    finally:
        SlowHub.is_over.set()
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    assert SlowHub.has_begun.is_set(), done.stdout
    assert float(done.stdout) < 0.5, done.stdout
    # The partial download is kept for the next attempt, and no incomplete file looks complete.
    assert sorted(file.name for file in tmp_path.glob("**/snapshots/*/*")) == ["config.json"]


class TokenHub(SlowHub):
    """Serves a hub with one model that requires the token."""

    seen: set[str | None] = set()
    FILES = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}

    def do_GET(self):
        token = self.headers.get("Authorization")
        self.seen.add(token)
        name = self.path.rsplit("/", 1)[1]
        metadata = {"X_Repo_Commit": "0" * 40, "ETag": f'"{name}"'}
        if token != "Bearer hf_right":
            self.send_response(401)
            self.end_headers()
        elif self.path.startswith("/api/"):
            body = json.dumps({"sha": "0" * 40, "siblings": [{"rfilename": name} for name in self.FILES]}).encode()
            self.answer(body, Content_Length=len(body))
        else:
            body = self.FILES[name]
            requested = self.headers.get("Range", f"bytes=0-{len(body) - 1}").removeprefix("bytes=")
            first, last = (int(bound or len(body)) for bound in requested.split("-"))
            last = min(last, len(body) - 1)
            metadata["Content_Range"] = f"bytes {first}-{last}/{len(body)}"
            self.answer(body[first : last + 1], Content_Length=last + 1 - first, **metadata)


def test_hub_options_work_as_in_transformers(python, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), TokenHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own, usual = tmp_path / "own", tmp_path / "usual"
    script = """
import os, pickle, candle_gpt2
def error_of(**options):
    try:
        candle_gpt2.Model.from_pretrained("someone/tiny", **options)
    except candle_gpt2.Gpt2Error as error:
        return str(error)
own = os.environ["OWN"]
print(error_of(cache_dir=own, local_files_only=True))
print(error_of(cache_dir=own, token=False))
print(error_of(cache_dir=own, token="hf_wrong"))
model = candle_gpt2.Model.from_pretrained("someone/tiny", cache_dir=own, token="hf_right")
assert b"hf_right" not in pickle.dumps(model)
again = candle_gpt2.Model.from_pretrained("someone/tiny", cache_dir=own, local_files_only=True)
assert pickle.loads(pickle.dumps(again)).generate([1, 2], max_new_tokens=3) == model.generate([1, 2], max_new_tokens=3)
print(error_of(local_files_only=True))
"""
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        variables = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(usual), "HF_HUB_OFFLINE": "", "OWN": str(own)}
        done = python(script, HF_TOKEN="hf_usual", **variables)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "not in the cache" in lines[0] and "not in the cache" in lines[-1], lines
    assert TokenHub.seen == {None, "Bearer hf_wrong", "Bearer hf_right"}
    assert not usual.exists() and own.exists()


def test_parameters_equal_the_stored_tensors(model):
    opened = candle_gpt2.Model.from_pretrained(TINY, dtype="q8")
    parameters = opened.parameters()
    stored = {key.removeprefix("transformer."): array for key, array in read_safetensors(TINY / "model.safetensors")[1].items()}
    assert set(parameters) == set(stored) - {"lm_head.weight"} and list(parameters)[0] == "wte.weight"
    for key, array in parameters.items():
        # Hugging Face's checkpoints store the blocks' matrices transposed.
        expected = stored[key].T if array.ndim == 2 and key.startswith("h.") else stored[key]
        np.testing.assert_array_equal(array, expected, err_msg=key)
    assert model.parameters()["wpe.weight"].shape == (512, 256), "the built-in model"


@pytest.mark.parametrize("name", ["pytorch-zip", "pytorch-legacy", "tensorflow"])
def test_parameters_do_not_depend_on_the_format(name):
    expected = candle_gpt2.Model.from_pretrained(CHECKPOINTS["shards"]).parameters()
    found = candle_gpt2.Model.from_pretrained(CHECKPOINTS[name]).parameters()
    assert list(found) == list(expected)
    for key, array in found.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


def test_parameters_of_a_deleted_checkpoint_raise(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(TINY, folder)
    model = candle_gpt2.Model.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="copy"):
        model.parameters()
