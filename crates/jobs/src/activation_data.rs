//! Training data for dictionaries, read from activation shards that `gpt2 cache` wrote.

use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::safetensors::SliceSafetensors;
use candle_core::{DType, Device, Tensor};
use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::{LoadedModel, Reporter, fingerprint};
use candle_gpt2_training::{ActivationRows, RowValues};
use candle_gpt2_weights::MappedFile;

use crate::activation_manifest::ActivationManifest;
use crate::activations::{STARTS, TOKENS};
use crate::{DataSize, HeldOut, Hyperparameters, JobError, TrainingData, TrainingError};

/// Size of an `f32` in bytes.
const F32_BYTES: usize = 4;

/// Byte ranges of each dictionary block's input and output values in a shard file.
type ByteRanges = Vec<[Range<usize>; 2]>;
/// Tokens of a shard, start indices of its sequences, and byte ranges of its values.
type Contents = (Vec<u32>, Vec<i64>, ByteRanges);

/// A folder of activations whose shards have been checked.
pub(crate) struct ActivationFolder {
    folder: PathBuf,
    manifest: ActivationManifest,
}

/// A memory-mapped shard.
struct Shard {
    file: MappedFile,
    byte_ranges: ByteRanges,
}

/// Rows of activations from several shards.
struct ShardRows {
    shards: Vec<Shard>,
    widths: [usize; 2],
    /// Hook points of each block.
    names: Vec<[String; 2]>,
    /// Shard index of each row, and the row's index within that shard.
    rows: Vec<(u32, u32)>,
}

impl ActivationFolder {
    /// Whether a folder contains activations.
    pub(crate) fn is_activation_folder(folder: &Path) -> bool {
        ActivationManifest::path(folder).is_file()
    }

    /// Opens a folder.
    ///
    /// # Errors
    /// Fails if the folder is incomplete or damaged.
    pub(crate) fn open(folder: &Path) -> Result<Self, TrainingError> {
        let refuse = |what: &str| TrainingError::Data { path: folder.to_owned(), what: what.to_owned() };
        let manifest = ActivationManifest::read(folder)?
            .ok_or_else(|| refuse("not a folder of activations: activations.json is missing"))?;
        if !manifest.complete {
            return Err(refuse(
                "incomplete, because its job was interrupted; resume the job, or remove the folder and start over",
            ));
        }
        manifest.check_shards(folder)?;
        Ok(Self { folder: folder.to_owned(), manifest })
    }

    /// Whether the sequences begin with the BOS token.
    pub(crate) fn has_bos(&self) -> bool {
        self.manifest.bos.is_some()
    }

    /// Checks that this model produced the activations.
    ///
    /// # Errors
    /// Fails if a different model produced them, or if the reporter interrupts the check.
    pub(crate) fn check_model(&self, model: &LoadedModel, reporter: &dyn Reporter) -> Result<(), JobError> {
        let found = fingerprint(model.model(), reporter)?;
        if found == self.manifest.fingerprint {
            return Ok(());
        }
        let what = format!(
            "the activations were computed by another model, {} with weights in {}; use that model",
            self.manifest.model, self.manifest.weights
        );
        Err(TrainingError::Data { path: self.folder.clone(), what }.into())
    }

