//! Heads for classification and multiple choice, on top of the model in `model.rs`.
//!
//! ```text
//! logits of a row    = ln_f(x)[last token] · scoreᵀ              GPT2ForSequenceClassification
//! logits of a token  = ln_f(x) · classifierᵀ + b                 GPT2ForTokenClassification
//! logit of a choice  = ln_f(x)[summary token] · summaryᵀ + b     GPT2DoubleHeadsModel, which also has an lm_head
//! ```
//!
//! Source: transformers' `modeling_gpt2.py`, including its dropout in training. Rows of different lengths are
//! computed together without padding ([`Gpt2Model::forward_rows`]).
//!
//! Letters in shapes: `R` rows, `ΣT` tokens of all rows, `C` hidden size (`n_embd`), `L` labels, `V`
//! vocabulary.

use std::sync::Arc;

use candle_core::{D, Result, Tensor};
use candle_gpt2_attention::Pass;
use candle_gpt2_kernels::{Linear, ParameterSize, ParameterSource};

use crate::logits_for::tokens_of_rows;
use crate::parameters::{Layers, head_and_model};
use crate::{Gpt2Config, Gpt2LMHeadModel, Gpt2Model, HeadKind, ModelError, Summary, SummaryType};

/// Token dimension of a `(1, ΣT, C)` tensor.
const TOKEN_DIM: usize = 1;

/// Model that outputs label logits for each row, computed from the row's last token.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::VarBuilder;
/// use candle_gpt2::{Gpt2Config, Gpt2ForSequenceClassification, HeadKind, Pass};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let labels = ["bad", "fair", "good"].map(str::to_owned).to_vec();
/// let config = Gpt2Config { head: HeadKind::SequenceClassification, id2label: labels, ..sizes };
/// let model = Gpt2ForSequenceClassification::load(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let rows = [vec![1, 2, 3], vec![4]];
/// assert_eq!(model.forward(&rows, &mut Pass::inference())?.dims(), [2, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "GPT2ForSequenceClassification")]
pub struct Gpt2ForSequenceClassification {
    transformer: Gpt2Model,
    score: Linear,
}

impl Gpt2ForSequenceClassification {
    /// Loads the model from its parameters; the head is `score.weight`.
    ///
    /// # Errors
    /// If the configuration has a different head, or a parameter is missing or has the wrong shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        expect_head(config, HeadKind::SequenceClassification)?;
        let [head, _] = head_and_model(&vb);
        Ok(Self {
            transformer: Gpt2Model::load(config, vb)?,
            score: Layers::outside_blocks(config, head).linear("score")?,
        })
    }

    /// Computes logits over the labels for each row.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` IDs; returns `(R, L)`.
    ///
    /// # Errors
    /// See [`Gpt2Model::forward_rows`].
    pub fn forward(&self, rows: &[impl AsRef<[u32]>], pass: &mut Pass) -> Result<Tensor> {
        let hidden_states = self.transformer.forward_rows(rows, pass)?; // (1, ΣT, C)
        let last = rows.iter().map(|row| self.config().classified_token(row.as_ref()));
        self.score.forward(&tokens_of_rows(&hidden_states, lengths_of(rows), last)?)
    }

    /// Model below the head.
    pub fn transformer(&self) -> &Gpt2Model {
        &self.transformer
    }

    /// Classification head.
    pub fn score(&self) -> &Linear {
        &self.score
    }

    /// Configuration that the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        self.transformer.config()
    }

    /// Size of all parameters.
    pub fn size(&self) -> ParameterSize {
        self.transformer.size() + self.score.size()
    }
}

/// Model that outputs label logits for each token.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::VarBuilder;
/// use candle_gpt2::{Gpt2Config, Gpt2ForTokenClassification, HeadKind, Pass};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let labels = ["name", "place", "other", "number"].map(str::to_owned).to_vec();
/// let config = Gpt2Config { head: HeadKind::TokenClassification, id2label: labels, ..sizes };
/// let model = Gpt2ForTokenClassification::load(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let rows = [vec![1, 2, 3], vec![4]];
/// assert_eq!(model.forward(&rows, &mut Pass::inference())?.dims(), [1, 4, 4], "one text of 3 + 1 tokens");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "GPT2ForTokenClassification")]
pub struct Gpt2ForTokenClassification {
    transformer: Gpt2Model,
    classifier: Linear,
}

