//! Properties of every GPT-2: causality, caching in chunks, independent rows, observers, gradients.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2::{
    ByOutput, Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, KvDType, KvPool, LogitsFor, Observer, ParameterCounts,
    Pass, Site, SiteKind, expected_parameters,
};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_testing::{Fixture, assert_parity, device, dtype, pattern, skipped, values};
use candle_nn::VarBuilder;

use crate::common;

/// Tolerance for f32 arithmetic in a different summation order, on logits of magnitude 10.
const SAME: f64 = 2e-5;

fn model() -> Result<Gpt2LMHeadModel> {
    common::model(&Fixture::open("gpt2/upcast"))
}

fn ids(rows: &[&[u32]]) -> Tensor {
    Tensor::from_slice(&rows.concat(), (rows.len(), rows[0].len()), &device()).unwrap()
}

fn all_logits(model: &Gpt2LMHeadModel, ids: &Tensor) -> Result<Tensor> {
    model.forward_with(ids, LogitsFor::EveryToken, None, &mut Pass::inference())
}

fn step(model: &Gpt2LMHeadModel, ids: &Tensor, cache: &mut Gpt2Cache) -> Result<Tensor> {
    model.forward_with(ids, LogitsFor::EveryToken, Some(cache), &mut Pass::inference())
}

fn cache(model: &Gpt2LMHeadModel, batch: usize) -> Result<Gpt2Cache> {
    Gpt2Cache::new(model.config(), batch, 12, dtype(), &device())
}

#[test]
fn logits_of_a_token_range_equal_the_full_logits() -> Result<()> {
    let model = model()?;
    let rows = ids(&[&[5, 9, 70, 3, 11, 12], &[1, 2, 3, 4, 5, 6]]);
    let all = all_logits(&model, &rows)?;
    let some = |first, count| {
        model.forward_with(&rows, LogitsFor::Tokens { first, count }, None, &mut Pass::inference())
    };
    for (first, count) in [(0, 6), (0, 2), (2, 3), (5, 1)] {
        let what = format!("{count} tokens from {first} on");
        assert_parity(&some(first, count)?, &all.narrow(1, first, count)?, SAME, &what);
    }
    assert!(some(5, 2).is_err() && some(6, 1).is_err(), "the sequence has six tokens");
    Ok(())
}

/// A position tensor requires a cache, even if blocks are recomputed.
#[test]
fn step_with_a_position_tensor_needs_a_cache() -> Result<()> {
    let model = model()?;
    let positions = Tensor::new(&[[2u32]], &device())?;
    for recomputes in [false, true] {
        let mut pass = Pass::inference().at(positions.clone()).recomputing(recomputes);
        let error = model.forward_with(&ids(&[&[5]]), LogitsFor::LastToken, None, &mut pass).unwrap_err();
        let expected = candle_gpt2::AttentionError::NotAStep.to_string();
        assert!(error.to_string().contains(&expected), "{error}");
    }
    Ok(())
}

#[test]
fn future_tokens_do_not_change_past_logits() -> Result<()> {
    let model = model()?;
    let past = |ids: &Tensor| Ok::<_, candle_core::Error>(values(&all_logits(&model, ids)?.narrow(1, 0, 4)?));
    assert_eq!(past(&ids(&[&[5, 9, 70, 3, 11, 12]]))?, past(&ids(&[&[5, 9, 70, 3, 42, 0]]))?);
    assert_ne!(past(&ids(&[&[5, 9, 70, 3, 11, 12]]))?, past(&ids(&[&[5, 8, 70, 3, 11, 12]]))?);
    Ok(())
}

/// Logits with a cache equal those without, however the prompt is split.
///
/// Sources: huggingface/transformers#13849, rasbt/LLMs-from-scratch#1048.
#[test]
fn any_split_into_cached_chunks_equals_the_whole() -> Result<()> {
    let model = model()?;
    let whole_ids = ids(&[&[5, 9, 70, 3, 11, 12, 1], &[1, 2, 3, 4, 5, 6, 7]]);
    let whole = all_logits(&model, &whole_ids)?;
    for chunks in [vec![7], vec![1; 7], vec![4, 3], vec![6, 1], vec![1, 5, 1]] {
        let (mut cache, mut outputs, mut start) = (cache(&model, 2)?, Vec::new(), 0);
        for tokens in &chunks {
            outputs.push(step(&model, &whole_ids.narrow(1, start, *tokens)?.contiguous()?, &mut cache)?);
            start += tokens;
        }
        assert_eq!(cache.lengths(), [7, 7]);
        assert_parity(&Tensor::cat(&outputs, 1)?, &whole, SAME, &format!("chunks {chunks:?}"));
    }
    Ok(())
}

