//! Job that stores activations at selected hook points for every token in a prompts file.
//!
//! A shard gets its final name when it is complete, and `activations.json` lists the complete shards. An
//! interruption therefore loses only the shard being computed. Sequences are computed in batches without
//! padding, and a sequence's values do not depend on its batch.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2Config, Site};
use candle_gpt2_engine::{LoadedModel, Progress, Reporter, RowFile, Unit, fingerprint};
use candle_gpt2_interpret::{InterpretError, record_rows, site_width, token_rows};
use candle_gpt2_weights::{MappedFile, replace_file, write_tensors};
use serde::{Deserialize, Serialize};

use crate::activation_manifest::{
    ActivationManifest, ActivationShard, FILE_NAME, Prompts, SCHEMA, SiteWidth, file_crc32, shard_name,
};
use crate::job_folder::{JobFolder, Resume};
use crate::{JobError, TrainingError};

/// Number of tokens in a batch, enough to keep all threads busy.
const BATCH_TOKENS: usize = 2048;
/// Name of the tensor with a shard's token ids.
pub(crate) const TOKENS: &str = "tokens";
/// Name of the tensor with the index of each sequence's first token.
pub(crate) const STARTS: &str = "starts";
/// Name of the tensor with each sequence's line in the prompts file, counted from 1.
pub(crate) const LINES: &str = "lines";

/// Job that turns a prompts file into a folder of activation shards.
///
/// A shard is a safetensors file. It has an f32 tensor `(tokens, width)` for each hook point, named as in
/// TransformerLens, and the token ids in `tokens`. For each sequence, `starts` has the row of its first
/// token and `lines` has its line.
///
/// A prompt is one sequence, but a prompt longer than the context is split into several.
/// `activations.json` describes the shards. The same job writes the same files, interrupted or not.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, RowFile, Silent};
/// use candle_gpt2_interpret::named_sites;
/// use candle_gpt2_jobs::{ActivationsJob, ActivationsOptions};
///
/// let folder = tempfile::tempdir()?;
/// let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let job = ActivationsJob {
///     prompts: "prompts.txt".into(),
///     rows: RowFile::new("prompts.txt".as_ref(), b"One day, Mia was\nThe dog ran".to_vec()),
///     model: "built-in".into(),
///     sites: named_sites("resid_pre2", 6)?,
///     bos: None,
///     out: folder.path().join("activations"),
///     options: ActivationsOptions::default(),
/// };
/// let report = job.run(&model, &Silent)?;
/// assert_eq!(report.sequences, 2);
/// let shard = candle_core::safetensors::load(job.out.join(&report.shards[0]), &candle_core::Device::Cpu)?;
/// assert_eq!(shard["blocks.2.hook_resid_pre"].dims(), [report.tokens, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ActivationsJob {
    /// Path of the prompts file.
    pub prompts: PathBuf,
    /// Prompts read from the file.
    pub rows: RowFile,
    /// Name of the model.
    pub model: String,
    /// Hook points: at least one, each with a vector for every token; see [`site_width`].
    pub sites: Vec<Site>,
    /// Token to prepend to every sequence.
    pub bos: Option<u32>,
    /// Output folder; it must be new or empty, unless the job resumes.
    pub out: PathBuf,
    /// Other options.
    pub options: ActivationsOptions,
}

/// Options for writing activations.
///
/// In JSON, the options form an object keyed by field name; every field is optional. An
/// [`ActivationsJob`] contains them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ActivationsOptions {
    /// Tokens in a shard; the current shard stays in memory and takes 4 bytes per token for each value at
    /// each hook point
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS", default_value_t = ActivationsOptions::default().shard_size, allow_negative_numbers = true, requires = "prompts_file"))]
    pub shard_size: usize,
    /// Resume an interrupted run in --out; the other options must be the same
    #[cfg_attr(feature = "clap", arg(long, requires = "prompts_file"))]
    pub resume: bool,
}

impl Default for ActivationsOptions {
    fn default() -> Self {
        Self { shard_size: 1 << 15, resume: false }
    }
}