impl Gpt2ForTokenClassification {
    /// Loads the model from its parameters; the head is `classifier.weight` and `classifier.bias`.
    ///
    /// # Errors
    /// If the configuration has a different head, or a parameter is missing or has the wrong shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        expect_head(config, HeadKind::TokenClassification)?;
        let [head, _] = head_and_model(&vb);
        Ok(Self {
            transformer: Gpt2Model::load(config, vb)?,
            classifier: Layers::outside_blocks(config, head).linear("classifier")?,
        })
    }

    /// Computes logits over the labels for each token, row after row.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` IDs; returns `(1, ΣT, L)`.
    ///
    /// # Errors
    /// See [`Gpt2Model::forward_rows`].
    pub fn forward(&self, rows: &[impl AsRef<[u32]>], pass: &mut Pass) -> Result<Tensor> {
        let hidden_states = self.transformer.forward_rows(rows, pass)?; // (1, ΣT, C)
        self.classifier.forward(&pass.dropout(hidden_states, self.config().classifier_dropout)?)
    }

    /// Model below the head.
    pub fn transformer(&self) -> &Gpt2Model {
        &self.transformer
    }

    /// Classification head.
    pub fn classifier(&self) -> &Linear {
        &self.classifier
    }

    /// Configuration that the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        self.transformer.config()
    }

    /// Size of all parameters.
    pub fn size(&self) -> ParameterSize {
        self.transformer.size() + self.classifier.size()
    }
}

/// Model that outputs next-token logits, and one logit per row that ranks the rows as choices.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::VarBuilder;
/// use candle_gpt2::{Gpt2Config, Gpt2DoubleHeads, HeadKind, Pass};
///
/// let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// let config = Gpt2Config { head: HeadKind::DoubleHeads, ..sizes };
/// let model = Gpt2DoubleHeads::load(&config, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let choices = [vec![1, 2, 3], vec![4, 5]];
/// let (next_token, choice) = model.forward(&choices, Some(&[2, 0]), &mut Pass::inference())?;
/// assert_eq!((next_token.dims(), choice.dims()), (&[1, 5, 11][..], &[2][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "GPT2DoubleHeadsModel")]
pub struct Gpt2DoubleHeads {
    language_model: Gpt2LMHeadModel,
    summary: Linear,
}