    /// Splits the activations into training and held-out data.
    ///
    /// The last sequences, up to a fraction `held_out` of all tokens, are held out. The first token of
    /// each sequence is omitted.
    ///
    /// # Errors
    /// Fails if a hook point is missing, a shard is damaged, or there are too few tokens.
    pub(crate) fn training_data(
        &self,
        config: &Gpt2Config,
        hyperparameters: &Hyperparameters,
        held_out: f64,
    ) -> Result<TrainingData, TrainingError> {
        let Some(dictionary) = &hyperparameters.dictionary else {
            return Err(TrainingError::Call {
                what: "activations can only be used with `task` dictionary".into(),
            });
        };
        let sites = dictionary.sites(config)?;
        let names: Vec<[String; 2]> =
            sites.iter().map(|pair| pair.map(|(site, _)| site.to_string())).collect();
        let is_there = |name: &String| self.manifest.sites.iter().any(|site| site.name == *name);
        if let Some(missing) = names.iter().flatten().find(|name| !is_there(name)) {
            let there: Vec<&str> = self.manifest.sites.iter().map(|site| &site.name[..]).collect();
            let what =
                format!("the folder contains activations at {}, but not at {missing}", there.join(", "));
            return Err(TrainingError::Data { path: self.folder.clone(), what });
        }
        // The widths are the same for all blocks.
        let widths = sites[0].map(|(_, width)| width);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a fraction of the count fits into usize"
        )]
        let training = ((self.manifest.tokens as f64) * (1.0 - held_out)) as usize;
        let mut rows = ShardRows { shards: Vec::new(), widths, names, rows: Vec::new() };
        let (mut texts, mut before) = (Vec::new(), 0);
        for (number, written) in self.manifest.shards.iter().enumerate() {
            let file = MappedFile::open(&self.folder.join(&written.file))?;
            let damaged = |what: String| TrainingError::Data {
                path: file.path().to_owned(),
                what: format!("{what}; the shard is damaged: remove the folder and create it again"),
            };
            let read = || -> candle_core::Result<Contents> {
                let tensors = SliceSafetensors::new(&file)?;
                let ids = tensors.load(TOKENS, &Device::Cpu)?.to_vec1::<u32>()?;
                let starts = tensors.load(STARTS, &Device::Cpu)?.to_vec1::<i64>()?;
                let place = |name: &str, width: usize| -> candle_core::Result<Range<usize>> {
                    let view = tensors.get(name)?;
                    let dtype = DType::try_from(view.dtype())?;
                    if view.shape() != [ids.len(), width] || dtype != DType::F32 {
                        let (shape, tokens) = (view.shape().to_vec(), ids.len());
                        candle_core::bail!(
                            "`{name}`: expected f32 of shape ({tokens}, {width}), found {dtype:?} of shape {shape:?}"
                        );
                    }
                    let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
                    Ok(start..start + view.data().len())
                };
                let byte_ranges = rows
                    .names
                    .iter()
                    .map(|[read, written]| Ok([place(read, widths[0])?, place(written, widths[1])?]));
                let byte_ranges = byte_ranges.collect::<candle_core::Result<ByteRanges>>()?;
                Ok((ids, starts, byte_ranges))
            };
            let (ids, starts, byte_ranges) = read().map_err(|error| damaged(error.to_string()))?;
            if ids.len() != written.tokens || ids.iter().any(|id| *id as usize >= config.vocab_size) {
                return Err(damaged(format!(
                    "expected {} tokens, all with ids in the vocabulary",
                    written.tokens
                )));
            }
            let ends = starts.iter().copied().skip(1).chain([ids.len() as i64]);
            for (start, end) in starts.iter().copied().zip(ends) {
                let text =
                    usize::try_from(start).ok().zip(usize::try_from(end).ok()).map(|(start, end)| start..end);
                let text = text.filter(|text| text.start < text.end && text.end <= ids.len());
                let text =
                    text.ok_or_else(|| damaged("`starts` does not split the tokens into sequences".into()))?;
                if before + text.end <= training {
                    // Both numbers fit into 32 bits: a shard fits into memory, and a folder has few
                    // shards.
                    let row = |row: usize| {
                        (u32::try_from(number).unwrap_or_default(), u32::try_from(row).unwrap_or_default())
                    };
                    rows.rows.extend((text.start + 1..text.end).map(row));
                } else {
                    texts.push(ids[text].to_vec());
                }
            }
            before += ids.len();
            rows.shards.push(Shard { file, byte_ranges });
        }
        let size = DataSize {
            training_tokens: rows.rows.len(),
            held_out_tokens: texts.iter().map(Vec::len).sum(),
            rows: None,
        };
        // FNV-1a over the fields that identify these activations.
        let fingerprint = format!(
            "{:?}",
            (
                &self.manifest.fingerprint,
                &self.manifest.prompts.crc32,
                self.manifest.bos,
                size.training_tokens
            )
        )
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Ok(TrainingData {
            examples: Box::new(ActivationRows::new(rows, hyperparameters.context, hyperparameters.seed)?),
            held_out: (held_out > 0.0).then_some(HeldOut::Texts(texts)),
            fingerprint,
            size,
        })
    }
}

impl RowValues for ShardRows {
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn read(&self, rows: &[usize]) -> candle_core::Result<[Tensor; 2]> {
        let Some(first) = self.shards.first() else { candle_core::bail!("the folder has no shards") };
        let of = |side: usize| {
            let width = self.widths[side];
            let mut values = Vec::with_capacity(first.byte_ranges.len() * rows.len() * width);
            for block in 0..first.byte_ranges.len() {
                for row in rows {
                    let (shard, place) = self.rows[*row];
                    let Shard { file, byte_ranges } = &self.shards[shard as usize];
                    let start = byte_ranges[block][side].start + place as usize * width * F32_BYTES;
                    let (numbers, _) = file[start..start + width * F32_BYTES].as_chunks::<F32_BYTES>();
                    let numbers = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
                    if let Some(value) = numbers.clone().find(|value| !value.is_finite()) {
                        candle_core::bail!(
                            "{}: `{}`: expected finite numbers, found {value} at token {place}; the shard is damaged: remove the folder \
                             and create it again",
                            file.path().display(),
                            self.names[block][side]
                        );
                    }
                    values.extend(numbers);
                }
            }
            Tensor::from_vec(values, (first.byte_ranges.len() * rows.len(), width), &Device::Cpu)
        };
        let x = of(0)?;
        let y = match first.byte_ranges.iter().all(|[read, written]| read == written) {
            true => x.clone(),
            false => of(1)?,
        };
        Ok([x, y])
    }
}