/// Result of a job; [`ActivationsJob::run`] returns it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ActivationsReport {
    /// Name and version of the folder's layout.
    pub schema: &'static str,
    /// Output folder.
    pub out: PathBuf,
    /// Hook points.
    pub sites: Vec<SiteWidth>,
    /// Token prepended to every sequence.
    pub bos: Option<u32>,
    /// Number of tokens in all shards.
    pub tokens: usize,
    /// Number of sequences in all shards.
    pub sequences: usize,
    /// File names of the shards.
    pub shards: Vec<String>,
    /// Size of all shards in bytes.
    pub bytes: u64,
    /// Number of tokens that this run computed.
    pub computed_tokens: usize,
    /// Duration of this run in seconds.
    pub elapsed_s: f64,
}

/// A sequence of tokens and its line in the prompts file.
struct Sequence {
    line: usize,
    ids: Vec<u32>,
}

/// Totals over all sequences of a job.
#[derive(Clone, Copy)]
struct Counted {
    tokens: usize,
    /// CRC-32 of the lengths and ids of all sequences.
    crc32: u32,
}

impl ActivationsJob {
    /// Checks everything that does not require the model's weights.
    ///
    /// # Errors
    /// Fails if there are no hook points, a hook point does not have one vector per token, or the shard
    /// size is 0.
    pub fn check(&self, config: &Gpt2Config) -> Result<(), JobError> {
        if self.sites.is_empty() {
            return Err(call("`sites`: expected at least one hook point").into());
        }
        self.site_widths(config)?;
        if self.options.shard_size == 0 {
            let expected = "at least 1".to_owned();
            let found = "0".to_owned();
            return Err(TrainingError::OptionOutOfRange { option: "shard_size", expected, found }.into());
        }
        Ok(())
    }

    /// Writes the missing shards.
    ///
    /// # Errors
    /// Fails if an option is out of range, the folder is in use or belongs to another job, a line is
    /// not a valid prompt, or a file cannot be written.
    ///
    /// Returns [`TrainingError::Interrupted`] if the reporter interrupts the job. Complete shards are
    /// kept.
    pub fn run(&self, model: &LoadedModel, reporter: &dyn Reporter) -> Result<ActivationsReport, JobError> {
        self.write(model, reporter).map_err(|error| match error.is_interrupted() {
            true => {
                let manifest = ActivationManifest::path(&self.out);
                TrainingError::Interrupted { state: manifest.exists().then_some(manifest) }.into()
            }
            false => error,
        })
    }

    fn write(&self, model: &LoadedModel, reporter: &dyn Reporter) -> Result<ActivationsReport, JobError> {
        let clock = Instant::now();
        self.check(model.config())?;
        JobFolder::expect_unused(&self.out)?;
        let counted = self.count(model, reporter)?;
        let wanted = self.manifest(counted, model, reporter)?;
        // A killed run may leave complete shards followed by an incomplete one.
        let next = shard_name(self.existing_manifest()?.map_or(0, |found| found.shards.len()));
        let folder = JobFolder::take(&self.out, &[FILE_NAME, &next])?;
        // Another process may have used the folder since the first check.
        let found = self.existing_manifest()?;
        let is_begun = found.is_some();
        if let Some(found) = &found {
            found.check_same(&self.out, &wanted)?;
            found.check_shards(&self.out)?;
        }
        folder.remove_leftovers();
        let mut manifest = found.unwrap_or(wanted);
        let before = manifest.tokens;
        let written = match manifest.complete {
            true => Ok(()),
            false => self.write_shards(&mut manifest, counted.tokens, model, reporter),
        };
        if written.is_err() && !is_begun && manifest.shards.is_empty() {
            let _ = fs::remove_file(ActivationManifest::path(&self.out));
        }
        written?;
        Ok(ActivationsReport {
            schema: SCHEMA,
            out: self.out.clone(),
            bytes: manifest.shards.iter().map(|shard| shard.bytes).sum(),
            sites: manifest.sites,
            bos: manifest.bos,
            tokens: manifest.tokens,
            sequences: manifest.sequences,
            shards: manifest.shards.into_iter().map(|shard| shard.file).collect(),
            computed_tokens: manifest.tokens - before,
            elapsed_s: clock.elapsed().as_secs_f64(),
        })
    }

