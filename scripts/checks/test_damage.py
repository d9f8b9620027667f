"""Damaged checkpoints: every build of the program rejects each with the same exit code and message.

usage: pytest scripts/checks -k damage --program FILE --other 'scripts/wine.sh gpt2.exe' --other 'qemu-aarch64 gpt2'
"""

import json
import pathlib
import re
import shlex
import struct
import subprocess

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
SECONDS = 60
# Lines that Wine itself prints.
WINE_OUTPUT = re.compile(r"^([0-9a-f]{4}:|wine)")


def safetensors(header, body):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def damage_cases(folder):
    """Yields the name of each kind of damage and the files it replaces; `None` removes a file."""
    data, config = (folder / WEIGHTS).read_bytes(), json.loads((folder / CONFIG).read_text())
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = sorted(set(header) - {"__metadata__"})
    first, last = names[0], names[-1]

    def changed(**fields):
        return safetensors({name: {**tensor, **fields} if name == first else tensor for name, tensor in header.items()}, body)

    def without(name):
        return safetensors({other: tensor for other, tensor in header.items() if other != name}, body)

    weights = {
        "empty": b"",
        "five bytes": data[:5],
        "cut in the header": data[:100],
        "cut in the tensors": data[:-1000],
        "half": data[: len(data) // 2],
        "header of 2^60 bytes": struct.pack("<Q", 1 << 60) + data[8:],
        "header of braces": data[:8] + b"{" * length + body,
        "zeros": bytes(64),
        "without a tensor": without(first),
        "without another tensor": without(last),
        "other shape": changed(shape=[3, 3]),
        "unknown type": changed(dtype="F99"),
        "beyond the end": changed(data_offsets=[0, 1 << 50]),
        "end before start": changed(data_offsets=[10, 5]),
        "text": b"hello world",
        "half a pickle": b"\x80\x04.",
        "half an archive": b"PK\x03\x04" + bytes(100),
        "GGUF of ones": b"GGUF\x03\0\0\0" + b"\xff" * 64,
        "missing": None,
    }
    configs = {"empty": b"", "half": b"{", "a list": b"[]", "missing": None}
    for key in ("n_embd", "n_head", "n_layer", "vocab_size", "n_positions"):
        configs |= {f"{key} {value}": json.dumps({**config, key: value}).encode() for value in (0, -1, "x", 1 << 40)}
    for key, value in (("activation_function", "nope"), ("model_type", "llama"), ("layer_norm_epsilon", -1)):
        configs[f"{key} {value}"] = json.dumps({**config, key: value}).encode()
    tokenizers = {"empty": b"", "no tokenizer": b"{}", "half": b"[1", "invalid UTF-8": b"\xff\xfe\0"}
    for file, kinds in ((WEIGHTS, weights), (CONFIG, configs), (TOKENIZER, tokenizers)):
        for name, content in kinds.items():
            yield f"{file}, {name}", {file: content}
    yield "all files", dict.fromkeys((WEIGHTS, CONFIG, TOKENIZER))


def run_damaged(command, folder):
    done = subprocess.run([*command, "generate", "One day", "--max-new-tokens", "2", "--offline", "--model", folder.name],
                          capture_output=True, cwd=folder.parent, timeout=SECONDS)
    lines = done.stderr.decode(errors="replace").replace("\r", "").replace("\\", "/").splitlines()
    return done.returncode, [line for line in lines if not WINE_OUTPUT.match(line)]


def test_damage_is_rejected_alike_on_every_platform(program, request, tmp_path):
    whole = tmp_path / "whole"
    program("convert", "built-in", whole)
    # Resolves paths against the current folder, because the programs run in another one.
    others = [
        [str(path.absolute()) if (path := pathlib.Path(part)).is_file() else part for part in shlex.split(command)]
        for command in request.config.getoption("other") or []
    ]
    if not others:
        print("compares no program for another system: see --other")
    count = 0
    for name, files in damage_cases(whole):
        broken = tmp_path / f"broken-{count}"
        broken.mkdir()
        for file in whole.iterdir():
            content = files.get(file.name, file.read_bytes())
            if content is not None:
                (broken / file.name).write_bytes(content)
        code, lines = run_damaged([program.path], broken)
        assert code in (1, 2) and lines and "panicked" not in str(lines), f"{name}: exit code {code}, {lines}"
        for command in others:
            assert run_damaged(command, broken) == (code, lines), f"{name}: {command[0]}"
        count += 1
    print(f"{count} damaged checkpoints")
