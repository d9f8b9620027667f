//! GPT-2 as in the paper, in candle's own operations, without a cache or fused kernels.
//!
//! The fast model, `crates/gpt2/src/model.rs`, computes the same logits (`crates/gpt2/tests/suite/plain.rs`).
//! Names are Hugging Face's, with nanoGPT's in comments. B batch, T tokens, C hidden size, H heads, V vocab.
//! Usage: `cargo run --release -p candle-gpt2 --example plain -- "One day"`
#![expect(clippy::print_stdout, reason = "what the example shows")]

use std::collections::HashMap;
use std::io::Cursor;

use candle_core::quantized::gguf_file::Content;
use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2::Gpt2Config;
use candle_nn::VarBuilder;
use candle_nn::ops::softmax;

/// y = x · weight + bias, with weights stored as (in, out); nanoGPT's `nn.Linear` stores (out, in).
struct Conv1D {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1D {
    fn load(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self { weight: vb.get((inputs, outputs), "weight")?, bias: vb.get(outputs, "bias")? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.broadcast_matmul(&self.weight)?.broadcast_add(&self.bias)
    }
}

/// Normalizes each token to mean 0 and variance 1, then scales and shifts each component.
struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    fn load(config: &Gpt2Config, vb: VarBuilder) -> Result<Self> {
        let (weight, bias) = (vb.get(config.n_embd, "weight")?, vb.get(config.n_embd, "bias")?);
        Ok(Self { weight, bias, eps: config.layer_norm_epsilon })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = x.sqr()?.mean_keepdim(D::Minus1)?;
        let x = x.broadcast_div(&(variance + self.eps)?.sqrt()?)?;
        x.broadcast_mul(&self.weight)?.broadcast_add(&self.bias)
    }
}

/// Causal attention: no token attends to later ones. nanoGPT: `CausalSelfAttention`.
struct Attention {
    c_attn: Conv1D, // queries, keys and values side by side
    c_proj: Conv1D, // the course's `out_proj`
    n_head: usize,
}

impl Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, c, d) = (x.dim(0)?, x.dim(1)?, x.dim(2)?, x.dim(2)? / self.n_head);
        let parts = self.c_attn.forward(x)?.chunk(3, D::Minus1)?;
        let heads = |part: &Tensor| part.reshape((b, t, self.n_head, d))?.transpose(1, 2)?.contiguous();
        let (q, k, v) = (heads(&parts[0])?, heads(&parts[1])?, heads(&parts[2])?); // (B, H, T, d)

        let scores = (q.matmul(&k.t()?)? / (d as f64).sqrt())?; // (B, H, T, T): query × key
        let later = |place| if place % t > place / t { f32::NEG_INFINITY } else { 0.0 };
        let mask = Tensor::from_vec((0..t * t).map(later).collect::<Vec<f32>>(), (t, t), x.device())?;
        let weights = softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        let z = weights.matmul(&v)?; // (B, H, T, d)
        self.c_proj.forward(&z.transpose(1, 2)?.reshape((b, t, c))?)
    }
}

/// One layer: attention moves information between tokens; the MLP processes each token.
struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    c_fc: Conv1D, // layers of the MLP; nanoGPT: `mlp.c_fc`, `mlp.c_proj`
    c_proj: Conv1D,
}

