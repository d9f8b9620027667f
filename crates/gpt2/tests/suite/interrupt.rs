//! Passes that end before their end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Result, Tensor};
use gpt2::{Gpt2Cache, Gpt2LMHead, LogitsFor, Pass};
use gpt2_testing::{Fixture, device, dtype, values};

use crate::common;

const IDS: [u32; 6] = [5, 9, 70, 3, 11, 12];

fn model() -> Result<Gpt2LMHead> {
    common::model(&Fixture::open("gpt2/upcast"))
}

/// The model, which is asked as often as this before it ends its passes, and how often it was asked.
fn ending_after(asked: usize) -> Result<(Gpt2LMHead, Arc<AtomicUsize>)> {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let model = model()?.interrupted_by(Arc::new(move || counted.fetch_add(1, Ordering::SeqCst) >= asked));
    Ok((model, count))
}

fn step(model: &Gpt2LMHead, ids: &[u32], cache: &mut Gpt2Cache) -> Result<Tensor> {
    let ids = Tensor::new(ids, &device())?.unsqueeze(0)?;
    model.forward(&ids, LogitsFor::EveryToken, Some(cache), &mut Pass::inference())
}

#[test]
fn an_interrupted_pass_ends_wherever_it_is_and_leaves_the_cache_as_it_was() -> Result<()> {
    let plain = model()?;
    let new_cache = || Gpt2Cache::new(plain.config(), 1, 12, dtype(), &device());
    let mut cache = new_cache()?;
    let (beginning, expected) = (step(&plain, &IDS[..4], &mut cache)?, step(&plain, &IDS[4..], &mut cache)?);
    // Twice in each block.
    let asked = 2 * plain.config().n_layer;
    for asked in 0..asked {
        let (ending, count) = ending_after(asked)?;
        let mut cache = new_cache()?;
        assert_eq!(values(&step(&plain, &IDS[..4], &mut cache)?), values(&beginning));
        let told = step(&ending, &IDS[4..], &mut cache).unwrap_err().to_string();
        assert!(told.starts_with("the computation was interrupted"), "{told}");
        assert_eq!((count.load(Ordering::SeqCst), cache.lengths()), (asked + 1, &[4][..]));
        assert!(ending.is_interrupted());
        assert_eq!(values(&step(&plain, &IDS[4..], &mut cache)?), values(&expected), "after {asked}");
    }
    let (whole, count) = ending_after(asked)?;
    let mut cache = new_cache()?;
    step(&plain, &IDS[..4], &mut cache)?;
    assert_eq!(values(&step(&whole, &IDS[4..], &mut cache)?), values(&expected));
    assert_eq!(count.load(Ordering::SeqCst), asked);
    assert!(!plain.is_interrupted());
    Ok(())
}

/// The head of many tokens is computed in pieces, between which it is asked too.
#[test]
fn logits_of_many_tokens_are_the_same_in_pieces() -> Result<()> {
    let plain = model()?;
    let hidden = Tensor::randn(0_f32, 1.0, (2, 300, plain.config().n_embd), &device())?.to_dtype(dtype())?;
    let (never, count) = ending_after(usize::MAX)?;
    for wanted in [LogitsFor::EveryToken, LogitsFor::Tokens { first: 7, count: 290 }, LogitsFor::LastToken] {
        let (expected, found) = (plain.logits(&hidden, wanted)?, never.logits(&hidden, wanted)?);
        assert_eq!(values(&found), values(&expected), "{wanted:?}");
    }
    assert_eq!(count.load(Ordering::SeqCst), 4, "two whole pieces each; what is less is there at once");
    let (ending, _) = ending_after(1)?;
    assert!(ending.logits(&hidden, LogitsFor::EveryToken).is_err());
    Ok(())
}