impl Gpt2DoubleHeads {
    /// Loads the model from its parameters.
    ///
    /// The output head is loaded as in [`Gpt2LMHeadModel::load`]. The choice head is
    /// `multiple_choice_head.summary.weight` and `.bias`.
    ///
    /// # Errors
    /// If the configuration has a different head, or a parameter is missing or has the wrong shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        expect_head(config, HeadKind::DoubleHeads)?;
        let [head, _] = head_and_model(&vb);
        Ok(Self {
            language_model: Gpt2LMHeadModel::load(config, vb)?,
            summary: Layers::outside_blocks(config, head).linear("multiple_choice_head.summary")?,
        })
    }

    /// Computes the next-token logits after each token, and the choice logit of each row.
    ///
    /// `summary_tokens` has the index of the summary token within each row. Without it, the last token is the
    /// summary. Only a head of [`SummaryType::ClsIndex`] reads it.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` IDs; returns `(1, ΣT, V)` and `(R)`.
    ///
    /// # Errors
    /// If an index in `summary_tokens` is out of range, and in the cases of [`Gpt2Model::forward_rows`].
    pub fn forward(
        &self,
        rows: &[impl AsRef<[u32]>],
        summary_tokens: Option<&[usize]>,
        pass: &mut Pass,
    ) -> Result<(Tensor, Tensor)> {
        let hidden_states = self.transformer().forward_rows(rows, pass)?; // (1, ΣT, C)
        let choices = self.choices(&hidden_states, rows, summary_tokens, pass)?;
        Ok((self.language_model.lm_head().forward(&hidden_states)?, choices))
    }

    /// Computes only the choice logits of the rows; see [`Gpt2DoubleHeads::forward`].
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` IDs; returns `(R)`.
    ///
    /// # Errors
    /// See [`Gpt2DoubleHeads::forward`].
    pub fn forward_choices(
        &self,
        rows: &[impl AsRef<[u32]>],
        summary_tokens: Option<&[usize]>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let hidden_states = self.transformer().forward_rows(rows, pass)?; // (1, ΣT, C)
        self.choices(&hidden_states, rows, summary_tokens, pass)
    }

    fn choices(
        &self,
        hidden_states: &Tensor,
        rows: &[impl AsRef<[u32]>],
        summary_tokens: Option<&[usize]>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let Summary { token, activation, first_dropout, last_dropout } = self.config().summary;
        let lengths = || lengths_of(rows);
        let of_rows = |tokens: Vec<usize>| tokens_of_rows(hidden_states, lengths(), tokens.into_iter());
        let summaries = match (token, summary_tokens) {
            (SummaryType::ClsIndex, Some(tokens)) => {
                expect_summary_tokens(tokens, lengths())?;
                of_rows(tokens.to_vec())?
            }
            (SummaryType::ClsIndex | SummaryType::Last, _) => {
                of_rows(lengths().map(|length| length.saturating_sub(1)).collect())?
            }
            (SummaryType::First, _) => of_rows(vec![0; rows.len()])?,
            (SummaryType::Mean, _) => {
                let mut first = 0;
                let means = lengths().map(|length| {
                    first += length;
                    hidden_states.narrow(TOKEN_DIM, first - length, length)?.mean(TOKEN_DIM)
                });
                Tensor::cat(&means.collect::<Result<Vec<_>>>()?, 0)?
            }
        }; // (R, C)
        let logits = self.summary.forward(&pass.dropout(summaries, first_dropout)?)?; // (R, 1)
        let logits = match activation {
            Some(activation) => activation.forward(&logits)?,
            None => logits,
        };
        pass.dropout(logits, last_dropout)?.squeeze(D::Minus1)
    }

    /// Model with its head over the vocabulary.
    pub fn language_model(&self) -> &Gpt2LMHeadModel {
        &self.language_model
    }

    /// Model below the heads.
    pub fn transformer(&self) -> &Gpt2Model {
        self.language_model.transformer()
    }

    /// Choice head.
    pub fn summary(&self) -> &Linear {
        &self.summary
    }

    /// Configuration that the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        self.language_model.config()
    }

    /// Size of all parameters.
    pub fn size(&self) -> ParameterSize {
        self.language_model.size() + self.summary.size()
    }
}

impl Gpt2Model {
    /// Computes hidden states after the final norm for rows of different lengths.
    ///
    /// The rows are packed into one sequence without padding. Tokens of different rows do not affect each
    /// other.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` IDs; returns `(1, T_1 + … + T_R, C)`.
    ///
    /// # Errors
    /// If there are no rows, a row is empty or longer than the context, or an ID is outside the vocabulary.
    pub fn forward_rows(&self, rows: &[impl AsRef<[u32]>], pass: &mut Pass) -> Result<Tensor> {
        let lengths: Arc<[usize]> = lengths_of(rows).collect();
        let ids: Vec<u32> = rows.iter().flat_map(|row| row.as_ref()).copied().collect();
        let tokens = ids.len();
        let ids = Tensor::from_vec(ids, (1, tokens), self.device())?;
        self.forward_with(&ids, None, &mut pass.reborrow().of_rows(lengths))
    }
}

/// Number of tokens in each row.
fn lengths_of(rows: &[impl AsRef<[u32]>]) -> impl ExactSizeIterator<Item = usize> {
    rows.iter().map(|row| row.as_ref().len())
}

/// Rejects a configuration with a different head.
fn expect_head(config: &Gpt2Config, expected: HeadKind) -> Result<()> {
    if config.head != expected {
        let (expected, found) = (expected.class_name(), config.head.class_name());
        return Err(ModelError::OtherHead { expected, found }.into());
    }
    Ok(())
}

/// Rejects summary tokens that are out of range, and lists that do not have one token per row.
fn expect_summary_tokens(tokens: &[usize], lengths: impl ExactSizeIterator<Item = usize>) -> Result<()> {
    let refuse = |found, expected| Err(ModelError::NoSummary { found, expected }.into());
    if tokens.len() != lengths.len() {
        let expected = format!("one token index for each of {} rows", lengths.len());
        return refuse(format!("indices {tokens:?}"), expected);
    }
    for (row, (token, length)) in tokens.iter().zip(lengths).enumerate() {
        if *token >= length {
            return refuse(
                format!("index {token} in row {row}"),
                format!("a token index from 0 to {}", length.saturating_sub(1)),
            );
        }
    }
    Ok(())
}
