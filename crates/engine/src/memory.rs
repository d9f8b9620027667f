//! How much memory a model needs, and whether the keys and values of a request fit into what is free.

use crate::{ProcessMemory, free_memory};
use candle_core::DType;
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, KvDType, KvSlot};
use candle_gpt2_generation::{GenerationConfig, Request, SchedulerOptions, SearchMode};
use candle_gpt2_weights::{Checkpoint, LoadMemory, WeightDType};
use serde::Serialize;

use crate::{EngineError, LoadedModel};

/// The memory that a model needs on the CPU, in bytes, known before it is loaded. What the tokenizer and the program itself take
/// is not in it, nor the files that are held in memory already.
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
    /// The weights as they are held.
    pub weights: u64,
    /// The most that loading takes beside them: one parameter of a file that is read in parts.
    pub loading: u64,
    /// Keys and values of one full context.
    pub kv: u64,
    /// What is computed between the weights, of a prompt as long as the context, and the logits of one token: about.
    pub activations: u64,
}

impl MemoryNeeded {
    /// Of a model with weights and caches in these types; `None` is what [`ModelOptions`](crate::ModelOptions) takes.
    ///
    /// # Errors
    /// When the tensors are not those of the model, or the CPU has not the type.
    pub fn of(
        checkpoint: &Checkpoint,
        dtype: Option<WeightDType>,
        kv_dtype: Option<KvDType>,
    ) -> Result<Self, EngineError> {
        let LoadMemory { held: weights, reading: loading } = checkpoint.load_memory(dtype)?;
        let config = checkpoint.config();
        let kv_dtype = kv_dtype.unwrap_or_else(|| checkpoint.kv_dtype_on_cpu(dtype));
        // Heads are filled up to a multiple of 16, as tokens are.
        let filled = |count: usize| KvSlot::room_of(count) as u64;
        let of_each = config.kv_bytes_per_token(kv_dtype) as u64;
        let of_filled = of_each.saturating_mul(filled(config.head_dim())).div_ceil(config.head_dim() as u64);
        let kv = match config.head.has_language_model() {
            true => of_filled.saturating_mul(filled(config.n_positions)),
            // A classifier keeps none.
            false => 0,
        };
        // Of each token in the widest place, the end of the MLP: what is inside, three times as much as the product's own copies
        // of it, and beside them the residual stream, its norm, the output and what fills these up.
        let width = (4 * config.inner_width() + 5 * config.n_embd) as u64;
        let values =
            (config.n_positions as u64).saturating_mul(width).saturating_add(config.vocab_size as u64);
        Ok(Self { weights, loading, kv, activations: values.saturating_mul(size_of::<f32>() as u64) })
    }

    /// The memory of two models that run together, one of which is loaded after the other.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            weights: self.weights.saturating_add(other.weights),
            loading: self.loading.max(other.loading),
            kv: self.kv.saturating_add(other.kv),
            activations: self.activations.max(other.activations),
        }
    }

    /// What has to be free: nothing is computed yet while it is loaded, and what loading takes is free again then.
    pub fn total(&self) -> u64 {
        let Self { weights, loading, kv, activations } = *self;
        weights.saturating_add(loading.max(kv.saturating_add(activations)))
    }
}

/// Checks that the weights fit into the memory that is free, swap included, if the system says how much that is: a process that
/// takes more is killed without a word. Nothing but the weights is counted, so that what is refused could not have been loaded.
pub(crate) fn check_room(checkpoint: &Checkpoint, dtype: Option<WeightDType>) -> Result<(), EngineError> {
    let Some(ProcessMemory { available, swap, .. }) = ProcessMemory::now() else { return Ok(()) };
    check_room_in(available.saturating_add(swap) as u64, checkpoint, dtype)
}

/// The type in which a CPU holds the weights of a checkpoint: `dtype`, or by default that of the checkpoint.
pub(crate) fn dtype_on_cpu(checkpoint: &Checkpoint, dtype: Option<WeightDType>) -> WeightDType {
    dtype.or(checkpoint.quantized_dtype()).unwrap_or(match checkpoint.stored_dtype() {
        DType::F16 => WeightDType::F16,
        _ => WeightDType::F32,
    })
}

