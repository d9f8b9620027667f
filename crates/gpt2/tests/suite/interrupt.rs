//! Passes that end before their end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Result, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_kernels::{interruptible, is_interrupted};
use candle_gpt2_testing::{Fixture, device, dtype, values};

use crate::common;

const IDS: [u32; 6] = [5, 9, 70, 3, 11, 12];

fn step(model: &Gpt2LMHeadModel, ids: &[u32], cache: &mut Gpt2Cache) -> Result<Tensor> {
    let ids = Tensor::new(ids, &device())?.unsqueeze(0)?;
    model.forward_with(&ids, LogitsFor::EveryToken, Some(cache), &mut Pass::inference())
}

#[test]
fn an_interrupted_pass_ends_wherever_it_is_and_leaves_the_cache_as_it_was() -> Result<()> {
    let model = common::model(&Fixture::open("gpt2/upcast"))?;
    let begun = || -> Result<Gpt2Cache> {
        let mut cache = Gpt2Cache::new(model.config(), 1, 12, dtype(), &device())?;
        step(&model, &IDS[..4], &mut cache)?;
        Ok(cache)
    };
    let expected = values(&step(&model, &IDS[4..], &mut begun()?)?);
    let ended = |asked: usize, cache: &mut Gpt2Cache| {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let is_raised = Arc::new(move || counted.fetch_add(1, Ordering::SeqCst) >= asked);
        let found = interruptible(is_raised, || step(&model, &IDS[4..], cache));
        (found, count.load(Ordering::SeqCst))
    };
    let (whole, asked) = ended(usize::MAX, &mut begun()?);
    assert_eq!(values(&whole?), expected);
    // In each product at least: four of each block, and the head.
    assert!(asked > 4 * model.config().n_layer, "{asked}");
    for asked in 0..asked {
        let mut cache = begun()?;
        let (found, count) = ended(asked, &mut cache);
        let told = found.unwrap_err().to_string();
        assert!(told.starts_with("the computation was interrupted"), "{told}");
        assert_eq!((count, cache.lengths()), (asked + 1, &[4][..]));
        assert_eq!(values(&step(&model, &IDS[4..], &mut cache)?), expected, "after {asked}");
    }
    assert!(!is_interrupted());
    Ok(())
}
