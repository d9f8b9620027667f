//! Analyses, computed piece by piece.
//!
//! Parts that need the model process a few tokens at a time, so other clients' completions continue in
//! between. Parts that need no model run on any thread.

use std::fmt;
use std::ops::ControlFlow::{self, Break, Continue};
use std::vec::IntoIter;

use candle_core::Tensor;
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Site, SiteKind};
use candle_gpt2_engine::{Classification, Classifier, LoadedModel, Question};
use candle_gpt2_interpret::{
    LensCell, LensOptions, Patterns, Record, Recording, ReplacementModel, Run, lens_cells, lens_logits_at,
    lens_logprobs, residual_sites,
};
use candle_gpt2_look::{Attention, Lens, PrefixCache, feature_in_text, strongest_features};
use candle_gpt2_pictures::{data, graph_data};

use crate::answer::json;
use crate::classify::{ClassifyAnswer, ClassifyCall};
use crate::embeddings::{EmbeddingsAnswer, EmbeddingsCall};
use crate::look::{
    AttentionRequest, FeatureRequest, FeaturesRequest, GraphRequest, HeadRequest, LensRequest, NextRequest,
    refused,
};
use crate::{ApiError, Reply, ServedModel};

/// Token dimension of hidden states `(1, T, C)`.
const TOKEN_DIM: usize = 1;

/// Analysis in progress: attention, lens, head, next tokens, features, embeddings or labels.
///
/// Callers alternate [`Analysis::compute`], or [`Analysis::classify`] for a classifier, with
/// [`Analysis::conclude`] until it returns the reply. [`Work::Analysis`](crate::Work) holds the analysis.
pub struct Analysis {
    piece: Piece,
    texts: usize,
    prompt_tokens: usize,
}

/// Next piece of work.
enum Piece {
    /// Next-token candidates for a text that has not been prefilled.
    Next(Box<NextRequest>),
    /// A recording that has not started.
    Record { ids: Vec<u32>, sites: Vec<Site>, then: Then<Record> },
    /// A recording in progress; it advances a few tokens at a time.
    Recording(Box<Recording>, Then<Record>),
    /// Another computation with the model; its argument is the maximum number of tokens.
    Compute(Computation),
    /// Classification of texts.
    Label(Box<Labeling>),
    /// Final step that needs no model.
    Conclude(Conclusion),
}

type Computation = Box<dyn FnOnce(&Gpt2LMHeadModel, usize) -> Result<Conclusion, ApiError> + Send>;
type Conclusion = Box<dyn FnOnce(&ServedModel) -> Outcome + Send>;
type Then<T> = Box<dyn FnOnce(T, &ServedModel) -> Outcome + Send>;

/// Questions that the classifier has not answered yet, and its classifications so far.
struct Labeling {
    questions: IntoIter<Question>,
    classified: Vec<Classification>,
    answer: ClassifyAnswer,
}

/// The reply, or the next piece of work.
type Outcome = Result<ControlFlow<Reply, Piece>, ApiError>;

impl Analysis {
    pub(crate) fn attention(request: AttentionRequest) -> Self {
        let AttentionRequest { ids, heads, warnings } = request;
        Self::of(record(ids.clone(), Patterns::sites(&heads), move |record, served| {
            let report = Attention::report(record, &ids, &heads, served.name(), &served.reader())?;
            Ok(Break(Reply::new(data(&report), warnings)))
        }))
    }

    pub(crate) fn head(HeadRequest { head, warnings }: HeadRequest) -> Self {
        Self::of(record(head.ids().to_owned(), head.sites(), move |record, served| {
            let steps = head.steps(&record, &served.reader()).map_err(ApiError::failed)?;
            Ok(Break(Reply::new(json(&steps), warnings)))
        }))
    }

    pub(crate) fn next(request: NextRequest) -> Self {
        Self::of(Piece::Next(Box::new(request)))
    }

