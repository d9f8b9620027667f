//! Tests that batched completions equal single ones, and the behavior at the end of the context.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{
    Gpt2LMHeadModel, Gpt2Model, KvCache, LogitsFor, MultiHeadAttention, ParameterSize, Pass, Sublayer,
};
use candle_gpt2_generation::{
    BatchGenerator, GenerationConfig, GenerationError, LongPrompt, Request, StopReason, TokenGenerator,
    WhenFull,
};
use candle_gpt2_testing::{fixture_path, json_fixture};
use candle_gpt2_weights::{Checkpoint, LoadOptions, Tokenizer, WeightDType, load_tokenizer};

fn tiny() -> Gpt2LMHeadModel {
    Checkpoint::open(fixture_path("tiny-checkpoint")).unwrap().load(&LoadOptions::default(), &|_| ()).unwrap()
}

fn alone(model: &Gpt2LMHeadModel, prompt: &[u32], config: &GenerationConfig) -> (Vec<u32>, StopReason) {
    let mut tokens = TokenGenerator::new(model, prompt, config).unwrap();
    let ids = tokens.by_ref().collect::<Result<_, _>>().unwrap();
    (ids, tokens.stop_reason().unwrap())
}

/// Returns the ids and the stop reason of every completion, by prompt and sequence.
fn batched(
    model: &Gpt2LMHeadModel,
    prompts: &[Vec<u32>],
    batch_size: usize,
    config: &GenerationConfig,
) -> Vec<(Vec<u32>, Option<StopReason>)> {
    let sequences = config.num_return_sequences;
    let mut found = vec![(Vec::new(), None); prompts.len() * sequences];
    for token in
        BatchGenerator::<&Tokenizer>::new(model, Request::each(prompts, config), batch_size, None).unwrap()
    {
        let token = token.unwrap();
        let completion = &mut found[token.prompt * sequences + token.sequence];
        assert_eq!(completion.1, None, "no event follows the end of a completion");
        completion.0.push(token.id);
        completion.1 = token.stop_reason;
    }
    found
}

/// Returns prompts of one token up to the whole context, with duplicates.
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |length: u32, seed: u32| (0..length).map(|index| (index * 37 + seed) % 300).collect();
    [(3, 5), (1, 90), (30, 7), (47, 2), (48, 3), (12, 11), (3, 5), (3, 5), (20, 250)]
        .map(|(length, seed)| prompt(length, seed))
        .to_vec()
}

/// Rows of different lengths need neither a padding token nor a mask.
///
/// Several end-of-text tokens end the rows at different lengths. See huggingface/transformers#3021 and
/// #4122.
#[test]
fn batched_rows_equal_single_rows() {
    let model = tiny();
    let prompts = prompts();
    // Choose end-of-text tokens that end some of the completions early.
    let ends: Vec<u32> = alone(&model, &prompts[2], &GenerationConfig::default()).0[3..5].to_vec();
    let config = GenerationConfig { max_new_tokens: 20, eos_token_id: ends, ..GenerationConfig::default() };
    let expected: Vec<_> = prompts.iter().map(|prompt| alone(&model, prompt, &config)).collect();
    assert!(expected.iter().any(|(_, reason)| *reason == StopReason::Eos));
    assert!(expected.iter().any(|(_, reason)| *reason == StopReason::MaxNewTokens));
    assert!(expected.iter().any(|(_, reason)| *reason == StopReason::Context));
    for batch_size in [1, 2, 4, 9, 100] {
        let found = batched(&model, &prompts, batch_size, &config);
        let found: Vec<_> = found.into_iter().map(|(ids, reason)| (ids, reason.unwrap())).collect();
        assert_eq!(found, expected, "batches of {batch_size}");
    }
}

/// All weight dtypes.
const DTYPES: [WeightDType; 6] =
    [WeightDType::F32, WeightDType::F16, WeightDType::Q8, WeightDType::Q6, WeightDType::Q5, WeightDType::Q4];

fn load(folder: &Path, dtype: WeightDType) -> Gpt2LMHeadModel {
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    Checkpoint::open(folder).unwrap().load(&options, &|_| ()).unwrap()
}