#[test]
fn batch_rows_equal_the_rows_alone() -> Result<()> {
    let model = model()?;
    let rows: [&[u32]; 3] = [&[5, 9, 70, 3], &[1, 1, 1, 1], &[78, 0, 33, 2]];
    let together = all_logits(&model, &ids(&rows))?;
    for (row, tokens) in rows.iter().enumerate() {
        let alone = all_logits(&model, &ids(&[tokens]))?;
        assert_parity(&together.narrow(0, row, 1)?, &alone, SAME, &format!("row {row}"));
    }
    Ok(())
}

/// Rows of different lengths need no padding, because each row's length determines its positions.
///
/// Sources: huggingface/transformers#3021 and #7552.
#[test]
fn ragged_rows_equal_the_rows_alone() -> Result<()> {
    let model = model()?;
    let mut ragged = cache(&model, 2)?;
    step(&model, &ids(&[&[5, 9, 70, 3, 8], &[1, 2, 3, 4, 5]]), &mut ragged)?;
    ragged.truncate(0, 2)?;
    let together = step(&model, &ids(&[&[30, 31], &[40, 41]]), &mut ragged)?;
    assert_eq!(ragged.lengths(), [4, 7]);
    for (row, tokens) in [(0, &[5, 9, 30, 31][..]), (1, &[1, 2, 3, 4, 5, 40, 41])] {
        let alone = all_logits(&model, &ids(&[tokens]))?.narrow(1, tokens.len() - 2, 2)?;
        assert_parity(&together.narrow(0, row, 1)?, &alone, SAME, &format!("row {row}"));
    }
    Ok(())
}

#[test]
fn forks_share_only_the_prefix() -> Result<()> {
    let model = model()?;
    let mut prefix = cache(&model, 1)?;
    step(&model, &ids(&[&[5, 9, 70]]), &mut prefix)?;
    let mut forked = prefix.fork(&[0, 0])?;
    step(&model, &ids(&[&[1]]), &mut prefix)?;
    let forked_logits = step(&model, &ids(&[&[20], &[30]]), &mut forked)?;
    for (row, last) in [(0, 20), (1, 30)] {
        let alone = all_logits(&model, &ids(&[&[5, 9, 70, last]]))?.narrow(1, 3, 1)?;
        assert_parity(&forked_logits.narrow(0, row, 1)?, &alone, SAME, &format!("fork {row}"));
    }
    Ok(())
}

/// A prompt that was prefilled alone continues in any row of a batch, replacing the row's tokens.
#[test]
fn copied_row_continues_like_the_original() -> Result<()> {
    let model = model()?;
    let mut batch = cache(&model, 3)?;
    step(&model, &ids(&[&[7, 7, 7, 7], &[5, 9, 70, 3], &[6, 6, 6, 6]]), &mut batch)?;
    for (row, prompt) in [(0, &[1u32, 2][..]), (2, &[40, 41, 42, 43, 44])] {
        let mut alone = Gpt2Cache::new(model.config(), 1, prompt.len(), dtype(), &device())?;
        step(&model, &ids(&[prompt]), &mut alone)?;
        batch.copy_row(row, &alone, 0, alone.lengths()[0])?;
    }
    assert_eq!(batch.lengths(), [2, 4, 5]);
    let together = step(&model, &ids(&[&[30], &[31], &[32]]), &mut batch)?;
    for (row, whole) in [(0, &[1u32, 2, 30][..]), (1, &[5, 9, 70, 3, 31]), (2, &[40, 41, 42, 43, 44, 32])] {
        let alone = all_logits(&model, &ids(&[whole]))?.narrow(1, whole.len() - 1, 1)?;
        assert_parity(&together.narrow(0, row, 1)?, &alone, SAME, &format!("row {row}"));
    }
    let mut small = Gpt2Cache::new(model.config(), 1, 4, dtype(), &device())?;
    for (row, source_row) in [(0, 0), (1, 0), (0, 3)] {
        let result = small.copy_row(row, &batch, source_row, 3);
        assert_eq!(result.is_ok(), (row, source_row) == (0, 0), "{row} from {source_row}");
    }
    assert!(small.copy_row(0, &batch, 1, 5).is_err(), "five tokens exceed the capacity of four");
    assert!(small.copy_row(0, &batch, 0, 4).is_err(), "the source row has three tokens");
    assert_eq!(small.lengths(), [3], "unchanged");
    small.copy_row(0, &batch, 1, 2)?;
    assert_eq!(small.lengths(), [2], "a prefix");
    let alone = all_logits(&model, &ids(&[&[5, 9, 8]]))?.narrow(1, 2, 1)?;
    assert_parity(&step(&model, &ids(&[&[8]]), &mut small)?, &alone, SAME, "after a prefix");
    let shallow = Gpt2Config { n_layer: 2, ..model.config().clone() };
    let shallow = Gpt2Cache::new(&shallow, 1, 4, dtype(), &device())?;
    assert!(small.copy_row(0, &shallow, 0, shallow.lengths()[0]).is_err(), "a cache of another model");
    Ok(())
}