    pub(crate) fn lens(request: LensRequest, served: &ServedModel) -> Self {
        let sites = residual_sites(served.config().n_layer).collect();
        Self::of(record(request.ids.clone(), sites, |record, _| {
            let residuals = record.values.into_values().collect();
            let lens =
                LensPass { request, residuals, layer: None, token: 0, last: Vec::new(), cells: Vec::new() };
            Ok(Continue(lens.next_piece()))
        }))
    }

    pub(crate) fn features(request: FeaturesRequest) -> Self {
        let sites = request.dictionaries.iter().map(|(_, dictionary)| dictionary.config().site).collect();
        Self::of(record(request.ids.clone(), sites, move |record, served| {
            let (reader, name) = (served.reader(), served.name().to_owned());
            let FeaturesRequest { ids, dictionaries, top, warnings } = request;
            let of = move |model: &Gpt2LMHeadModel, _| {
                let layers: Vec<_> =
                    dictionaries.iter().map(|(layer, dictionary)| (*layer, dictionary)).collect();
                strongest_features(&record, &ids, &layers, top, model, &name, &reader).map_err(refused)
            };
            Ok(Continue(compute(of, |report, _| Ok(Break(Reply::new(data(&report), warnings))))))
        }))
    }

    pub(crate) fn feature(request: FeatureRequest) -> Self {
        let sites = vec![request.dictionary.config().site];
        Self::of(record(request.ids.clone(), sites, move |record, served| {
            let reader = served.reader();
            let FeatureRequest { ids, dictionary, feature, warnings } = request;
            let of = move |model: &Gpt2LMHeadModel, _| {
                feature_in_text(&record, &ids, (&dictionary, feature), model, &reader).map_err(refused)
            };
            Ok(Continue(compute(of, |card, _| Ok(Break(Reply::new(json(&card), warnings))))))
        }))
    }

    /// Creates the analysis for an attribution graph; tracing, its slowest part, needs no model.
    pub(crate) fn graph(GraphRequest { ids, transcoders, graph, warnings }: GraphRequest) -> Self {
        let (of_ids, options) = (ids.clone(), graph.options());
        let of = move |model: &Gpt2LMHeadModel, _| {
            let replaced =
                Run::new(model, &of_ids).and_then(|run| ReplacementModel::new(&run, &transcoders, &options));
            replaced.map_err(|error| refused(error.into()))
        };
        Self::of(compute(of, move |replacement, served| {
            let traced = graph.of_replacement(&replacement, &ids, served.name(), &served.reader());
            let (report, picture) = traced.map_err(refused)?;
            Ok(Break(Reply::new(graph_data(&report, &picture), warnings)))
        }))
    }

    pub(crate) fn embeddings(EmbeddingsCall { rows, answer }: EmbeddingsCall) -> Self {
        let (texts, prompt_tokens) = (rows.len(), answer.prompt_tokens());
        Self { piece: embedding(rows.into_iter(), answer), texts, prompt_tokens }
    }

    pub(crate) fn labels(ClassifyCall { questions, answer }: ClassifyCall) -> Self {
        let (texts, prompt_tokens) = (questions.len(), answer.prompt_tokens());
        let labeling = Labeling { questions: questions.into_iter(), classified: Vec::new(), answer };
        Self { piece: Piece::Label(Box::new(labeling)), texts, prompt_tokens }
    }

    fn of(piece: Piece) -> Self {
        Self { piece, texts: 1, prompt_tokens: 0 }
    }

    /// Number of texts in the analysis.
    pub fn texts(&self) -> usize {
        self.texts
    }

    /// Number of prompt tokens that embeddings and classification report under `usage`.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Computes the next piece of work, covering at most `tokens` tokens.
    ///
    /// If one call computes all tokens, the values equal the library's bit for bit.
    ///
    /// # Errors
    /// If the model fails.
    pub fn compute(self, model: &LoadedModel, tokens: usize) -> Result<Self, ApiError> {
        let mut piece = self.piece;
        let model = model.model();
        if let Piece::Next(request) = piece {
            piece = next(*request);
        }
        if let Piece::Record { ids, sites, then } = piece {
            let recording = Recording::new(model, ids, sites).map_err(ApiError::failed)?;
            piece = Piece::Recording(Box::new(recording), then);
        }
        let piece = match piece {
            Piece::Recording(mut recording, then) => {
                recording.advance(model, tokens)?;
                match recording.is_complete() {
                    true => Piece::Conclude(Box::new(|served| then(recording.into_record()?, served))),
                    false => Piece::Recording(recording, then),
                }
            }
            Piece::Compute(of) => Piece::Conclude(of(model, tokens)?),
            Piece::Label(_) => return Err(ApiError::failed("a language model cannot classify texts")),
            piece => piece,
        };
        Ok(Self { piece, ..self })
    }

