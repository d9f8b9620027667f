//! Interrupted passes.

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
fn interrupted_pass_leaves_the_cache_unchanged() -> Result<()> {
    let model = common::model(&Fixture::open("gpt2/upcast"))?;
    let prefilled = || -> Result<Gpt2Cache> {
        let mut cache = Gpt2Cache::new(model.config(), 1, 12, dtype(), &device())?;
        step(&model, &IDS[..4], &mut cache)?;
        Ok(cache)
    };
    let expected = values(&step(&model, &IDS[4..], &mut prefilled()?)?);
    let run_interrupted = |checks: usize, cache: &mut Gpt2Cache| {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let is_raised = Arc::new(move || counted.fetch_add(1, Ordering::SeqCst) >= checks);
        let found = interruptible(is_raised, || step(&model, &IDS[4..], cache));
        (found, count.load(Ordering::SeqCst))
    };
    let (whole, checks) = run_interrupted(usize::MAX, &mut prefilled()?);
    assert_eq!(values(&whole?), expected);
    // At least one check per matrix product: four in each block, and one in the head.
    assert!(checks > 4 * model.config().n_layer, "{checks}");
    for checks in 0..checks {
        let mut cache = prefilled()?;
        let (found, count) = run_interrupted(checks, &mut cache);
        let message = found.unwrap_err().to_string();
        assert!(message.starts_with("the computation was interrupted"), "{message}");
        assert_eq!((count, cache.lengths()), (checks + 1, &[4][..]));
        assert_eq!(values(&step(&model, &IDS[4..], &mut cache)?), expected, "after {checks}");
    }
    assert!(!is_interrupted());
    Ok(())
}
