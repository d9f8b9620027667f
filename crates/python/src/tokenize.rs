//! Encoding of texts into token files for training.

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
use crate::train::data_paths;
use crate::values::{number, report_to_dict};

/// Encodes texts into token files for training, as `gpt2 tokenize` does.
///
/// The folder `out` receives train.bin and val.bin, which nanoGPT reads, or numbered files, and also
/// tokens.json and the tokenizer; candle_gpt2.train accepts it as data. The same call writes the same files,
/// regardless of the number of threads, and even after an interruption. Returns a dict: out, format, dtype,
/// training_tokens, held_out_tokens, documents, shards, bytes, encoded_bytes, elapsed_s.
///
/// data: a file or a list of files: UTF-8 text, or .jsonl with a `text` in each line. model: the checkpoint
/// that supplies the tokenizer. tokenizer: a tokenizer.json, spiece.model or vocab.txt, or a folder that
/// contains one; by default the model's. format: "nanogpt" or "llm.c". dtype: "u16" or "u32", by default the
/// narrowest that fits the vocabulary. shard_tokens: tokens per file, by default all, or 100 million for
/// llm.c. held_out: fraction at the end of each file that is held out. resume: continue an interrupted call.
#[pyfunction]
#[pyo3(signature = (data, out, *, model = None, tokenizer = None, n_head = None, offline = false, **options), text_signature = "(data, out, *, format='nanogpt', dtype=None, shard_tokens=None, held_out=0.01, resume=False, model=None, tokenizer=None, n_head=None, offline=False)")]
#[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
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
    let (data, hub) = (data_paths(data)?, hub(offline));
    let job = TokenizeJob { data, model, tokenizer, out, options, n_head, hub };
    report_to_dict(py, &reporting(py, |listener| job.run(listener))?)
}