    /// Classifies the next `texts` texts, or one if `texts` is 0.
    ///
    /// # Errors
    /// If the classifier fails.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use candle_gpt2_api::{ApiOptions, Endpoint, ServedModel, Work};
    ///
    /// # let options = candle_gpt2_engine::ModelOptions { model: candle_gpt2_testing::fixture_path("heads/sequence"), ..Default::default() };
    /// # let classifier = options.open_classifier(&candle_gpt2_engine::Silent)?.load_classifier(&candle_gpt2_engine::Silent)?;
    /// let served = ServedModel::of_classifier(&classifier, ApiOptions::default());
    /// let body = br#"{"input": ["the sea", "a wood"]}"#;
    /// let Work::Analysis(analysis) = served.read(Endpoint::Classify, body, None)? else { panic!("expected an analysis") };
    /// assert_eq!(analysis.texts(), 2);
    /// let ControlFlow::Break(reply) = analysis.classify(&classifier, 2)?.conclude(&served)? else { panic!("expected a reply") };
    /// assert!(reply.json.contains(r#""num_classes":5"#), "{}", reply.json);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn classify(self, classifier: &Classifier, texts: usize) -> Result<Self, ApiError> {
        let piece = match self.piece {
            Piece::Label(mut labeling) => {
                let questions: Vec<Question> = labeling.questions.by_ref().take(texts.max(1)).collect();
                let classified = classifier.classify(&questions).map_err(ApiError::failed)?;
                labeling.classified.extend(classified);
                match labeling.questions.len() {
                    0 => Piece::Conclude(Box::new(move |_| {
                        Ok(Break(labeling.answer.into_reply(&labeling.classified)))
                    })),
                    _ => Piece::Label(labeling),
                }
            }
            _ => return Err(ApiError::failed("a classifier cannot run an analysis of a language model")),
        };
        Ok(Self { piece, ..self })
    }

    /// Runs the next part if it needs no model; returns the reply once all parts are done.
    ///
    /// # Errors
    /// If the results cannot be converted to a reply.
    pub fn conclude(self, served: &ServedModel) -> Result<ControlFlow<Reply, Self>, ApiError> {
        let outcome = match self.piece {
            Piece::Conclude(conclude) => conclude(served)?,
            piece => Continue(piece),
        };
        Ok(outcome.map_continue(|piece| Self { piece, ..self }))
    }

    /// Computes the next piece for all tokens at once, then concludes it.
    ///
    /// Successive `/look/next` requests often concern the same text, so `reading` caches its prefill.
    pub(crate) fn step(
        self,
        model: &LoadedModel,
        served: &ServedModel,
        reading: &mut PrefixCache,
    ) -> Result<ControlFlow<Reply, Self>, ApiError> {
        if let Piece::Next(request) = self.piece {
            let logits = reading.logits(model.model(), &request.text, request.ids.len() - 1);
            return request.into_reply(&logits.map_err(ApiError::failed)?, served).map(Break);
        }
        self.compute(model, usize::MAX)?.conclude(served)
    }
}

fn record(
    ids: Vec<u32>,
    sites: Vec<Site>,
    then: impl FnOnce(Record, &ServedModel) -> Outcome + Send + 'static,
) -> Piece {
    Piece::Record { ids, sites, then: Box::new(then) }
}

