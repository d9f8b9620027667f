//! Memory requirements of a model, and checks that weights and KV caches fit in free memory.

use crate::{ProcessMemory, free_memory};
use candle_core::DType;
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, KvDType, KvSlot};
use candle_gpt2_generation::{GenerationConfig, Request, SchedulerOptions, SearchMode};
use candle_gpt2_weights::{Checkpoint, LoadMemory, WeightDType};
use serde::Serialize;

use crate::{EngineError, LoadedModel};

/// Memory that a model needs on the CPU, in bytes, known before it is loaded.
///
/// The tokenizer, the program itself, and files that are already in memory are not included.
///
/// ```
/// use candle_gpt2_engine::{MemoryNeeded, ModelOptions, Silent, WeightDType};
///
/// let checkpoint = ModelOptions::default().open_checkpoint(&Silent)?;
/// let needed = |dtype| MemoryNeeded::of(&checkpoint, Some(dtype), None);
/// assert!(needed(WeightDType::Q8)?.weights < needed(WeightDType::F32)?.weights / 3);
/// assert!(needed(WeightDType::F32)?.total() > 4 * 3_487_232);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryNeeded {
    /// Size of the weights in memory.
    pub weights: u64,
    /// Additional memory while loading; at most one parameter if the file is read in parts.
    pub loading: u64,
    /// KV cache of one full context.
    pub kv: u64,
    /// Approximate size of a full-length prompt's activations and one token's logits.
    pub activations: u64,
}

impl MemoryNeeded {
    /// Computes a model's requirements for the given weight and KV cache types.
    ///
    /// `None` selects the default of [`ModelOptions`](crate::ModelOptions).
    ///
    /// # Errors
    /// If the tensors do not fit the model, or the CPU does not support the type.
    pub fn of(
        checkpoint: &Checkpoint,
        dtype: Option<WeightDType>,
        kv_dtype: Option<KvDType>,
    ) -> Result<Self, EngineError> {
        let LoadMemory { resident: weights, reading: loading } = checkpoint.load_memory(dtype)?;
        let config = checkpoint.config();
        let kv_dtype = kv_dtype.unwrap_or_else(|| checkpoint.kv_dtype_on_cpu(dtype));
        // The head dimension is padded to a multiple of 16, as is the number of tokens.
        let filled = |count: usize| KvSlot::room_of(count) as u64;
        let of_each = config.kv_bytes_per_token(kv_dtype) as u64;
        let of_filled = of_each.saturating_mul(filled(config.head_dim())).div_ceil(config.head_dim() as u64);
        let kv = match config.head.has_language_model() {
            true => of_filled.saturating_mul(filled(config.n_positions)),
            // A classifier has no cache.
            false => 0,
        };
        // Values per token at the widest point, the end of the MLP. The inner activations count four times,
        // because the matrix product holds copies of them. The rest is the residual stream, the normalized
        // stream, the output and padding.
        let width = (4 * config.inner_width() + 5 * config.n_embd) as u64;
        let values =
            (config.n_positions as u64).saturating_mul(width).saturating_add(config.vocab_size as u64);
        Ok(Self { weights, loading, kv, activations: values.saturating_mul(size_of::<f32>() as u64) })
    }

    /// Combines the memory of two models that are loaded one after the other and run together.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            weights: self.weights.saturating_add(other.weights),
            loading: self.loading.max(other.loading),
            kv: self.kv.saturating_add(other.kv),
            activations: self.activations.max(other.activations),
        }
    }

    /// Free memory required to load and run the model.
    ///
    /// Loading and computation do not overlap, so only the larger of the two counts.
    pub fn total(&self) -> u64 {
        let Self { weights, loading, kv, activations } = *self;
        weights.saturating_add(loading.max(kv.saturating_add(activations)))
    }
}

/// Checks that the weights fit in the free memory, including swap, if the system reports it.
///
/// A process that exceeds the memory is killed without a message. Only the weights count, so no model that
/// could be loaded is rejected.
pub(crate) fn check_room(checkpoint: &Checkpoint, dtype: Option<WeightDType>) -> Result<(), EngineError> {
    let Some(ProcessMemory { available, swap, .. }) = ProcessMemory::now() else { return Ok(()) };
    check_room_in(available.saturating_add(swap) as u64, checkpoint, dtype)
}

/// Type of the weights on a CPU: `dtype`, or by default the checkpoint's own type.
pub(crate) fn dtype_on_cpu(checkpoint: &Checkpoint, dtype: Option<WeightDType>) -> WeightDType {
    dtype.or(checkpoint.quantized_dtype()).unwrap_or(match checkpoint.stored_dtype() {
        DType::F16 => WeightDType::F16,
        _ => WeightDType::F32,
    })
}