/// Rows that are removed, inserted in another order or dropped do not affect other rows.
///
/// Copies of the same source row continue independently.
#[test]
fn moved_rows_do_not_affect_other_rows() -> Result<()> {
    let model = model()?;
    let pool = KvPool::new(model.config(), 80, dtype(), &device())?;
    let new_cache = |batch, capacity| pool.cache(batch, capacity).unwrap();
    let mut texts: Vec<Vec<u32>> = vec![vec![5, 9, 70], vec![1, 2, 3], vec![40, 41, 42]];
    let mut batch = new_cache(3, 12);
    let rows = |texts: &[Vec<u32>]| texts.iter().map(|text| text[text.len() - 1]).collect::<Vec<_>>();
    step(&model, &ids(&[&texts[0], &texts[1], &texts[2]]), &mut batch)?;
    let expect = |batch: &mut Gpt2Cache, texts: &mut Vec<Vec<u32>>, tokens: &[u32], what: &str| {
        texts.iter_mut().zip(tokens).for_each(|(text, token)| text.push(*token));
        let last: Vec<[u32; 1]> = rows(texts).into_iter().map(|id| [id]).collect();
        let last: Vec<&[u32]> = last.iter().map(|id| &id[..]).collect();
        let together = step(&model, &ids(&last), batch)?;
        for (row, text) in texts.iter().enumerate() {
            let alone = all_logits(&model, &ids(&[text]))?.narrow(1, text.len() - 1, 1)?;
            assert_parity(&together.narrow(0, row, 1)?, &alone, SAME, &format!("{what}, row {row}"));
        }
        Ok::<_, candle_core::Error>(())
    };
    expect(&mut batch, &mut texts, &[7, 8, 9], "in one batch")?;
    // The first row is removed. A new row with a different capacity gets a slot apart from the other rows'.
    let first = batch.take(0)?;
    let first_text = texts.remove(0);
    assert_eq!((first.lengths(), batch.lengths()), (&[4][..], &[4, 4][..]));
    expect(&mut batch, &mut texts, &[10, 11], "without the first")?;
    let mut other = new_cache(1, 7);
    step(&model, &ids(&[&[30, 31]]), &mut other)?;
    batch.insert(2, other)?;
    texts.push(vec![30, 31]);
    batch.insert(3, first)?;
    texts.push(first_text);
    expect(&mut batch, &mut texts, &[12, 13, 14, 15], "with a new row and the first one again")?;
    // Copies one source twice, once to the slot of an omitted row, and later three times, once to a new slot.
    for (sources, tokens) in [
        (vec![3, 1, 3], vec![20, 21, 22]),
        (vec![0, 2, 1], vec![23, 24, 25]),
        (vec![1, 1, 1, 2], vec![26, 27, 28, 29]),
    ] {
        let shared = |a: usize, b: usize| {
            texts[a].iter().zip(&texts[b]).take_while(|(a, b)| a == b).count().min(texts[a].len())
        };
        batch.reorder(&sources, shared)?;
        texts = sources.iter().map(|source| texts[*source].clone()).collect();
        assert_eq!(batch.lengths(), texts.iter().map(Vec::len).collect::<Vec<_>>());
        expect(&mut batch, &mut texts, &tokens, &format!("{sources:?}"))?;
    }
    // Four rows with capacity 12, rounded up to 16 tokens, use 64 of 80 tokens. One more row fits, but not
    // two.
    assert_eq!(pool.tokens_in_use(), 64);
    batch.reorder(&[0, 0, 1, 2, 3], |_, _| 0)?;
    assert!(batch.reorder(&[0, 0, 1, 2, 3, 4], |_, _| 0).is_err(), "a sixth row does not fit");
    assert!(batch.reorder(&[5], |_, _| 0).is_err(), "a row that does not exist");
    drop(batch);
    assert_eq!(pool.tokens_in_use(), 0);
    Ok(())
}

