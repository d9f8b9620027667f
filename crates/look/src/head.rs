//! One attention head at one token, step by step.
//!
//! The steps follow the computation by hand: query and keys, attention scores, scaling and masking, softmax
//! to attention weights, and the context vector as the weighted sum of the values.

use candle_core::{DType, Tensor};
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_interpret::{Head, Record};
use serde::Serialize;

use crate::error::{Result, invalid_option};
use crate::{LookSubject, Reader, Text};

/// Computes the steps of a head for one query token and one key token.
///
/// ```
/// use candle_gpt2_interpret::Head;
/// use candle_gpt2_look::{OneHead, Reader, LookSubject, Text};
/// # use candle_gpt2_engine::Silent;
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// # let reader = Reader::without_bos(model.vocabulary());
/// # let subject = LookSubject::new(&model, "built-in".into(), &reader);
/// let head = Head { layer: 2, head: 1 };
/// let steps = OneHead { text: Text::Ids(vec![5, 6, 7]), head, query: -1, key: 0 }.check(&reader)?.look(&subject)?;
/// assert_eq!((steps.query, steps.key, steps.weights.len()), (2, 0, 3));
/// let products: f32 = steps.q.iter().zip(&steps.k).map(|(q, k)| q * k).sum();
/// assert!((steps.score - products).abs() < 1e-3);
/// assert!((steps.weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct OneHead {
    /// Text to analyze.
    pub text: Text,
    /// Head (`layer`, `head`).
    pub head: Head,
    /// Query token (`query`): an index from 0, or a negative index from the end.
    pub query: i64,
    /// Key token (`key`), which also supplies the value; not after the query token.
    pub key: i64,
}

/// A validated head and token pair.
///
/// Returned by [`OneHead::check`].
#[derive(Debug, Clone)]
pub struct CheckedHead {
    ids: Vec<u32>,
    head: Head,
    query: usize,
    key: usize,
}

/// Steps of a head.
///
/// `D` is the head size. Lists over keys have `query + 1` entries, because no token attends to later ones.
///
/// Returned by [`CheckedHead::look`]; see [`OneHead`] for an example.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeadSteps {
    /// All tokens of the text.
    pub tokens: Vec<String>,
    /// Layer index.
    pub layer: usize,
    /// Head index in the layer.
    pub head: usize,
    /// Index of the query token.
    pub query: usize,
    /// Index of the key token.
    pub key: usize,
    /// Head size `D`.
    pub head_dim: usize,
    /// Scale factor of the scores: `1/√D`, or as configured.
    pub scale: f64,
    /// Query vector of the query token, `(D)`.
    pub q: Vec<f32>,
    /// Key vector of the key token, `(D)`.
    pub k: Vec<f32>,
    /// Elementwise products of the query and key vectors, `(D)`.
    pub products: Vec<f32>,
    /// Attention score for the pair: the sum of the products.
    pub score: f32,
    /// Attention score for the pair after scaling.
    pub scaled: f32,
    /// Scaled attention scores for all keys that the query token can attend to.
    pub scores: Vec<f32>,
    /// Attention weights: the softmax of the scores, with a sum of 1.
    pub weights: Vec<f32>,
    /// Value vector of the key token, `(D)`.
    pub v: Vec<f32>,
    /// Context vector of the query token, `(D)`: the weighted sum of the value vectors.
    pub context: Vec<f32>,
}

impl OneHead {
    /// Validates the text, the head and the tokens without the model's weights.
    ///
    /// # Errors
    /// If the text, the head or a token is invalid, or the key comes after the query.
    pub fn check(&self, reader: &Reader) -> Result<CheckedHead> {
        let ids = reader.text(&self.text)?;
        let config = reader.config();
        self.head.check(config.n_layer, config.n_head)?;
        let [query, key] = [("query", self.query), ("key", self.key)]
            .map(|(option, position)| reader.position(option, position, ids.len()));
        let (query, key) = (query?, key?);
        if key > query {
            return Err(invalid_option(format!(
                "`key` {key}: token {query} attends only to itself and earlier tokens"
            )));
        }
        Ok(CheckedHead { ids, head: self.head, query, key })
    }
}

impl CheckedHead {
    /// Returns the tokens to run the model on; tokens after the query do not affect its steps.
    pub fn ids(&self) -> &[u32] {
        self.ids.get(..=self.query).unwrap_or_default()
    }

    /// Returns the hook points that a record needs for [`CheckedHead::steps`].
    pub fn sites(&self) -> Vec<Site> {
        [SiteKind::Q, SiteKind::K, SiteKind::V, SiteKind::AttnScores, SiteKind::Pattern, SiteKind::Z]
            .map(|kind| self.site(kind))
            .into()
    }

    fn site(&self, kind: SiteKind) -> Site {
        Site::in_block(self.head.layer, kind)
    }

    /// Runs the model and computes the steps.
    ///
    /// # Errors
    /// If the model fails.
    pub fn look(&self, subject: &LookSubject) -> Result<HeadSteps> {
        self.steps(&subject.run(self.ids())?.record(self.sites())?, subject.reader())
    }

    /// Computes the steps from a record of [`CheckedHead::sites`] on [`CheckedHead::ids`].
    ///
    /// # Errors
    /// If the record lacks a hook point.
    pub fn steps(&self, record: &Record, reader: &Reader) -> Result<HeadSteps> {
        let Head { layer, head } = self.head;
        let of_token = |kind: SiteKind, token: usize| -> Result<Vec<f32>> {
            Ok(numbers(&record.get(self.site(kind))?.get(0)?.get(token)?.get(head)?)?) // (B, T, H, D)
        };
        let of_keys = |kind: SiteKind| -> Result<Vec<f32>> {
            let row = record.get(self.site(kind))?.get(0)?.get(head)?.get(self.query)?; // (B, H, T, S)
            Ok(numbers(&row.narrow(0, 0, self.query + 1)?)?)
        };
        let (q, k) = (of_token(SiteKind::Q, self.query)?, of_token(SiteKind::K, self.key)?);
        let products: Vec<f32> = q.iter().zip(&k).map(|(q, k)| q * k).collect();
        let scores = of_keys(SiteKind::AttnScores)?;
        Ok(HeadSteps {
            tokens: self.ids.iter().map(|id| reader.printable(*id)).collect(),
            layer,
            head,
            query: self.query,
            key: self.key,
            head_dim: q.len(),
            scale: reader.config().attention_scale(layer),
            score: products.iter().sum(),
            scaled: scores.get(self.key).copied().unwrap_or(f32::NEG_INFINITY),
            products,
            scores,
            weights: of_keys(SiteKind::Pattern)?,
            v: of_token(SiteKind::V, self.key)?,
            context: of_token(SiteKind::Z, self.query)?,
            q,
            k,
        })
    }
}

fn numbers(row: &Tensor) -> candle_core::Result<Vec<f32>> {
    row.to_dtype(DType::F32)?.to_vec1()
}