/// A row's logits are bit-identical whether it is alone in a step or among rows of other lengths.
#[test]
fn step_logits_do_not_depend_on_the_batch() {
    const ROWS: usize = 40;
    let prompts: Vec<Vec<u32>> =
        (0..40u32).map(|row| (0..1 + row * 7 % 40).map(|index| (index * 37 + row) % 300).collect()).collect();
    let next: Vec<u32> = (0..40u32).map(|row| row * 5 % 300).collect();
    for dtype in DTYPES {
        let model = load(&fixture_path("tiny-checkpoint"), dtype);
        let mut cache = model.new_cache(ROWS, 48).unwrap();
        let step = |ids: &[u32], rows: usize, cache: &mut _| -> Vec<Vec<u32>> {
            let ids = Tensor::from_slice(ids, (rows, ids.len() / rows), &Device::Cpu).unwrap();
            let logits =
                model.forward_with(&ids, LogitsFor::LastToken, Some(cache), &mut Pass::inference()).unwrap();
            let logits = logits.squeeze(1).unwrap().to_vec2::<f32>().unwrap();
            logits.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
        };
        for (row, prompt) in prompts.iter().enumerate() {
            let mut prefix = model.new_cache(1, 48).unwrap();
            step(prompt, 1, &mut prefix);
            cache.copy_row(row, &prefix, 0, prefix.lengths()[0]).unwrap();
        }
        let alone: Vec<Vec<u32>> = (0..ROWS)
            .map(|row| step(&next[row..=row], 1, &mut cache.fork(&[row]).unwrap()).remove(0))
            .collect();
        for rows in 2..=ROWS {
            let chosen: Vec<usize> = (0..rows).map(|index| (index * 3 + rows) % ROWS).collect();
            let ids: Vec<u32> = chosen.iter().map(|row| next[*row]).collect();
            let found = step(&ids, rows, &mut cache.fork(&chosen).unwrap());
            for (found, row) in found.iter().zip(&chosen) {
                assert_eq!(found, &alone[*row], "{dtype:?}: row {row} among {rows}");
            }
        }
    }
}

/// Compares 200 prompts of all lengths, half greedy and half sampled, in every weight dtype.
#[test]
fn completions_do_not_depend_on_the_batch() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories");
    let prompts: Vec<Vec<u32>> = (0..200u32)
        .map(|prompt| (0..1 + prompt * 13 % 41).map(|index| (index * 137 + prompt * 61) % 2048).collect())
        .collect();
    let greedy = GenerationConfig { max_new_tokens: 8, ..GenerationConfig::default() };
    let sampled = GenerationConfig { do_sample: true, seed: 4, ..greedy.clone() };
    for dtype in DTYPES {
        let model = load(&folder, dtype);
        for (prompts, config) in [(&prompts[..100], &greedy), (&prompts[100..], &sampled)] {
            let expected: Vec<_> = prompts.iter().map(|prompt| alone(&model, prompt, config)).collect();
            for batch_size in [2, 7, 32] {
                let found = batched(&model, prompts, batch_size, config);
                let found: Vec<_> = found.into_iter().map(|(ids, reason)| (ids, reason.unwrap())).collect();
                assert_eq!(found, expected, "{dtype:?} in batches of {batch_size}");
            }
        }
    }
}

/// Rounding keys and values to 11 bits changes no greedy completion of this model.
#[test]
fn f16_cache_keeps_greedy_completions() {
    let (model, half) = (tiny(), tiny().with_kv_dtype(DType::F16));
    let (prompts, config) =
        (prompts(), GenerationConfig { max_new_tokens: 20, ..GenerationConfig::default() });
    let expected = batched(&model, &prompts, 1, &config);
    for batch_size in [1, 4, 9] {
        assert_eq!(batched(&half, &prompts, batch_size, &config), expected, "batches of {batch_size}");
    }
}

/// Covers sampling with penalties, which depend on the history of each row.
#[test]
fn sampled_completions_do_not_depend_on_the_batch() {
    let model = tiny();
    let prompts = prompts();
    let config = GenerationConfig {
        max_new_tokens: 12,
        do_sample: true,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.2,
        no_repeat_ngram_size: 3,
        seed: 8,
        ..GenerationConfig::default()
    };
    let expected: Vec<_> = prompts.iter().map(|prompt| alone(&model, prompt, &config).0).collect();
    for batch_size in [2, 5, 9] {
        let found: Vec<_> =
            batched(&model, &prompts, batch_size, &config).into_iter().map(|text| text.0).collect();
        assert_eq!(found, expected, "batches of {batch_size}");
    }
}

/// Completions for one prompt share its keys and values; the first equals a single completion.
#[test]
fn completions_of_one_prompt_differ_and_are_reproducible() {
    let model = tiny();
    let single =
        GenerationConfig { do_sample: true, seed: 4, max_new_tokens: 10, ..GenerationConfig::default() };
    let config = GenerationConfig { num_return_sequences: 4, ..single.clone() };
    let prompts = &prompts()[..3];
    let expected = batched(&model, prompts, 1, &config);
    for batch_size in [2, 3, 12] {
        assert_eq!(batched(&model, prompts, batch_size, &config), expected);
    }
    for (index, prompt) in prompts.iter().enumerate() {
        let texts = &expected[index * 4..][..4];
        assert_eq!(texts[0].0, alone(&model, prompt, &single).0);
        assert!((1..4).all(|other| texts[other].0 != texts[0].0), "{texts:?}");
    }
}