    /// Returns the manifest from an earlier run.
    ///
    /// Rejects a folder with other contents, or with a manifest if `resume` is not set.
    fn existing_manifest(&self) -> Result<Option<ActivationManifest>, TrainingError> {
        let found = if self.out.is_dir() { ActivationManifest::read(&self.out)? } else { None };
        let can_resume = found.is_some();
        let resume = Resume { resumes: can_resume && self.options.resume, can_resume };
        JobFolder::check(&self.out, &[FILE_NAME], None, resume)?;
        Ok(found)
    }

    fn site_widths(&self, config: &Gpt2Config) -> Result<Vec<SiteWidth>, TrainingError> {
        let width = |site: &Site| {
            let width = site_width(*site, config).ok_or_else(|| {
                call(&format!(
                    "`sites`: {site} does not have one vector per token; choose residual streams, normalized inputs, queries, keys, values, \
                     z, MLP outputs or MLP neurons"
                ))
            })?;
            Ok(SiteWidth { name: site.to_string(), width })
        };
        self.sites.iter().map(width).collect()
    }

    /// Creates the manifest of a folder before anything is computed.
    fn manifest(
        &self,
        counted: Counted,
        model: &LoadedModel,
        reporter: &dyn Reporter,
    ) -> Result<ActivationManifest, JobError> {
        Ok(ActivationManifest {
            schema: SCHEMA.to_owned(),
            complete: false,
            model: self.model.clone(),
            fingerprint: fingerprint(model.model(), reporter)?,
            weights: model.weight_type().to_owned(),
            prompts: Prompts {
                file: self.prompts.clone(),
                bytes: self.rows.bytes().len() as u64,
                crc32: crc32fast::hash(self.rows.bytes()),
                ids_crc32: counted.crc32,
            },
            sites: self.site_widths(model.config())?,
            dtype: "F32".to_owned(),
            bos: self.bos,
            context: model.config().n_positions,
            shard_size: self.options.shard_size,
            tokens: 0,
            sequences: 0,
            shards: Vec::new(),
        })
    }

    /// Reads every prompt once, to find invalid lines before the long computation.
    fn count(&self, model: &LoadedModel, reporter: &dyn Reporter) -> Result<Counted, JobError> {
        let bar = reporter.start("reading", self.rows.len() as u64, Unit::Items("prompts"));
        let (mut tokens, mut hasher) = (0, crc32fast::Hasher::new());
        for index in 0..self.rows.len() {
            for Sequence { ids, .. } in self.sequences(index, model)? {
                tokens += ids.len();
                hasher.update(&(ids.len() as u64).to_le_bytes());
                ids.iter().for_each(|id| hasher.update(&id.to_le_bytes()));
            }
            bar.advance(1);
            if reporter.is_interrupted() {
                return Err(interrupted().into());
            }
        }
        match tokens {
            0 => {
                let what = "the file contains no tokens".to_owned();
                Err(TrainingError::Data { path: self.prompts.clone(), what }.into())
            }
            _ => Ok(Counted { tokens, crc32: hasher.finalize() }),
        }
    }

    /// Splits a row into sequences.
    fn sequences(&self, index: usize, model: &LoadedModel) -> Result<Vec<Sequence>, TrainingError> {
        let row = self.rows.sequences(index, model.vocabulary(), self.bos);
        let refuse = |error| {
            let what = format!("line {}: {error}", row.line);
            TrainingError::Data { path: self.prompts.clone(), what }
        };
        let sequence = |ids| Sequence { line: row.line, ids };
        Ok(row.sequences.map_err(refuse)?.into_iter().map(sequence).collect())
    }

