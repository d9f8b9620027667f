//! A folder of shards that `gpt2 cache` wrote, on its way to what a dictionary learns from.

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

/// Bytes of a number.
const F32_BYTES: usize = 4;

/// Where the values that are read, and those that are written, are in the file of a shard, for each block of a dictionary.
type Places = Vec<[Range<usize>; 2]>;
/// Tokens of a shard, where its sequences begin, and where its values lie.
type Contents = (Vec<u32>, Vec<i64>, Places);

/// A folder of activations, whose shards are there.
pub(crate) struct ActivationFolder {
    folder: PathBuf,
    manifest: ActivationManifest,
}

/// A shard in memory as far as it is read.
struct Shard {
    file: MappedFile,
    places: Places,
}

/// Rows of shards.
struct ShardRows {
    shards: Vec<Shard>,
    widths: [usize; 2],
    /// The hook points of each block.
    names: Vec<[String; 2]>,
    /// The shard of each row, and its place there.
    rows: Vec<(u32, u32)>,
}

impl ActivationFolder {
    /// Whether a folder is one of activations.
    pub(crate) fn is_one(folder: &Path) -> bool {
        ActivationManifest::path(folder).is_file()
    }

    /// Opens a folder.
    ///
    /// # Errors
    /// When its making was interrupted, or it is damaged.
    pub(crate) fn open(folder: &Path) -> Result<Self, TrainingError> {
        let refuse = |what: &str| TrainingError::Data { path: folder.to_owned(), what: what.to_owned() };
        let manifest = ActivationManifest::read(folder)?
            .ok_or_else(|| refuse("no folder of activations: it has no activations.json"))?;
        if !manifest.complete {
            return Err(refuse(
                "its making was interrupted: resume it, or remove the folder and make it again",
            ));
        }
        manifest.check_shards(folder)?;
        Ok(Self { folder: folder.to_owned(), manifest })
    }

    /// Whether the texts begin with the BOS token.
    pub(crate) fn has_bos(&self) -> bool {
        self.manifest.bos.is_some()
    }

    /// Refuses another model than the one that the activations are of.
    ///
    /// # Errors
    /// When it is another one, or the reporter interrupts the check.
    pub(crate) fn check_model(&self, model: &LoadedModel, reporter: &dyn Reporter) -> Result<(), JobError> {
        let found = fingerprint(model.model(), reporter)?;
        if found == self.manifest.fingerprint {
            return Ok(());
        }
        let what = format!(
            "the activations are of the model {} with weights in {}, which computes other numbers than this one; give that model",
            self.manifest.model, self.manifest.weights
        );
        Err(TrainingError::Data { path: self.folder.clone(), what }.into())
    }