#[test]
fn batched_tokens_carry_their_decoded_text() {
    let model = tiny();
    let tokenizer = load_tokenizer(fixture_path("tiny-checkpoint")).unwrap();
    let config = GenerationConfig { max_new_tokens: 15, ..GenerationConfig::default() };
    let prompts = prompts();
    let mut texts = vec![String::new(); prompts.len()];
    let mut ids = vec![Vec::new(); prompts.len()];
    for token in BatchGenerator::new(&model, Request::each(&prompts, &config), 4, Some(&tokenizer)).unwrap() {
        let token = token.unwrap();
        texts[token.prompt].push_str(&token.text);
        ids[token.prompt].push(token.id);
    }
    for (text, ids) in texts.iter().zip(&ids) {
        assert_eq!(*text, tokenizer.decode(ids, true).unwrap());
    }
}

/// A long prompt is rejected with both lengths in the error message, or truncated by the policy.
///
/// See huggingface/transformers#14384.
#[test]
fn long_prompt_is_rejected_or_truncated() {
    let model = tiny();
    let long: Vec<u32> = (0..60).collect();
    let config = GenerationConfig { max_new_tokens: 5, ..GenerationConfig::default() };
    let error = TokenGenerator::new(&model, &long, &config).err().unwrap().to_string();
    assert!(error.contains("the prompt has 60 tokens, but the model's context has 48"), "{error}");
    let keep =
        |head, last| GenerationConfig { long_prompt: LongPrompt::Keep { head, last }, ..config.clone() };
    let last = alone(&model, &long, &keep(0, 40));
    assert_eq!(last, alone(&model, &long[20..], &config));
    let head_and_last = alone(&model, &long, &keep(4, 30));
    assert_eq!(head_and_last, alone(&model, &[&long[..4], &long[30..]].concat(), &config));
    assert_ne!(last.0, head_and_last.0);
    // A prompt that fits is not truncated.
    assert_eq!(alone(&model, &long[..48], &keep(0, 10)), alone(&model, &long[..48], &config));
    for (head, last, fits) in [(0, 48, true), (8, 40, true), (8, 41, false), (0, 49, false), (0, 0, false)] {
        let result = TokenGenerator::new(&model, &long, &keep(head, last));
        assert_eq!(result.is_ok(), fits, "{head} and {last}");
        assert!(result.err().is_none_or(|error| error.is_usage()));
    }
}

/// Once the context is full, the completion equals one whose prompt is the slid window.
///
/// The window consists of the head and the last half of the context.
#[test]
fn sliding_window_continues_past_the_context() {
    let model = tiny();
    let prompt: Vec<u32> = (0..40).map(|index| (index * 7) % 300).collect();
    for head in [0, 3] {
        let config = GenerationConfig {
            max_new_tokens: 60,
            when_full: WhenFull::Slide { head },
            ..GenerationConfig::default()
        };
        let (found, reason) = alone(&model, &prompt, &config);
        assert_eq!((found.len(), reason), (60, StopReason::MaxNewTokens));
        let mut all = prompt.clone();
        let mut window = prompt.clone();
        while all.len() < 100 {
            let until_full =
                GenerationConfig { max_new_tokens: 100 - all.len(), ..GenerationConfig::default() };
            all.extend(alone(&model, &window, &until_full).0);
            window = [&all[..head], &all[all.len() - 24..]].concat();
        }
        assert_eq!(found, all[40..], "head {head}");
        // A batch gives the same result.
        let batch = [prompt.clone(), vec![5; 10], prompt.clone()];
        let texts = batched(&model, &batch, 3, &config);
        assert_eq!((&texts[0].0, &texts[2].0), (&found, &found));
    }
    let oversized =
        GenerationConfig { when_full: WhenFull::Slide { head: 25 }, ..GenerationConfig::default() };
    let error = TokenGenerator::new(&model, &[1], &oversized).err().unwrap();
    assert!(matches!(error, GenerationError::WindowTooLong { kept: 49, n_positions: 48 }), "{error}");
}

/// Padding rows of the vocabulary can be excluded from sampling; see karpathy/nanoGPT#169.
#[test]
fn suppressed_tokens_are_never_sampled() {
    let model = tiny();
    let padding: Vec<u32> = (100..300).collect();
    let config = GenerationConfig {
        do_sample: true,
        temperature: 5.0,
        top_k: 0,
        max_new_tokens: 40,
        suppress_tokens: padding,
        ..GenerationConfig::default()
    };
    assert!(alone(&model, &[299], &config).0.iter().all(|id| *id < 100));
}

