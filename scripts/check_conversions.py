"""Shows that transformers and llama.cpp read what `gpt2 convert` writes, and write the same greedy text.

usage: python scripts/check_conversions.py PROGRAM [CHECKPOINT …]      (default: the fixtures in every format)

PROGRAM is the built gpt2. Needs scripts/requirements.txt. Prints a line for each check; exit code 1 if one fails.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import llama_cpp
import torch
import transformers
from export_reference import FIXTURES, random_gpt2

FORMATS = ["pytorch-legacy", "tensorflow", "llmc/gpt2.bin", "gguf/q4_0.gguf", "safetensors-shards"]
IDS = [5, 299, 0, 17, 130]
NEW_TOKENS = 12


def run(program, *arguments):
    output = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert output.returncode == 0, (arguments, output.stderr)
    return output.stdout


def ours(program, path):
    ids = ",".join(map(str, IDS))
    flags = ("--greedy", "--max-new-tokens", NEW_TOKENS, "--json", "--ids", ids, "--model", path)
    return json.loads(run(program, "generate", *flags))["ids"]


@torch.no_grad()
def theirs_transformers(path):
    model = transformers.GPT2LMHeadModel.from_pretrained(path, dtype=torch.float32).eval()
    output = model.generate(torch.tensor([IDS]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
                            attention_mask=torch.ones(1, len(IDS)).long())
    return output[0, len(IDS):].tolist()


def theirs_llama_cpp(path):
    # Token by token: batches of such small quantized models crash llama.cpp, its own files included.
    model = llama_cpp.Llama(model_path=str(path), n_ctx=32, n_batch=1, verbose=False, n_threads=1)
    ids, new = list(IDS), []
    for token in model.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):
        new.append(token)
        if len(new) == NEW_TOKENS or token == model.token_eos():
            return new


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    tokenizer = FIXTURES / "tiny-checkpoint" / "tokenizer.json"
    failed = False

    def check(what, same):
        nonlocal failed
        failed |= not same
        print(f"{what}: {'same' if same else 'DIFFERENT'}")

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        # Wide enough for llama.cpp's kernels; large embeddings, so that the most probable token stands out as it does in
        # a trained model, and llama.cpp's rounding of activations to 8 bits does not decide.
        wide = folder / "wide"
        model = random_gpt2(77, vocab_size=300, n_positions=32, n_embd=128, n_layer=2, n_head=2)
        model.transformer.wte.weight.data *= 4
        model.save_pretrained(wide)
        paths = [pathlib.Path(path) for path in sys.argv[2:]] or [wide, *(FIXTURES / "formats" / name for name in FORMATS)]
        for number, path in enumerate(paths):
            for dtype in ("f32", "f16", "bf16"):
                target = folder / f"{number}-{dtype}"
                run(program, "convert", path, target, "--dtype", dtype, "--tokenizer", tokenizer)
                check(f"{path.name} -> Hugging Face {dtype}, ours and transformers", ours(program, target) == theirs_transformers(target))
                if dtype == "f32":
                    check(f"{path.name} -> Hugging Face f32, before and after", ours(program, path) == ours(program, target))
        for dtype in ("f32", "f16", "q8_0", "q4_0"):
            target = folder / f"{dtype}.gguf"
            run(program, "convert", paths[0], target, "--dtype", dtype, "--tokenizer", tokenizer)
            check(f"{paths[0].name} -> GGUF {dtype}, ours and llama.cpp", ours(program, target) == theirs_llama_cpp(target))
    sys.exit(failed)


if __name__ == "__main__":
    main()