fn check_room_in(free: u64, checkpoint: &Checkpoint, dtype: Option<WeightDType>) -> Result<(), EngineError> {
    let needed = |dtype| -> Result<u64, EngineError> {
        let LoadMemory { held, reading } = checkpoint.load_memory(dtype)?;
        Ok(held.max(reading))
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

/// The keys and values of what is made at once.
#[derive(Debug, PartialEq)]
pub(crate) struct Room {
    /// Texts, or rows of a search.
    rows: usize,
    /// Tokens of the longest.
    longest: usize,
    /// Tokens of all.
    kv_tokens: usize,
}

impl Room {
    /// Of as many texts as `options` say: of those that come first, whose prompts have texts of so many `tokens` each, and
    /// `copies` of them. On a CPU memory is taken when it is written; on a GPU, the whole of it before the first text.
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

    /// Of the rows of a search.
    pub(crate) fn of_search(prompt: &[u32], config: &GenerationConfig, model: &Gpt2Config) -> Self {
        let (rows, more) = match config.search_mode() {
            // It looks at what the model makes of the last token too.
            SearchMode::Contrastive => (config.top_k.min(model.vocab_size), 1),
            _ => (config.num_beams, 0),
        };
        let config = GenerationConfig {
            max_new_tokens: config.max_new_tokens.saturating_add(more),
            max_length: config.max_length.map(|length| length.saturating_add(more)),
            ..config.clone()
        };
        // A prompt that is refused takes none.
        let longest = Request::new(prompt.to_vec(), config).kv_tokens(model).unwrap_or(0);
        Self { rows, longest, kv_tokens: rows.saturating_mul(longest) }
    }

    /// Checks that they fit into the memory that is free, if the system says how much that is.
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

    /// `token` are the bytes of one.
    fn check_in(&self, available: usize, token: usize) -> Result<(), EngineError> {
        let needed = self.kv_tokens.saturating_mul(token);
        if needed > available {
            return Err(EngineError::NoRoom { rows: self.rows, tokens: self.longest, needed, available });
        }
        Ok(())
    }
}

impl LoadedModel {
    /// Checks that the keys and values of so many texts at once, of `kv_tokens` tokens in all, fit into the memory that is free,
    /// if the system says how much that is.
    ///
    /// # Errors
    /// When they do not.
    pub fn check_kv_room(&self, texts: usize, kv_tokens: usize) -> Result<(), EngineError> {
        let longest = kv_tokens.div_ceil(texts.max(1));
        Room { rows: texts, longest, kv_tokens }.check(self.model(), self.assistant())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelOptions, Silent};

    fn options(max_texts: usize, each: usize) -> SchedulerOptions {
        SchedulerOptions { max_texts, kv_tokens: max_texts.saturating_mul(each), chunk_tokens: 2 }
    }

    /// 2 · 12 · 768 values of 4 bytes for each token of the 124M model.
    #[test]
    fn texts_that_do_not_fit_are_refused_with_the_numbers() {
        let config = Gpt2Config::gpt2();
        let needed = 4096 * 1024 * 2 * 12 * 768 * 4;
        let check = |available, tokens, dtype| {
            let room = Room::of_texts(&[tokens], 4096, options(4096, tokens), true);
            room.check_in(available, config.kv_bytes_per_token(dtype))
        };
        assert!(check(needed, 1024, KvDType::F32).is_ok());
        let refusal = check(needed - 1, 1024, KvDType::F32).unwrap_err();
        assert!(refusal.is_usage());
        let told = "a batch of 4096 sequences of up to 1024 tokens needs 288.0 GiB of KV cache";
        assert!(refusal.to_string().starts_with(told), "{refusal}");
        assert!(
            check(needed / 2, 1024, KvDType::F16).is_ok() && check(needed / 2, 512, KvDType::F32).is_ok()
        );
        let endless = Room::of_texts(&[usize::MAX], usize::MAX, options(usize::MAX, usize::MAX), true);
        assert!(endless.check_in(0, config.kv_bytes_per_token(KvDType::F32)).is_err(), "no overflow");
    }

    /// A long text takes its own memory, not that of all others too; a GPU's is taken as a whole.
    #[test]
    fn texts_take_what_each_of_them_needs() {
        let of = |copies, options, is_cpu| Room::of_texts(&[1000, 3, 0, 5], copies, options, is_cpu);
        let sums = [(4, 1, 1008), (8, 2, 2016), (5, 2, 2006), (2, 3, 2000), (2, 1, 1003)];
        for (rows, copies, kv_tokens) in sums {
            let expected = Room { rows, longest: 1000, kv_tokens };
            assert_eq!(of(copies, options(rows, 1024), true), expected, "{copies} of each");
        }
        let whole = Room { rows: 4, longest: 1024, kv_tokens: 4096 };
        assert_eq!(of(1, options(4, 1024), false), whole);
        assert_eq!(Room::of_texts(&[], 1, options(1, 1), true), Room { rows: 1, longest: 0, kv_tokens: 0 });
    }

    #[test]
    fn weights_that_do_not_fit_are_refused_with_a_type_that_does() {
        let model = candle_gpt2_testing::fixture_path("tiny-checkpoint");
        let checkpoint = ModelOptions { model, ..ModelOptions::default() }.open_checkpoint(&Silent).unwrap();
        let needed = |dtype| MemoryNeeded::of(&checkpoint, Some(dtype), None).unwrap().weights;
        let (f32, f16, q4) = (needed(WeightDType::F32), needed(WeightDType::F16), needed(WeightDType::Q4));
        assert!(check_room_in(f32, &checkpoint, None).is_ok());
        for (free, fitting) in [(f32 - 1, Some(("f16", f16))), (q4, Some(("q4", q4))), (q4 - 1, None)] {
            let refusal = check_room_in(free, &checkpoint, None).unwrap_err();
            assert!(!refusal.is_usage());
            let EngineError::WeightRoom { free: told, weights, dtype, fitting: found } = refusal else {
                panic!("{refusal}")
            };
            assert_eq!((told, weights, dtype, found), (free, f32, "f32", fitting));
        }
        assert!(check_room_in(q4, &checkpoint, Some(WeightDType::Q4)).is_ok());
        let refusal = EngineError::WeightRoom {
            free: 3 << 20,
            weights: 8 << 20,
            dtype: "f32",
            fitting: Some(("q8", 2 << 20)),
        };
        let told = "the weights take 8.0 MiB of memory in f32, and 3.0 MiB are free; in q8 they take 2.0 MiB";
        assert_eq!(refusal.to_string(), told);
        let refusal =
            EngineError::WeightRoom { free: 1 << 20, weights: 8 << 20, dtype: "f32", fitting: None };
        assert!(
            refusal.to_string().ends_with("1.0 MiB are free; they fit in no smaller type either"),
            "{refusal}"
        );
    }

    #[test]
    fn searches_take_their_rows() {
        let model = Gpt2Config::gpt2();
        let room = |config: &GenerationConfig| Room::of_search(&[1, 2, 3], config, &model);
        let each = |rows, longest| Room { rows, longest, kv_tokens: rows * longest };
        let beams = GenerationConfig { num_beams: 5, max_new_tokens: 10, ..GenerationConfig::default() };
        assert_eq!(room(&beams), each(5, 16), "whole panels");
        assert_eq!(room(&GenerationConfig { max_new_tokens: 5000, ..beams.clone() }), each(5, 1024));
        let at_most = |max_length| GenerationConfig {
            max_length: Some(max_length),
            max_new_tokens: 5000,
            ..beams.clone()
        };
        assert_eq!(room(&at_most(17)), each(5, 16), "the last token is not read again");
        assert_eq!(room(&at_most(18)), each(5, 32));
        let contrastive = GenerationConfig {
            penalty_alpha: 0.6,
            top_k: 4096,
            max_new_tokens: 10,
            ..GenerationConfig::default()
        };
        assert_eq!(room(&contrastive), each(4096, 16));
        let small = Gpt2Config { vocab_size: 300, ..model.clone() };
        assert_eq!(Room::of_search(&[1, 2, 3], &contrastive, &small), each(300, 16));
    }
}