    /// The data of a training. The last texts, a share of all tokens, are held out; first tokens of texts are left out.
    ///
    /// # Errors
    /// When the hook points are not there, a shard is damaged, or there are too few tokens.
    pub(crate) fn training_data(
        &self,
        config: &Gpt2Config,
        numbers: &Hyperparameters,
        held_out: f64,
    ) -> Result<TrainingData, TrainingError> {
        let Some(dictionary) = &numbers.dictionary else {
            return Err(TrainingError::Call { what: "activations are for the task `dictionary`".into() });
        };
        let sites = dictionary.sites(config)?;
        let names: Vec<[String; 2]> =
            sites.iter().map(|pair| pair.map(|(site, _)| site.to_string())).collect();
        let is_there = |name: &String| self.manifest.sites.iter().any(|site| site.name == *name);
        if let Some(missing) = names.iter().flatten().find(|name| !is_there(name)) {
            let there: Vec<&str> = self.manifest.sites.iter().map(|site| &site.name[..]).collect();
            let what = format!("it has activations of {}, and none of {missing}", there.join(", "));
            return Err(TrainingError::Data { path: self.folder.clone(), what });
        }
        // Those of all blocks are the same.
        let widths = sites[0].map(|(_, width)| width);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of the tokens lies within them"
        )]
        let training = ((self.manifest.tokens as f64) * (1.0 - held_out)) as usize;
        let mut rows = ShardRows { shards: Vec::new(), widths, names, rows: Vec::new() };
        let (mut texts, mut before) = (Vec::new(), 0);
        for (number, written) in self.manifest.shards.iter().enumerate() {
            let file = MappedFile::open(&self.folder.join(&written.file))?;
            let damaged = |what: String| TrainingError::Data {
                path: file.path().to_owned(),
                what: format!("{what}; the shard is damaged: remove the folder and make it again"),
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
                            "`{name}`: expected f32 of ({tokens}, {width}), found {dtype:?} of {shape:?}"
                        );
                    }
                    let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
                    Ok(start..start + view.data().len())
                };
                let places = rows
                    .names
                    .iter()
                    .map(|[read, written]| Ok([place(read, widths[0])?, place(written, widths[1])?]));
                let places = places.collect::<candle_core::Result<Places>>()?;
                Ok((ids, starts, places))
            };
            let (ids, starts, places) = read().map_err(|error| damaged(error.to_string()))?;
            if ids.len() != written.tokens || ids.iter().any(|id| *id as usize >= config.vocab_size) {
                return Err(damaged(format!("expected {} tokens of the vocabulary", written.tokens)));
            }
            let ends = starts.iter().copied().skip(1).chain([ids.len() as i64]);
            for (start, end) in starts.iter().copied().zip(ends) {
                let text =
                    usize::try_from(start).ok().zip(usize::try_from(end).ok()).map(|(start, end)| start..end);
                let text = text.filter(|text| text.start < text.end && text.end <= ids.len());
                let text =
                    text.ok_or_else(|| damaged("`starts` does not cut its tokens into texts".into()))?;
                if before + text.end <= training {
                    // A shard has fewer tokens than 32 bits count, for it fits into memory; so has a folder shards.
                    let row = |row: usize| {
                        (u32::try_from(number).unwrap_or_default(), u32::try_from(row).unwrap_or_default())
                    };
                    rows.rows.extend((text.start + 1..text.end).map(row));
                } else {
                    texts.push(ids[text].to_vec());
                }
            }
            before += ids.len();
            rows.shards.push(Shard { file, places });
        }
        let size = DataSize {
            training_tokens: rows.rows.len(),
            held_out_tokens: texts.iter().map(Vec::len).sum(),
            rows: None,
        };
        // FNV-1a over what tells these activations from others.
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
            examples: Box::new(ActivationRows::new(rows, numbers.context, numbers.seed)?),
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
        let Some(first) = self.shards.first() else { candle_core::bail!("there are no shards") };
        let of = |side: usize| {
            let width = self.widths[side];
            let mut values = Vec::with_capacity(first.places.len() * rows.len() * width);
            for block in 0..first.places.len() {
                for row in rows {
                    let (shard, place) = self.rows[*row];
                    let Shard { file, places } = &self.shards[shard as usize];
                    let start = places[block][side].start + place as usize * width * F32_BYTES;
                    let (numbers, _) = file[start..start + width * F32_BYTES].as_chunks::<F32_BYTES>();
                    let numbers = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
                    if let Some(value) = numbers.clone().find(|value| !value.is_finite()) {
                        candle_core::bail!(
                            "{}: `{}`: expected finite numbers, found {value} at token {place}; the shard is damaged: remove the folder \
                             and make it again",
                            file.path().display(),
                            self.names[block][side]
                        );
                    }
                    values.extend(numbers);
                }
            }
            Tensor::from_vec(values, (first.places.len() * rows.len(), width), &Device::Cpu)
        };
        let x = of(0)?;
        let y = match first.places.iter().all(|[read, written]| read == written) {
            true => x.clone(),
            false => of(1)?,
        };
        Ok([x, y])
    }
}