/// Creates a piece that runs `of` with the model, then `then` without it.
fn compute<T: Send + 'static, E: Into<ApiError>>(
    of: impl FnOnce(&Gpt2LMHeadModel, usize) -> Result<T, E> + Send + 'static,
    then: impl FnOnce(T, &ServedModel) -> Outcome + Send + 'static,
) -> Piece {
    Piece::Compute(Box::new(|model, tokens| {
        let computed = of(model, tokens).map_err(Into::into)?;
        Ok(Box::new(|served| then(computed, served)))
    }))
}

/// Records the output head's input, `(1, T, C)`.
fn record_hidden(ids: Vec<u32>, then: impl FnOnce(&Tensor) -> Outcome + Send + 'static) -> Piece {
    let site = Site::outside(SiteKind::FinalNorm);
    record(ids, vec![site], move |record, _| then(record.get(site)?))
}

fn next(request: NextRequest) -> Piece {
    record_hidden(request.ids.clone(), |hidden| {
        let hidden = hidden.clone();
        let of = move |model: &Gpt2LMHeadModel, _| model.head(&hidden, LogitsFor::LastToken);
        let then = move |logits: Tensor, served: &ServedModel| {
            request.into_reply(&logits.flatten_all()?.to_vec1()?, served).map(Break)
        };
        Ok(Continue(compute(of, then)))
    })
}

/// Creates a piece that embeds the next text, then continues with the rest.
fn embedding(mut rows: IntoIter<Vec<u32>>, mut answer: EmbeddingsAnswer) -> Piece {
    record_hidden(rows.next().unwrap_or_default(), |hidden| {
        answer.add(&hidden.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1::<f32>()?);
        match rows.len() {
            0 => answer.into_reply().map(Break),
            _ => Ok(Continue(embedding(rows, answer))),
        }
    })
}

/// State of a logit lens, computed piece by piece.
///
/// For a text of 128 tokens, the logits of all layers together would take hundreds of megabytes.
struct LensPass {
    request: LensRequest,
    /// Residual stream at each layer, `(1, T, C)`.
    residuals: Vec<Tensor>,
    /// Current layer; `None` while computing the last layer, the reference for all others.
    layer: Option<usize>,
    /// Index of the next token.
    token: usize,
    /// Log-probabilities from the last layer, one row for each token.
    last: Vec<Vec<f32>>,
    cells: Vec<LensCell>,
}

impl LensPass {
    /// Creates a piece that computes one layer's logits at the next tokens, `(1, T, V)`.
    fn next_piece(self) -> Piece {
        let (last_layer, first) = (self.residuals.len() - 1, self.token);
        let layer = self.layer.unwrap_or(last_layer);
        let (residual, rest) = (self.residuals[layer].clone(), self.request.ids.len() - first);
        let of = move |model: &Gpt2LMHeadModel, tokens: usize| {
            // (1, T, C)
            let residual = residual.narrow(TOKEN_DIM, first, tokens.clamp(1, rest))?.contiguous()?;
            lens_logits_at(model, layer, residual, &|_, x| Ok(x))
        };
        compute(of, |logits, served| self.read(&logits, served))
    }

    fn read(mut self, logits: &Tensor, served: &ServedModel) -> Outcome {
        let (predicted, first, ids) = (lens_logprobs(logits)?, self.token, &self.request.ids);
        self.token += predicted.len();
        if self.layer.is_none() {
            self.last.extend(predicted);
        } else {
            let options = LensOptions { top: 1, watch: Vec::new() };
            let next = ids.get(first + 1..).unwrap_or_default();
            self.cells.extend(lens_cells(&predicted, &self.last[first..], &options, next)?);
        }
        if self.token == ids.len() {
            (self.token, self.layer) = (0, Some(self.layer.map_or(0, |layer| layer + 1)));
        }
        if self.layer != Some(self.residuals.len()) {
            return Ok(Continue(self.next_piece()));
        }
        let (cells, LensRequest { ids, show, warnings }) =
            (self.cells.iter().collect::<Vec<_>>(), self.request);
        let report = Lens::report("logit lens", show, &cells, &ids, served.name(), &served.reader());
        Ok(Break(Reply::new(data(&report), warnings)))
    }
}

impl fmt::Debug for Analysis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Analysis").finish_non_exhaustive()
    }
}