/// Copies and forks of an f16 cache match those of an f32 cache up to rounding.
#[test]
fn f16_cache_matches_f32_up_to_rounding() -> Result<()> {
    /// Tolerance for logits of unit size if keys and values are rounded to a relative 2^-12.
    const ROUNDED: f64 = 2e-3;
    let logits = |kv_dtype: DType| -> Result<Vec<Tensor>> {
        let model = model()?.with_kv_dtype(kv_dtype);
        let mut batch = model.new_cache(3, 12)?;
        let prompt = step(&model, &ids(&[&[7, 7, 2, 9], &[5, 9, 70, 3], &[6, 1, 6, 8]]), &mut batch)?;
        batch.truncate(0, 2)?;
        let mut alone = model.new_cache(1, 5)?;
        step(&model, &ids(&[&[40, 41, 42, 43, 44]]), &mut alone)?;
        batch.copy_row(2, &alone, 0, alone.lengths()[0])?;
        let ragged = step(&model, &ids(&[&[30], &[31], &[32]]), &mut batch)?;
        let mut forked = batch.fork(&[2, 0])?;
        let forked = step(&model, &ids(&[&[8], &[9]]), &mut forked)?;
        Ok(vec![prompt, ragged, forked])
    };
    assert_eq!(model()?.kv_dtype(), dtype().into(), "the default for weights of this dtype");
    for (half, single) in logits(DType::F16)?.iter().zip(&logits(dtype())?) {
        assert!(dtype() != DType::F32 || values(half) != values(single));
        assert_parity(half, single, ROUNDED, "a cache in f16");
    }
    Ok(())
}

/// A step whose positions are a tensor matches a normal step, but keeps the cache's lengths.
#[test]
fn step_with_a_position_tensor_equals_a_normal_step() -> Result<()> {
    if device().is_cpu() && dtype() != DType::F32 {
        skipped("on the CPU, steps at positions in memory support only f32");
        return Ok(());
    }
    let model = model()?;
    let ragged = || -> Result<Gpt2Cache> {
        let mut ragged = cache(&model, 2)?;
        step(&model, &ids(&[&[5, 9, 70, 3, 8], &[1, 2, 3, 4, 5]]), &mut ragged)?;
        ragged.truncate(0, 2)?;
        Ok(ragged)
    };
    let (mut numbers, mut memory) = (ragged()?, ragged()?);
    let tokens = ids(&[&[30, 31, 32], &[40, 41, 42]]);
    let expected = step(&model, &tokens, &mut numbers)?;
    for count in [1, 3, 3] {
        let positions = Tensor::new(&[[2u32, 3, 4], [5, 6, 7]], &device())?.narrow(1, 0, count)?;
        let mut pass = Pass::inference().at(positions.contiguous()?);
        let tokens = tokens.narrow(1, 0, count)?.contiguous()?;
        let found = model.forward_with(&tokens, LogitsFor::EveryToken, Some(&mut memory), &mut pass)?;
        assert_parity(&found, &expected.narrow(1, 0, count)?, SAME, "at positions in memory");
        assert_eq!(memory.lengths(), [2, 5], "so the step can be repeated");
    }
    Ok(())
}

/// Whether steps of one token with this cache are replayed.
fn is_recorded(cache: &Gpt2Cache) -> bool {
    matches!(cache.recording(1), Some(Ok(())))
}

/// Returns the model with recorded steps.
#[expect(unsafe_code, reason = "recording steps has a safety contract")]
fn recorded(model: Gpt2LMHeadModel) -> Gpt2LMHeadModel {
    // SAFETY: These tests run on a GPU with one test thread, so nothing else uses the device.
    unsafe { model.with_recorded_steps() }
}

