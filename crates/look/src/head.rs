//! One head of attention at one token, step by step, in the words and the order in which it is computed by hand: query and keys, attention
//! scores, scaled and masked, softmax to attention weights, and the context vector as the sum of the values by these weights.

use candle_core::{DType, Tensor};
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_interpret::{Head, Record};
use serde::Serialize;

use crate::error::{Result, wrong};
use crate::{LookSubject, Reader, Text};

/// The steps of a head for one token, which looks at another.
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
    /// The text.
    pub text: Text,
    /// The head (`layer`, `head`).
    pub head: Head,
    /// The token whose query is taken (`query`), counted from 0, or from −1 at the end.
    pub query: i64,
    /// The token whose key and value are taken (`key`): that of the query, or one before it.
    pub key: i64,
}

/// A head and a pair of tokens that exist, whose steps can be computed.
///
/// Given by [`OneHead::check`].
#[derive(Debug, Clone)]
pub struct CheckedHead {
    ids: Vec<u32>,
    head: Head,
    query: usize,
    key: usize,
}

/// The steps. `D` is the width of a head; lists over keys have `query + 1` entries, for no token sees one behind it.
///
/// Given by [`CheckedHead::look`]; see [`OneHead`] for an example.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HeadSteps {
    /// The whole text, token by token.
    pub tokens: Vec<String>,
    /// The layer.
    pub layer: usize,
    /// The head.
    pub head: usize,
    /// The token that looks.
    pub query: usize,
    /// The token that is looked at.
    pub key: usize,
    /// `D`.
    pub head_dim: usize,
    /// What scores are multiplied by: `1/√D`, or as the configuration says.
    pub scale: f64,
    /// The query vector of the token that looks, `(D)`.
    pub q: Vec<f32>,
    /// The key vector of the token that is looked at, `(D)`.
    pub k: Vec<f32>,
    /// Their products, entry by entry, `(D)`.
    pub products: Vec<f32>,
    /// The attention score of the pair: the sum of the products.
    pub score: f32,
    /// The same, scaled.
    pub scaled: f32,
    /// The scaled attention scores of all keys that the token sees.
    pub scores: Vec<f32>,
    /// The attention weights: the softmax of the scores. They add up to 1.
    pub weights: Vec<f32>,
    /// The value vector of the token that is looked at, `(D)`.
    pub v: Vec<f32>,
    /// The context vector of the token that looks, `(D)`: the sum of the value vectors, each times its weight.
    pub context: Vec<f32>,
}

impl OneHead {
    /// Reads and checks what can be without the weights of the model.
    ///
    /// # Errors
    /// When the text, the head or a token does not exist, or the key comes after the query.
    pub fn check(&self, reader: &Reader) -> Result<CheckedHead> {
        let ids = reader.text(&self.text)?;
        let config = reader.config();
        self.head.check(config.n_layer, config.n_head)?;
        let [query, key] = [("query", self.query), ("key", self.key)]
            .map(|(option, position)| reader.position(option, position, ids.len()));
        let (query, key) = (query?, key?);
        if key > query {
            return Err(wrong(format!(
                "`key` {key}: token {query} sees itself and the tokens before it, of which this is none"
            )));
        }
        Ok(CheckedHead { ids, head: self.head, query, key })
    }
}

impl CheckedHead {
    /// The tokens to run the model on: those after the query have no part in its steps.
    pub fn ids(&self) -> &[u32] {
        self.ids.get(..=self.query).unwrap_or_default()
    }

    /// The places that a record needs for [`CheckedHead::steps`].
    pub fn sites(&self) -> Vec<Site> {
        [SiteKind::Q, SiteKind::K, SiteKind::V, SiteKind::AttnScores, SiteKind::Pattern, SiteKind::Z]
            .map(|kind| self.site(kind))
            .into()
    }

    fn site(&self, kind: SiteKind) -> Site {
        Site::in_block(self.head.layer, kind)
    }

    /// Runs the model, and takes the steps.
    ///
    /// # Errors
    /// Those of the model.
    pub fn look(&self, subject: &LookSubject) -> Result<HeadSteps> {
        self.steps(&subject.run(self.ids())?.record(self.sites())?, subject.reader())
    }

    /// The steps, from a record of [`CheckedHead::sites`] on [`CheckedHead::ids`].
    ///
    /// # Errors
    /// When the record lacks one of them.
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
            tokens: self.ids.iter().map(|id| reader.shown(*id)).collect(),
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