    fn write_shards(
        &self,
        manifest: &mut ActivationManifest,
        total: usize,
        model: &LoadedModel,
        reporter: &dyn Reporter,
    ) -> Result<(), JobError> {
        manifest.write(&self.out)?;
        let bar = reporter.start("computing", total as u64, Unit::Items("tokens"));
        bar.advance(manifest.tokens as u64);
        let (mut waiting, mut tokens, mut skipped): (Vec<Sequence>, _, _) =
            (Vec::new(), 0, manifest.sequences);
        for index in 0..self.rows.len() {
            for sequence in self.sequences(index, model)? {
                if skipped > 0 {
                    skipped -= 1;
                    continue;
                }
                if !waiting.is_empty() && tokens + sequence.ids.len() > self.options.shard_size {
                    self.write_shard(manifest, &std::mem::take(&mut waiting), model, (reporter, &*bar))?;
                    tokens = 0;
                }
                tokens += sequence.ids.len();
                waiting.push(sequence);
            }
        }
        if !waiting.is_empty() {
            self.write_shard(manifest, &waiting, model, (reporter, &*bar))?;
        }
        manifest.complete = true;
        Ok(manifest.write(&self.out)?)
    }

    /// Computes sequences, writes them as the next shard, and adds it to the manifest.
    fn write_shard(
        &self,
        manifest: &mut ActivationManifest,
        sequences: &[Sequence],
        model: &LoadedModel,
        (reporter, bar): (&dyn Reporter, &dyn Progress),
    ) -> Result<(), JobError> {
        let mut rows: Vec<Vec<f32>> = vec![Vec::new(); self.sites.len()];
        let mut rest = sequences;
        while let [first, ..] = rest {
            if reporter.is_interrupted() {
                return Err(interrupted().into());
            }
            let (mut count, mut tokens) = (1, first.ids.len());
            while let Some(next) = rest.get(count).filter(|next| tokens + next.ids.len() <= BATCH_TOKENS) {
                (count, tokens) = (count + 1, tokens + next.ids.len());
            }
            let (batch, after) = rest.split_at(count);
            let ids: Vec<&[u32]> = batch.iter().map(|sequence| &sequence.ids[..]).collect();
            let record = record_rows(model.model(), &ids, self.sites.iter().copied()).map_err(compute)?;
            for (site, rows) in self.sites.iter().zip(&mut rows) {
                let values = token_rows(*site, record.get(*site)?)?.to_device(&Device::Cpu)?;
                rows.extend(values.flatten_all()?.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()?);
            }
            bar.advance(tokens as u64);
            rest = after;
        }
        let ids: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.ids.iter().copied()).collect();
        let tokens = ids.len();
        let mut start = 0;
        let starts = sequences.iter().map(|sequence| {
            start += sequence.ids.len();
            start - sequence.ids.len()
        });
        let lines = sequences.iter().map(|sequence| sequence.line);
        let list = |numbers: &mut dyn Iterator<Item = usize>| -> candle_core::Result<Tensor> {
            let numbers: Vec<i64> = numbers.map(|number| number as i64).collect();
            Tensor::from_vec(numbers, sequences.len(), &Device::Cpu)
        };
        let mut tensors = BTreeMap::from([
            (TOKENS.to_owned(), Tensor::from_vec(ids, tokens, &Device::Cpu)?),
            (STARTS.to_owned(), list(&mut starts.into_iter())?),
            (LINES.to_owned(), list(&mut lines.into_iter())?),
        ]);
        for (SiteWidth { name, width }, rows) in manifest.sites.iter().zip(rows) {
            tensors.insert(name.clone(), Tensor::from_vec(rows, (tokens, *width), &Device::Cpu)?);
        }
        let name = shard_name(manifest.shards.len());
        let path = self.out.join(&name);
        replace_file(&path, |partial: &Path| Ok(write_tensors(partial, &tensors, HashMap::new())?))?;
        let file = MappedFile::open(&path)?;
        let (bytes, crc32) = (file.len() as u64, Some(file_crc32(&file)));
        manifest.shards.push(ActivationShard {
            file: name,
            tokens,
            sequences: sequences.len(),
            bytes,
            crc32,
        });
        manifest.tokens += tokens;
        manifest.sequences += sequences.len();
        Ok(manifest.write(&self.out)?)
    }
}

fn call(what: &str) -> TrainingError {
    TrainingError::Call { what: what.to_owned() }
}

fn interrupted() -> TrainingError {
    TrainingError::Interrupted { state: None }
}

/// Converts an error from a validated sequence, where only the computation itself can fail.
fn compute(error: InterpretError) -> TrainingError {
    match error {
        InterpretError::Compute(error) => error.into(),
        error => call(&error.to_string()),
    }
}
