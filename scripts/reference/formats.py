"""One seeded GPT-2 in every checkpoint format, written by the usual tools, with expected logits.

Writes to `formats`. Needs --llama-cpp, and tensorflow, gguf and llama-cpp-python. A second run changes only the legacy PyTorch
file, in which PyTorch names storages by memory address.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers

from reference import common
from reference.common import checkpoint_tensors, random_gpt2, save, train_tokenizer

IDS = [5, 299, 0, 17, 130, 42, 42]
SIZES = dict(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=4)
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def folder(name):
    path = common.place(f"formats/{name}")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


@torch.no_grad()
def logits(model):
    return model(torch.tensor([IDS])).logits


def linear(name, value):
    """Returns the weight in nn.Linear's layout."""
    return value.t().contiguous() if name.endswith(CONV1D) else value


def export_pytorch(model):
    """Writes pytorch_model.bin like old transformers versions: zip, legacy, sharded; with masks and head."""
    state = dict(checkpoint_tensors(model))
    state["lm_head.weight"] = state["transformer.wte.weight"]
    for layer in range(SIZES["n_layer"]):
        mask = torch.tril(torch.ones(32, 32, dtype=torch.uint8)).view(1, 1, 32, 32)
        state[f"transformer.h.{layer}.attn.bias"] = mask
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    for name, is_zip in (("pytorch-zip", True), ("pytorch-legacy", False)):
        path = folder(name)
        torch.save(state, path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
        model.config.save_pretrained(path)
    # Parameters, half precision, transposed views: typical output of fine-tuning scripts.
    path = folder("pytorch-views")
    views = {key: torch.nn.Parameter(value.half().t().contiguous().t() if value.dim() == 2 else value.half(), False)
             for key, value in checkpoint_tensors(model).items()}
    torch.save({"state_dict": views, "step": 3}, path / "weights.ckpt")
    model.config.save_pretrained(path)

    path = folder("pytorch-shards")
    names = sorted(checkpoint_tensors(model))
    places = {}
    for shard, part in enumerate((names[:9], names[9:])):
        file = f"pytorch_model-0000{shard + 1}-of-00002.bin"
        torch.save({key: state[key].clone() for key in part}, path / file)
        places |= {key: file for key in part}
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model.config.save_pretrained(path)


def export_safetensors_shards(model):
    path = folder("safetensors-shards")
    model.save_pretrained(path, max_shard_size="40KB")
    (path / "generation_config.json").unlink(missing_ok=True)


def export_tensorflow(model, tokenizer_folder):
    """Writes OpenAI's layout with TensorFlow's own saver."""
    import tensorflow as tf

    path = folder("tensorflow")
    graph = tf.Graph()
    with graph.as_default():
        for key, value in checkpoint_tensors(model).items():
            parts = key.removeprefix("transformer.").split(".")
            if parts[0] == "h":
                parts = [f"h{parts[1]}", *parts[2:]]
            leaf = parts.pop()
            value = value.numpy()
            if parts[0] in ("wte", "wpe"):
                pass
            elif "ln_" in parts[-1]:
                parts.append({"weight": "g", "bias": "b"}[leaf])
            else:
                parts.append({"weight": "w", "bias": "b"}[leaf])
                value = value[None] if leaf == "weight" else value
            tf.compat.v1.get_variable("model/" + "/".join(parts), initializer=value)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            tf.compat.v1.train.Saver().save(session, str(path / "model.ckpt"), write_meta_graph=False)
    # The saver writes the folder's own path; OpenAI's file has the bare name.
    (path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\nall_model_checkpoint_paths: "model.ckpt"\n')
    sizes = {"n_vocab": 300, "n_ctx": 32, "n_embd": 32, "n_head": 4, "n_layer": 2}
    (path / "hparams.json").write_text(json.dumps(sizes))
    shutil.copy(tokenizer_folder / "vocab.json", path / "encoder.json")
    shutil.copy(tokenizer_folder / "merges.txt", path / "vocab.bpe")


def export_nano_gpt():
    """Writes nanoGPT's ckpt.pt: exact GELU, no biases, 300 tokens padded to 320, names from torch.compile."""
    model = random_gpt2(31, **{**SIZES, "vocab_size": 320}, activation_function="gelu")
    state = {}
    for key, value in model.state_dict().items():
        if key.endswith("bias"):
            value.zero_()
            continue
        state[f"_orig_mod.{key}"] = linear(key, value)
    state["_orig_mod.lm_head.weight"] = state["_orig_mod.transformer.wte.weight"]
    arguments = dict(n_layer=2, n_head=4, n_embd=32, block_size=32, bias=False, vocab_size=320, dropout=0.0)
    checkpoint = {
        "model": state,
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}]},
        "model_args": arguments, "iter_num": 7, "best_val_loss": torch.tensor(1.5), "config": {"dataset": "x"},
    }
    torch.save(checkpoint, folder("nanogpt") / "ckpt.pt")
    return logits(model)


