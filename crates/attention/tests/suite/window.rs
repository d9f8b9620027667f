//! Tests that restricted attention computes only the band and equals masked full attention.
//!
//! Source: "Attention Is All You Need", section 4.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2_attention::{AttentionMask, Pass, ScaledDotProduct};
use candle_gpt2_testing::{assert_close, pattern};

/// Tolerance for the same f32 arithmetic, summed in a different order.
const SAME: f64 = 2e-6;

struct Heads {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Heads {
    fn new(query_len: usize, key_len: usize) -> Self {
        let heads = |tokens: usize, offset| pattern(&[2, 3, tokens, 5], 4.0, offset);
        Self { q: heads(query_len, 0), k: heads(key_len, 5000), v: heads(key_len, 9000) }
    }

    /// Returns inputs that track gradients, which the forward-only kernel does not support.
    fn tracked(query_len: usize, key_len: usize) -> Result<Self> {
        let Self { q, k, v } = Self::new(query_len, key_len);
        Ok(Self { q: Var::from_tensor(&q)?.into_inner(), k, v })
    }

    fn attend(&self, mask: &AttentionMask) -> Result<Tensor> {
        ScaledDotProduct::new(5).forward(&self.q, &self.k, &self.v, mask, &[], &mut Pass::inference())
    }
}

/// Returns the window as a dense additive mask.
fn dense_window(query_len: usize, key_len: usize, before: usize, after: usize) -> AttentionMask {
    let mut scores = vec![f32::NEG_INFINITY; query_len * key_len];
    for query in 0..query_len {
        for key in query.saturating_sub(before)..(query + after + 1).min(key_len) {
            scores[query * key_len + key] = 0.0;
        }
    }
    AttentionMask::Additive(Tensor::from_vec(scores, (query_len, key_len), &Device::Cpu).unwrap())
}

#[test]
fn window_equals_the_dense_mask() -> Result<()> {
    for tokens in [1, 7, 33, 100] {
        let heads = Heads::new(tokens, tokens);
        for (before, after) in [(0, 0), (1, 1), (3, 0), (0, 2), (5, 9), (40, 40)] {
            let band = heads.attend(&AttentionMask::Window { before, after })?;
            let whole = heads.attend(&dense_window(tokens, tokens, before, after))?;
            assert_close(&band, &whole, SAME, &format!("{tokens} tokens, window {before}, {after}"));
        }
    }
    Ok(())
}

/// Tests values and gradients of the blockwise computation, used where the kernel does not apply.
#[test]
fn window_gradients_equal_the_dense_mask() -> Result<()> {
    for (tokens, before, after) in [(33, 1, 1), (100, 5, 9), (100, 40, 40)] {
        let heads = Heads::tracked(tokens, tokens)?;
        let (band, whole) = (
            heads.attend(&AttentionMask::Window { before, after })?,
            heads.attend(&dense_window(tokens, tokens, before, after))?,
        );
        let what = format!("{tokens} tokens, window {before}, {after}");
        assert_close(&band, &whole, SAME, &what);
        let gradient = |output: &Tensor| -> Result<Tensor> {
            let gradients = (output * pattern(output.dims(), 1.0, 77))?.sum_all()?.backward()?;
            Ok(gradients.get(&heads.q).unwrap().clone())
        };
        assert_close(&gradient(&band)?, &gradient(&whole)?, 10.0 * SAME, &what);
    }
    Ok(())
}

#[test]
fn cross_attention_window_equals_the_dense_mask() -> Result<()> {
    let heads = Heads::new(70, 75);
    let band = heads.attend(&AttentionMask::Window { before: 2, after: 6 })?;
    assert_close(&band, &heads.attend(&dense_window(70, 75, 2, 6))?, SAME, "70 queries over 75 keys");
    Ok(())
}

#[test]
fn window_of_full_length_is_full_attention() -> Result<()> {
    let heads = Heads::new(50, 50);
    let full = heads.attend(&AttentionMask::Bidirectional)?;
    for radius in [49, 50, usize::MAX] {
        let window = heads.attend(&AttentionMask::Window { before: radius, after: radius })?;
        assert_close(&window, &full, SAME, &format!("radius {radius}"));
    }
    let causal = heads.attend(&AttentionMask::Window { before: 50, after: 0 })?;
    assert_close(&causal, &heads.attend(&AttentionMask::Causal)?, SAME, "a causal window of the length");
    Ok(())
}

#[test]
fn zero_window_attends_only_to_itself() -> Result<()> {
    let heads = Heads::new(40, 40);
    let own = heads.attend(&AttentionMask::Window { before: 0, after: 0 })?;
    assert_close(&own, &heads.v.to_dtype(DType::F32)?, SAME, "radius 0");
    Ok(())
}