#[test]
fn time_limit_stops_after_the_next_token() {
    let model = tiny();
    let config = GenerationConfig { max_time: Some(1e-9), max_new_tokens: 9, ..GenerationConfig::default() };
    let clock = || {
        let started = Instant::now();
        Arc::new(move || started.elapsed())
    };
    let mut tokens = TokenGenerator::new(&model, &[1, 2], &config).unwrap().with_clock(clock());
    let ids: Vec<u32> = tokens.by_ref().collect::<Result<_, _>>().unwrap();
    assert_eq!((ids.len(), tokens.stop_reason()), (1, Some(StopReason::MaxTime)));
    let error = TokenGenerator::new(&model, &[1, 2], &config).unwrap().next().unwrap().unwrap_err();
    assert!(matches!(error, GenerationError::NoClock), "{error}");
}

#[test]
fn out_of_vocabulary_ids_name_the_option() {
    let model = tiny();
    let start = GenerationConfig::default;
    for (option, config) in [
        ("eos_token_id", GenerationConfig { eos_token_id: vec![0, 300], ..start() }),
        ("bad_words_ids", GenerationConfig { bad_words_ids: vec![vec![1, 300]], ..start() }),
        ("sequence_bias", GenerationConfig { sequence_bias: vec![(vec![300], 1.0)], ..start() }),
        ("suppress_tokens", GenerationConfig { suppress_tokens: vec![300], ..start() }),
        ("begin_suppress_tokens", GenerationConfig { begin_suppress_tokens: vec![300], ..start() }),
        ("forced_bos_token_id", GenerationConfig { forced_bos_token_id: Some(300), ..start() }),
    ] {
        let error = TokenGenerator::new(&model, &[1], &config).err().unwrap();
        assert!(error.is_usage() && error.to_string().starts_with(&format!("`{option}`")), "{error}");
    }
    let stops = GenerationConfig { stop_strings: vec!["x".into()], ..start() };
    let error = TokenGenerator::new(&model, &[1], &stops).err().unwrap();
    assert!(matches!(error, GenerationError::StopStringsWithoutTokenizer));
}

/// Generation with a KV cache gives the reference completions; see huggingface/transformers#25420.
#[test]
fn batched_completions_equal_the_reference() {
    let model = tiny();
    let expected = json_fixture("tiny_checkpoint_expected");
    let cases = expected["greedy"].as_array().unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let prompts: Vec<Vec<u32>> = cases.iter().map(|case| ids(&case["prompt_ids"])).collect();
    assert!(prompts.iter().any(|prompt| prompt.len() != prompts[0].len()), "lengths differ");
    let config = GenerationConfig {
        max_new_tokens: 20,
        eos_token_id: model.config().eos_token_id.clone(),
        ..GenerationConfig::default()
    };
    for (found, case) in batched(&model, &prompts, 8, &config).iter().zip(cases) {
        assert_eq!(found.0, ids(&case["ids"]));
    }
}

/// The model's own attention, in place of itself.
#[derive(Debug)]
struct SameAttention(MultiHeadAttention);

impl Sublayer for SameAttention {
    fn forward(
        &self,
        x: &Tensor,
        cache: Option<&mut KvCache>,
        pass: &mut Pass,
    ) -> candle_core::Result<Tensor> {
        let mask = pass.causal_mask();
        self.0.forward_with(x, None, &mask, cache, pass)
    }

    fn size(&self) -> ParameterSize {
        self.0.size()
    }
}

#[test]
fn models_with_an_attention_of_ones_own_generate_in_batches() {
    let model = tiny();
    let body = model.transformer();
    let blocks = body.blocks().iter().cloned().map(|block| {
        let attention = Arc::new(SameAttention(block.attn().clone()));
        block.with_attention(attention)
    });
    let (wte, wpe, ln_f) = (body.wte().clone(), body.wpe().clone(), body.ln_f().clone());
    let body = Gpt2Model::new(body.config(), wte.clone(), wpe, blocks.collect(), ln_f).unwrap();
    let own = Gpt2LMHeadModel::new(body, wte).unwrap();
    let config = GenerationConfig { do_sample: false, max_new_tokens: 6, ..GenerationConfig::default() };
    let prompts = [vec![1, 2, 3], vec![7], vec![4, 5, 6, 8, 9]];
    assert_eq!(batched(&own, &prompts, 3, &config), batched(&model, &prompts, 3, &config));
}