def export_llm_c(model):
    """Writes llm.c's .bin, versions 3 (f32) and 5 (bf16), with the vocabulary padded to 384."""
    state = {key.removeprefix("transformer."): linear(key, value) for key, value in checkpoint_tensors(model).items()}
    padded = torch.zeros(384, 32)
    padded[:300] = state["wte.weight"]
    kinds = ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight",
             "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight",
             "mlp.c_proj.bias")
    values = [padded, state["wpe.weight"]]
    values += [state[f"h.{layer}.{kind}"] for kind in kinds for layer in range(2)]
    values += [state["ln_f.weight"], state["ln_f.bias"]]
    path = folder("llmc")
    for version, name in ((3, "gpt2.bin"), (5, "gpt2_bf16.bin")):
        header = np.zeros(256, dtype=np.int32)
        header[:8] = [20240326, version, 32, 300, 2, 4, 32, 384]
        with open(path / name, "wb") as file:
            file.write(header.tobytes())
            for value in values:
                data = value.detach().float().contiguous()
                file.write(data.numpy().tobytes() if version == 3 else data.bfloat16().view(torch.int16).numpy().tobytes())


def export_book():
    """Writes the book's GPTModel: separate projections without biases, untied output head, one head."""
    model = random_gpt2(33, **{**SIZES, "n_embd": 64, "n_head": 1, "n_layer": 1}, tie_word_embeddings=False)
    names = {"ln_1.weight": "norm1.scale", "ln_1.bias": "norm1.shift", "attn.c_proj.weight": "att.out_proj.weight",
             "attn.c_proj.bias": "att.out_proj.bias", "ln_2.weight": "norm2.scale", "ln_2.bias": "norm2.shift",
             "mlp.c_fc.weight": "ff.layers.0.weight", "mlp.c_fc.bias": "ff.layers.0.bias",
             "mlp.c_proj.weight": "ff.layers.2.weight", "mlp.c_proj.bias": "ff.layers.2.bias"}
    outside = {"transformer.wte.weight": "tok_emb.weight", "transformer.wpe.weight": "pos_emb.weight",
               "transformer.ln_f.weight": "final_norm.scale", "transformer.ln_f.bias": "final_norm.shift",
               "lm_head.weight": "out_head.weight"}
    state = {}
    for key, value in model.state_dict().items():
        if key in outside:
            state[outside[key]] = value
        elif key.endswith("attn.c_attn.bias"):
            value.zero_()
        elif key.endswith("attn.c_attn.weight"):
            for name, part in zip(("W_query", "W_key", "W_value"), value.split(64, dim=1)):
                state[f"trf_blocks.0.att.{name}.weight"] = part.t().contiguous()
        else:
            state[f"trf_blocks.0.{names[key.removeprefix('transformer.h.0.')]}"] = linear(key, value)
    state["trf_blocks.0.att.mask"] = torch.triu(torch.ones(32, 32), diagonal=1)
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}}, folder("book") / "model_and_optimizer.pth")
    return logits(model)