/// Covers all states of a cache, whose steps a GPU replays and other devices compute as usual.
#[test]
fn recorded_steps_equal_unrecorded_steps() -> Result<()> {
    let (plain, recorder) = (model()?, recorded(model()?));
    let (mut expected, mut found) = (cache(&plain, 2)?, cache(&recorder, 2)?);
    let mut kept = Vec::new();
    let mut both = |expected: &mut Gpt2Cache, found: &mut Gpt2Cache, rows: &[&[u32]]| -> Result<()> {
        let expected_logits = step(&plain, &ids(rows), expected)?;
        kept.push((step(&recorder, &ids(rows), found)?, expected_logits));
        assert_eq!(found.lengths(), expected.lengths());
        Ok(())
    };
    both(&mut expected, &mut found, &[&[5, 9], &[1, 2]])?;
    for token in [8, 40, 77, 21] {
        assert!(!is_recorded(&found));
        both(&mut expected, &mut found, &[&[token], &[token + 1]])?;
    }
    assert_eq!(is_recorded(&found), device().is_cuda(), "from the fourth step on");
    // Tests row lengths that differ from the recorded step's, and a prompt between replays.
    for cache in [&mut expected, &mut found] {
        cache.truncate(0, 2)?;
        cache.truncate(1, 4)?;
    }
    both(&mut expected, &mut found, &[&[33], &[34]])?;
    both(&mut expected, &mut found, &[&[6, 7], &[0, 78]])?;
    both(&mut expected, &mut found, &[&[12], &[11]])?;
    // A fork has its own recordings.
    let (mut forked_expected, mut forked) = (expected.fork(&[1, 0, 1])?, found.fork(&[1, 0, 1])?);
    for token in [3, 2, 1, 0] {
        both(&mut forked_expected, &mut forked, &[&[token], &[token + 4], &[token + 9]])?;
        both(&mut expected, &mut found, &[&[token], &[token]])?;
    }
    assert_eq!((is_recorded(&found), is_recorded(&forked)), (device().is_cuda(), device().is_cuda()));
    // Later steps do not overwrite logits that were returned earlier.
    for (index, (found, expected)) in kept.iter().enumerate() {
        assert_parity(found, expected, SAME, &format!("pass {index}"));
    }
    // A full cache rejects the step with the same error as without recordings, and stays unchanged.
    let message = |model: &Gpt2LMHeadModel, cache: &mut Gpt2Cache| {
        let error = step(model, &ids(&[&[1], &[1]]), cache).unwrap_err().to_string();
        assert_eq!(cache.lengths(), [10, 12]);
        error.lines().next().map(str::to_owned)
    };
    assert_eq!(message(&recorder, &mut found), message(&plain, &mut expected));
    Ok(())
}

/// Covers steps of several tokens, partly truncated as with drafts, with one recording per size.
#[test]
fn recorded_multi_token_steps_equal_unrecorded_steps() -> Result<()> {
    const ALL: [u32; 3] = [30, 31, 32];
    let (plain, recorder) = (model()?, recorded(model()?));
    let (mut expected, mut found) = (cache(&plain, 2)?, cache(&recorder, 2)?);
    for round in 0..6 {
        for tokens in [3, 1, 2] {
            let rows = [&ALL[..tokens], &[ALL[2], round, 5][..tokens]];
            let what = format!("{tokens} tokens in round {round}");
            let [expected_logits, found_logits] =
                [(&plain, &mut expected), (&recorder, &mut found)].map(|(model, cache)| -> Result<Tensor> {
                    let logits = step(model, &ids(&rows), cache)?;
                    let lengths = cache.lengths().to_vec();
                    assert_eq!(lengths.len(), 2);
                    // Drops at least one token of the first row and all new tokens of the second.
                    cache.truncate(0, (lengths[0] - 1).min(8 - round as usize % 3))?;
                    cache.truncate(1, lengths[1] - tokens)?;
                    Ok(logits)
                });
            assert_parity(&found_logits?, &expected_logits?, SAME, &what);
            assert_eq!(found.lengths(), expected.lengths());
        }
    }
    let recorded = |cache: &Gpt2Cache| [1, 2, 3].map(|tokens| cache.recording(tokens) == Some(Ok(())));
    assert_eq!(recorded(&found), [device().is_cuda(); 3]);
    assert!(
        [0, 4, 9].iter().all(|tokens| found.recording(*tokens).is_none()),
        "no steps of these sizes were computed"
    );
    // An invalid ID leaves the cache unchanged.
    let [unknown, known] = [ids(&[&[79, 1], &[1, 2]]), ids(&[&[78, 1], &[1, 2]])];
    assert!(step(&recorder, &unknown, &mut found).is_err());
    assert_eq!((recorded(&found), found.lengths()), ([device().is_cuda(); 3], expected.lengths()));
    let expected = step(&plain, &known, &mut expected)?;
    assert_parity(
        &step(&recorder, &known, &mut found)?,
        &expected,
        SAME,
        "after an id outside the vocabulary",
    );
    Ok(())
}