fn check_room_in(free: u64, checkpoint: &Checkpoint, dtype: Option<WeightDType>) -> Result<(), EngineError> {
    let needed = |dtype| -> Result<u64, EngineError> {
        let LoadMemory { resident, reading } = checkpoint.load_memory(dtype)?;
        Ok(resident.max(reading))
    };
    let weights = needed(dtype)?;
    if weights <= free {
        return Ok(());
    }
    let mut smaller = [WeightDType::F16, WeightDType::Q8, WeightDType::Q4].into_iter();
    let fitting = smaller
        .find_map(|dtype| Some((dtype.name(), needed(Some(dtype)).ok().filter(|bytes| *bytes <= free)?)));
    let dtype = dtype_on_cpu(checkpoint, dtype).name();
    Err(EngineError::WeightRoom { free, weights, dtype, fitting })
}

/// Total KV cache size for all sequences that run concurrently.
#[derive(Debug, PartialEq)]
pub(crate) struct KvDemand {
    /// Number of sequences, or rows of a search.
    rows: usize,
    /// Tokens of the longest sequence.
    longest: usize,
    /// Tokens of all sequences.
    kv_tokens: usize,
}

impl KvDemand {
    /// Computes the KV cache size for the first `options.max_texts` sequences.
    ///
    /// Each prompt has `copies` sequences. `tokens` holds, for each prompt, the length of one sequence. A CPU
    /// allocates memory when it is written, and a GPU allocates all of it before the first sequence.
    pub(crate) fn of_texts(tokens: &[usize], copies: usize, options: SchedulerOptions, is_cpu: bool) -> Self {
        let SchedulerOptions { max_texts: rows, kv_tokens, .. } = options;
        if !is_cpu {
            return Self { rows, longest: kv_tokens / rows, kv_tokens };
        }
        let (mut rest, mut kv_tokens) = (rows, 0_usize);
        for each in tokens {
            let texts = copies.min(rest);
            rest -= texts;
            kv_tokens = kv_tokens.saturating_add(texts.saturating_mul(*each));
        }
        Self { rows, longest: tokens.iter().copied().max().unwrap_or(0), kv_tokens }
    }

    /// Computes the KV cache size for the rows of a search.
    pub(crate) fn of_search(prompt: &[u32], config: &GenerationConfig, model: &Gpt2Config) -> Self {
        let (rows, more) = match config.search_mode() {
            // Contrastive search also runs the last token through the model.
            SearchMode::Contrastive => (config.top_k.min(model.vocab_size), 1),
            _ => (config.num_beams, 0),
        };
        let config = GenerationConfig {
            max_new_tokens: config.max_new_tokens.saturating_add(more),
            max_length: config.max_length.map(|length| length.saturating_add(more)),
            ..config.clone()
        };
        // A rejected prompt needs no cache.
        let longest = Request::new(prompt.to_vec(), config).kv_tokens(model).unwrap_or(0);
        Self { rows, longest, kv_tokens: rows.saturating_mul(longest) }
    }

    /// Checks that the cache fits in the free memory, if the system reports it.
    pub(crate) fn check(
        &self,
        model: &Gpt2LMHeadModel,
        assistant: Option<&Gpt2LMHeadModel>,
    ) -> Result<(), EngineError> {
        let of_assistant = |model: &Gpt2LMHeadModel| model.config().kv_bytes_per_token(model.kv_dtype());
        let of_assistant = assistant.map_or(0, of_assistant);
        match free_memory(model.device()) {
            Some(available) => {
                let of_both = model.config().kv_bytes_per_token(model.kv_dtype()) + of_assistant;
                self.check_in(available, of_both)
            }
            None => Ok(()),
        }
    }

    /// Checks the cache against `available` bytes, at `token` bytes per token.
    fn check_in(&self, available: usize, token: usize) -> Result<(), EngineError> {
        let needed = self.kv_tokens.saturating_mul(token);
        if needed > available {
            return Err(EngineError::NoRoom { rows: self.rows, tokens: self.longest, needed, available });
        }
        Ok(())
    }
}

impl LoadedModel {
    /// Checks that a KV cache of `kv_tokens` tokens for `texts` sequences fits in the free memory.
    ///
    /// The check passes if the system does not report the free memory.
    ///
    /// # Errors
    /// If the cache does not fit.
    pub fn check_kv_room(&self, texts: usize, kv_tokens: usize) -> Result<(), EngineError> {
        let longest = kv_tokens.div_ceil(texts.max(1));
        KvDemand { rows: texts, longest, kv_tokens }.check(self.model(), self.assistant())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelOptions, Silent};

    fn options(max_texts: usize, each: usize) -> SchedulerOptions {
        SchedulerOptions { max_texts, kv_tokens: max_texts.saturating_mul(each), chunk_tokens: 2 }
    }