def export_gguf(llama_cpp_source, tokenizer_folder):
    """Writes GGUF with llama.cpp's converter and quantizer; expects the logits of the dequantized weights."""
    sys.path[:0] = [str(llama_cpp_source), str(llama_cpp_source / "gguf-py")]
    import gguf
    import llama_cpp
    from conversion import get_model_class
    from conversion.base import ModelBase, TextModel
    from gguf import quants

    # The converter recognizes pre-tokenizers by a hash of their output; ours is GPT-2's with other merges.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    path, expected = folder("gguf"), {}

    def convert(model, name, ftype):
        with tempfile.TemporaryDirectory() as source:
            model.config.n_ctx = SIZES["n_positions"]
            model.save_pretrained(source)
            transformers.GPT2TokenizerFast.from_pretrained(str(tokenizer_folder)).save_pretrained(source)
            target = path / f"{name}.gguf"
            hparams = ModelBase.load_hparams(pathlib.Path(source), False)
            cls = get_model_class(hparams["architectures"][0])
            cls(pathlib.Path(source), ftype, target, model_name="tiny").write()
        return target

    def dequantized(model, file):
        """Returns a copy of the model with the weights from a GGUF file."""
        names = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}
        block = {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
                 "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
        state = model.state_dict()
        for tensor in gguf.GGUFReader(file).tensors:
            parts = tensor.name.split(".")
            own = f"h.{parts[1]}.{block[parts[2]]}" if parts[0] == "blk" else names[parts[0]]
            value = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            key = f"transformer.{own}.{parts[-1]}"
            state[key].copy_(linear(key, value).reshape(state[key].shape))
        return logits(model)

    small = random_gpt2(30, **SIZES)
    full = convert(small, "f32", gguf.LlamaFileType.ALL_F32)
    for name, ftype in (("f16", gguf.LlamaFileType.MOSTLY_F16), ("bf16", gguf.LlamaFileType.MOSTLY_BF16)):
        convert(small, name, ftype)
    wide_model = random_gpt2(34, **{**SIZES, "n_embd": 256, "n_layer": 1, "n_inner": 256})
    wide = convert(wide_model, "wide", gguf.LlamaFileType.ALL_F32)
    for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_S", "Q5_K_S", "Q6_K"):
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        parameters.pure = True
        source = wide if name.endswith(("_K", "_K_S")) else full
        target = path / f"{name.removesuffix('_S').lower()}.gguf"
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters)
        assert code == 0, (name, code)
    wide.unlink()
    for file in sorted(path.glob("*.gguf")):
        sizes = {**SIZES, "n_embd": 256, "n_layer": 1, "n_inner": 256} if file.stem.endswith("_k") else SIZES
        with torch.no_grad():
            expected[f"gguf.{file.stem}"] = dequantized(random_gpt2(0, **sizes), file)
    return expected


def export(arguments):
    if not arguments.llama_cpp:
        sys.exit("formats needs --llama-cpp DIR, llama.cpp's source folder")
    shutil.rmtree(common.place("formats"), ignore_errors=True)
    with tempfile.TemporaryDirectory() as tokenizer_folder, torch.no_grad():
        tokenizer_folder = pathlib.Path(tokenizer_folder)
        train_tokenizer(tokenizer_folder, 300)
        model = random_gpt2(30, **SIZES)
        expected = {"input_ids": torch.tensor([IDS]), "model": logits(model)}
        export_pytorch(model)
        export_safetensors_shards(model)
        export_tensorflow(model, tokenizer_folder)
        export_llm_c(model)
        expected["nanogpt"], expected["book"] = export_nano_gpt(), export_book()
        expected |= export_gguf(arguments.llama_cpp.resolve(), tokenizer_folder)
    save("formats/expected", expected)
