//! The heads over labels and over texts, on the model of `model.rs`.
//!
//! ```text
//! logits of a text  = ln_f(x)[its last token] · scoreᵀ                    GPT2ForSequenceClassification
//! logits of a token = ln_f(x) · classifierᵀ + b                           GPT2ForTokenClassification
//! logit of a choice = ln_f(x)[the token that sums it up] · summaryᵀ + b   GPT2DoubleHeadsModel, beside its lm_head
//! ```
//!
//! Source: transformers' `modeling_gpt2.py`, with its dropout in training. Texts are rows of any lengths, which are computed
//! together and without padding ([`Gpt2Model::forward_rows`]).
//!
//! Letters in shapes: `R` rows, `ΣT` tokens of all rows, `C` width (`n_embd`), `L` labels, `V` vocabulary.

use std::sync::Arc;

use candle_core::{D, Result, Tensor};
use candle_gpt2_attention::Pass;
use candle_gpt2_kernels::{Linear, ParameterSize, ParameterSource};

use crate::parameters::Layers;
use crate::{Gpt2Config, Gpt2LMHeadModel, Gpt2Model, HeadKind, ModelError, Summary, SummaryType};

/// Axis of the tokens in a `(1, ΣT, C)` tensor.
const TOKEN_DIM: usize = 1;

/// One set of logits for each text, read from its last token.
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
    /// The model from its parameters; the head is `score.weight`.
    ///
    /// # Errors
    /// When the configuration is that of another head, or a parameter is missing or has another shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        expect_head(config, HeadKind::SequenceClassification)?;
        Ok(Self {
            transformer: Gpt2Model::load(config, vb.clone())?,
            score: Layers::outside_blocks(config, vb).linear("score")?,
        })
    }

    /// Logits over the labels of each row.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` ids; returns `(R, L)`.
    ///
    /// # Errors
    /// As [`Gpt2Model::forward_rows`].
    pub fn forward(&self, rows: &[impl AsRef<[u32]>], pass: &mut Pass) -> Result<Tensor> {
        let hidden_states = self.transformer.forward_rows(rows, pass)?; // (1, ΣT, C)
        let last = rows.iter().map(|row| self.config().classified_token(row.as_ref()));
        self.score.forward(&tokens_of_rows(&hidden_states, rows, last)?)
    }

    /// The model below the head.
    pub fn transformer(&self) -> &Gpt2Model {
        &self.transformer
    }

    /// The head.
    pub fn score(&self) -> &Linear {
        &self.score
    }

    /// The configuration the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        self.transformer.config()
    }

    /// The size of the parameters.
    pub fn size(&self) -> ParameterSize {
        self.transformer.size() + self.score.size()
    }
}

/// One set of logits for each token.
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
    /// The model from its parameters; the head is `classifier.weight` and `classifier.bias`.
    ///
    /// # Errors
    /// When the configuration is that of another head, or a parameter is missing or has another shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        expect_head(config, HeadKind::TokenClassification)?;
        Ok(Self {
            transformer: Gpt2Model::load(config, vb.clone())?,
            classifier: Layers::outside_blocks(config, vb).linear("classifier")?,
        })
    }

    /// Logits over the labels of each token, those of the rows one after the other.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` ids; returns `(1, ΣT, L)`.
    ///
    /// # Errors
    /// As [`Gpt2Model::forward_rows`].
    pub fn forward(&self, rows: &[impl AsRef<[u32]>], pass: &mut Pass) -> Result<Tensor> {
        let hidden_states = self.transformer.forward_rows(rows, pass)?; // (1, ΣT, C)
        self.classifier.forward(&pass.dropout(hidden_states, self.config().classifier_dropout)?)
    }

    /// The model below the head.
    pub fn transformer(&self) -> &Gpt2Model {
        &self.transformer
    }

    /// The head.
    pub fn classifier(&self) -> &Linear {
        &self.classifier
    }

    /// The configuration the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        self.transformer.config()
    }

    /// The size of the parameters.
    pub fn size(&self) -> ParameterSize {
        self.transformer.size() + self.classifier.size()
    }
}