/// A cache with recorded steps continues with a different model, which records its own steps.
#[test]
fn recording_belongs_to_one_model() -> Result<()> {
    const STEPS: [usize; 12] = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1];
    let fixture = Fixture::open("gpt2/upcast");
    let unscaled = Gpt2Config { scale_attn_weights: false, ..model()?.config().clone() };
    let models = || -> Result<[Gpt2LMHeadModel; 2]> {
        Ok([model()?, common::from_conv1d(&unscaled, fixture.tensors_below("transformer."))?])
    };
    let run = |models: [Gpt2LMHeadModel; 2]| -> Result<(Vec<Tensor>, Vec<bool>)> {
        let mut cache = cache(&models[0], 1)?;
        let logits = |(model, token): (&usize, u32)| {
            Ok((step(&models[*model], &ids(&[&[token]]), &mut cache)?, is_recorded(&cache)))
        };
        STEPS.iter().zip(1..).map(logits).collect()
    };
    let (found, recorded) = run(models()?.map(recorded))?;
    for (index, (found, expected)) in found.iter().zip(&run(models()?)?.0).enumerate() {
        assert_parity(found, expected, SAME, &format!("step {index}"));
    }
    // Each switch to the other model prepares a new recording.
    let steps: Vec<usize> = (0..STEPS.len()).filter(|step| recorded[*step]).collect();
    assert_eq!(steps, if device().is_cuda() { vec![3, 4, 6, 7, 9, 10] } else { Vec::new() });
    Ok(())
}

/// A cache whose dtype differs from the activations' reports that its steps cannot be recorded.
///
/// The steps are then computed as usual.
#[test]
fn unrecordable_steps_are_computed() -> Result<()> {
    let kv_dtype = if dtype() == DType::F16 { DType::F32 } else { DType::F16 };
    let (plain, recorder) = (model()?, recorded(model()?));
    let new_cache = |model: &Gpt2LMHeadModel| Gpt2Cache::new(model.config(), 1, 12, kv_dtype, &device());
    let (mut expected, mut found) = (new_cache(&plain)?, new_cache(&recorder)?);
    for token in 1..7 {
        let expected = step(&plain, &ids(&[&[token]]), &mut expected)?;
        assert_parity(&step(&recorder, &ids(&[&[token]]), &mut found)?, &expected, SAME, "computed");
    }
    assert_eq!(found.lengths(), [6]);
    match found.recording(1) {
        Some(Err(reason)) => {
            assert!(device().is_cuda() && reason.contains("no kernel for a step"), "{reason}")
        }
        other => assert!(!device().is_cuda() && other.is_none(), "{other:?}"),
    }
    Ok(())
}

/// Rejects invalid input before any computation, with sizes in the message.
///
/// Sources: huggingface/transformers#530 and #14384.
#[test]
fn invalid_lengths_and_ids_are_rejected() -> Result<()> {
    let model = model()?;
    let too_long = all_logits(&model, &ids(&[&[0; 17]])).unwrap_err().to_string();
    assert!(too_long.contains("17 new tokens exceed the context length of 16 tokens"), "{too_long}");
    // Uses the CPU, because a GPU cannot allocate zero bytes.
    let none = Tensor::zeros((1, 0), DType::U32, &Device::Cpu)?;
    assert!(all_logits(&model, &none).unwrap_err().to_string().contains("at least one token"));
    assert!(all_logits(&model, &ids(&[&[79]])).is_err(), "an id outside the vocabulary");
    let shallow = Gpt2Config { n_layer: 2, ..model.config().clone() };
    let mut shallow = Gpt2Cache::new(&shallow, 1, 12, dtype(), &device())?;
    let error = step(&model, &ids(&[&[0]]), &mut shallow).unwrap_err().to_string();
    assert!(error.contains("the cache has 2 blocks, but the model has 3"), "{error}");
    let mut cache = cache(&model, 1)?;
    step(&model, &ids(&[&[0; 10]]), &mut cache)?;
    assert!(step(&model, &ids(&[&[0; 3]]), &mut cache).is_err(), "past the capacity of the cache");
    Ok(())
}

/// Observer that sets the output of one block's MLP to zero.
struct WithoutMlp(usize);

impl Observer for WithoutMlp {
    fn wants(&self, site: Site) -> bool {
        site == Site::in_block(self.0, SiteKind::MlpOut)
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        value.zeros_like()
    }
}