impl Block {
    fn load(config: &Gpt2Config, vb: VarBuilder) -> Result<Self> {
        let (c, inner) = (config.n_embd, config.n_inner.unwrap_or(4 * config.n_embd));
        Ok(Self {
            ln_1: LayerNorm::load(config, vb.pp("ln_1"))?,
            attn: Attention {
                c_attn: Conv1D::load(c, 3 * c, vb.pp("attn.c_attn"))?,
                c_proj: Conv1D::load(c, c, vb.pp("attn.c_proj"))?,
                n_head: config.n_head,
            },
            ln_2: LayerNorm::load(config, vb.pp("ln_2"))?,
            c_fc: Conv1D::load(c, inner, vb.pp("mlp.c_fc"))?,
            c_proj: Conv1D::load(inner, c, vb.pp("mlp.c_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attn.forward(&self.ln_1.forward(x)?)?)?;
        let hidden = self.c_fc.forward(&self.ln_2.forward(&x)?)?.gelu()?;
        &x + self.c_proj.forward(&hidden)?
    }
}

/// The whole model. nanoGPT: `GPT`, with its parts under `transformer.wte` and so on.
pub(crate) struct PlainGpt2 {
    wte: Tensor,
    wpe: Tensor,
    h: Vec<Block>,
    ln_f: LayerNorm,
}

impl PlainGpt2 {
    pub(crate) fn load(config: &Gpt2Config, vb: VarBuilder) -> Result<Self> {
        let blocks = (0..config.n_layer).map(|layer| Block::load(config, vb.pp(format!("h.{layer}"))));
        Ok(Self {
            wte: vb.get((config.vocab_size, config.n_embd), "wte.weight")?,
            wpe: vb.get((config.n_positions, config.n_embd), "wpe.weight")?,
            h: blocks.collect::<Result<_>>()?,
            ln_f: LayerNorm::load(config, vb.pp("ln_f"))?,
        })
    }

    /// Maps token IDs `(B, T)` to logits `(B, T, V)`: scores of every possible token after each token.
    pub(crate) fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let tokens = self.wte.index_select(&ids.flatten_all()?, 0)?.reshape((b, t, ()))?;
        let mut x = tokens.broadcast_add(&self.wpe.narrow(0, 0, t)?)?;
        for block in &self.h {
            x = block.forward(&x)?;
        }
        self.ln_f.forward(&x)?.broadcast_matmul(&self.wte.t()?) // tied head; nanoGPT: `lm_head`
    }
}

/// Reads the tensors of a GGUF file in f32, under Hugging Face's names.
pub(crate) fn tensors(gguf: &[u8]) -> Result<HashMap<String, Tensor>> {
    const NAMES: [(&str, &str); 10] = [
        ("token_embd", "wte"),
        ("position_embd", "wpe"),
        ("blk", "h"),
        ("attn_norm", "ln_1"),
        ("attn_qkv", "attn.c_attn"),
        ("attn_output", "attn.c_proj"),
        ("ffn_norm", "ln_2"),
        ("ffn_up", "mlp.c_fc"),
        ("ffn_down", "mlp.c_proj"),
        ("output_norm", "ln_f"),
    ];
    let mut file = Cursor::new(gguf);
    let content = Content::read(&mut file)?;
    let read = |name: &String| {
        let mut tensor = content.tensor(&mut file, name, &Device::Cpu)?.dequantize(&Device::Cpu)?;
        let name =
            NAMES.iter().fold(format!("transformer.{name}"), |name, (from, to)| name.replace(from, to));
        if name.contains(".c_") && name.ends_with(".weight") {
            tensor = tensor.t()?.contiguous()?; // GGUF stores (out, in).
        }
        Ok((name, tensor))
    };
    content.tensor_infos.keys().map(read).collect()
}

/// Continues a prompt by greedy decoding.
fn main() -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let config = Gpt2Config::from_json(std::str::from_utf8(candle_gpt2_stories::CONFIG)?)?;
    let tokenizer = tokenizers::Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER)?;
    let vb = VarBuilder::from_tensors(tensors(candle_gpt2_stories::WEIGHTS)?, DType::F32, &Device::Cpu);
    let model = PlainGpt2::load(&config, vb.pp("transformer"))?;
    let prompt = std::env::args().nth(1).unwrap_or("One day".into());
    let mut ids = tokenizer.encode(prompt, false)?.get_ids().to_vec();
    for _ in 0..40 {
        let logits = model.forward(&Tensor::new(&ids[..], &Device::Cpu)?.unsqueeze(0)?)?;
        ids.push(logits.get(0)?.get(ids.len() - 1)?.argmax(D::Minus1)?.to_scalar()?);
    }
    println!("{}", tokenizer.decode(&ids, false)?);
    Ok(())
}