/// Logits of the next token, and one logit for each text, by which one of several texts is chosen.
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
    /// The model from its parameters; the heads are that of [`Gpt2LMHeadModel::load`], and `multiple_choice_head.summary.weight` and
    /// `.bias`.
    ///
    /// # Errors
    /// When the configuration is that of another head, or a parameter is missing or has another shape.
    pub fn load(config: &Gpt2Config, vb: impl ParameterSource) -> Result<Self> {
        expect_head(config, HeadKind::DoubleHeads)?;
        Ok(Self {
            language_model: Gpt2LMHeadModel::load(config, vb.clone())?,
            summary: Layers::outside_blocks(config, vb).linear("multiple_choice_head.summary")?,
        })
    }

    /// Logits of the next token after each token, and of each row as a choice. `summarised` has for each row the token that sums
    /// it up, counted from 0; without it that is the last one. Only a head of [`SummaryType::ClsIndex`] reads it.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` ids; returns `(1, ΣT, V)` and `(R)`.
    ///
    /// # Errors
    /// As [`Gpt2Model::forward_rows`], and when a row does not have its token.
    pub fn forward(
        &self,
        rows: &[impl AsRef<[u32]>],
        summarised: Option<&[usize]>,
        pass: &mut Pass,
    ) -> Result<(Tensor, Tensor)> {
        let hidden_states = self.transformer().forward_rows(rows, pass)?; // (1, ΣT, C)
        let choices = self.choices(&hidden_states, rows, summarised, pass)?;
        Ok((self.language_model.lm_head().forward(&hidden_states)?, choices))
    }

    /// The logits of the rows as choices alone, see [`Gpt2DoubleHeads::forward`].
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` ids; returns `(R)`.
    ///
    /// # Errors
    /// As [`Gpt2DoubleHeads::forward`].
    pub fn forward_choices(
        &self,
        rows: &[impl AsRef<[u32]>],
        summarised: Option<&[usize]>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let hidden_states = self.transformer().forward_rows(rows, pass)?; // (1, ΣT, C)
        self.choices(&hidden_states, rows, summarised, pass)
    }

    fn choices(
        &self,
        hidden_states: &Tensor,
        rows: &[impl AsRef<[u32]>],
        summarised: Option<&[usize]>,
        pass: &mut Pass,
    ) -> Result<Tensor> {
        let Summary { token, activation, first_dropout, last_dropout } = self.config().summary;
        let lengths = || rows.iter().map(|row| row.as_ref().len());
        let of_rows = |tokens: Vec<usize>| tokens_of_rows(hidden_states, rows, tokens.into_iter());
        let summaries = match (token, summarised) {
            (SummaryType::ClsIndex, Some(tokens)) => {
                expect_summarised(tokens, lengths())?;
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

    /// The model with its head over the vocabulary.
    pub fn language_model(&self) -> &Gpt2LMHeadModel {
        &self.language_model
    }

    /// The model below the heads.
    pub fn transformer(&self) -> &Gpt2Model {
        self.language_model.transformer()
    }

    /// The head over choices.
    pub fn summary(&self) -> &Linear {
        &self.summary
    }

    /// The configuration the model was built with.
    pub fn config(&self) -> &Gpt2Config {
        self.language_model.config()
    }

    /// The size of the parameters.
    pub fn size(&self) -> ParameterSize {
        self.language_model.size() + self.summary.size()
    }
}

impl Gpt2Model {
    /// Hidden states after the final norm, of rows of any lengths, which lie one after the other in one text without padding, each as if it were alone.
    ///
    /// # Shapes
    /// `rows` of `T_1` to `T_R` ids; returns `(1, T_1 + … + T_R, C)`.
    ///
    /// # Errors
    /// When there is no row, a row is empty or longer than the context, or an id is outside the vocabulary.
    pub fn forward_rows(&self, rows: &[impl AsRef<[u32]>], pass: &mut Pass) -> Result<Tensor> {
        let lengths: Arc<[usize]> = rows.iter().map(|row| row.as_ref().len()).collect();
        let ids: Vec<u32> = rows.iter().flat_map(|row| row.as_ref()).copied().collect();
        let tokens = ids.len();
        let ids = Tensor::from_vec(ids, (1, tokens), self.device())?;
        self.forward_with(&ids, None, &mut pass.reborrow().of_rows(lengths))
    }
}

/// One token of each row, counted from 0 in it: `(R, C)` of `hidden_states` `(1, ΣT, C)`.
fn tokens_of_rows(
    hidden_states: &Tensor,
    rows: &[impl AsRef<[u32]>],
    tokens: impl Iterator<Item = usize>,
) -> Result<Tensor> {
    let mut first = 0;
    let mut places = Vec::with_capacity(rows.len());
    for (row, token) in rows.iter().zip(tokens) {
        places.push(u32::try_from(first + token).map_err(candle_core::Error::wrap)?);
        first += row.as_ref().len();
    }
    let places = Tensor::new(places, hidden_states.device())?;
    hidden_states.squeeze(0)?.index_select(&places, 0)
}

/// Refuses a configuration of another head.
fn expect_head(config: &Gpt2Config, expected: HeadKind) -> Result<()> {
    if config.head != expected {
        let (expected, found) = (expected.class_name(), config.head.class_name());
        return Err(ModelError::OtherHead { expected, found }.into());
    }
    Ok(())
}

/// Refuses tokens that the rows do not have.
fn expect_summarised(tokens: &[usize], lengths: impl ExactSizeIterator<Item = usize>) -> Result<()> {
    let refuse = |found, expected| Err(ModelError::NoSummary { found, expected }.into());
    if tokens.len() != lengths.len() {
        let expected = format!("{} rows need a token each", lengths.len());
        return refuse(format!("the tokens {tokens:?}"), expected);
    }
    for (row, (token, length)) in tokens.iter().zip(lengths).enumerate() {
        if *token >= length {
            return refuse(
                format!("token {token} of row {row}"),
                format!("both are counted from 0, and it has {length}"),
            );
        }
    }
    Ok(())
}