#[test]
fn observer_can_replace_an_activation() -> Result<()> {
    let fixture = Fixture::open("gpt2/upcast");
    let tokens = ids(&[&[5, 9, 70]]);
    let mut observer = WithoutMlp(1);
    let mut pass = Pass::inference().observed_by(&mut observer);
    let knocked_out =
        common::model(&fixture)?.forward_with(&tokens, LogitsFor::EveryToken, None, &mut pass)?;
    let mut tensors = fixture.tensors_below("transformer.");
    for name in ["h.1.mlp.c_proj.weight", "h.1.mlp.c_proj.bias"] {
        let zero = tensors[name].zeros_like()?;
        tensors.insert(name.into(), zero);
    }
    let config = Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).unwrap();
    let without_weights = all_logits(&common::from_conv1d(&config, tensors)?, &tokens)?;
    assert_parity(&knocked_out, &without_weights, SAME, "a block without its MLP");
    Ok(())
}

fn small_config() -> Gpt2Config {
    Gpt2Config { vocab_size: 13, n_positions: 7, n_embd: 8, n_layer: 3, n_head: 2, ..Gpt2Config::gpt2() }
}

/// Creates variables under the model's parameter names.
fn variables(config: &Gpt2Config) -> HashMap<String, Var> {
    let variable = |(index, parameter): (usize, candle_gpt2::Parameter)| {
        let values = pattern(&parameter.shape, 0.5, 100 * index as u64);
        (parameter.name, Var::from_tensor(&values.to_device(&device()).unwrap()).unwrap())
    };
    expected_parameters(config).into_iter().enumerate().map(variable).collect()
}

fn model_of(config: &Gpt2Config, variables: &HashMap<String, Var>) -> Result<Gpt2LMHeadModel> {
    let tensors = variables.iter().map(|(name, variable)| (name.clone(), variable.as_tensor().clone()));
    Gpt2LMHeadModel::load(
        config,
        ByOutput(VarBuilder::from_tensors(tensors.collect(), DType::F32, &device())),
    )
}

/// candle's fused layer norm and softmax would silently leave most parameters without a gradient.
#[test]
fn every_parameter_receives_a_gradient() -> Result<()> {
    for tie_word_embeddings in [true, false] {
        let config = Gpt2Config { tie_word_embeddings, ..small_config() };
        let variables = variables(&config);
        let logits = all_logits(&model_of(&config, &variables)?, &ids(&[&[1, 5, 9, 12, 0]]))?;
        let gradients = logits.sqr()?.sum_all()?.backward()?;
        for (name, variable) in &variables {
            let gradient = gradients.get(variable).unwrap_or_else(|| panic!("{name} has no gradient"));
            assert!(
                values(gradient).iter().any(|value| value.abs() > 1e-6),
                "the gradient of {name} is zero"
            );
        }
    }
    Ok(())
}

#[test]
fn dropout_acts_in_training_only_and_follows_its_seed() -> Result<()> {
    let config = small_config();
    let model = model_of(&config, &variables(&config))?;
    let tokens = ids(&[&[1, 5, 9, 12, 0]]);
    let trained = |seed: u64| -> Result<Vec<f64>> {
        let mut generator = RandomStream::new(seed);
        Ok(values(&model.forward_with(
            &tokens,
            LogitsFor::EveryToken,
            None,
            &mut Pass::training(&mut generator),
        )?))
    };
    assert_eq!(trained(1)?, trained(1)?);
    assert_ne!(trained(1)?, trained(2)?);
    assert_ne!(trained(1)?, values(&all_logits(&model, &tokens)?));
    // Each rate takes effect on its own.
    let without = Gpt2Config { embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0, ..config };
    for alone in [
        Gpt2Config { embd_pdrop: 0.5, ..without.clone() },
        Gpt2Config { attn_pdrop: 0.5, ..without.clone() },
        Gpt2Config { resid_pdrop: 0.5, ..without.clone() },
    ] {
        let model = model_of(&alone, &variables(&alone))?;
        let mut generator = RandomStream::new(1);
        let pass = &mut Pass::training(&mut generator);
        let trained = model.forward_with(&tokens, LogitsFor::EveryToken, None, pass)?;
        assert_ne!(values(&trained), values(&all_logits(&model, &tokens)?), "{alone:?}");
    }
    let model = model_of(&without, &variables(&without))?;
    let mut generator = RandomStream::new(1);
    let trained =
        model.forward_with(&tokens, LogitsFor::EveryToken, None, &mut Pass::training(&mut generator))?;
    let inferred = all_logits(&model, &tokens)?;
    // A GPU uses different attention kernels in training.
    if device().is_cpu() {
        assert_eq!(values(&trained), values(&inferred));
    }
    assert_parity(&trained, &inferred, 1e-5, "without dropout");
    Ok(())
}

