//! `softmax(scale · Q Kᵀ) V` where every query sees keys that lie side by side: causal, full and windowed attention, with and
//! without a cache.
//!
//! One query, a step of decoding, is bound by memory: [`one_query`]. Many queries are bound by arithmetic: [`many_queries`].
//! Neither computes what no query sees, and what a query does not see never reaches its result, not even NaN.

mod element;
mod heads;
mod many_queries;
mod one_query;
mod softmax;
#[cfg(test)]
mod tests;
mod write;

use std::ops::Range;

use element::Element;
use half::f16;
use half::slice::HalfFloatSliceExt;
pub use heads::{Heads, KvSlot};
pub use write::{KvValues, write_tokens};

use crate::simd::InstructionSet;

/// Keys and values as a cache may hold them.
#[derive(Debug, Clone)]
pub enum KvHeads<'a> {
    /// In f32.
    F32([Heads<'a>; 2]),
    /// In f16.
    F16([Heads<'a, f16>; 2]),
}

/// Attention of some queries over keys and values.
///
/// # Shapes
/// `q` `(B, H, T, D)`; keys `(B, H, S, D)`, values `(B, H, S, Dv)`. `visible` has for each of the `B · T` queries the keys that
/// it sees, at least one of those that its row has. Returns `(B, T, H, Dv)`.
///
/// # Panics
/// When the shapes are not these.
pub fn attention(q: &Heads<'_>, kv: &KvHeads<'_>, scale: f32, visible: &[Range<usize>]) -> Vec<f32> {
    attention_with(q, kv, scale, visible, InstructionSet::detected())
}

/// The same with these instructions.
fn attention_with(
    q: &Heads<'_>,
    kv: &KvHeads<'_>,
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    match kv {
        KvHeads::F32([k, v]) => attention_over(q, k, v, scale, visible, instructions),
        KvHeads::F16([k, v]) => attention_over(q, &bits(k), &bits(v), scale, visible, instructions),
    }
}

/// The same heads as bits.
fn bits<'a>(heads: &Heads<'a, f16>) -> Heads<'a, u16> {
    heads.with_values(heads.values.reinterpret_cast())
}

fn attention_over<E: Element>(
    q: &Heads<'_>,
    k: &Heads<'_, E>,
    v: &Heads<'_, E>,
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    let sees =
        |(query, keys): (usize, &Range<usize>)| !keys.is_empty() && keys.end <= k.tokens_of(query / q.tokens);
    let fits = k.rows.len() == q.rows.len()
        && v.rows.len() == q.rows.len()
        && [k.heads, v.heads] == [q.heads; 2]
        && k.head_dim == q.head_dim
        && k.tokens == v.tokens
        && visible.len() == q.rows.len() * q.tokens
        && visible.iter().enumerate().all(sees);
    assert!(fits, "queries, keys, values and what is seen of them do not fit together");
    if q.rows.len() * q.tokens * q.heads * v.head_dim == 0 {
        return Vec::new();
    }
    match q.tokens {
        1 => one_query::attention(q, k, v, scale, visible, instructions),
        _ => many_queries::attention(q, k, v, scale, visible, instructions),
    }
}