    /// The 124M model caches 2 · 12 · 768 values of 4 bytes for each token.
    #[test]
    fn batch_that_exceeds_memory_is_rejected_with_its_size() {
        let config = Gpt2Config::gpt2();
        let needed = 4096 * 1024 * 2 * 12 * 768 * 4;
        let check = |available, tokens, dtype| {
            let demand = KvDemand::of_texts(&[tokens], 4096, options(4096, tokens), true);
            demand.check_in(available, config.kv_bytes_per_token(dtype))
        };
        assert!(check(needed, 1024, KvDType::F32).is_ok());
        let error = check(needed - 1, 1024, KvDType::F32).unwrap_err();
        assert!(error.is_usage());
        let expected = "a batch of 4096 sequences of up to 1024 tokens needs 288.0 GiB of KV cache";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert!(
            check(needed / 2, 1024, KvDType::F16).is_ok() && check(needed / 2, 512, KvDType::F32).is_ok()
        );
        let endless = KvDemand::of_texts(&[usize::MAX], usize::MAX, options(usize::MAX, usize::MAX), true);
        assert!(endless.check_in(0, config.kv_bytes_per_token(KvDType::F32)).is_err(), "no overflow");
    }

    /// On a CPU, each sequence counts with its own length; a GPU allocates the whole cache up front.
    #[test]
    fn kv_demand_on_cpu_sums_individual_lengths() {
        let of = |copies, options, is_cpu| KvDemand::of_texts(&[1000, 3, 0, 5], copies, options, is_cpu);
        let sums = [(4, 1, 1008), (8, 2, 2016), (5, 2, 2006), (2, 3, 2000), (2, 1, 1003)];
        for (rows, copies, kv_tokens) in sums {
            let expected = KvDemand { rows, longest: 1000, kv_tokens };
            assert_eq!(of(copies, options(rows, 1024), true), expected, "{copies} of each");
        }
        let whole = KvDemand { rows: 4, longest: 1024, kv_tokens: 4096 };
        assert_eq!(of(1, options(4, 1024), false), whole);
        assert_eq!(
            KvDemand::of_texts(&[], 1, options(1, 1), true),
            KvDemand { rows: 1, longest: 0, kv_tokens: 0 }
        );
    }

    #[test]
    fn oversized_weights_are_rejected_with_a_fitting_dtype() {
        let model = candle_gpt2_testing::fixture_path("tiny-checkpoint");
        let checkpoint = ModelOptions { model, ..ModelOptions::default() }.open_checkpoint(&Silent).unwrap();
        let needed = |dtype| MemoryNeeded::of(&checkpoint, Some(dtype), None).unwrap().weights;
        let (f32, f16, q4) = (needed(WeightDType::F32), needed(WeightDType::F16), needed(WeightDType::Q4));
        assert!(check_room_in(f32, &checkpoint, None).is_ok());
        for (free, fitting) in [(f32 - 1, Some(("f16", f16))), (q4, Some(("q4", q4))), (q4 - 1, None)] {
            let error = check_room_in(free, &checkpoint, None).unwrap_err();
            assert!(!error.is_usage());
            let EngineError::WeightRoom { free: found_free, weights, dtype, fitting: found } = error else {
                panic!("{error}")
            };
            assert_eq!((found_free, weights, dtype, found), (free, f32, "f32", fitting));
        }
        assert!(check_room_in(q4, &checkpoint, Some(WeightDType::Q4)).is_ok());
        let error = EngineError::WeightRoom {
            free: 3 << 20,
            weights: 8 << 20,
            dtype: "f32",
            fitting: Some(("q8", 2 << 20)),
        };
        let expected =
            "the weights need 8.0 MiB of memory in f32, but only 3.0 MiB is free; in q8 they need 2.0 MiB";
        assert_eq!(error.to_string(), expected);
        let error = EngineError::WeightRoom { free: 1 << 20, weights: 8 << 20, dtype: "f32", fitting: None };
        assert!(error.to_string().ends_with("1.0 MiB is free; no smaller dtype fits either"), "{error}");
    }

    #[test]
    fn search_needs_one_row_per_beam_or_candidate() {
        let model = Gpt2Config::gpt2();
        let demand = |config: &GenerationConfig| KvDemand::of_search(&[1, 2, 3], config, &model);
        let each = |rows, longest| KvDemand { rows, longest, kv_tokens: rows * longest };
        let beams = GenerationConfig { num_beams: 5, max_new_tokens: 10, ..GenerationConfig::default() };
        assert_eq!(demand(&beams), each(5, 16), "whole panels");
        assert_eq!(demand(&GenerationConfig { max_new_tokens: 5000, ..beams.clone() }), each(5, 1024));
        let at_most = |max_length| GenerationConfig {
            max_length: Some(max_length),
            max_new_tokens: 5000,
            ..beams.clone()
        };
        assert_eq!(demand(&at_most(17)), each(5, 16), "the last token needs no cache entry");
        assert_eq!(demand(&at_most(18)), each(5, 32));
        let contrastive = GenerationConfig {
            penalty_alpha: 0.6,
            top_k: 4096,
            max_new_tokens: 10,
            ..GenerationConfig::default()
        };
        assert_eq!(demand(&contrastive), each(4096, 16));
        let small = Gpt2Config { vocab_size: 300, ..model.clone() };
        assert_eq!(KvDemand::of_search(&[1, 2, 3], &contrastive, &small), each(300, 16));
    }
}