/// Published sizes, compared with the parameter list and with a built model.
///
/// The model's zeros use no memory until they are touched. Source: transformers' `num_parameters()` for the
/// published checkpoints.
#[test]
fn presets_have_the_published_parameter_counts() -> Result<()> {
    for (name, total) in [
        ("distilgpt2", 81_912_576),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ] {
        let config = Gpt2Config::preset(name).unwrap();
        assert_eq!(ParameterCounts::new(&config).unique, total, "{name}");
        let model = Gpt2LMHeadModel::load(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
        assert_eq!(model.parameter_count(), total, "{name}, built");
        assert_eq!(model.weight_bytes(), 4 * total, "{name}, in f32");
    }
    Ok(())
}

#[test]
fn component_counts_of_the_124m_model_are_correct() {
    let counts = ParameterCounts::new(&Gpt2Config::gpt2());
    assert_eq!(counts.with_untied_head, 163_037_184);
    assert_eq!(counts.embedding, 38_597_376 + 786_432);
    assert_eq!(counts.per_block, 7_087_872);
    assert_eq!(counts.attention_per_block, 2_362_368);
    assert_eq!(counts.mlp_per_block, 4_722_432);
    assert_eq!(counts.blocks, 12 * 7_087_872);
    let untied = ParameterCounts::new(&Gpt2Config { tie_word_embeddings: false, ..Gpt2Config::gpt2() });
    assert_eq!((untied.unique, untied.with_untied_head), (163_037_184, 163_037_184));
    assert_eq!(Gpt2Config::gpt2().kv_bytes_per_token(KvDType::F32), 73_728);
}

/// Published counts for each size, taken from the literature rather than computed by this project.
#[test]
fn ledger_contains_every_published_count() {
    for (preset, paper, counts) in [
        (
            "distilgpt2",
            None,
            [42_528_768, 81_126_144, 81_898_752, 81_912_576, 81_948_672, 120_496_128, 120_509_952],
        ),
        (
            "gpt2",
            Some("117M"),
            [85_056_000, 123_653_376, 124_412_160, 124_439_808, 124_475_904, 163_009_536, 163_037_184],
        ),
        (
            "gpt2-medium",
            Some("345M"),
            [302_311_424, 353_774_592, 354_749_440, 354_823_168, 354_871_296, 406_212_608, 406_286_336],
        ),
        (
            "gpt2-large",
            Some("762M"),
            [708_390_400, 772_719_360, 773_891_840, 774_030_080, 774_090_240, 838_220_800, 838_359_040],
        ),
        (
            "gpt2-xl",
            Some("1542M"),
            [
                1_475_561_600,
                1_555_972_800,
                1_557_380_800,
                1_557_611_200,
                1_557_686_400,
                1_637_792_000,
                1_638_022_400,
            ],
        ),
    ] {
        let config = Gpt2Config::preset(preset).unwrap();
        let found: Vec<usize> = candle_gpt2::parameter_ledger(&config).iter().map(|row| row.count).collect();
        assert_eq!(found, counts, "{preset}");
        assert_eq!(candle_gpt2::paper_size(&config), paper, "{preset}");
        let untied = Gpt2Config { tie_word_embeddings: false, ..config };
        let found: Vec<usize> = candle_gpt2::parameter_ledger(&untied).iter().map(|row| row.count).collect();
        assert_eq!(found, counts, "{preset}, untied: the definitions name their own head");
    }
}

/// Observer that runs the observed model on other tokens in the middle of a pass.
struct Comparing {
    model: Arc<OnceLock<Gpt2LMHeadModel>>,
    logits: Vec<Tensor>,
}

impl Observer for Comparing {
    fn wants(&self, site: Site) -> bool {
        site == Site { layer: Some(1), kind: SiteKind::ResidPre }
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        self.logits.push(all_logits(self.model.get().unwrap(), &ids(&[&[70, 9, 5]]))?);
        Ok(value)
    }
}

#[test]
fn observer_can_run_the_observed_model() -> Result<()> {
    let itself = Arc::new(OnceLock::new());
    let observer = Arc::new(Mutex::new(Comparing { model: itself.clone(), logits: Vec::new() }));
    let observed = itself.get_or_init(|| model().unwrap().observed_by(observer.clone()));
    for pass in 1..=2 {
        all_logits(observed, &ids(&[&[5, 9, 70]]))?;
        let logits = &observer.lock().unwrap().logits;
        assert_eq!(logits.len(), pass, "its own passes are not observed");
        assert_parity(&logits[pass - 1], &all_logits(&model()?, &ids(&[&[70, 9, 5]]))?, SAME, "in a pass");
    }
    Ok(())
}
