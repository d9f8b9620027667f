//! Texts to token files that a training reads.

use std::path::PathBuf;

use candle_gpt2_jobs::TokenizeJob;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::Map;

use crate::errors::Result;
use crate::keywords::read;
use crate::model::hub;
use crate::process::start;
use crate::reporting::reporting;
use crate::train::files;
use crate::values::{dict_of, number};

/// Encodes texts into token files, as `gpt2 tokenize` does: the folder out gets train.bin and val.bin, which nanoGPT reads, or
/// numbered files, next to tokens.json and the tokenizer; candle_gpt2.train takes it as data. The same call gives the same
/// files, whatever the number of threads, interrupted or not. Returns a dict: out, format, dtype, training_tokens, held_out_tokens,
/// documents, shards, bytes, encoded_bytes, elapsed_s.
///
/// data: a file or a list of them, UTF-8 text, or .jsonl with a `text` in each line. model: the checkpoint whose tokenizer is used;
/// tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder with one, by default the model's. format: "nanogpt" or "llm.c". dtype: "u16" or "u32", by
/// default as narrow as the vocabulary allows. shard_tokens: tokens in a file, by default all, or 100 million for llm.c. held_out: the
/// share at the end of each file that is not trained on. resume: continue what an interrupted call has made.
#[pyfunction]
#[pyo3(signature = (data, out, *, model = None, tokenizer = None, n_head = None, offline = false, **options), text_signature = "(data, out, *, format='nanogpt', dtype=None, shard_tokens=None, held_out=0.01, resume=False, model=None, tokenizer=None, n_head=None, offline=False)")]
#[expect(clippy::too_many_arguments, reason = "keywords of Python")]
pub(crate) fn tokenize<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyAny>,
    out: PathBuf,
    model: Option<PathBuf>,
    tokenizer: Option<PathBuf>,
    #[pyo3(from_py_with = number)] n_head: Option<usize>,
    offline: bool,
    options: Option<&Bound<'py, PyDict>>,
) -> Result<Bound<'py, PyAny>> {
    start()?;
    let options = read(Map::new(), options, &["model", "tokenizer", "n_head", "offline"])?;
    let (data, hub) = (files(data)?, hub(offline));
    let job = TokenizeJob { data, model, tokenizer, out, options, n_head, hub };
    dict_of(py, &reporting(py, |listener| job.run(listener))?)
}
